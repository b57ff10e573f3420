"""Tokenizers of the `tokenizers` library with the special tokens of BERT: built, read from files, saved."""

import codecs
import itertools
import json
import os
import re
from collections.abc import Collection
from operator import index, itemgetter
from pathlib import Path
from typing import Any

import tokenizers

from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.records import ROLES
from cloze.pipeline.tokenization.growth import check_growth, check_template, without_vocabulary
from cloze.pipeline.untrusted import check_readable, fields_if_readable, load_json, read_json, unique_fields

HUGGING_FACE_NAMES = dict(zip(ROLES, ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), strict=True))
CONFIG = "config.json"  # of the model, which may lie beside its tokenizer
ADDED_TOKENS = "added_tokens.json"  # of a tokenizer without tokenizer.json
_EXTRA = "extra_special_tokens", "additional_special_tokens"  # of transformers 5, and of 4
_OF_ADDED = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")
_RULES = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")  # of a BERT tokenizer
_PREFIX_SPACE = "add_prefix_space"  # of one whose tokens hold the space before a word
_USUAL_NAMES = {  # tried in turn if no configuration names the token
    "pad": ("[PAD]", "<pad>", "<|pad|>", "<|end_of_text|>"),
    "unknown": ("[UNK]", "<unk>"),
    "classification": ("[CLS]", "<s>", "<sos>", "<cls>", "<|begin_of_text|>"),
    "separator": ("[SEP]", "</s>", "<eos>", "<sep>", "<|end_of_text|>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}
# Classes of transformers that read a vocab.txt as BertTokenizer does, whatever special tokens they name; each may have
# a twin whose name ends in Fast. Others, such as BertJapaneseTokenizer, EsmTokenizer and BertweetTokenizer, cut texts
# otherwise.
_OF_VOCAB_TXT = {
    *("BertTokenizer", "BertTokenizerLegacy", "ConvBertTokenizer", "DistilBertTokenizer", "DPRContextEncoderTokenizer"),
    *("DPRQuestionEncoderTokenizer", "DPRReaderTokenizer", "ElectraTokenizer", "FunnelTokenizer", "LayoutLMTokenizer"),
    *("LayoutLMv2Tokenizer", "LxmertTokenizer", "MobileBertTokenizer", "MPNetTokenizer", "RealmTokenizer"),
    *("RetriBertTokenizer", "SplinterTokenizer", "SqueezeBertTokenizer"),
}
_OF_TOKENIZER_JSON = "PreTrainedTokenizerFast", "TokenizersBackend"  # these use that file as it is, and need it
# Classes whose byte-level rule is made anew by `add_prefix_space`, whatever tokenizer.json has; with any other one the
# file counts (AutoTokenizer of transformers 5, which the tests ask).
_BYTE_LEVEL_CLASSES = {
    *("BartTokenizer", "BlenderbotTokenizer", "DebertaTokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "LEDTokenizer"),
    *("LayoutLMv3Tokenizer", "LongformerTokenizer", "LukeTokenizer", "MvpTokenizer", "RobertaTokenizer"),
    "WhisperTokenizer",
}
# Classes that make their rule of `▁` anew, with the one that each has for `add_prefix_space: false` (the same source).
_METASPACE_CLASSES = {
    **dict.fromkeys(("AlbertTokenizer", "BarthezTokenizer", "BigBirdTokenizer", "CamembertTokenizer"), "never"),
    **dict.fromkeys(("LayoutXLMTokenizer", "RemBertTokenizer", "XGLMTokenizer", "XLMRobertaTokenizer"), "never"),
    "DebertaV2Tokenizer": "first",
}
# Classes that make the rules for case, accents and Chinese characters anew by their configuration, and what each reads
# of it (the same source).
_BY_FILE = {"BertTokenizerLegacy", "ConvBertTokenizer", "RealmTokenizer", "RetriBertTokenizer"}  # these do not
_OF_CASE = {
    **dict.fromkeys(_OF_VOCAB_TXT - _BY_FILE, _RULES),
    **dict.fromkeys(("AlbertTokenizer", "RemBertTokenizer"), ("do_lower_case", "keep_accents")),
    "DebertaV2Tokenizer": ("do_lower_case",),
}
# The class of a model that names none, and None for models whose class uses the file, whatever they name: of models of
# masked tokens those with one of the classes above.
_CLASS_OF_MODEL = {
    **dict.fromkeys(("bert", "convbert", "distilbert", "electra", "ernie", "layoutlm"), "BertTokenizer"),
    **dict.fromkeys(("megatron-bert", "nomic_bert", "squeezebert"), "BertTokenizer"),
    **dict.fromkeys(("albert", "yoso"), "AlbertTokenizer"),
    **dict.fromkeys(("bart", "data2vec-text", "ibert", "longformer", "mra", "roberta"), "RobertaTokenizer"),
    **dict.fromkeys(("gte", "jina_embeddings_v3", "xlm-roberta", "xmod"), "XLMRobertaTokenizer"),
    **dict.fromkeys(("modernbert", "nystromformer", "xlm-roberta-xl")),
    "big_bird": "BigBirdTokenizer",
    "camembert": "CamembertTokenizer",
    "deberta": "DebertaTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "funnel": "FunnelTokenizer",
    "luke": "LukeTokenizer",
    "mobilebert": "MobileBertTokenizer",
    "mpnet": "MPNetTokenizer",
    "mvp": "MvpTokenizer",
    "rembert": "RemBertTokenizer",
    "roberta-prelayernorm": "RobertaTokenizer",
}
_OTHER_NAMES = {"classification": "bos_token", "separator": "eos_token"}  # of tokenizers made after decoders'


def read_tokenizer_config(folder: Path) -> Fields:
    """The tokenizer's configuration files in a folder; empty if there are none.

    Raises:
        UserError: for invalid JSON, and JSON that is no object.
    """
    content = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        content[name] = _fields_of(folder / name)
        _check_kinds(folder / name, content[name])
    names, config = content.values()
    # Since 4.34 the configuration says all; transformers takes older names from the other file.
    return names | config if "added_tokens_decoder" in config else config | names


def _fields_of(path: Path) -> Fields:
    """The fields of a JSON file; none if there is no such file. Raises UserError if it can't be read."""
    if not os.path.lexists(path):
        return {}
    if not path.is_file():  # as a link to a file that is gone
        raise UserError(f"{path}: found no regular file, expected one; restore or remove it")
    try:
        content = read_json(path)
    except ValueError as error:
        raise UserError(f"{path}: isn't JSON: {error}; fix or remove it") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: found {type(content).__name__}, expected an object; fix or remove the file")
    return content


def _check_kinds(path: Path, config: Fields) -> None:
    """Raise UserError for names of special tokens that are no texts, and rules that are neither true nor false."""
    for name in (*HUGGING_FACE_NAMES.values(), *_OTHER_NAMES.values()):
        value = config.get(name)
        given = value.get("content") if isinstance(value, dict) else value
        if not isinstance(given, str) and value is not None:
            raise UserError(f"{path}: {name}: found {str(value)[:60]!r}, expected the text of a token; fix it")
    for name in _EXTRA:
        if not isinstance(config.get(name), list | dict | None):  # the letters of a text would be tokens
            raise UserError(f"{path}: {name}: found {str(config[name])[:60]!r}, expected a list of tokens; fix it")
    for name in (*_RULES, _PREFIX_SPACE):
        if not isinstance(config.get(name), bool | None):
            raise UserError(f"{path}: {name}: found {str(config[name])[:60]!r}, expected true or false; fix it")


def special_names(vocabulary: dict[str, int], config: Fields, of_bytes: bool = False) -> dict[str, str]:
    """Names of the special tokens by role: those of the configuration, or usual ones in the vocabulary.

    Args:
        of_bytes: every text has tokens; where none is for unknown ones, padding's stands for it.
    """
    names: dict[str, str] = {}
    for role in ROLES:
        named = config.get(HUGGING_FACE_NAMES[role]) or (role in _OTHER_NAMES and config.get(_OTHER_NAMES[role]))
        named = named.get("content") if isinstance(named, dict) else named
        usual = [name for name in _USUAL_NAMES[role] if name in vocabulary]
        if role == "unknown" and of_bytes:
            usual.append(names["pad"])
        names[role] = named or (usual[0] if usual else _USUAL_NAMES[role][0])
    return names


def named_class(folder: Path, config: Fields) -> str | None:
    """The tokenizer's class, where AutoTokenizer looks for it: in its configuration, else in config.json."""
    named = config.get("tokenizer_class") or fields_if_readable(folder / CONFIG).get("tokenizer_class")
    return named if isinstance(named, str) else None


def _class_used(folder: Path, config: Fields) -> str | None:
    """The class with which AutoTokenizer reads a tokenizer.json, without Fast, or nothing if it is not known; None: one
    that uses the file as it is, whatever the configuration says.
    """
    usual = _CLASS_OF_MODEL.get(str(fields_if_readable(folder / CONFIG).get("model_type")), "")
    named = named_class(folder, config) or usual
    return None if usual is None or named in _OF_TOKENIZER_JSON else str(named).removesuffix("Fast")


def from_vocab_txt(path: Path, config: Fields) -> tokenizers.Tokenizer:
    """BERT's tokenizer with a vocab.txt; cased by `config`, otherwise if a token has a capital letter.

    Raises:
        UserError: for a repeated token, and the vocab.txt of a class that reads it otherwise.
    """
    check_readable(path)
    vocabulary = _tokens_of(path)
    named, whole = named_class(path.parent, config), path.with_name("tokenizer.json")
    if named in _OF_TOKENIZER_JSON and whole.is_file():  # as `cloze vocab` writes both files
        backend = from_tokenizer_json(whole, config)
        if isinstance(backend.model, tokenizers.models.WordPiece) and backend.get_vocab() == vocabulary:
            return backend  # with rules that the other file does not have
    if named is not None and named.removesuffix("Fast") not in _OF_VOCAB_TXT:
        raise UserError(
            f"{path}: found the tokenizer_class {named:.60}, which does not read a vocab.txt as BERT's does, expected "
            "BertTokenizer or a tokenizer.json; transformers writes one where it can: "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER); for texts that are cut into words already "
            "copy vocab.txt alone into a folder"
        )
    names = special_names(vocabulary, config)
    specials = {*names.values(), *itertools.chain.from_iterable(_USUAL_NAMES.values())}
    cased = any(token != token.lower() for token in vocabulary if token not in specials and not token.startswith("["))
    backend = wordpiece_backend(vocabulary, names, lowercase=not cased, strip_accents=None)
    _normalize_as_described(backend, path, config, "BertTokenizer")
    return backend


def _tokens_of(path: Path) -> dict[str, int]:
    """The ids of the tokens of a vocab.txt. Raises UserError for a repeated token and another encoding than UTF-8."""
    content = path.read_bytes()
    if content.startswith(codecs.BOM_UTF8) or b"\0" in content[:4]:
        found = "a byte order mark" if content.startswith(codecs.BOM_UTF8) else "NUL bytes, as in UTF-16"
        raise UserError(f"{path}: found {found}, expected UTF-8 without; convert it")
    tokens = content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if tokens and not tokens[-1]:
        tokens.pop()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if vocabulary[token] != number)
        raise UserError(f"{path}: found {twice!r} twice, expected each token once, one a line")
    return vocabulary


def from_tokenizer_json(path: Path, config: Fields) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json, with the rules of `config` that transformers prefers to the file's: those of a
    BERT normalizer, and the space before a text.

    Raises:
        UserError: the file is too large, or its rules make texts that much longer.
        Exception: it is no tokenizer; a plain one of the library, or as `load_json`.
    """
    check_readable(path)
    content = load_json(path.read_bytes(), unique_fields)  # of a field that comes twice the library might read another
    if isinstance(content, dict) and isinstance(added := content.get("added_tokens", []), list):
        rules = without_vocabulary(content)
        check_template(rules, path)
        named = [token.get("content") for token in added if isinstance(token, dict)]
        check_growth(rules, [name for name in named if isinstance(name, str)], path)
    backend = tokenizers.Tokenizer.from_file(str(path))
    for token in content.get("added_tokens") or ():  # which the library numbers anew, in the order of the list
        place = backend.token_to_id(token["content"])
        if place is None:
            raise UserError(
                f"{path}: found {token['content']!r} in added_tokens, of which the library makes no token, expected "
                "the text of one; remove it"
            )
        if place != token["id"]:
            raise UserError(
                f"{path}: found {token['id']} as the id of {token['content']!r} in added_tokens, expected {place}, as "
                "its vocabulary and the tokens before it have it; correct it"
            )
    if (used := _class_used(path.parent, config)) is not None:
        _normalize_as_described(backend, path, config, used)
        _add_space_as_described(backend, path, config, used)
    return backend


def with_listed_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Fields) -> tokenizers.Tokenizer:
    """The tokenizer with the tokens that a folder lists beside its vocabulary, as transformers has it: in
    `added_tokens_decoder` of tokenizer_config.json (since 4.34), whose rules count, else in added_tokens.json; and with
    special tokens that it names, if they have an id.

    Raises:
        UserError: a list can't be read, or gives a token another id than it has behind those before.
    """
    path, listed, twice = folder / "tokenizer_config.json", config.get("added_tokens_decoder"), False
    try:
        marks = [_added(each if isinstance(each, dict) else {"content": each}, True) for each in _named(config)]
        if listed is None:
            path, special = folder / ADDED_TOKENS, {mark.content for mark in marks}
            ids = _fields_of(path)
            listed = {index(number): {"content": name, "special": name in special} for name, number in ids.items()}
            twice = len(listed) < len(ids)
        tokens = sorted(((int(number), _added(token)) for number, token in listed.items()), key=itemgetter(0))
        fault = "" if all(token.content for token in [*marks, *dict(tokens).values()]) else "one has no content"
        fault = "two have the same id" if twice else fault
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        fault = str(error)
    if fault:
        raise UserError(f"{path}: found added tokens that can't be read ({fault}), expected texts with ids")
    check_growth(backend, [token.content for token in [*marks, *dict(tokens).values()]], path)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    if path.name != ADDED_TOKENS:
        as_it_is = _class_used(folder, config) is None
        backend = _with_rules(backend, [token for _, token in tokens if token.content in known], as_it_is)
    roles = special_names(backend.get_vocab(), config, byte_level(backend)).values()
    known |= {name for name in roles if backend.token_to_id(name) is not None}
    backend.add_tokens([token for _, token in tokens if token.content not in known])
    for number, token in tokens:
        if number != (place := backend.token_to_id(token.content)):
            raise UserError(
                f"{path}: found {number} as the id of {token.content!r}, expected {place}, as its vocabulary and the "
                "tokens before it have it; correct it"
            )
    known |= {token.content for _, token in tokens}
    # Without an id the model may have no row for one, or another than would come next: it stays text.
    known |= {mark.content for mark in marks if backend.token_to_id(mark.content) is None}
    backend.add_tokens([mark for mark in marks if mark.content not in known])
    return backend


def _with_rules(
    backend: tokenizers.Tokenizer, tokens: list[tokenizers.AddedToken], stay_special: bool
) -> tokenizers.Tokenizer:
    """One whose added tokens are found in texts by the rules of these; itself, where they are found so already.

    Args:
        stay_special: a token that is special is so whatever these say.
    """
    given = {token.content: {name: getattr(token, name) for name in _OF_ADDED} for token in tokens}
    for known in backend.get_added_tokens_decoder().values() if stay_special else ():
        if known.special and known.content in given:
            given[known.content]["special"] = True
    if all(
        given.get(known.content, {}).get(name) in (None, getattr(known, name))
        for known in backend.get_added_tokens_decoder().values()
        for name in _OF_ADDED
    ):
        return backend
    content = content_of(backend)
    content["added_tokens"] = [token | given.get(token["content"], {}) for token in content["added_tokens"]]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _named(config: Fields) -> list[Any]:
    """The special tokens that a configuration names: `bos_token`, `entity_token`, and those without a name."""
    extra = config.get(_EXTRA[0]) or config.get(_EXTRA[1]) or []
    of_a_name = [value for name, value in config.items() if name.endswith("_token") and value]
    named = [value for value in of_a_name if isinstance(value, str) or isinstance(value, dict) and "content" in value]
    return [*named, *(extra.values() if isinstance(extra, dict) else extra)]


def _added(given: Fields, special: bool = False) -> tokenizers.AddedToken:
    """One as transformers describes it."""
    fields: dict[str, Any] = {"special": special} | {name: given[name] for name in _OF_ADDED if name in given}
    return tokenizers.AddedToken(**{"normalized": not fields["special"], **fields})


def content_of(backend: tokenizers.Tokenizer) -> Fields:
    """The content of its tokenizer.json. The library writes the whole vocabulary for it, so ask once."""
    content: Fields = json.loads(backend.to_str())
    return content


def model_of(backend: tokenizers.Tokenizer) -> Fields:
    """The field `model` of it: the model's type, options and vocabulary."""
    model: Fields = content_of(backend)["model"]
    return model


def with_special(backend: tokenizers.Tokenizer, names: Collection[str], special: bool) -> tokenizers.Tokenizer:
    """A copy in which these added tokens are special, or are not."""
    content = content_of(backend)
    for token in content["added_tokens"]:
        if token["content"] in names:
            token["special"] = special
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _normalize_as_described(backend: tokenizers.Tokenizer, path: Path, config: Fields, named: str) -> None:
    """Let BERT's normalizer be as the configuration says, where the class `named` prefers that to the file.

    Raises:
        UserError: there are other rules for case, accents and Chinese characters, and the class `named` makes others of
            the configuration.
    """
    ours, read = backend.normalizer, _OF_CASE.get(named, ())
    if isinstance(ours, tokenizers.normalizers.BertNormalizer) and read == _RULES:
        backend.normalizer = tokenizers.normalizers.BertNormalizer(
            clean_text=ours.clean_text,
            strip_accents=config.get("strip_accents", ours.strip_accents),
            lowercase=bool(config.get("do_lower_case", ours.lowercase)),
            handle_chinese_chars=bool(config.get("tokenize_chinese_chars", ours.handle_chinese_chars)),
        )
        return
    found = ours.normalize_str("Aé") if ours else "Aé"
    does = {  # None: neither as stated true nor as stated false, as a letter and its accent apart
        "do_lower_case": "A" not in found,
        "strip_accents": None if "e\u0301" in found else "é" not in found,
        "tokenize_chinese_chars": len(parts(backend, "中中")) > 1,
    }
    does["keep_accents"] = None if does["strip_accents"] is None else not does["strip_accents"]
    stated = dict(config)
    if "strip_accents" in stated and stated["strip_accents"] is None:  # BERT's: where it makes lower case
        stated["strip_accents"] = stated.get("do_lower_case")
    for name in read:
        if isinstance(stated.get(name), bool) and stated[name] != does[name]:
            text = "中中" if name == "tokenize_chinese_chars" else "Aé"
            made = parts(backend, text) if text == "中中" else found
            raise UserError(
                f"{path.parent}: found {name} {json.dumps(config[name])} in tokenizer_config.json and rules in "
                f"{path.name} that make {made!r} of {text!r}, expected the rules that {named} of "
                "transformers makes of it; correct the one that is wrong"
            )


def _add_space_as_described(backend: tokenizers.Tokenizer, path: Path, config: Fields, named: str) -> None:
    """Add a space before a text, or none, as the configuration says, where the class `named` prefers it to the file.

    Raises:
        UserError: the configuration says it of rules that transformers has and the file has not.
    """
    added, rules = config.get(_PREFIX_SPACE), backend.pre_tokenizer
    if added is None or rules is None:
        return
    if named in _BYTE_LEVEL_CLASSES and isinstance(rules, tokenizers.pre_tokenizers.ByteLevel):
        rules.add_prefix_space = added
    if named in _METASPACE_CLASSES:
        expected = "always" if added else _METASPACE_CLASSES[named]
        if found := set(re.findall(r'"prepend_scheme":"(\w+)"', rules.__getstate__().decode())) - {expected}:
            raise UserError(
                f"{path.parent}: found {_PREFIX_SPACE} {str(added).lower()} in tokenizer_config.json and the "
                f"prepend_scheme {found.pop()} in {path.name}, expected {expected}, the rule that {named} of "
                "transformers makes of it; correct the one that is wrong"
            )


def rules_to_describe(backend: tokenizers.Tokenizer, config: Fields) -> Fields:
    """The rules of a tokenizer that a configuration, without the files beside it, would say otherwise: by what it has,
    or, of a BERT tokenizer, by the defaults of transformers' classes for what it lacks.
    """
    rules, spaces = backend.normalizer, backend.pre_tokenizer
    ours, usual = {}, {}
    if isinstance(rules, tokenizers.normalizers.BertNormalizer):
        usual = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}
        ours = {
            "do_lower_case": rules.lowercase,
            "strip_accents": rules.strip_accents,
            "tokenize_chinese_chars": rules.handle_chinese_chars,
        }
    if isinstance(spaces, tokenizers.pre_tokenizers.ByteLevel) and config.get(_PREFIX_SPACE) is not None:
        ours[_PREFIX_SPACE] = spaces.add_prefix_space
    return {name: value for name, value in ours.items() if config.get(name, usual.get(name)) != value}


def wordpiece_backend(
    vocabulary: dict[str, int], names: dict[str, str], lowercase: bool, strip_accents: bool | None
) -> tokenizers.Tokenizer:
    """BERT's tokenizer with a vocabulary."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(vocabulary, unk_token=names["unknown"], max_input_chars_per_word=100)
    )
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    add_special_tokens(backend, names)
    return backend


def byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether the characters of tokens stand for bytes, as in RoBERTa's BPE."""
    return any(part.startswith("Ġ") for part in parts(backend, "a a"))


def has_all_bytes(backend: tokenizers.Tokenizer) -> bool:
    """Whether a BPE model has a token for each byte of UTF-8, so that no text has anything that it does not know."""
    model = model_of(backend)
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):  # a byte has several tokens then
        return False
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}  # in UTF-8
    words = {f"<0x{byte:02X}>" for byte in range(0x100) if byte not in never}
    letters = set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - set(map(chr, never))  # these stand for themselves
    return bool(
        (model.get("byte_fallback") and model["vocab"].keys() >= words)
        or ("åĮĹ" in "".join(parts(backend, "北")) and model["vocab"].keys() >= letters)  # whatever else rules do
    )


def space_begins_word(backend: tokenizers.Tokenizer) -> bool:
    """Whether tokens include the space before a word: as `Ġ` (byte-level BPE) or as `▁` (SentencePiece)."""
    rules = backend.pre_tokenizer
    marked = rules is not None and rules.pre_tokenize_str("a a")[-1][1] == (1, 3)
    return marked or any("▁" in part for part in parts(backend, "a a"))


def adds_space(backend: tokenizers.Tokenizer) -> bool:
    """Whether the first word of a text is encoded like one after a space, as SentencePiece's models do by default."""
    return "".join(parts(backend, "a")).startswith(("Ġ", "▁"))


def parts(backend: tokenizers.Tokenizer, text: str) -> list[str]:
    """What the normaliser and the pre-tokenizer make of a text, before the model sees it."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        return [text]
    return [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def add_special_tokens(backend: tokenizers.Tokenizer, names: dict[str, str]) -> None:
    """Mark the five tokens as special, and add a post-processor that puts them around one or two texts."""
    known = [name for name in names.values() if backend.token_to_id(name) is not None]
    # For users of the library, too, a mask replaces a word with the space before it.
    takes_space = names["mask"] if space_begins_word(backend) else None
    backend.add_special_tokens(
        [tokenizers.AddedToken(name, special=True, normalized=False, lstrip=name == takes_space) for name in known]
    )
    if names["classification"] in known and names["separator"] in known:
        put_around_texts(backend, names)


def put_around_texts(backend: tokenizers.Tokenizer, names: dict[str, str]) -> None:
    """Set the library's post-processor: `[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]`, with B as segment 1."""
    first, last = names["classification"], names["separator"]
    a = [_special(first, 0), {"Sequence": {"id": "A", "type_id": 0}}, _special(last, 0)]
    b = [{"Sequence": {"id": "B", "type_id": 1}}, _special(last, 1)]
    ids = {name: {"id": name, "ids": [backend.token_to_id(name)], "tokens": [name]} for name in (first, last)}
    processor = {"type": "TemplateProcessing", "single": a, "pair": a + b, "special_tokens": ids}
    if byte_level(backend):  # offsets exclude the spaces before words
        trim = {"type": "ByteLevel", "add_prefix_space": adds_space(backend), "trim_offsets": True, "use_regex": True}
        processor = {"type": "Sequence", "processors": [trim, processor]}
    # From JSON, since the library's constructor interprets names with a colon or a dollar.
    backend.post_processor = without_vocabulary({"post_processor": processor}).post_processor


def _special(name: str, segment: int) -> Fields:
    return {"SpecialToken": {"id": name, "type_id": segment}}


def stand_around_texts(
    backend: tokenizers.Tokenizer, names: dict[str, str], pairs: bool = True, segments: bool = True
) -> bool:
    """Whether the post-processor already does that: for single texts and `pairs`, with the numbers of `segments`."""
    first, last = (backend.token_to_id(names[role]) for role in ("classification", "separator"))
    try:
        a, b = (backend.encode(text, add_special_tokens=False) for text in "ab")
    except Exception:  # a plain Exception: the model has neither the word nor an unknown token
        return False
    one, pair = backend.post_process(a), backend.post_process(a, b)
    alone = one.ids == [first, *a.ids, last] and not (segments and any(one.type_ids))
    if not (alone and pairs):
        return alone
    numbered = pair.type_ids == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    return pair.ids == [first, *a.ids, last, *b.ids, last] and (numbered or not segments)
