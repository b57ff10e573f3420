"""Tokenizers of the `tokenizers` library with the special tokens of BERT: built, read from files, saved."""

import itertools
import json
from pathlib import Path

import tokenizers

from cloze.pipeline.errors import UserError
from cloze.pipeline.records import ROLES

HUGGING_FACE_NAMES = dict(zip(ROLES, ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), strict=True))
_USUAL_NAMES = {  # tried in turn where no configuration names the token
    "pad": ("[PAD]", "<pad>"),
    "unknown": ("[UNK]", "<unk>"),
    "classification": ("[CLS]", "<s>", "<sos>", "<cls>"),
    "separator": ("[SEP]", "</s>", "<eos>", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
}


def read_tokenizer_config(folder: Path) -> dict:
    """How a folder describes its tokenizer; empty if it does not. Raises UserError for what isn't JSON."""
    config: dict = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            try:
                config |= json.loads((folder / name).read_text(encoding="utf-8"))
            except (ValueError, TypeError) as error:
                raise UserError(f"{folder / name}: isn't JSON: {error}; fix or remove it") from error
    return config


def special_names(vocabulary: dict[str, int], config: dict) -> dict[str, str]:
    """The special tokens' names by role: those that the configuration gives, or usual ones in the vocabulary."""
    names = {}
    for role in ROLES:
        named = config.get(HUGGING_FACE_NAMES[role])
        named = named.get("content") if isinstance(named, dict) else named
        usual = [name for name in _USUAL_NAMES[role] if name in vocabulary]
        names[role] = named or (usual[0] if usual else _USUAL_NAMES[role][0])
    return names


def from_vocab_txt(path: Path, config: dict) -> tokenizers.Tokenizer:
    """BERT's tokenizer around a vocab.txt, cased if `config` says so, or else if it has a token with a capital letter.

    Raises UserError for a token that stands there twice.
    """
    tokens = path.read_text(encoding="utf-8").split("\n")
    if tokens and not tokens[-1]:
        tokens.pop()
    tokens = [token.rstrip("\r") for token in tokens]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if vocabulary[token] != number)
        raise UserError(f"{path}: found {twice!r} twice, expected each token once, one a line")
    names = special_names(vocabulary, config)
    specials = {*names.values(), *itertools.chain.from_iterable(_USUAL_NAMES.values())}
    cased = any(token != token.lower() for token in tokens if token not in specials and not token.startswith("["))
    backend = wordpiece_backend(vocabulary, names, lowercase=not cased, strip_accents=None)
    _normalize_as_described(backend, config)
    return backend


def from_tokenizer_json(path: Path, config: dict) -> tokenizers.Tokenizer:
    """The tokenizer in the library's own file, but where `config` says how a BERT's normalises: then as that says."""
    backend = tokenizers.Tokenizer.from_file(str(path))
    if config.get("tokenizer_class") not in ("PreTrainedTokenizerFast", "TokenizersBackend"):  # they ask the file alone
        _normalize_as_described(backend, config)
    return backend


def _normalize_as_described(backend: tokenizers.Tokenizer, config: dict) -> None:
    ours = backend.normalizer
    if isinstance(ours, tokenizers.normalizers.BertNormalizer):
        backend.normalizer = tokenizers.normalizers.BertNormalizer(
            clean_text=ours.clean_text, strip_accents=config.get("strip_accents", ours.strip_accents),
            lowercase=bool(config.get("do_lower_case", ours.lowercase)),
            handle_chinese_chars=bool(config.get("tokenize_chinese_chars", ours.handle_chinese_chars)),
        )


def default_normalization(backend: tokenizers.Tokenizer, config: dict) -> dict:
    """What a BERT's tokenizer does and `config` doesn't say, where the classes of transformers would then do other."""
    rules = backend.normalizer
    if not isinstance(rules, tokenizers.normalizers.BertNormalizer):
        return {}
    usual = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}
    ours = {"do_lower_case": rules.lowercase, "strip_accents": rules.strip_accents,
            "tokenize_chinese_chars": rules.handle_chinese_chars}
    return {name: value for name, value in ours.items() if name not in config and value != usual[name]}


def wordpiece_backend(
    vocabulary: dict[str, int], names: dict[str, str], lowercase: bool, strip_accents: bool | None
) -> tokenizers.Tokenizer:
    """BERT's tokenizer around a vocabulary."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(vocabulary, unk_token=names["unknown"], max_input_chars_per_word=100)
    )
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    add_special_tokens(backend, names)
    return backend


def space_begins_word(backend: tokenizers.Tokenizer) -> bool:
    """Whether the space before a word is a part of it, as in byte-level BPE."""
    rules = backend.pre_tokenizer
    return rules is not None and rules.pre_tokenize_str("a a")[-1][1] == (1, 3)


def add_special_tokens(backend: tokenizers.Tokenizer, names: dict[str, str]) -> None:
    """Make the five tokens special, and put them around one text or two when a library user encodes."""
    known = [name for name in names.values() if backend.token_to_id(name) is not None]
    # To a library user too a mask stands for a word with the space before it.
    takes_space = names["mask"] if space_begins_word(backend) else None
    backend.add_special_tokens([
        tokenizers.AddedToken(name, special=True, normalized=False, lstrip=name == takes_space) for name in known
    ])
    if names["classification"] in known and names["separator"] in known:
        put_around_texts(backend, names)


def put_around_texts(backend: tokenizers.Tokenizer, names: dict[str, str]) -> None:
    """Let a library user's texts come as `[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]`, the latter part as segment 1."""
    first, last = names["classification"], names["separator"]
    a = [_special(first, 0), {"Sequence": {"id": "A", "type_id": 0}}, _special(last, 0)]
    b = [{"Sequence": {"id": "B", "type_id": 1}}, _special(last, 1)]
    ids = {name: {"id": name, "ids": [backend.token_to_id(name)], "tokens": [name]} for name in (first, last)}
    processor = {"type": "TemplateProcessing", "single": a, "pair": a + b, "special_tokens": ids}
    if space_begins_word(backend):  # offsets are those of words without the spaces before them
        added = backend.pre_tokenizer.pre_tokenize_str("a")[0][0] != "a"
        trim = {"type": "ByteLevel", "add_prefix_space": added, "trim_offsets": True, "use_regex": True}
        processor = {"type": "Sequence", "processors": [trim, processor]}
    # From JSON: the library's own constructor reads names with a colon or a dollar as something else.
    empty = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    read = tokenizers.Tokenizer.from_str(json.dumps(empty | {"post_processor": processor}))
    backend.post_processor = read.post_processor


def _special(name: str, segment: int) -> dict:
    return {"SpecialToken": {"id": name, "type_id": segment}}


def stand_around_texts(backend: tokenizers.Tokenizer, names: dict[str, str]) -> bool:
    """Whether they come so already."""
    first, last = (backend.token_to_id(names[role]) for role in ("classification", "separator"))
    try:
        a, b = (backend.encode(text, add_special_tokens=False) for text in "ab")
    except Exception:  # a bare one: the model knows neither the word nor a token for what it doesn't know
        return False
    one, pair = backend.post_process(a), backend.post_process(a, b)
    return (
        one.ids == [first, *a.ids, last]
        and pair.ids == [first, *a.ids, last, *b.ids, last]
        and pair.type_ids == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    )
