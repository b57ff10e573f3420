"""SQuAD's files and measures, against the official scripts."""

import json
import random

import numpy as np
import pytest

from cloze.launch.finetune.squad import (
    Question,
    best_threshold,
    normalized_characters,
    normalized_words,
    read_squad,
    squad_metrics,
    squad_scores,
)
from cloze.pipeline.errors import UserError
from tests.references import official_f1, official_words

CASES = [
    ("The cat.", "cat"),
    ("a cat sat", "the cat sat down"),
    ("", "x"),
    ("x", ""),
    ("3.5%", "35"),
    ("an", "the"),
    ("cat, cat sat", "cat sat"),
    ("...", "?"),
    ("Straße", "strasse"),
    ("the the", "cat"),
]
PARTS = (
    "the",
    "The",
    "a",
    "an",
    "cat",
    "Cat",
    "cat's",
    "sat",
    "25%",
    "2.5",
    "...",
    "É",
    "theater",
    "—",
    "北京",
    "a.",
    "  ",
)


def test_scores_are_those_of_the_official_scripts():
    for version in (1, 2):
        questions = [Question(str(n), "", 0, ((truth, 0),)) for n, (_, truth) in enumerate(CASES)]
        if version == 2:  # an answer without words is none there
            questions = [Question(q.id, "", 0, ((CASES[n][1], 0), ("the", 0))) for n, q in enumerate(questions)]
        scores = squad_scores(questions, [prediction for prediction, _ in CASES], normalized_words, version == 2)
        if version == 1:
            assert scores[:, 1].tolist() == pytest.approx([official_f1(*case, 1) for case in CASES])
        assert scores[:, 0].tolist() == [
            max(
                official_words(guess) == official_words(text)
                for text in (([truth] if official_words(truth) else [""]) if version == 2 else [truth])
            )
            for guess, truth in CASES
        ]


@pytest.mark.parametrize("version", [1, 2])
def test_scores_of_random_answers_are_those_of_the_official_scripts(version):
    """One to four right answers each, of 2.0 also none; articles, punctuation and nothing at all among their words."""
    rng = random.Random(version)

    def answer() -> str:
        return " ".join(rng.choices(PARTS, k=rng.randint(1, 5)))

    truths = [[answer() for _ in range(rng.randint(version == 1, 4))] for _ in range(600)]
    guesses = [rng.choice([answer(), answer(), *right, ""]) for right in truths]
    expected = []
    for right, guess in zip(truths, guesses, strict=True):
        if version == 2:
            right = [text for text in right if official_words(text)] or [""]
        expected.append(
            [
                max(float(official_words(guess) == official_words(text)) for text in right),
                max(official_f1(guess, text, version) for text in right),
            ]
        )
    questions = [Question(str(n), "", 0, tuple((text, 0) for text in right)) for n, right in enumerate(truths)]
    scores = squad_scores(questions, guesses, normalized_words, version == 2)
    np.testing.assert_allclose(scores, expected)
    metrics = squad_metrics(questions, guesses, normalized_words, version == 2)
    means = 100 * np.mean(expected, axis=0)
    assert [metrics["exact_match"], metrics["f1"]] == pytest.approx(means.tolist())
    assert 10 < means.min() < means.max() < 90
    if version == 2:
        for name, chosen in (("HasAns", True), ("NoAns", False)):
            part = [each for each, right in zip(expected, truths, strict=True) if bool(right) == chosen]
            assert [metrics[f"{name}_exact"], metrics[f"{name}_f1"]] == pytest.approx(100 * np.mean(part, axis=0))
            assert metrics[f"{name}_total"] == len(part) > 50


def test_chinese_answers_are_compared_by_character():
    assert normalized_characters("北京，2022 年。") == list("北京2022年")


def test_the_best_threshold_is_found():
    rng = np.random.default_rng(0)
    scores, none, odds = rng.random(30), rng.random(30) < 0.4, rng.normal(size=30)
    scores[none] = 0.0
    value, threshold = best_threshold(scores, none, np.ones(30, bool), odds)
    tried = {cut: np.where(odds > cut, none, scores).mean() for cut in (*odds, odds.min() - 1)}
    assert value == pytest.approx(max(tried.values())) == np.where(odds > threshold, none, scores).mean()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "SQuAD: found a list, expected an object with 'data'; articles"),
        ('{"data": {}}', "SQuAD: found 'data' as an object, expected a list"),
        ('{"data": [{"paragraphs": [3]}]}', "paragraph 1: found a number, expected an object with 'context'"),
        ('{"data": [{"title": ""}]}', "data\\[0\\]: found the fields 'title', expected 'paragraphs'"),
        ('{"data": [{"paragraphs": [{"context": "a", "qas": [[]]}]}]}', "question 1: found a list, expected an object"),
        (
            '{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": 1, "question": "?", "answers": {}}]}]}]}',
            "question 1: found 'answers' as an object, expected a list",
        ),
        ('{"data": ', "SQuAD's JSON"),
        (
            '{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": 1, "question": "?", "answers": [{"text": "a", '
            '"answer_start": null}]}]}]}]}',
            "found 'answer_start' as null, expected a number",
        ),
    ],
)
def test_what_is_not_squad_says_what_it_is(tmp_path, content, said):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(UserError, match=f"bad.json: can't be read as .*{said}"):
        read_squad(tmp_path / "bad.json")


def test_an_answer_before_the_text_begins_is_refused(tmp_path):
    """Python counts negative places from the end, where the answer would be found."""
    question = {"id": "q", "question": "?", "answers": [{"text": "milk", "answer_start": -5}]}
    (tmp_path / "bad.json").write_text(
        json.dumps({"data": [{"paragraphs": [{"context": "bought milk.", "qas": [question]}]}]})
    )
    with pytest.raises(UserError, match="question q: .* character -5"):
        read_squad(tmp_path / "bad.json")
