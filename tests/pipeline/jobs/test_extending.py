"""Extended vocabularies: fewer tokens for the text's words, and old texts, ids and files as they were."""

import json
from collections import Counter

import pytest
import tokenizers
from tokenizers import normalizers

from cloze.launch.cli import main
from cloze.pipeline.config import PrepareConfig, VocabularyConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.extending import ADDED
from cloze.pipeline.jobs.vocabulary import extend_vocabulary
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.pipeline import corpus
from tests.pipeline.families import KINDS, LINES, family

EXTENDABLE = [kind for kind in KINDS if not kind.startswith("BPE")]
DOMAIN = [
    "Transformers tokenize tokenizers, and transformers learn.",
    "Токенизаторы режут слова.",
    "猫は猫を読みました。",
] * 9


def config(folder, kind, add=30, **changes) -> PrepareConfig:
    family(kind).save(folder / "old")
    (folder / "in.txt").write_text("\n\n".join([*LINES, *DOMAIN]), encoding="utf-8")
    values = {"input": [str(folder / "in.txt")], "extend": str(folder / "old"), "output": str(folder / "new")}
    return PrepareConfig(**{**values, "vocabulary": VocabularyConfig(add=add), **changes})


@pytest.mark.parametrize("kind", EXTENDABLE)
def test_words_of_the_text_need_fewer_tokens_and_old_ids_stay(tmp_path, kind):
    extension = extend_vocabulary(config(tmp_path, kind))
    old, new = family(kind), Tokenizer.from_folder(tmp_path / "new")
    assert new.fingerprint == extension.tokenizer.fingerprint
    assert new.tokens[: old.vocab_size] == old.tokens and new.names == old.names
    assert new.vocab_size == old.vocab_size + len(extension.added)
    assert new.backend.normalizer is None or new.backend.normalizer.normalize_str("a") == "a"
    texts = [*LINES, *DOMAIN]
    counts = Counter(new.encode_batch(texts)[0].tolist())
    saved = len(old.encode_batch(texts)[0]) - counts.total()
    assert saved == extension.tokens_before - extension.tokens_after > 100
    for each in extension.added:
        assert each.count == counts[new.tokens.index(each.token)], each
        joined = each.pieces[0] + "".join(piece.removeprefix("##") for piece in each.pieces[1:])
        assert joined == each.token and set(each.pieces) <= set(old.tokens)
    assert [each.saved for each in extension.added] == sorted((each.saved for each in extension.added), reverse=True)
    bare = tokenizers.Tokenizer.from_file(str(tmp_path / "new/tokenizer.json"))
    for text in texts:
        assert new.encode(text) == bare.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("rules", "text", "found"),
    [
        ([normalizers.Replace("q", "q" * 999)] * 3, "q", "found a text that the tokenizer's normalizer makes .* times"),
        ([normalizers.Replace(tokenizers.Regex("(x+x+)+y"), "")], "x" * 40, "found a rule that gives up on a text"),
    ],
    ids=["endless", "panics"],
)
def test_a_text_that_the_rules_can_t_take_is_a_line(tmp_path, rules, text, found):
    """Where words are counted, too, which asks the library itself."""
    wanted = config(tmp_path, "WordPiece")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "old/tokenizer.json"))
    backend.normalizer = normalizers.Sequence(rules)
    backend.save(str(tmp_path / "old/tokenizer.json"))
    (tmp_path / "in.txt").write_text(text)
    with pytest.raises(UserError, match=found):
        extend_vocabulary(wanted)


def test_special_tokens_behind_a_unigram_model_keep_their_ids(tmp_path):
    """DeBERTa's mask has an id behind the model's list, in which new pieces get theirs."""
    content = json.loads(family("Unigram").backend.to_str())
    listed = content["model"]["vocab"]
    assert listed[4][0] == "[MASK]"
    listed[4][0] = "▁other"
    mask = next(token for token in content["added_tokens"] if token["content"] == "[MASK]")
    mask["id"] = len(listed)
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    old = Tokenizer(backend, corpus.NAMES)
    given = config(tmp_path, "Unigram")
    old.save(tmp_path / "old")
    extend_vocabulary(given)
    new = Tokenizer.from_folder(tmp_path / "new")
    assert new.special_tokens.mask == old.special_tokens.mask == len(listed)
    assert new.tokens[: old.vocab_size] == old.tokens and new.vocab_size > old.vocab_size
    assert new.special_tokens.mask not in new.encode("a [MASK] b")


def test_the_model_chooses_each_added_token_often_enough(tmp_path):
    """WordPiece takes the longest piece first: of `##ba` it had once left one occurrence."""
    given = config(tmp_path, "Chinese WordPiece")
    (tmp_path / "in.txt").write_text("bba bbba bba baba bbbbb bbab bbaa aabb")
    added = extend_vocabulary(given).added
    assert added and min(each.count for each in added) >= 2
    new = Tokenizer.from_folder(tmp_path / "new")
    counts = Counter(new.encode((tmp_path / "in.txt").read_text()))
    assert all(counts[new.tokens.index(each.token)] == each.count for each in added)


@pytest.mark.parametrize("kind", ["WordPiece", "byte-level BPE"])
def test_added_tokens_behind_the_vocabulary_keep_their_ids(tmp_path, kind):
    """ModernBERT's special tokens have such ids."""
    given = config(tmp_path, "byte-level BPE")
    before = corpus.tokenizer() if kind == "WordPiece" else family(kind)
    backend = tokenizers.Tokenizer.from_str(before.backend.to_str())
    backend.add_tokens(["[X1]", tokenizers.AddedToken("<more>", normalized=False)])
    old = Tokenizer(backend, before.names)
    old.save(tmp_path / "old")
    added = extend_vocabulary(given).added
    new = Tokenizer.from_folder(tmp_path / "new")
    assert new.tokens[: old.vocab_size] == old.tokens and new.vocab_size == old.vocab_size + len(added) > old.vocab_size
    for text in ("a [X1] b<more>c", "X1 more"):
        assert [new.tokens[each] for each in new.encode(text) if each < old.vocab_size] == [
            old.tokens[each] for each in old.encode(text)
        ]


def test_an_added_word_is_refused_where_longer_words_would_be_cut_by_it(tmp_path):
    given = config(tmp_path, "byte-level BPE")
    backend = tokenizers.Tokenizer.from_str(corpus.tokenizer().backend.to_str())
    backend.add_tokens(["newer"])
    Tokenizer(backend, corpus.NAMES).save(tmp_path / "old")
    with pytest.raises(UserError, match="with the added token 'newer', which words may contain, behind its vocabulary"):
        extend_vocabulary(given)


def test_a_vocabulary_is_extended_twice_and_workers_do_not_change_it(tmp_path):
    extend_vocabulary(config(tmp_path, "byte-level BPE", add=10))
    first = Tokenizer.from_folder(tmp_path / "new")
    again = config(tmp_path, "byte-level BPE", extend=str(tmp_path / "new"), output=str(tmp_path / "twice"))
    extend_vocabulary(again)
    twice = Tokenizer.from_folder(tmp_path / "twice")
    assert twice.tokens[: first.vocab_size] == first.tokens and twice.vocab_size == first.vocab_size + 30
    extend_vocabulary(config(tmp_path, "byte-level BPE", add=10, output=str(tmp_path / "two"), workers=2))
    assert corpus.contents(tmp_path / "two") == corpus.contents(tmp_path / "new")


def test_the_command_lists_what_it_adds(tmp_path, capsys):
    given = config(tmp_path, "Chinese WordPiece")
    words = ["vocab", "--extend", given.extend, "--input", *given.input, "--output", given.output]
    assert main([*words, "--vocabulary.add", "5", "--vocabulary.lowercase", "false", "--vocab_size", "99"]) == 0
    output = capsys.readouterr()
    assert "vocabulary.lowercase, vocab_size: not used with extend" in output.err
    output = output.out
    assert "5 tokens added" in output and "tokens per word of the text" in output
    rows = [line.split("\t") for line in (tmp_path / "new" / ADDED).read_text(encoding="utf-8").splitlines()]
    assert rows[0] == ["token", "saved_tokens", "count", "pieces"] and len(rows) == 6
    assert all(int(saved) == int(count) * (len(pieces.split()) - 1) for _, saved, count, pieces in rows[1:])
    assert main(words) == 2
    assert "vocabulary.add: found 0, expected at least 1 with extend, else 0" in capsys.readouterr().err
    assert main(["vocab", "--input", *given.input, "--output", given.output, "--vocab_size", "80"]) == 0
    assert not (tmp_path / "new" / ADDED).exists(), "it is another vocabulary's"


def test_words_without_pieces_are_said_with_the_reason(tmp_path):
    given = config(tmp_path, "Chinese WordPiece")
    (tmp_path / "in.txt").write_text(f"ωμ ωμ ωμ βήτ βήτ {'a' * 101}")
    unknown = r"2 different words have characters that the tokenizer lacks \('ωμ', 'β.*'\): they stay unknown; train"
    said = rf"1 different words are longer than the 100 characters .* \('a{{40}}'\): .*; {unknown}"
    with pytest.raises(UserError, match=f"no pieces that stand together 2 times, expected some to add; {said}"):
        extend_vocabulary(given)


def test_words_that_a_bpe_without_an_unknown_token_takes_letters_from_are_left_out(tmp_path):
    given = config(tmp_path, "WordPiece", add=1)
    names = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: number for number, token in enumerate([*names, *"catx"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(names)
    roles = ("pad", "classification", "separator", "mask")
    Tokenizer(backend, {"unknown": "[PAD]", **dict(zip(roles, names, strict=True))}).save(tmp_path / "old")
    (tmp_path / "in.txt").write_text("caéx caéx caéx at at")
    extension = extend_vocabulary(given)
    assert [each.token for each in extension.added] == ["at"] and "lacks ('caéx')" in extension.without_pieces


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("BPE with ▁", "BPE in .* without a pre-tokenizer that cuts words"),
        ("words", "WordLevel in .*, whose words"),
    ],
)
def test_what_cannot_be_extended_is_refused_by_name(tmp_path, kind, message):
    given = config(tmp_path, "Unigram" if kind == "words" else kind)
    if kind == "words":
        words = VocabularyConfig(model="words")
        main(["vocab", "--input", given.input[0], "--output", str(tmp_path / "old"), "--vocabulary.model", words.model])
    with pytest.raises(UserError, match=f"extend: found a tokenizer of kind {message}"):
        extend_vocabulary(given)
    assert not (tmp_path / "new").exists()


def test_a_tokenizer_is_not_extended_in_its_own_folder(tmp_path):
    """Again and again, at each repetition of the command."""
    given = config(tmp_path, "Unigram", output=str(tmp_path / "else" / ".." / "old"))
    before = corpus.contents(tmp_path / "old")
    with pytest.raises(UserError, match="output: found .*, which holds the tokenizer to extend"):
        extend_vocabulary(given)
    assert corpus.contents(tmp_path / "old") == before


def test_a_text_without_anything_to_join_is_refused(tmp_path):
    given = config(tmp_path, "byte-level BPE")
    (tmp_path / "in.txt").write_text("q")
    with pytest.raises(UserError, match="input: found no pieces that stand together 2 times"):
        extend_vocabulary(given)
    assert not list((tmp_path / "new").iterdir())
