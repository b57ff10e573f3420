"""Tokenizers of others: what is written beside shards and models makes the sequences that samples are."""

import json
import math

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer
from transformers.models.auto import modeling_auto, tokenization_auto

from cloze.launch.texts.encoding import TextEncoder
from cloze.pipeline.errors import UserError
from cloze.pipeline.records import ROLES
from cloze.pipeline.tokenization import backends
from cloze.pipeline.tokenization.backends import HUGGING_FACE_NAMES, wordpiece_backend
from cloze.pipeline.tokenization.tokenizer import Tokenizer, copy_tokenizer
from tests.byte_level import EURO_NAMES, byte_tokenizer, save_as_eurobert
from tests.pipeline import corpus
from tests.pipeline.families import family
from tests.synthetic import NAMES

ROBERTA = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))
OTHERS = {  # what stands around texts, and how the folder describes itself
    "nothing": (None, {}),
    "RoBERTa's": (
        ROBERTA,
        {"tokenizer_class": "RobertaTokenizer", "model_input_names": ["input_ids"], "model_max_length": 6},
    ),
    "byte pieces alone": (processors.ByteLevel(), {"tokenizer_class": "GPT2Tokenizer"}),
}


@pytest.mark.parametrize("others", OTHERS)
def test_transformers_makes_the_sequences_of_samples_whatever_stood_around_texts(tmp_path, others):
    texts = ["the cat sat on the mat", "a cat"]
    template, config = OTHERS[others]
    backend = Backend.from_str(byte_tokenizer(texts * 2).backend.to_str())
    backend.post_processor = template
    (tmp_path / "given").mkdir()
    backend.save(str(tmp_path / "given/tokenizer.json"))
    named = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), NAMES.values(), strict=True))
    (tmp_path / "given/tokenizer_config.json").write_text(json.dumps(config | named))
    given = Tokenizer.from_folder(tmp_path / "given")
    fingerprint = given.fingerprint
    copy_tokenizer(given, tmp_path / "copied")
    copy_tokenizer(given, tmp_path / "again")
    assert corpus.contents(tmp_path / "again") == corpus.contents(tmp_path / "copied")
    copied, loaded = Tokenizer.from_folder(tmp_path / "copied"), AutoTokenizer.from_pretrained(tmp_path / "copied")
    assert copied.fingerprint == fingerprint and copied.names == given.names
    for pair in (texts[:1], texts):
        expected, found = TextEncoder(copied, 64).encode(*pair), loaded(*pair)
        assert found["input_ids"] == expected.ids and found["token_type_ids"] == expected.segments
    places = loaded(texts[0], return_offsets_mapping=True)["offset_mapping"]
    assert places == TextEncoder(copied, 64).encode(texts[0]).offsets, "the spaces before words are no part of them"
    assert len(loaded(texts[0], truncation=True)["input_ids"]) == min(len(places), config.get("model_max_length", 99))


KINDS = {  # how the folder describes its tokenizer, tokens, and a text
    "uncased": ({"do_lower_case": True}, "the cafe ##s caf ##é", "The Cafés THE café"),
    "uncased, with accents": ({"do_lower_case": True, "strip_accents": False}, "the cafe ##s caf ##é", "The cafés É"),
    "cased": ({"do_lower_case": False}, "The the Caf cafe ##é ##s", "The the THE Cafés cafe"),
    "Chinese": ({"do_lower_case": False, "tokenize_chinese_chars": True}, "巴 黎 ##黎 A ##1 是 ,", "巴黎 是A1,巴 黎𠀀"),
    "multilingual": ({"do_lower_case": False}, "La ville й ##ой 東 京 한국 ##어 का", "La villea йой 東京La 한국어 का"),
    "Chinese words": ({"do_lower_case": False, "tokenize_chinese_chars": False}, "東京 東 ##京 ##駅", "東京 東京駅 東"),
}


@pytest.mark.parametrize("file", ["vocab.txt", "tokenizer.json", "another's tokenizer.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_vocabularies_of_every_kind_give_the_ids_that_transformers_gives(tmp_path, kind, file):
    """Where tokenizer.json normalises in another way than tokenizer_config.json says, that goes before it."""
    described, tokens, text = KINDS[kind]
    tokens = [*NAMES.values(), *tokens.split()]
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described | {"tokenizer_class": "BertTokenizer"}))
    if file != "vocab.txt":
        AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
        (tmp_path / "vocab.txt").unlink(missing_ok=True)
    if file.startswith("another"):
        backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
        backend.normalizer = normalizers.BertNormalizer(
            lowercase=not described["do_lower_case"], strip_accents=True, handle_chinese_chars="Chinese" not in kind
        )
        backend.save(str(tmp_path / "tokenizer.json"))
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs(text, text[:5])
    found = TextEncoder(ours, 64).encode(text, text[:5])
    assert found.ids == expected["input_ids"] and found.segments == expected["token_type_ids"]
    assert ours.encode(text) == ours.encode_plainly([text])[0].tolist() and len(set(found.ids)) >= 5
    copy_tokenizer(ours, tmp_path / "copied")
    assert AutoTokenizer.from_pretrained(tmp_path / "copied")(text, text[:5])["input_ids"] == found.ids


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_folder_leaves_unsaid_is_written_into_its_copy(tmp_path, kind):
    """tokenizer.json alone says how it normalises: transformers' class would follow its own defaults in the copy."""
    described, tokens, text = KINDS[kind]
    tokens = [*NAMES.values(), *tokens.split()]
    backend = wordpiece_backend({token: number for number, token in enumerate(tokens)}, NAMES, True, None)
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=described["do_lower_case"],
        strip_accents=described.get("strip_accents"),
        handle_chinese_chars=described.get("tokenize_chinese_chars", True),
    )
    Tokenizer(backend, NAMES).save(tmp_path / "given")
    (tmp_path / "given/tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    ours = Tokenizer.from_folder(tmp_path / "given")
    copy_tokenizer(ours, tmp_path / "copied")
    copied, loaded = Tokenizer.from_folder(tmp_path / "copied"), AutoTokenizer.from_pretrained(tmp_path / "copied")
    assert copied.fingerprint == ours.fingerprint
    assert ours.encode(text) == copied.encode(text) == loaded(text, add_special_tokens=False)["input_ids"]


ADDED = ["zebra", "new york", "[E1]"]


def _decoder(first: int) -> dict:
    flags = {"lstrip": False, "rstrip": False}
    return {
        str(first + place): flags
        | {"content": token, "special": (mark := token == "[E1]"), "normalized": not mark, "single_word": mark}
        for place, token in enumerate(ADDED)
    }


LISTED = {  # which file has the vocabulary, added_tokens.json, and what is in tokenizer_config.json; by the next id
    "transformers 2 to 4.33": ("vocab.txt", True, lambda first: {"additional_special_tokens": ["[E1]"]}),
    "no special one": ("vocab.txt", True, lambda first: {}),
    "since 4.34": (
        "vocab.txt",
        True,
        lambda first: {"added_tokens_decoder": _decoder(first), "additional_special_tokens": ["[E1]"]},
    ),
    "beside tokenizer.json": ("tokenizer.json", False, lambda first: {"added_tokens_decoder": _decoder(first)}),
    "names of the vocabulary": (
        "tokenizer.json",
        False,
        lambda first: (
            {"extra_special_tokens": ["[NEW]"], "bos_token": "[BOS]", "cls_token": "[CLS]"}
            | {"entity_token": {"content": "york"}}
        ),
    ),
    "in tokenizer.json": ("all", False, lambda first: {"extra_special_tokens": ["[E1]"]}),
    "split": ("all", False, lambda first: {"extra_special_tokens": ["[E1]"], "split_special_tokens": True}),
}


@pytest.mark.parametrize("form", LISTED)
def test_tokens_beside_the_vocabulary_are_those_that_transformers_finds(tmp_path, form):
    """Also special ones, but the five with roles, which a text never becomes."""
    tokens = [*NAMES.values(), "the", "sat", "##zebra", "new", "york", "e", "##1", "[", "]", "mask", "[NEW]", "[BOS]"]
    file, beside, settings = LISTED[form]
    backend = wordpiece_backend({token: n for n, token in enumerate(tokens)}, NAMES, lowercase=True, strip_accents=None)
    if file == "all":
        backend.add_tokens(ADDED[:2])
        backend.add_special_tokens(ADDED[2:])
    if file == "vocab.txt":
        (tmp_path / file).write_text("".join(f"{token}\n" for token in tokens))
    else:
        backend.save(str(tmp_path / "tokenizer.json"))
    if beside:
        (tmp_path / "added_tokens.json").write_text(json.dumps({t: len(tokens) + n for n, t in enumerate(ADDED)}))
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True} | settings(len(tokens))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = "The [E1] Zebra sat, zebrazebra New York[E1] [NEW] [BOS] york"
    theirs = AutoTokenizer.from_pretrained(tmp_path)(text, add_special_tokens=False)["input_ids"]
    given = Tokenizer.from_folder(tmp_path)
    assert given.encode(text) == theirs
    named = form == "names of the vocabulary"
    assert set(theirs) >= ({len(tokens) - 2, len(tokens) - 1} if named else {len(tokens), len(tokens) + 1})
    assert given.vocab_size == len(tokens) + (0 if named else 3)
    copy_tokenizer(given, tmp_path / "copied")
    (tmp_path / "copied/added_tokens.json").unlink(missing_ok=True)
    copied, loaded = Tokenizer.from_folder(tmp_path / "copied"), AutoTokenizer.from_pretrained(tmp_path / "copied")
    assert copied.fingerprint == given.fingerprint and copied.encode(text) == theirs
    assert loaded(text, add_special_tokens=False)["input_ids"] == theirs
    mask = "[MASK]"
    assert given.special_tokens.mask not in given.encode(f"the {mask} sat")
    assert (mask in loaded.tokenize(mask)) == (form != "split")


@pytest.mark.parametrize("ids", [(1, 0), (0, 0), (5, 6)])
def test_added_tokens_whose_ids_the_library_does_not_give(tmp_path, ids):
    """It numbers them anew in the order of the list: each would have another row of the model's embeddings."""
    tokenizer = corpus.tokenizer()
    tokenizer.backend.add_special_tokens(["[E1]", "[E2]"])
    tokenizer.save(tmp_path)
    path, first = tmp_path / "tokenizer.json", tokenizer.vocab_size
    content = json.loads(path.read_text())
    for token, number in zip(content["added_tokens"][-2:], ids, strict=True):
        token["id"] = first + number
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"tokenizer.json: found \d+ as the id of '\[E\d\]' in added_tokens, expected"):
        Tokenizer.from_folder(tmp_path)


# What is followed where the two files differ, for each class and type of model that may be named.
FOLLOWED = {
    ("RobertaTokenizer", None, None): "configuration",
    ("LongformerTokenizerFast", None, "longformer"): "configuration",
    (None, None, "roberta"): "configuration",
    ("RobertaTokenizerFast", None, "modernbert"): "file",
    (None, None, "modernbert"): "file",
    ("JinaTokenizer", None, None): "file",
    (None, "PreTrainedTokenizerFast", "roberta"): "file",
    ("LlamaTokenizer", None, None): "file",
}


@pytest.mark.parametrize(("named", "followed"), FOLLOWED.items(), ids=map(str, FOLLOWED))
@pytest.mark.parametrize("in_file", [True, False])
def test_a_space_before_a_text_is_as_transformers_has_it(tmp_path, in_file, named, followed):
    """Whoever sets add_prefix_space edits tokenizer_config.json, which some classes prefer to the other file."""
    names = dict(zip(ROLES, ("<pad>", "<unk>", "<s>", "</s>", "<mask>"), strict=True))
    backend = byte_tokenizer(["new york sat", "the york new"] * 4, names=names).backend
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=in_file)
    (folder := tmp_path / "given").mkdir()
    backend.save(str(folder / "tokenizer.json"))
    of_tokenizer, of_model, model = named
    given = {HUGGING_FACE_NAMES[role]: name for role, name in names.items()} | {"add_prefix_space": not in_file}
    given |= {"tokenizer_class": of_tokenizer} if of_tokenizer else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    described = {"tokenizer_class": of_model, "model_type": model}
    if any(described.values()):
        (folder / "config.json").write_text(json.dumps({name: value for name, value in described.items() if value}))
    ours = Tokenizer.from_folder(folder)
    assert ours.first_word_differs == (in_file if followed == "configuration" else not in_file)
    copy_tokenizer(ours, tmp_path / "copy")  # which has no config.json
    for same in (AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path / "copy")):
        for text in ("york new york", " york", "http://york.new ", "sat"):
            assert ours.encode(text) == same(text, add_special_tokens=False)["input_ids"]
    again = Tokenizer.from_folder(tmp_path / "copy")
    assert again.encode("york new") == ours.encode("york new") and again.fingerprint == ours.fingerprint


@pytest.mark.parametrize("named", ["BertTokenizer", "ConvBertTokenizerFast", "RetriBertTokenizer", "Mine", None])
@pytest.mark.parametrize("lowercase", [True, False])
def test_a_class_that_uses_the_file_as_it_is_has_its_case(tmp_path, named, lowercase):
    """Whatever the configuration says of it, which counts for BERT's own class alone."""
    tokens = {name: number for number, name in enumerate([*NAMES.values(), "the", "The", "cafes", "Cafés"])}
    wordpiece_backend(tokens, NAMES, lowercase, None).save(str(tmp_path / "tokenizer.json"))
    config = {HUGGING_FACE_NAMES[role]: name for role, name in NAMES.items()} | {"do_lower_case": not lowercase}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | ({"tokenizer_class": named} if named else {})))
    theirs = AutoTokenizer.from_pretrained(tmp_path)("The Cafés", add_special_tokens=False)["input_ids"]
    ours = Tokenizer.from_folder(tmp_path).encode("The Cafés")
    lower = ours == [tokens["the"], tokens["cafes"]]
    assert ours == theirs and lower == (lowercase if named != "BertTokenizer" else not lowercase)


def test_classes_that_make_rules_anew_are_those_of_transformers(tmp_path):
    """For spaces, case and accents, of all that it knows, asked by folders whose two files differ; and the class of
    each model of masked tokens.
    """
    of_models = {
        model: name.removesuffix("Fast") for model, name in tokenization_auto.TOKENIZER_MAPPING_NAMES.items() if name
    }
    names = dict(zip(ROLES, ("<pad>", "<unk>", "<s>", "</s>", "<mask>"), strict=True))
    bytes_alone = byte_tokenizer(["new york sat", "the york new"] * 4, names=names).backend
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    spaces = family("Unigram, no spaces cut").backend
    spaces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    pieces = wordpiece_backend({name: number for number, name in enumerate(NAMES.values())}, NAMES, False, False)
    for each in (bytes_alone, spaces, pieces):
        each.normalizer = normalizers.Sequence([])
    found: dict[str, dict[str, str]] = {"ByteLevel": {}, "Metaspace": {}, "case": {}}
    for named in {*of_models.values(), *backends._OF_CASE, "BartTokenizer", "LongformerTokenizer"}:
        for rule, backend, roles in (
            ("ByteLevel", bytes_alone, names),
            ("Metaspace", spaces, corpus.NAMES),
            ("case", pieces, NAMES),
        ):
            backend.save(str(tmp_path / "tokenizer.json"))
            given = {HUGGING_FACE_NAMES[role]: name for role, name in roles.items()}
            given |= {"do_lower_case": True, "strip_accents": True, "tokenize_chinese_chars": True}
            given |= {"keep_accents": False, "tokenizer_class": named, "add_prefix_space": False}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
            try:
                read = AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer
                made = json.loads(read.to_str())["pre_tokenizer"]
            except Exception:  # it needs other files or libraries
                continue
            if read.normalizer and "a" in (text := read.normalizer.normalize_str("Aé中")):
                found["case"][named] = text
            if rule == "case":
                continue
            parts = made.get("pretokenizers", [made])
            if rule == "ByteLevel" and made["type"] == rule and not made["add_prefix_space"]:
                found[rule][named] = ""
            for part in parts if rule == "Metaspace" else ():
                if part["type"] == rule and part["prepend_scheme"] != "always":
                    found[rule][named] = part["prepend_scheme"]
    assert set(found["ByteLevel"]) == backends._BYTE_LEVEL_CLASSES
    # The tables have none of those of decoders, of speech and of images.
    others = {"CodeLlamaTokenizer", "LlamaTokenizer", "SeamlessM4TTokenizer"}
    others |= {"CLIPTokenizer", "OpenAIGPTTokenizer", "Siglip2Tokenizer", "XLNetTokenizer"}
    spaces, case = (
        {name: made for name, made in found[rule].items() if name not in others} for rule in list(found)[1:]
    )
    assert spaces == backends._METASPACE_CLASSES
    made = {"tokenize_chinese_chars": "ae 中 ", "keep_accents": "ae中", "do_lower_case": "aé中"}  # by what is read last
    assert case == {name: made[read[-1]] for name, read in backends._OF_CASE.items()}
    of_masked = {model: of_models.get(model) for model in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    known = backends._BYTE_LEVEL_CLASSES | backends._METASPACE_CLASSES.keys() | backends._OF_CASE.keys()
    known |= {"TokenizersBackend"}
    expected = {model: named for model, named in of_masked.items() if named in known}
    assert {model: named or "TokenizersBackend" for model, named in backends._CLASS_OF_MODEL.items()} == expected


def test_a_rule_for_spaces_that_transformers_would_make_otherwise_is_refused(tmp_path):
    backend = family("Unigram, no spaces cut").backend
    for named, added, scheme, expected in (
        ("DebertaV2Tokenizer", False, "always", "first"),
        ("XLMRobertaTokenizerFast", False, "always", "never"),
        ("AlbertTokenizer", True, "never", "always"),
    ):
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme=scheme)])
        backend.save(str(tmp_path / "tokenizer.json"))
        given = {"tokenizer_class": named, "add_prefix_space": added}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
        with pytest.raises(UserError, match=f"prepend_scheme {scheme} in tokenizer.json, expected {expected}, the"):
            Tokenizer.from_folder(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(given | {"add_prefix_space": None}))
        Tokenizer.from_folder(tmp_path)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.save(str(tmp_path / "tokenizer.json"))
    given = {HUGGING_FACE_NAMES[role]: name for role, name in corpus.NAMES.items()} | {"add_prefix_space": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given | {"tokenizer_class": "DebertaV2Tokenizer"}))
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the cat sat", " cat", "cat"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


_CASE = {"do_lower_case": True, "strip_accents": True, "keep_accents": False}


@pytest.mark.parametrize(
    ("named", "rules", "stated", "refused"),
    [
        ("BertTokenizer", [], _CASE, "do_lower_case true"),
        ("BertTokenizerFast", [normalizers.Lowercase()], _CASE, "strip_accents true"),
        (
            "BertTokenizer",
            [normalizers.Lowercase()],
            {"do_lower_case": True, "strip_accents": None},
            "strip_accents null",
        ),
        ("BertTokenizer", [normalizers.Lowercase()], {"strip_accents": None}, None),
        ("BertTokenizer", [normalizers.NFD(), normalizers.Lowercase()], _CASE, "strip_accents true"),
        ("BertTokenizer", [normalizers.NFD()], {"strip_accents": False}, "strip_accents false"),
        ("BertTokenizer", [], {"tokenize_chinese_chars": True}, "tokenize_chinese_chars true"),
        ("BertTokenizer", [], {"tokenize_chinese_chars": False}, None),
        ("AlbertTokenizer", [normalizers.Lowercase()], _CASE, "keep_accents false"),
        ("AlbertTokenizer", [normalizers.NFKD()], {"keep_accents": True}, "keep_accents true"),
        ("DebertaV2Tokenizer", [normalizers.NFC()], _CASE, "do_lower_case true"),
        ("DebertaV2Tokenizer", [normalizers.Lowercase()], _CASE, None),
        ("AlbertTokenizer", [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()], _CASE, None),
        ("XLMRobertaTokenizer", [], _CASE, None),
        ("PreTrainedTokenizerFast", [], _CASE, None),
        (None, [], _CASE, None),
        ("bert", [], _CASE, "do_lower_case true"),  # a model's type, whose class counts
        ("deberta-v2", [], _CASE, "do_lower_case true"),
        ("modernbert", [], _CASE, None),
    ],
)
def test_a_rule_for_case_that_transformers_would_make_otherwise_is_refused(tmp_path, named, rules, stated, refused):
    backend = family("Unigram, no spaces cut").backend
    backend.pre_tokenizer, backend.normalizer = pre_tokenizers.Whitespace(), normalizers.Sequence(rules)
    backend.save(str(tmp_path / "tokenizer.json"))
    given = stated | {HUGGING_FACE_NAMES[role]: name for role, name in corpus.NAMES.items()}
    if named and named.islower():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": named}))
    else:
        given["tokenizer_class"] = named
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    if refused is None:
        Tokenizer.from_folder(tmp_path)
        return
    with pytest.raises(UserError, match=f"found {refused} in tokenizer_config.json and rules in tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_model_whose_class_uses_the_file_has_its_rules_for_case(tmp_path):
    vocabulary = {name: number for number, name in enumerate([*NAMES.values(), "a", "A"])}
    wordpiece_backend(vocabulary, NAMES, False, None).save(str(tmp_path / "tokenizer.json"))
    names = {HUGGING_FACE_NAMES[role]: name for role, name in NAMES.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True} | names))
    for model, expected in (("bert", "a"), ("modernbert", "A")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
        ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
        assert ours.encode("A") == theirs("A", add_special_tokens=False)["input_ids"] == [vocabulary[expected]]


@pytest.mark.parametrize("named", ["BertTokenizer", "PreTrainedTokenizerFast"])
def test_an_added_token_is_found_by_the_rules_of_the_configuration(tmp_path, named):
    """Its rules are in two files, of which transformers uses the configuration's."""
    words = [*NAMES.values(), "pine", "##apple", "##s", "apple", "x"]
    backend = wordpiece_backend({name: number for number, name in enumerate(words)}, NAMES, True, None)
    backend.add_tokens([AddedToken("apple"), AddedToken("<E>", normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    names = {HUGGING_FACE_NAMES[role]: name for role, name in NAMES.items()}
    rules = {"lstrip": False, "rstrip": False, "special": False}
    apple = rules | {"content": "apple", "single_word": True, "normalized": True}
    mark = rules | {"content": "<E>", "single_word": False, "normalized": True}
    listed = {str(backend.token_to_id(each["content"])): each for each in (apple, mark)}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(names | {"tokenizer_class": named, "added_tokens_decoder": listed})
    )
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("pineapples", "x apple", "x <E> x", "x <e>x"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text
    assert [ours.tokens[each] for each in ours.encode("pineapples <e>")] == ["pine", "##apple", "##s", "<E>"]


@pytest.mark.parametrize("named", ["BertTokenizer", "PreTrainedTokenizerFast"])
def test_a_token_is_special_as_for_the_class(tmp_path, named):
    """Special ones are split, where that is asked for; a class that uses the file as it is takes it from both."""
    backend = wordpiece_backend({name: number for number, name in enumerate([*NAMES.values(), "x"])}, NAMES, True, None)
    backend.add_special_tokens(["[E]"])
    backend.save(str(tmp_path / "tokenizer.json"))
    rules = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    given = {HUGGING_FACE_NAMES[role]: name for role, name in NAMES.items()} | {
        "added_tokens_decoder": {str(backend.token_to_id("[E]")): rules | {"content": "[E]"}},
        "split_special_tokens": True,
        "tokenizer_class": named,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("x [E] x") == theirs("x [E] x", add_special_tokens=False)["input_ids"]


def test_configurations_that_are_no_texts_or_rules(tmp_path):
    family("Unigram, no spaces cut").backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": "yes"}')
    with pytest.raises(UserError, match="add_prefix_space: found 'yes', expected true or false"):
        Tokenizer.from_folder(tmp_path)


def test_an_added_token_without_text(tmp_path):
    backend = family("Unigram, no spaces cut").backend
    content = json.loads(backend.to_str())
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": backend.get_vocab_size(), "content": ""})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="found '' in added_tokens, of which the library makes no token, .*; remove it"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("added_tokens.json", {"zebra": 9}, "found 9 as the id of 'zebra', expected 6, as its vocabulary"),
        ("added_tokens.json", {"zebra": "x"}, "found added tokens that can't be read"),
        ("added_tokens.json", {"zebra": math.inf}, "found added tokens that can't be read"),
        ("added_tokens.json", {"zebra": 6.7}, "found added tokens that can't be read"),
        ("added_tokens.json", {"zebra": 6, "okapi": 6}, "found added tokens that can't be read .two have the same id"),
        ("added_tokens.json", ["zebra"], "found list, expected an object"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"6": {"contents": "zebra"}}}, "found added tokens that"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"0": {"content": "zebra"}}},
            "found 0 as the id of 'zebra'",
        ),
        ("tokenizer_config.json", {"extra_special_tokens": [3]}, "found added tokens that can't be read"),
        (
            "tokenizer_config.json",
            {"extra_special_tokens": "the"},
            "extra_special_tokens: found 'the', expected",
        ),
        (
            "special_tokens_map.json",
            {"additional_special_tokens": "e"},
            "additional_special_tokens: found 'e'",
        ),
    ],
)
def test_lists_of_added_tokens_that_say_no_ids_are_refused(tmp_path, name, content, said):
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in [*NAMES.values(), "the"]))
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"{name}: {said}"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
def test_a_file_that_is_there_and_none_is_not_missing(tmp_path, name):
    """As the link of a hub's folder whose content was removed: it may name the special tokens."""
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in [*NAMES.values(), "the"]))
    Tokenizer.from_folder(tmp_path)
    for make in (lambda path: path.symlink_to("gone"), lambda path: path.mkdir()):
        make(tmp_path / name)
        with pytest.raises(UserError, match=f"{name}: found no regular file, expected one; restore or remove it"):
            Tokenizer.from_folder(tmp_path)
        (tmp_path / name).unlink() if (tmp_path / name).is_symlink() else (tmp_path / name).rmdir()


@pytest.mark.parametrize("name", ["<cls:1>", "[CLS] x", "$A"])
def test_special_tokens_may_have_any_name(tmp_path, name):
    names = NAMES | {"classification": name}
    backend = Backend(models.WordLevel({each: number for number, each in enumerate([*names.values(), "a"])}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    Tokenizer(backend, names).save(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("a", "a")["input_ids"] == [2, 5, 3, 5, 3]


def test_a_model_that_knows_neither_a_word_nor_a_token_for_it():
    """The library's WordLevel has <unk> for unknown words by default, also where the vocabulary has none."""
    backend = Backend(models.WordLevel({each: number for number, each in enumerate([*NAMES.values(), "ka"])}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(UserError, match="the model's unk_token '<unk>'.*; write '\\[UNK\\]' there"):
        Tokenizer(backend, NAMES)


def test_word_pieces_without_a_token_for_unknown_words_are_refused_before_any_text_is_read(tmp_path):
    names = NAMES | {"unknown": "<unk>"}
    backend = Backend(models.WordPiece({each: number for number, each in enumerate([*names.values(), "ka"])}))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"unk_token": "<unk>"}')
    with pytest.raises(UserError, match="the model's unk_token '\\[UNK\\]'.*; write '<unk>' there"):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_in_the_form_of_samples_keeps_its_description(tmp_path):
    corpus.tokenizer().save(tmp_path / "given")
    described = json.loads((tmp_path / "given/tokenizer_config.json").read_text())
    described |= {"tokenizer_class": "BertTokenizer", "model_max_length": 512}
    (tmp_path / "given/tokenizer_config.json").write_text(json.dumps(described))
    copy_tokenizer(Tokenizer.from_folder(tmp_path / "given"), tmp_path / "copied")
    assert json.loads((tmp_path / "copied/tokenizer_config.json").read_text()) == described


def test_a_long_unknown_word_of_a_word_level_vocabulary_is_looked_up_once():
    """A run of a million letters without a space, such as DNA, has a million prefixes."""
    backend = Backend(models.WordLevel({name: number for number, name in enumerate([*NAMES.values(), "a"])}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer(backend, NAMES)

    class Counting(dict):
        asked = 0

        def get(self, *arguments):
            self.asked += 1
            return super().get(*arguments)

    tokenizer._whole_words = Counting(tokenizer._whole_words)
    unknown = tokenizer.special_tokens.unknown
    text = f"a {'acgt' * 100} a"
    assert tokenizer.encode(text) == [5, unknown, 5] == tokenizer.encode_plainly([text])[0].tolist()
    assert tokenizer._whole_words.asked < 5


def test_roles_of_a_tokenizer_made_after_a_decoders_are_those_of_its_beginning_and_end(tmp_path):
    """As EuroBERT's: its folder names no [CLS] and [SEP], and no unknown token, since every text has bytes."""
    made = save_as_eurobert(["the cat sat on the mat"] * 2, tmp_path / "source")
    read = Tokenizer.from_folder(tmp_path / "source")
    assert read.names == made.names == EURO_NAMES and read.fingerprint == made.fingerprint
    copy_tokenizer(read, tmp_path / "copy")
    described = [(tmp_path / name / "tokenizer_config.json").read_bytes() for name in ("source", "copy")]
    assert described[0] == described[1] and Tokenizer.from_folder(tmp_path / "copy").names == EURO_NAMES
    theirs = AutoTokenizer.from_pretrained(tmp_path / "copy")
    special = read.special_tokens
    inside = read.backend.encode("the cat", add_special_tokens=False).ids
    assert theirs("the cat")["input_ids"] == [special.classification, *inside, special.separator]


@pytest.mark.parametrize("change", [{"unk_id": None}, {}])
def test_a_unigram_model_without_its_unknown_token_is_refused(tmp_path, change):
    """A text with a character that it does not know ended with the library's error, and left half a table of words."""
    family("Unigram").save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    del content["model"]["unk_id"]
    path.write_text(json.dumps(content | {"model": content["model"] | change}))
    with pytest.raises(UserError, match="found no unk_id of its Unigram model, expected 1, the id of"):
        Tokenizer.from_folder(tmp_path)
