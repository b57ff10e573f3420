"""Chinese, which has no spaces: tags and answers by character."""

import json
import random
import re
from collections import Counter

import httpx
import numpy as np
import pytest

from cloze.launch.cli import main
from cloze.launch.predict.predictor import Predictor
from cloze.launch.predict.tags import TagWords
from cloze.launch.texts.encoding import characters
from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization.backends import wordpiece_backend
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.byte_level import byte_tokenizer
from tests.launch.finetune.running import finetune, lines
from tests.launch.finetune.small import NAMES, make_model
from tests.launch.serve.serving import server

COMMON = "在去看了的是年月日人大小上下中来"
OTHERS = "0123456789IBMaé☂"  # 2022 and IBM are words of the vocabulary, too; ☂ is none
PERSONS = ("王明", "李红", "张")


def tokenizer(kind: str) -> Tokenizer:
    if kind == "bytes":
        return byte_tokenizer([COMMON + "王明2022年 IBM 2022"] * 2)
    tokens = [*NAMES.values(), *COMMON, *"王明李红张", *"0123456789ibmae", "2022", "ibm", "##2", "##m", ",", "。"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return Tokenizer(wordpiece_backend(vocabulary, NAMES, True, None), NAMES)


def write_tags(path, rng: random.Random, count: int) -> list[str]:
    """Sentences with a person each, a character a line; returns them as texts."""
    texts, rows = [], ""
    for number in range(count):
        before, after = ("".join(rng.choices(COMMON + OTHERS, k=rng.randint(1, 9))) for _ in range(2))
        before += ("2022", "IBM", "é", "e\u0301")[number % 4]
        person = PERSONS[number % 3]
        tags = ["O"] * len(characters(before)) + ["B-PER"] + ["I-PER"] * (len(person) - 1) + ["O"] * len(after)
        text = before + person + after
        for (low, high), tag in zip(characters(text), tags, strict=True):
            rows += f"{text[low:high]} {tag}\n"
        rows += "\n"
        texts.append(text)
    path.write_text(rows, encoding="utf-8")
    return texts


def entities(tags: list[str], spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Characters of each entity of one kind in IOB2."""
    found: list[tuple[int, int]] = []
    for tag, before, (low, high) in zip(tags, ["O", *tags], spans, strict=False):
        if tag == "I-PER" and before != "O":
            found[-1] = found[-1][0], high
        elif tag != "O":
            found.append((low, high))
    return found


@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_a_tagger_of_characters_reads_texts_as_it_has_learned_them(tmp_path, capsys, kind):
    rng = random.Random(0)
    model = make_model(tmp_path / "model", tokenizer=tokenizer(kind))
    write_tags(tmp_path / "train.conll", rng, 48)
    texts = write_tags(tmp_path / "dev.conll", rng, 12)
    adapted = ("--freeze", "encoder") if kind == "bytes" else ()
    _, said = finetune(
        "ner",
        model,
        tmp_path / "train.conll",
        tmp_path / "dev.conll",
        tmp_path / "run",
        "--epochs",
        2,
        "--max_length",
        64,
        *adapted,
    )
    said = " ".join(said.replace("│", " ").split())
    assert "a word is a character" in said
    assert "metrics f1, precision, recall (entities, micro, strict), accuracy (words)" in said
    expected = lines(tmp_path / "run/predictions/validation.jsonl")
    predictor = Predictor.from_folder(tmp_path / "run")
    for text, theirs in zip(texts, expected, strict=True):
        (tokens,) = predictor.map(TagWords(aggregation="none", ignored_label=""), [text])
        firsts = {(tag.start, tag.end): tag for tag in reversed(tokens)}
        assert sorted(firsts) == characters(text)
        found = [firsts[span] for span in characters(text)]
        assert [tag.label for tag in found] == theirs["prediction"]
        assert [tag.score for tag in found] == pytest.approx(theirs["probabilities"], abs=1e-5)
        assert [(tag.start, tag.end) for tag in predictor.tag(text)] == entities(theirs["prediction"], characters(text))
    with pytest.raises(UserError, match="empty text"):
        predictor.tag("")
    if kind == "words":
        assert predictor.tokenize(texts[0]).offsets[1:-1] == characters(texts[0])
        assert main(["tokenize", str(tmp_path / "run"), "2022", "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == ["[CLS]", "2", "0", "2", "2", "[SEP]"]
        with server(tmp_path / "run") as (address, _), httpx.Client(base_url=address) as client:
            served = client.post("/tag", json={"inputs": texts}).json()["results"]
        path = tmp_path / "texts.txt"
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        assert main(["predict", "tag", str(tmp_path / "run"), "--file", str(path), "--format", "json"]) == 0
        printed = [json.loads(line)["tags"] for line in capsys.readouterr().out.splitlines()]
        spans = [[(tag.start, tag.end) for tag in predictor.tag(text)] for text in texts]
        assert spans == [[(tag["start"], tag["end"]) for tag in tags] for tags in printed]
        assert spans == [[(tag["start"], tag["end"]) for tag in each["tags"]] for each in served]


def test_words_of_several_characters_are_read_as_the_tokenizer_cuts_them(tmp_path):
    model = make_model(tmp_path / "model", tokenizer=tokenizer("words"))
    (tmp_path / "train.conll").write_text("王明 B-PER\n2022 O\n年 O\n", encoding="utf-8")
    finetune("ner", model, *2 * [tmp_path / "train.conll"], tmp_path / "run", "--epochs", 1)
    note = json.loads((tmp_path / "run/model/config.json").read_text())["cloze_truncation"]
    assert note == {"max_length": 32, "keep": "head", "head_tokens": 128}


def reference(answer: str, right: str) -> tuple[float, float]:
    """Exact match and F1 of letters and figures."""
    guessed, true = (re.findall(r"\w", text.lower()) for text in (answer, right))
    common = sum((Counter(guessed) & Counter(true)).values())
    if not common:
        return float(guessed == true), 0.0
    precision, recall = common / len(guessed), common / len(true)
    return float(guessed == true), 2 * precision * recall / (precision + recall)


def test_answers_are_measured_by_character(tmp_path):
    """Two right answers a question, with punctuation inside; what is compared is what the run has predicted."""
    rng = random.Random(1)
    paragraphs = []
    for number in range(24):
        context = "".join(rng.choices(COMMON + "0123456789，。", k=40))
        answers = [
            {"text": context[start : start + length], "answer_start": start}
            for start, length in ((rng.randrange(20), rng.randint(2, 8)), (25, 12))
        ]
        paragraphs.append({"context": context, "qas": [{"id": str(number), "question": "在年？", "answers": answers}]})
    path = tmp_path / "zh.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    model = make_model(tmp_path / "model", tokenizer=tokenizer("words"))
    results, _ = finetune(
        "squad",
        model,
        path,
        path,
        tmp_path / "run",
        "--epochs",
        2,
        "--max_length",
        32,
        "--window_step",
        16,
        "--answer_units",
        "characters",
        "--max_answer_tokens",
        12,
    )
    scores = [
        np.max([reference(each["prediction"], right) for right in each["label"]], axis=0)
        for each in lines(tmp_path / "run/predictions/validation.jsonl")
    ]
    exact, f1 = 100 * np.mean(scores, axis=0)
    assert 0 < f1 < 100
    assert [results["validation"][name] for name in ("exact_match", "f1")] == pytest.approx([exact, f1])
