"""Vocabularies: of every kind, the same for any number of workers, as good as the library's."""

import fcntl
import json
import re
import shutil

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from cloze.pipeline.config import PrepareConfig, SourceConfig, VocabularyConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs import vocabulary
from cloze.pipeline.jobs.vocabulary import train_vocabulary
from cloze.pipeline.progress import Progress
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.pipeline import corpus


def config(folder, name="vocab", **changes) -> PrepareConfig:
    values = {"input": [str(folder / "in")], "output": str(folder / name), "vocab_size": 200}
    return PrepareConfig(**{**values, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    for number in range(4):
        corpus.write_jsonl(folder / "in" / f"{number}.jsonl", corpus.documents(60, seed=number))
    return folder


def test_wordpiece_is_what_the_library_learns_from_the_text(folder):
    ours = train_vocabulary(config(folder))
    learner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer = normalizers.BertNormalizer()
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, min_frequency=2, special_tokens=list(corpus.NAMES.values()), show_progress=False
    )
    learner.train_from_iterator([text for seed in range(4) for text in corpus.documents(60, seed=seed)], trainer)
    # Ties between equally frequent pairs are broken in another way, and the library's differ from run to run.
    shared = set(ours.backend.get_vocab()) & set(learner.get_vocab())
    assert len(shared) >= 0.95 * 200
    assert ours.special_tokens.ids == [0, 1, 2, 3, 4] and ours.vocab_size == 200
    assert sorted(p.name for p in (folder / "vocab").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    ]


@pytest.mark.parametrize("model", ["wordpiece", "words", "bytes", "characters", "unigram"])
def test_workers_do_not_change_it(folder, tmp_path, model):
    words = VocabularyConfig(model=model)
    one = train_vocabulary(config(folder, output=str(tmp_path / "one"), vocab_size=400, vocabulary=words))
    two = train_vocabulary(config(folder, output=str(tmp_path / "two"), vocab_size=400, vocabulary=words, workers=2))
    assert one.fingerprint == two.fingerprint
    assert corpus.contents(tmp_path / "one") == corpus.contents(tmp_path / "two")


def test_casing_and_accents(folder):
    cased = train_vocabulary(config(folder, "cased", vocabulary=VocabularyConfig(lowercase=False)))
    assert cased.encode("Ka") != cased.encode("ka") and cased.encode("é") != cased.encode("e")
    kept = train_vocabulary(config(folder, "kept", vocabulary=VocabularyConfig(strip_accents=False)))
    assert kept.encode("Ka") == kept.encode("ka") and kept.encode("é") != kept.encode("e")


def test_bytes_know_every_text_and_decode_to_it(folder):
    tokenizer = train_vocabulary(config(folder, "bytes", vocab_size=600, vocabulary=VocabularyConfig(model="bytes")))
    assert tokenizer.word_table_reason == "model BPE" and tokenizer.vocab_size == 600
    text = "Kalo ren 中文 \U0001f642 déné"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.special_tokens.unknown not in tokenizer.encode(text)
    assert len(tokenizer.encode(" kalo")) < 5  # merges were learned


def test_unigram_pieces_have_scores_and_their_words_a_table(folder):
    unigram = VocabularyConfig(model="unigram")
    tokenizer = train_vocabulary(config(folder, "unigram", vocab_size=300, vocabulary=unigram))
    again = train_vocabulary(config(folder, "again", vocab_size=300, vocabulary=unigram))
    assert tokenizer.vocab_size == 300 and tokenizer.fingerprint == again.fingerprint
    texts = [*corpus.documents(20, seed=9), "Kalo ﬁ x´y ▁ka ▁ \u00a0\u0301a ｶﾞ a\u3000b \ufdfa", "[MASK] <s> 🙂\u0301"]
    (ids, offsets), plain = tokenizer.encode_batch(texts), tokenizer.encode_plainly(texts)
    assert tokenizer.word_table and ids.tolist() == plain[0].tolist() and offsets.tolist() == plain[1].tolist()
    assert len(ids) < 0.5 * sum(map(len, texts))
    assert tokenizer.decode(tokenizer.encode("kalo ren")) == "kalo ren"


def test_a_text_full_of_a_special_tokens_name_is_text(tmp_path):
    """As of HTML's <s>: the pieces had the name twice, and the token of that role another id."""
    names = {"pad_token": "<pad>", "unknown_token": "<unk>", "mask_token": "<mask>"}
    names |= {"classification_token": "<s>", "separator_token": "</s>"}
    words = [f"{first}{second}<s>{second} <s>{first}" for first in "abcdefg" for second in "hijklmn"]
    (tmp_path / "in").write_text("\n".join([" ".join(words)] * 40))
    unigram = VocabularyConfig(model="unigram", lowercase=False, **names)
    tokenizer = train_vocabulary(config(tmp_path, vocab_size=60, vocabulary=unigram))
    pieces = [piece for piece, _ in json.loads(tokenizer.backend.to_str())["model"]["vocab"]]
    assert pieces[:5] == list(tokenizer.names.values()) and len(set(pieces)) == len(pieces)
    assert tokenizer.decode(tokenizer.encode("ah<s>h <s>a")) == "ah<s>h <s>a"


def test_a_vocabulary_of_pieces_holds_all_characters(folder):
    """With fewer the library's trainer ends with an error of its own, or gives more pieces than it should."""
    unigram = VocabularyConfig(model="unigram")
    with pytest.raises(UserError, match="vocab_size: found 12, expected at least [0-9]+: the special tokens") as found:
        train_vocabulary(config(folder, "few", vocab_size=12, vocabulary=unigram))
    least = int(re.search("at least ([0-9]+)", str(found.value))[1])
    assert train_vocabulary(config(folder, "least", vocab_size=least, vocabulary=unigram)).vocab_size == least
    with pytest.raises(UserError, match=f"found {least - 1}, expected at least {least}"):
        train_vocabulary(config(folder, "less", vocab_size=least - 1, vocabulary=unigram))


@pytest.mark.parametrize(("model", "expected"), [("wordpiece", "raise it"), ("unigram", "raise vocabulary.alphabet")])
def test_an_alphabet_that_spells_no_word_is_refused(tmp_path, model, expected):
    (tmp_path / "in.txt").write_text("kalo kalo ren ren lumi\n")
    few = VocabularyConfig(model=model, alphabet=1)
    with pytest.raises(UserError, match=expected):
        train_vocabulary(PrepareConfig(input=[str(tmp_path / "in.txt")], output=str(tmp_path / "o"), vocabulary=few))


def test_characters(folder):
    tokenizer = train_vocabulary(config(folder, "characters", vocabulary=VocabularyConfig(model="characters")))
    assert [tokenizer.tokens[i] for i in tokenizer.encode("Kalo ren")] == list("kaloren")
    assert "pre-tokenizer Sequence" in tokenizer.word_table_reason


def test_the_two_line_corpus_gives_its_vocabulary(tmp_path):
    (tmp_path / "in.txt").write_text("Welcome to the\tthe jungle\nI can stay\there all night\n")
    special = VocabularyConfig(
        model="words",
        lowercase=False,
        min_frequency=1,
        pad_token="<pad>",
        unknown_token="<unk>",
        separator_token="<eos>",
        classification_token="<sos>",
        mask_token="<mask>",
        special_order=["pad", "unknown", "separator", "classification", "mask"],
    )
    tokenizer = train_vocabulary(
        PrepareConfig(
            input=[str(tmp_path / "in.txt")],
            output=str(tmp_path / "v"),
            source=SourceConfig(format="pairs"),
            vocabulary=special,
        )
    )
    expected = "<pad> <unk> <eos> <sos> <mask> the I Welcome all can here jungle night stay to"
    assert (tmp_path / "v/vocab.txt").read_text().split() == expected.split()
    assert tokenizer.special_tokens.classification == 3 and tokenizer.special_tokens.separator == 2


def test_a_small_text_gives_what_it_has(tmp_path):
    (tmp_path / "in.txt").write_text("abc abc")
    remarks = []

    class Listener:
        def stage(self, *_): ...
        def advance(self, *_): ...
        def note(self, text):
            remarks.append(text)

    tokenizer = train_vocabulary(config(tmp_path, input=[str(tmp_path / "in.txt")]), Listener())
    assert tokenizer.vocab_size < 200 and "not 200" in remarks[0]
    train_vocabulary(config(tmp_path, input=[str(tmp_path / "in.txt")], vocab_size=6), Listener())
    assert "not 6: that many special tokens and characters exist" in remarks[1]


def test_what_a_killed_run_left_is_removed_and_another_process_is_not_disturbed(folder, tmp_path):
    left = tmp_path / "v/.tmp-count-1/words-000000.arrow"
    left.parent.mkdir(parents=True)
    left.touch()
    with open(tmp_path / "v/.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process"):
            train_vocabulary(config(folder, output=str(tmp_path / "v")))
    assert left.exists()
    train_vocabulary(config(folder, output=str(tmp_path / "v")))
    assert len(list((tmp_path / "v").iterdir())) == 3


@pytest.mark.parametrize("change", [lambda data: data[: len(data) // 2], lambda data: data.replace(b"k", b"g", 1)])
def test_words_that_were_changed_between_counting_and_reading_are_noticed(folder, tmp_path, monkeypatch, change):
    """By a disk or a store; their file has no checksum of its own."""
    real = vocabulary.count_words

    def damaged(task):
        counted = real(task)
        counted.path.write_bytes(change(counted.path.read_bytes()))
        return counted

    monkeypatch.setattr(vocabulary, "count_words", damaged)
    with pytest.raises(UserError, match="words-000000.arrow: found other bytes than were written, expected them; run"):
        train_vocabulary(config(folder, output=str(tmp_path / "vocab")))


def test_a_folder_that_was_removed_before_the_tokenizer_was_written_is_made_again(folder, tmp_path):
    """With it the lock, which the end need not miss."""

    class Removing(Progress):
        def stage(self, name, *_) -> None:
            if name == "train":
                shutil.rmtree(tmp_path / "v")

    made = train_vocabulary(config(folder, output=str(tmp_path / "v")), Removing())
    assert Tokenizer.from_folder(tmp_path / "v").tokens == made.tokens


def test_a_file_that_was_removed_while_others_were_written_is_missed(folder, tmp_path, monkeypatch):
    """The folder is this process's until then."""

    def save(self, place):
        with pytest.raises(UserError, match="another process"):
            train_vocabulary(config(folder, output=str(place)))
        real(self, place)
        (place / "tokenizer_config.json").unlink()

    real = vocabulary.Tokenizer.save
    monkeypatch.setattr(vocabulary.Tokenizer, "save", save)
    with pytest.raises(UserError, match="found no tokenizer_config.json, expected it as it was written"):
        train_vocabulary(config(folder, output=str(tmp_path / "vocab")))


def test_counts_of_all_tasks_are_bounded_alike_for_any_workers(folder, monkeypatch):
    monkeypatch.setattr("cloze.pipeline.readers._GROUP_BYTES", 1)  # a task for each file
    monkeypatch.setattr("cloze.pipeline.jobs.vocabulary._COUNTED_WORDS", 100)
    words = VocabularyConfig(model="words", min_frequency=1)
    few = train_vocabulary(config(folder, "few", vocabulary=words))
    assert 50 < few.vocab_size <= 105
    assert few.fingerprint == train_vocabulary(config(folder, "few-2", vocabulary=words, workers=2)).fingerprint


@pytest.mark.parametrize(
    "name",
    [
        "[MA\nSK]",
        "[MASK]\r",
        "[MA\u2028SK]",
        "[MA SK]",
        "[MA\x00SK]",
        "",
        "the",
        "MASK",
        "été",
        "中",
        "don't",
        "well-known",
        "U.S.",
        "42",
        ".",
        "--",
        "[]",
    ],
)
def test_special_tokens_that_a_text_or_a_line_of_vocab_txt_could_not_tell_apart(name):
    with pytest.raises(UserError, match=r"vocabulary.mask_token: found .*, expected a name that no text has as a word"):
        VocabularyConfig(mask_token=name)
    for name in ("<mask>", "</s>", "<|m|>", "__mask__", "[屏蔽]", "[unused0]", "$A"):
        VocabularyConfig(mask_token=name)


def test_refusals(folder, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used/thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        train_vocabulary(config(folder, output=str(tmp_path / "used")))
    (tmp_path / "blank.txt").write_text(" \n \n")
    with pytest.raises(UserError, match="no word"):
        train_vocabulary(config(tmp_path, input=[str(tmp_path / "blank.txt")]))
    with pytest.raises(UserError, match="special tokens"):
        VocabularyConfig(pad_token="[UNK]")
