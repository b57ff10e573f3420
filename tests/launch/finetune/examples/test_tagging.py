"""Tags and choices: long inputs, exact counts, and the same answers from transformers."""

import gzip
import json
import random

import numpy as np
import pytest
import torch
from seqeval import scheme
from seqeval.metrics import f1_score
from transformers import AutoModelForTokenClassification, AutoTokenizer

from cloze.launch.cli import main
from cloze.launch.finetune.examples.tagging import TagExamples, find_tags, read_conll
from cloze.launch.finetune.tasks import find_task
from cloze.launch.predict.predictor import Predictor
from cloze.launch.texts.encoding import TextEncoder
from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.byte_level import byte_tokenizer
from tests.launch.finetune.running import finetune, lines
from tests.launch.finetune.small import GOOD, OTHERS, make_model

# ---- tags ----


def conll(path, rng, count):
    """Sentences in which a good word is a thing of one or two words: fine w3 -> B-thing I-thing."""
    text = ""
    for _ in range(count):
        words = [(word, "O") for word in rng.choices(OTHERS, k=rng.randint(3, 40))]
        place = rng.randrange(len(words) - 1)
        words[place] = (rng.choice(GOOD), "B-thing")
        if words[place][0] == "fine":
            words[place + 1] = (words[place + 1][0], "I-thing")
        text += "".join(f"{word}\t{tag}\n" for word, tag in words) + "\n"
    path.write_text(text)
    return path


def test_every_word_is_tagged_once_however_long_its_sentence(model, tmp_path):
    tokenizer = Tokenizer.from_folder(model)
    path = tmp_path / "long.conll"
    # 30 words in one sentence; one word of 9 pieces; one that the tokenizer makes nothing of.
    path.write_text(
        "-DOCSTART- O\n\n"
        + "".join(f"w{n % 20} {'B-x' if n % 7 == 0 else 'O'}\n" for n in range(30))
        + "\n"
        + "sssssssssss O\n\u200b\u200b B-x\n",
        encoding="utf-8",
    )
    sentences = read_conll(path)
    head = find_tags(sentences, [])
    assert head.labels == ("O", "B-x")
    examples = TagExamples(sentences, find_task("ner"), head, tokenizer, 8)
    assert examples.lengths.max() <= 8 and "2 sentences split" in examples.facts
    batch = examples.batch(np.arange(len(examples))) | examples.targets(np.arange(len(examples)))
    labels = batch["labels"].numpy()
    assert len(labels) == len(batch["input_ids"]) and (labels >= 0).sum() == len(sentences.words)
    assert [head.labels[n] for n in labels[labels >= 0]] == sentences.tags
    perfect = np.eye(2)[np.maximum(labels, 0)].astype(np.float32)
    assert examples.metrics(perfect)["f1"] == 1.0
    assert [each["prediction"] for each in examples.predictions(perfect)] == [sentences.tags[:30], sentences.tags[30:]]


def test_a_tagger_and_its_twin_in_transformers(model, tmp_path):
    rng = random.Random(0)
    train, validation = conll(tmp_path / "train.conll", rng, 120), conll(tmp_path / "dev.conll", rng, 15)
    results, _ = finetune("ner", model, train, validation, tmp_path / "run", "--epochs", 8, "--max_length", 64)
    assert results["validation"]["f1"] > 0.5
    predictions = lines(tmp_path / "run" / "predictions" / "validation.jsonl")
    strict = f1_score(
        [each["label"] for each in predictions],
        [each["prediction"] for each in predictions],
        mode="strict",
        scheme=scheme.IOB2,
    )
    assert results["validation"]["f1"] == pytest.approx(strict)
    reference, report = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "run" / "model", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert set(reference.config.id2label.values()) == {"O", "B-thing", "I-thing"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    for each in predictions:
        encoded = tokenizer(each["words"], is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            chances = reference(**encoded).logits[0].softmax(-1)
        ids = encoded.word_ids()
        firsts = [ids.index(word) for word in range(len(each["words"]))]
        assert [reference.config.id2label[int(chances[place].argmax())] for place in firsts] == each["prediction"]
        assert np.allclose(chances[firsts].max(-1).values, each["probabilities"], atol=1e-4)


def test_tags_that_are_no_entities(model, tmp_path, capsys):
    (tmp_path / "train.conll").write_text("w1 O\n\nw2 PER\n")
    (tmp_path / "iobes.conll").write_text("w1 O\nw2 S-x\n")
    for train, more, parts in (
        ("train", (), ("train.conll: row 3", "'PER'", "task pos")),
        ("iobes", ("--labels", "O", "B-x", "S-x"), ("labels: found S-x", "iobes.conll (IOBES)")),
    ):
        assert (
            main(
                [
                    "finetune",
                    "ner",
                    "--model",
                    str(model),
                    "--train",
                    str(tmp_path / f"{train}.conll"),
                    "--validation",
                    str(tmp_path / f"{train}.conll"),
                    "--output",
                    str(tmp_path / "run"),
                    "--max_length",
                    "16",
                    *more,
                ]
            )
            == 2
        )
        error = capsys.readouterr().err.strip()
        assert len(error.splitlines()) == 1 and all(part in error for part in parts), error
    assert find_tags(read_conll(tmp_path / "train.conll"), []).labels == ("O", "PER"), "what pos takes"


def test_byte_level_words_are_encoded_as_in_their_text(tmp_path):
    """`Ġyork` behind a space: as the text is encoded, and as transformers encodes words where it adds the space."""
    byte_tokenizer(["the man went to york and new york ."] * 2).save(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    sentences = [["york", "the", "man", "'s", "(", "york", ")", "don't", "😀", "U.S."], ["man", "pineyork"]]
    (tmp_path / "a.conll").write_text("\n".join("".join(f"{word} O\n" for word in words) for words in sentences))
    read = read_conll(tmp_path / "a.conll")
    examples = TagExamples(read, find_task("ner"), find_tags(read, []), tokenizer, 64)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for number, words in enumerate(sentences):
        ids = examples.batch(np.array([number]))["input_ids"].tolist()
        assert ids == next(TextEncoder(tokenizer, 64).windows(" ".join(words), length=64, step=32)).ids
        encoded = theirs(words, is_split_into_words=True)
        assert ids[1 + len(tokenizer.encode(words[0])) :] == encoded["input_ids"][encoded.word_ids().index(1) :]
        firsts = np.flatnonzero(examples.targets(np.array([number]))["labels"].numpy() >= 0)[1:]
        later = [encoded.word_ids().index(word) for word in range(1, len(words))]
        assert (firsts - firsts[0]).tolist() == [place - later[0] for place in later]


def test_a_byte_level_tagger_predicts_what_it_was_measured_by(tmp_path):
    rng = random.Random(1)
    train, validation = conll(tmp_path / "train.conll", rng, 48), conll(tmp_path / "dev.conll", rng, 10)
    folder = make_model(tmp_path / "model", tokenizer=byte_tokenizer([" ".join((*GOOD, *OTHERS))] * 4))
    results, _ = finetune(
        "ner",
        folder,
        train,
        validation,
        tmp_path / "run",
        "--epochs",
        5,
        "--max_length",
        64,
        "--train.precision",
        "bf16",
    )
    assert results["validation"]["f1"] > 0.5
    predictor = Predictor.from_folder(tmp_path / "run")
    for each in lines(tmp_path / "run" / "predictions" / "validation.jsonl"):
        text, entities, start = " ".join(each["words"]), [], 0
        for word, tag in zip(each["words"], each["prediction"], strict=True):
            if tag == "I-thing" and entities and entities[-1][1] == start - 1:
                entities[-1] = entities[-1][0], start + len(word)
            elif tag != "O":
                entities.append((start, start + len(word)))
            start += len(word) + 1
        tags = predictor.tag(text)
        assert [(tag.start, tag.end, tag.text) for tag in tags] == [(*span, text[slice(*span)]) for span in entities]


@pytest.mark.parametrize(
    "text, parts",
    [
        ("w1 O\nw2\n", ("row 2", "found 1 fields", "expected 2")),
        ("w1 O\nw2 B-y extra\n", ("row 2", "found 3 fields")),
        ("\n\n", ("found no rows",)),
        ("w1\tO\nw2\t\n", ("row 2", "found no tag in 'w2'")),
        *(
            ("\n".join(word and "\t".join([word, "Cats", "cat", *"______", "SpaceAfter=No"]) for word in words), found)
            for words, found in (
                (("1",), ("row 1", "found CoNLL-U, of 10 fields")),
                (("1-2", "1", "2", "2.1"), ("row 1", "found CoNLL-U, of 10 fields")),
                (("1", "cats"), ("found the tag",)),  # ten columns of another format
                (("1984", "", "cats"), ("found the tag",)),
            )
        ),
        ("w1\nw2\n", ("row 1", "expected a word and its tag")),
        ("w1 B-x\nw2 B-x\u200b\n", (r"found the tags 'B-x' and 'B-x\u200b', which look alike",)),
        ("w1 B-x\nw2 B-y\nw3 I-y\u200b\n", (r"found the tags 'y' and 'y\u200b', which look alike",)),
    ],
)
def test_conll_errors_name_the_row(model, tmp_path, capsys, text, parts):
    (tmp_path / "bad.conll").write_text(text)
    assert (
        main(
            [
                "finetune",
                "ner",
                "--model",
                str(model),
                "--train",
                str(tmp_path / "bad.conll"),
                "--validation",
                str(tmp_path / "bad.conll"),
                "--output",
                str(tmp_path / "run"),
                "--max_length",
                "16",
            ]
        )
        == 2
    )
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and all(part in error for part in ("bad.conll", *parts)), error


def test_what_gzip_unpacks_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("cloze.launch.texts.tables.MOST_BYTES", 1000)
    with gzip.open(tmp_path / "bomb.conll.gz", "wt") as file:
        file.write("w1 O\n" * 300)
    with pytest.raises(UserError, match=r"bomb.conll.gz: found more than 1,000 characters"):
        read_conll(tmp_path / "bomb.conll.gz")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_of_every_system_end_a_word(tmp_path, end):
    """Lines that end with a carriage return alone were one word once."""
    path = tmp_path / "tags.conll"
    path.write_bytes(end.join(["w1\tA", "w2\tB", "", "w3\tA", " ", "w4\tB", ""]).encode())
    found = read_conll(path)
    assert (found.words, found.tags) == (["w1", "w2", "w3", "w4"], ["A", "B", "A", "B"])
    assert found.bounds.tolist() == [0, 2, 3, 4] and found.lines.tolist() == [1, 2, 4, 6]


@pytest.mark.parametrize("listed", [[], ["--labels", "O", "B-x"]])
def test_a_tag_that_is_not_known(model, tmp_path, capsys, listed):
    """Not seen in training, or not in the list that was given."""
    (tmp_path / "train.conll").write_text("w1 O\nw2 B-x\n")
    (tmp_path / "dev.conll").write_text("w1 O\n\nw2 B-y\n")
    assert (
        main(
            [
                "finetune",
                "ner",
                "--model",
                str(model),
                "--train",
                str(tmp_path / "train.conll"),
                "--validation",
                str(tmp_path / "dev.conll"),
                "--output",
                str(tmp_path / "run"),
                "--max_length",
                "16",
                *listed,
            ]
        )
        == 2
    )
    said = "dev.conll: row 3: found the label 'B-y', expected one of 2: O, B-x; fix the row, or name this label too in"
    assert said in capsys.readouterr().err


# ---- choices ----
