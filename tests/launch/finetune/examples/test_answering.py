"""Answers: windows over long texts, the official scores, and the same answers from transformers and `cloze predict`."""

import json
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.finetune.error_analysis import page
from cloze.launch.finetune.examples.answering import AnswerExamples
from cloze.launch.finetune.squad import read_squad
from cloze.launch.finetune.tasks import find_task
from cloze.launch.predict.predictor import Predictor
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.texts.encoding import windows as windows_of
from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.byte_level import byte_tokenizer
from tests.launch.finetune.running import finetune, lines
from tests.launch.finetune.small import OTHERS, make_model, squad
from tests.references import official_f1, official_words


def test_three_windows_over_twelve_words():
    words = "the man went to the store and bought a gallon of milk".split()
    assert [" ".join(words[first:end]) for first, end in windows_of(len(words), 6, 3)] == [
        "the man went to the store",
        "to the store and bought a",
        "and bought a gallon of milk",
    ]
    for count in range(1, 40):
        covered = {token for first, end in windows_of(count, 6, 4) for token in range(first, end)}
        assert covered == set(range(count)), "no token is left out"


def answer_examples(model, path, task="squad", *overrides):
    config = parse(
        "finetune",
        [
            task,
            "--model",
            str(model),
            "--train",
            str(path),
            "--validation",
            str(path),
            "--output",
            "o",
            "--max_length",
            "24",
            "--window_step",
            "8",
            *overrides,
        ],
    )
    config = config.for_task(find_task(task), 64)
    return AnswerExamples(str(path), config, Tokenizer.from_folder(model), task == "squad2")


def perfect(examples) -> np.ndarray:
    """Outputs of a model that is certain of the right positions."""
    outputs = np.zeros((examples.num_places, 2), np.float32)
    starts = np.concatenate([[0], np.cumsum(examples.lengths)])[:-1]
    targets = examples.targets(np.arange(len(examples)))
    for side, name in enumerate(("start_positions", "end_positions")):
        outputs[starts + targets[name].numpy(), side] = 9.0
    return outputs


def test_answers_come_back_in_the_characters_of_the_text(model, tmp_path):
    examples = answer_examples(model, squad(tmp_path / "train.json", random.Random(2), 20))
    assert len(examples) > 20 and examples.lengths.max() <= 24, "long texts have several windows"
    assert examples.num_examples == 20, "the questions"
    outputs = perfect(examples)
    assert examples.metrics(outputs)["exact_match"] == 100.0
    contexts, questions, _ = read_squad(tmp_path / "train.json")
    for question, each in zip(questions, examples.predictions(outputs), strict=True):
        assert contexts[question.context][each["start"] :].startswith(each["prediction"])
        assert each["start"] == question.answers[0][1] and 0 < each["probability"] <= 1


def test_byte_level_answers_stand_without_the_spaces_around_them(tmp_path):
    """Their tokens hold the space before a word; with white space in rows, and a right answer that ends in a space."""
    words = " ".join(OTHERS)
    folder = make_model(tmp_path / "model", tokenizer=byte_tokenizer([words] * 2))
    contexts = ["w1 w2  w3 w4, w5", "w6 w7 w8\n\n w9", "w1  w2 "]
    answers = ["w3 w4", "w9", "w1 "]
    paragraphs = [
        {
            "context": context,
            "qas": [
                {"id": answer, "question": "w1 ?", "answers": [{"text": answer, "answer_start": context.index(answer)}]}
            ],
        }
        for context, answer in zip(contexts, answers, strict=True)
    ]
    (tmp_path / "dev.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    examples = answer_examples(folder, tmp_path / "dev.json")
    found = examples.predictions(perfect(examples))
    assert [each["prediction"] for each in found] == [answer.strip() for answer in answers]
    assert [each["start"] for each in found] == [7, 11, 0]
    assert "w9" not in page(examples, found) and "w3" not in page(examples, found), "no right answer is a mistake"


def test_questions_without_an_answer(model, tmp_path):
    examples = answer_examples(model, squad(tmp_path / "train.json", random.Random(3), 21, True), "squad2")
    metrics = examples.metrics(perfect(examples))
    assert metrics["exact_match"] == metrics["NoAns_f1"] == metrics["HasAns_f1"] == metrics["best_f1"] == 100.0
    metrics = examples.metrics(np.zeros((examples.num_places, 2), np.float32))
    assert metrics["best_exact"] >= 100 * 7 / 21 - 1e-9, "as good as never answering"


def test_finetune_and_predict_say_the_same_answers_with_the_same_probabilities(model, tmp_path):
    path = squad(tmp_path / "dev.json", random.Random(5), 9)
    finetune("squad", model, path, path, tmp_path / "run", "--epochs", 1, "--max_length", 24, "--window_step", 8)
    predictor = Predictor.from_folder(tmp_path / "run")
    contexts, questions, _ = read_squad(path)
    for question, ours in zip(questions, lines(tmp_path / "run" / "predictions" / "validation.jsonl"), strict=True):
        (span,) = predictor.answer(question.text, contexts[question.context], max_length=24, window_step=8)
        assert (span.text, span.start) == (ours["prediction"], ours["start"])
        assert span.probability == pytest.approx(ours["probability"], abs=1e-5)


def test_a_run_with_one_softmax_a_text_learns_to_answer(model, tmp_path):
    rng = random.Random(0)
    train, validation = squad(tmp_path / "train.json", rng, 24), squad(tmp_path / "dev.json", rng, 11)
    results, _ = finetune(
        "squad",
        model,
        train,
        validation,
        tmp_path / "run",
        "--epochs",
        4,
        "--max_length",
        24,
        "--window_step",
        8,
        "--answer_softmax",
        "document",
    )
    losses = [line["validation/loss"] for line in read_metrics(tmp_path / "run") if "validation/loss" in line]
    assert min(losses[1:]) < losses[0] and results["validation"]["examples"] == 11


def test_a_reader_and_its_twin_in_transformers(model, tmp_path):
    rng = random.Random(0)
    train, validation = squad(tmp_path / "train.json", rng, 80), squad(tmp_path / "dev.json", rng, 11)
    results, _ = finetune(
        "squad", model, train, validation, tmp_path / "run", "--epochs", 2, "--max_length", 64, "--window_step", 32
    )
    assert 0 <= results["validation"]["exact_match"] <= results["validation"]["f1"] <= 100
    reference, report = AutoModelForQuestionAnswering.from_pretrained(
        tmp_path / "run" / "model", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    contexts, questions, _ = read_squad(validation)
    predictions = lines(tmp_path / "run" / "predictions" / "validation.jsonl")
    for question, ours in zip(questions, predictions, strict=True):
        context = contexts[question.context]
        encoded = tokenizer(question.text, context, return_tensors="pt", return_offsets_mapping=True)
        offsets = encoded.pop("offset_mapping")[0]
        with torch.no_grad():
            output = reference(**encoded)
        text = [n for n, sequence in enumerate(encoded.sequence_ids()) if sequence == 1]
        spans = {
            (i, j): float(output.start_logits[0, i] + output.end_logits[0, j])
            for i in text
            for j in text
            if i <= j < i + 30
        }
        first, last = max(spans, key=spans.get)
        assert ours["prediction"] == context[int(offsets[first, 0]) : int(offsets[last, 1])]


def official_v2(truths: list[list[str]], predictions: list[str], odds: list[float], threshold: float) -> dict:
    """What evaluate-v2.0.py prints, restated by its definitions, but for the thresholds."""
    results = {}
    for name in ("exact", "f1"):
        raw = []
        for right, guess in zip(truths, predictions, strict=True):
            right = [text for text in right if official_words(text)] or [""]
            raw.append(
                max(
                    float(official_words(guess) == official_words(text))
                    if name == "exact"
                    else official_f1(guess, text, 2)
                    for text in right
                )
            )
        final = [
            float(not right) if odd > threshold else score for right, score, odd in zip(truths, raw, odds, strict=True)
        ]
        results[name] = 100 * np.mean(final)
        for group, chosen in (("HasAns", True), ("NoAns", False)):
            results[f"{group}_{name}"] = 100 * np.mean(
                [score for score, right in zip(final, truths, strict=True) if bool(right) == chosen]
            )
            results[f"{group}_total"] = sum(bool(right) == chosen for right in truths)
        current = best = sum(not right for right in truths)
        for number in sorted(range(len(odds)), key=lambda number: odds[number]):
            current += raw[number] if truths[number] else -1 if predictions[number] else 0
            best = max(best, current)
        results[f"best_{name}"] = 100 * best / len(truths)
    return results | {"total": len(truths)}


def test_squad_2_has_its_official_names_and_values(model, tmp_path):
    """Random scores, so that answers are wrong, partly right, right, and withheld rightly and wrongly."""
    examples = answer_examples(model, squad(tmp_path / "train.json", random.Random(3), 30, True), "squad2")
    outputs = perfect(examples) + np.random.default_rng(1).normal(0, 5, (examples.num_places, 2)).astype(np.float32)
    _, questions, _ = read_squad(tmp_path / "train.json")
    predictions = examples.predictions(outputs)
    texts, odds = [each["best"] for each in predictions], [each["no_answer_odds"] for each in predictions]
    expected = official_v2([[text for text, _ in q.answers] for q in questions], texts, odds, 0.0)
    metrics = examples.metrics(outputs)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["exact_match"] == metrics["exact"] and 0 < metrics["exact"] < 100
    assert [each["prediction"] for each in predictions] == [
        "" if odd > 0 else text for text, odd in zip(texts, odds, strict=True)
    ]
    assert metrics["best_f1"] >= metrics["f1"] and np.isfinite(metrics["best_f1_thresh"])


def test_a_question_that_lost_its_answers_does_not_leave_all_unmeasured(tmp_path):
    path = squad(tmp_path / "train.json", random.Random(3), 3, True)
    content = json.loads(path.read_text())
    del content["data"][0]["paragraphs"][0]["qas"][0]["answers"]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"question .*: found no field answers, which \d+ of \d+ questions have"):
        read_squad(path)


def test_without_a_text_there_are_no_odds_and_the_line_is_json(model, tmp_path):
    path = squad(tmp_path / "train.json", random.Random(3), 3, True)
    content = json.loads(path.read_text())
    content["data"][0]["paragraphs"][0]["context"] = ""
    path.write_text(json.dumps(content))
    examples = answer_examples(model, path, "squad2")
    first, *others = examples.predictions(perfect(examples))
    json.dumps([first, *others], allow_nan=False)
    assert (first["prediction"], first["best"], first["no_answer_odds"]) == ("", "", None)
    assert all(np.isfinite(each["no_answer_odds"]) for each in others)


@pytest.mark.parametrize(
    "change, parts",
    [
        (lambda qa: qa["answers"][0].update(answer_start=1), ("question q0", "expected the answer", "answer_start")),
        (lambda qa: qa.update(answers=[]), ("question q0", "found no answer", "squad2")),
        (lambda qa: qa.pop("question"), ("read as SQuAD: paragraph 1, question 1: found the fields", "'question'")),
    ],
)
def test_squad_errors_name_the_question(model, tmp_path, capsys, change, parts):
    path = squad(tmp_path / "bad.json", random.Random(0), 2)
    content = json.loads(path.read_text())
    change(content["data"][0]["paragraphs"][0]["qas"][0])
    path.write_text(json.dumps(content))
    assert (
        main(
            [
                "finetune",
                "squad",
                "--model",
                str(model),
                "--train",
                str(path),
                "--validation",
                str(path),
                "--output",
                str(tmp_path / "run"),
                "--max_length",
                "64",
                "--window_step",
                "16",
            ]
        )
        == 2
    )
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and all(part in error for part in ("bad.json", *parts)), error
