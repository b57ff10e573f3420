"""Answers: windows over long texts, the official scores, and the same answers from transformers and `cloze predict`."""

import json
import random
import re
import string
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from cloze.launch.cli import main, parse
from cloze.launch.config.tasks import find_task
from cloze.launch.finetune.examples.answering import AnswerExamples
from cloze.launch.finetune.mistakes import page
from cloze.launch.finetune.models import start_model
from cloze.launch.finetune.objective import FinetuningObjective
from cloze.launch.finetune.squad import (
    Question,
    best_threshold,
    normalized_characters,
    normalized_words,
    read_squad,
    squad_metrics,
    squad_scores,
)
from cloze.launch.predict.predictor import Predictor
from cloze.launch.pretrained.source import find_source
from cloze.launch.run.runs import read_metrics
from cloze.launch.texts.decoding import answer_spans, counts_once
from cloze.launch.texts.encoding import windows as windows_of
from cloze.model.tasks import BertForQuestionAnswering
from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.byte_level import byte_tokenizer
from tests.finetuning.running import finetune, lines
from tests.finetuning.small import OTHERS, make_model


def squad(path, rng, count, impossible=False):
    """Texts in which the answer to "? WORD" is the number behind WORD."""
    paragraphs = []
    for number in range(count):
        keys = rng.sample(OTHERS, rng.randint(3, 12))
        values = [str(rng.randrange(10)) for _ in keys]
        context = " ".join(f"{key} {value}," for key, value in zip(keys, values, strict=True))
        chosen = rng.randrange(len(keys))
        start = sum(len(key) + 4 for key in keys[:chosen]) + len(keys[chosen]) + 1
        answers = [{"text": values[chosen], "answer_start": start}]
        question = {"id": f"q{number}", "question": f"{keys[chosen]} ?", "answers": answers}
        if impossible and number % 3 == 0:
            question |= {"question": "superb ?", "answers": [], "is_impossible": True}
        paragraphs.append({"context": context, "qas": [question]})
    path.write_text(json.dumps({"version": "x", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return path


def test_three_windows_over_twelve_words():
    words = "the man went to the store and bought a gallon of milk".split()
    assert [" ".join(words[first:end]) for first, end in windows_of(len(words), 6, 3)] == [
        "the man went to the store", "to the store and bought a", "and bought a gallon of milk"]
    for count in range(1, 40):
        covered = {token for first, end in windows_of(count, 6, 4) for token in range(first, end)}
        assert covered == set(range(count)), "no token is left out"


def answer_examples(model, path, task="squad", *overrides):
    config = parse("finetune", [task, "--model", str(model), "--train", str(path), "--validation", str(path),
                                "--output", "o", "--max_length", "24", "--window_step", "8", *overrides])
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
    paragraphs = [{"context": context, "qas": [{"id": answer, "question": "w1 ?", "answers": [
        {"text": answer, "answer_start": context.index(answer)}]}]}
        for context, answer in zip(contexts, answers, strict=True)]
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


def best_window(windows: list[tuple[int, int]], token: int) -> int:
    """Where a token counts: with most context on its poorer side; in the first of equal ones."""
    scores = [min(token - first, end - 1 - token) if first <= token < end else -1 for first, end in windows]
    return scores.index(max(scores))


def test_a_token_of_several_windows_counts_in_the_one_where_most_stands_around_it():
    for total in range(1, 30):
        windows = list(windows_of(total, 7, 3))
        expected = [best_window(windows, token) == number
                    for number, (first, end) in enumerate(windows) for token in range(first, end)]
        chosen = counts_once(windows)
        assert chosen.tolist() == expected and chosen.sum() == total


@pytest.mark.parametrize("task", ["squad", "squad2"])
def test_one_softmax_over_all_windows_of_a_text(tmp_path, task):
    """Against scores by transformers, window by window, put together token by token; and its gradient."""
    model = make_model(tmp_path / "model", dropout=0.0)
    path = squad(tmp_path / "train.json", random.Random(4), 12, task == "squad2")
    examples = answer_examples(model, path, task, "--answer_softmax", "document")
    assert len(examples) == 12 < len(examples._windows)
    config = parse("finetune", [task, "--model", str(model), "--train", "t", "--validation", "v", "--output", "o"])
    reader = start_model(BertForQuestionAnswering, find_source(config), None, config)[0].eval()
    reader.save(tmp_path / "saved", model)
    reference = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "saved").eval()
    everything = np.arange(len(examples))
    micro = examples.batch(everything) | examples.targets(everything)
    objective = FinetuningObjective(examples)
    loss, _ = objective(reader(**micro), micro, torch.tensor(objective.counts([micro]), dtype=torch.float64))
    loss.backward()

    expected = []
    contexts, questions, _ = read_squad(path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for question in questions:
        encoded = tokenizer(contexts[question.context], add_special_tokens=False, return_offsets_mapping=True)
        asked = tokenizer(question.text, add_special_tokens=False)["input_ids"]
        windows = list(windows_of(len(encoded["input_ids"]), 24 - 3 - len(asked), 8))
        scores = []
        for first, end in windows:
            ids = [2, *asked, 3, *encoded["input_ids"][first:end], 3]
            segments = [0] * (len(asked) + 2) + [1] * (end - first + 1)
            output = reference(torch.tensor([ids]), token_type_ids=torch.tensor([segments]))
            scores.append(torch.stack([output.start_logits[0], output.end_logits[0]]))
        where = [best_window(windows, token) for token in range(len(encoded["input_ids"]))]
        tokens = [scores[window][:, token - windows[window][0] + len(asked) + 2] for token, window in enumerate(where)]
        starts = [[low for low, _ in encoded["offset_mapping"]].index(start) for _, start in question.answers]
        nothing = [part[:, 0] for part in scores] if task == "squad2" else []
        chances = torch.stack(tokens + nothing).softmax(0)
        # The answer is one token, its own start and end.
        right = chances[starts[0]] if starts else chances[len(tokens):].sum(0)
        expected.append(-right.log().mean())
    total = torch.stack(expected).mean()
    total.backward()
    assert loss.item() == pytest.approx(total.item(), abs=1e-5)
    assert (reader.span.weight.grad - reference.qa_outputs.weight.grad).abs().max() < 1e-5
    ours = reader.bert.embeddings.word.weight.grad[:74] - reference.bert.embeddings.word_embeddings.weight.grad
    assert ours.abs().max() < 1e-5
    outputs = torch.stack([reader(**examples.batch(everything)).start_logits,
                           reader(**examples.batch(everything)).end_logits], -1)
    assert examples.metrics(outputs.detach().numpy())["loss"] == pytest.approx(total.item(), abs=1e-5)
    empty = examples.metrics(np.full((examples.num_places, 2), -3e4, np.float32))["loss"]
    assert np.isfinite(empty)


def test_the_best_spans_of_several_windows():
    """Against a search over all pairs: in several windows the best score counts, no span is too long or reversed."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        windows, scores = [], {}
        for first in (0, 3, 6):
            starts, ends = rng.normal(size=(2, 8)).astype(np.float32)
            allowed = np.arange(8) >= 2
            offsets = [(0, 0)] * 2 + [(2 * (first + n), 2 * (first + n) + 1) for n in range(6)]
            windows.append((starts, ends, allowed, offsets))
            for a in range(2, 8):
                for b in range(a, min(8, a + 3)):
                    span = offsets[a][0], offsets[b][1]
                    scores[span] = max(scores.get(span, -np.inf), float(starts[a] + ends[b]))
        best = sorted(scores.items(), key=lambda item: -item[1])[:5]
        found = answer_spans(" " * 30, windows, 1000, 3)
        assert len(found) == len(scores) and [span for span, _ in found[:5]] == [span for span, _ in best]
        assert [score for _, score in found[:5]] == pytest.approx([score for _, score in best])


@pytest.mark.parametrize("text,tokens,whole", [
    ("In Londonderry, 1990", ["In", "London", "derry", ",", "19", "90"], {"In", "Londonderry", ",", "1990"}),
    ("Cafe\u0301s", ["Cafe", "\u0301s"], {"Cafe\u0301s"}),
    ("\u6771\u4eac\u90fd", ["\u6771", "\u4eac", "\u90fd"], {"\u6771", "\u4eac", "\u90fd"}),  # no spaces to go by
])
def test_an_answer_neither_begins_nor_ends_inside_a_word(text, tokens, whole):
    offsets, after = [], 0
    for token in tokens:
        low = text.index(token, after)
        after = low + len(token)
        offsets.append((low, after))
    falling = np.linspace(1, 0, len(tokens))
    found = answer_spans(text, [(falling, falling, np.ones(len(tokens), bool), offsets)], 20, len(tokens))
    spans = {text[low:high] for (low, high), _ in found}
    assert whole <= spans and not (set(tokens) - whole) & spans, spans
    # Of a word of which a window has a part only, the part is better than nothing.
    part = np.ones(1), np.ones(1), np.ones(1, bool), [(3, 5)]
    assert answer_spans("Londonderry", [part], 20, 5) == [((3, 5), 2.0)]


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
    results, _ = finetune("squad", model, train, validation, tmp_path / "run", "--epochs", 4, "--max_length", 24,
                          "--window_step", 8, "--answer_softmax", "document")
    losses = [line["validation/loss"] for line in read_metrics(tmp_path / "run") if "validation/loss" in line]
    assert min(losses[1:]) < losses[0] and results["validation"]["examples"] == 11


def test_a_reader_and_its_twin_in_transformers(model, tmp_path):
    rng = random.Random(0)
    train, validation = squad(tmp_path / "train.json", rng, 80), squad(tmp_path / "dev.json", rng, 11)
    results, _ = finetune("squad", model, train, validation, tmp_path / "run", "--epochs", 2, "--max_length", 64,
                       "--window_step", 32)
    assert 0 <= results["validation"]["exact_match"] <= results["validation"]["f1"] <= 100
    reference, report = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "run" / "model",
                                                                      output_loading_info=True)
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
        spans = {(i, j): float(output.start_logits[0, i] + output.end_logits[0, j])
                 for i in text for j in text if i <= j < i + 30}
        first, last = max(spans, key=spans.get)
        assert ours["prediction"] == context[int(offsets[first, 0]) : int(offsets[last, 1])]


def official_words(text: str) -> list[str]:
    """Both scripts' normal form, from its definition: small letters, no punctuation, no articles."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def official_f1(prediction: str, truth: str, version: int) -> float:
    """F1 as evaluate-v1.1.py and evaluate-v2.0.py define it, restated."""
    guessed, true = official_words(prediction), official_words(truth)
    if version == 2 and (not guessed or not true):
        return float(guessed == true)
    same = sum((Counter(guessed) & Counter(true)).values())
    if not same:
        return 0.0
    precision, recall = same / len(guessed), same / len(true)
    return 2 * precision * recall / (precision + recall)


def official_v2(truths: list[list[str]], predictions: list[str], odds: list[float], threshold: float) -> dict:
    """What evaluate-v2.0.py prints, restated by its definitions, but for the thresholds."""
    results = {}
    for name in ("exact", "f1"):
        raw = []
        for right, guess in zip(truths, predictions, strict=True):
            right = [text for text in right if official_words(text)] or [""]
            raw.append(max(float(official_words(guess) == official_words(text)) if name == "exact"
                           else official_f1(guess, text, 2) for text in right))
        final = [float(not right) if odd > threshold else score
                 for right, score, odd in zip(truths, raw, odds, strict=True)]
        results[name] = 100 * np.mean(final)
        for group, chosen in (("HasAns", True), ("NoAns", False)):
            results[f"{group}_{name}"] = 100 * np.mean([score for score, right in zip(final, truths, strict=True)
                                                        if bool(right) == chosen])
            results[f"{group}_total"] = sum(bool(right) == chosen for right in truths)
        current = best = sum(not right for right in truths)
        for number in sorted(range(len(odds)), key=lambda number: odds[number]):
            current += raw[number] if truths[number] else -1 if predictions[number] else 0
            best = max(best, current)
        results[f"best_{name}"] = 100 * best / len(truths)
    return results | {"total": len(truths)}


CASES = [("The cat.", "cat"), ("a cat sat", "the cat sat down"), ("", "x"), ("x", ""), ("3.5%", "35"), ("an", "the"),
         ("cat, cat sat", "cat sat"), ("...", "?"), ("Straße", "strasse"), ("the the", "cat")]


def test_scores_are_those_of_the_official_scripts():
    for version in (1, 2):
        questions = [Question(str(n), "", 0, ((truth, 0),), False) for n, (_, truth) in enumerate(CASES)]
        if version == 2:  # an answer without words is none there
            questions = [Question(q.id, "", 0, ((CASES[n][1], 0), ("the", 0)), False) for n, q in enumerate(questions)]
        scores = squad_scores(questions, [prediction for prediction, _ in CASES], normalized_words, version == 2)
        if version == 1:
            assert scores[:, 1].tolist() == pytest.approx([official_f1(*case, 1) for case in CASES])
        assert scores[:, 0].tolist() == [
            max(official_words(guess) == official_words(text) for text in
                (([truth] if official_words(truth) else [""]) if version == 2 else [truth])) for guess, truth in CASES]


PARTS = ("the", "The", "a", "an", "cat", "Cat", "cat's", "sat", "25%", "2.5", "...", "É", "theater", "—", "北京",
         "a.", "  ")


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
        expected.append([max(float(official_words(guess) == official_words(text)) for text in right),
                         max(official_f1(guess, text, version) for text in right)])
    questions = [Question(str(n), "", 0, tuple((text, 0) for text in right), not right)
                 for n, right in enumerate(truths)]
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
    assert [each["prediction"] for each in predictions] == ["" if odd > 0 else text
                                                            for text, odd in zip(texts, odds, strict=True)]
    assert metrics["best_f1"] >= metrics["f1"] and np.isfinite(metrics["best_f1_thresh"])


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


def test_chinese_answers_are_compared_by_character():
    assert normalized_characters("北京，2022 年。") == list("北京2022年")


def test_the_best_threshold_is_found():
    rng = np.random.default_rng(0)
    scores, none, odds = rng.random(30), rng.random(30) < 0.4, rng.normal(size=30)
    scores[none] = 0.0
    value, threshold = best_threshold(scores, none, np.ones(30, bool), odds)
    tried = {cut: np.where(odds > cut, none, scores).mean() for cut in (*odds, odds.min() - 1)}
    assert value == pytest.approx(max(tried.values())) == np.where(odds > threshold, none, scores).mean()


@pytest.mark.parametrize("change, parts", [
    (lambda qa: qa["answers"][0].update(answer_start=1), ("question q0", "expected the answer", "answer_start")),
    (lambda qa: qa.update(answers=[]), ("question q0", "found no answer", "squad2")),
    (lambda qa: qa.pop("question"), ("read as SQuAD: paragraph 1, question 1: found the fields", "'question'")),
])
def test_squad_errors_name_the_question(model, tmp_path, capsys, change, parts):
    path = squad(tmp_path / "bad.json", random.Random(0), 2)
    content = json.loads(path.read_text())
    change(content["data"][0]["paragraphs"][0]["qas"][0])
    path.write_text(json.dumps(content))
    assert main(["finetune", "squad", "--model", str(model), "--train", str(path), "--validation", str(path),
                 "--output", str(tmp_path / "run"), "--max_length", "64", "--window_step", "16"]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and all(part in error for part in ("bad.json", *parts)), error


@pytest.mark.parametrize(("content", "said"), [
    ("[]", "SQuAD: found a list, expected an object with 'data'; articles"),
    ('{"data": {}}', "SQuAD: found 'data' as an object, expected a list"),
    ('{"data": [{"paragraphs": [3]}]}', "paragraph 1: found a number, expected an object with 'context'"),
    ('{"data": [{"title": ""}]}', "data\\[0\\]: found the fields 'title', expected 'paragraphs'"),
    ('{"data": [{"paragraphs": [{"context": "a", "qas": [[]]}]}]}', "question 1: found a list, expected an object"),
    ('{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": 1, "question": "?", "answers": {"text": ["a"]}}]}]}]}',
     "question 1: found 'answers' as an object, expected a list"),
    ('{"data": ', "SQuAD's JSON"),
    ('{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": 1, "question": "?", "answers": [{"text": "a", '
     '"answer_start": null}]}]}]}]}', "found 'answer_start' as null, expected a number"),
])
def test_what_is_not_squad_says_what_it_is(tmp_path, content, said):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(UserError, match=f"bad.json: can't be read as .*{said}"):
        read_squad(tmp_path / "bad.json")


def test_an_answer_before_the_text_begins_is_refused(tmp_path):
    """Python counts negative places from the end, where the answer would be found."""
    question = {"id": "q", "question": "?", "answers": [{"text": "milk", "answer_start": -5}]}
    (tmp_path / "bad.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": "bought milk.",
                                                                            "qas": [question]}]}]}))
    with pytest.raises(UserError, match="question q: .* character -5"):
        read_squad(tmp_path / "bad.json")


