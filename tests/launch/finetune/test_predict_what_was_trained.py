"""What `cloze finetune` leaves is what `cloze predict` and `cloze serve` use: the same predictions, kind by kind."""

import json
import random

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from cloze.launch.cli import main
from cloze.launch.finetune.tasks import KINDS, TASKS
from cloze.launch.predict.operation import Row
from cloze.launch.predict.predictor import Predictor
from cloze.launch.predict.tags import TagWords, _begins_entity, _entity, _groups
from tests.launch.finetune.examples import test_embedding
from tests.launch.finetune.running import finetune, lines
from tests.launch.finetune.small import GOOD, OTHERS, sentence, write_tsv
from tests.launch.serve.serving import server
from tests.tables import assert_same_names

FEW = ("--epochs", 2)


def ask(capsys, operation: str, folder, rows: list, *options: str, path) -> list[dict]:
    """What the command prints for lines of JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    assert main(["predict", operation, str(folder), "--file", str(path), "--format", "json", *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def trained(model, folder, task: str, header: tuple, rows: list, *overrides) -> list[dict]:
    """Fine-tune on rows, validate on the first ten; returns the predictions for these."""
    train, validation = (
        write_tsv(folder / f"{name}.tsv", header, chosen) for name, chosen in (("train", rows), ("dev", rows[:10]))
    )
    finetune(task, model, train, validation, folder / "run", *FEW, *overrides)
    return lines(folder / "run" / "predictions" / "validation.jsonl")


RNG = random.Random(3)
SINGLE = [sentence(RNG, RNG.choice(GOOD)) for _ in range(24)]
CASES = {  # task -> header, rows, overrides
    "classification": (("text", "label"), [(text, "abc"[n % 3]) for n, text in enumerate(SINGLE)], ()),
    "pair-classification": (
        ("text_a", "text_b", "label"),
        [(a, b, "xy"[n % 2]) for n, (a, b) in enumerate(zip(SINGLE, reversed(SINGLE), strict=True))],
        ("--max_length", 64),
    ),
    "pair-regression": (
        ("text_a", "text_b", "label"),
        [(a, b, n / 5) for n, (a, b) in enumerate(zip(SINGLE, reversed(SINGLE), strict=True))],
        ("--max_length", 64),
    ),
    "multi-label": (
        ("text", "labels"),
        [(text, ("red", "blue", "red,blue", "")[n % 4]) for n, text in enumerate(SINGLE)],
        ("--pooling", "mean"),
    ),
    "label-columns": (
        ("text", "size", "kind"),
        [(text, "sl"[n % 2], "pqr"[n % 3]) for n, text in enumerate(SINGLE)],
        ("--label_columns", "size", "kind"),
    ),
}


# Of each kind of task what trains it, saves it and predicts with it.
PREDICTED = {
    **{TASKS[task].kind: "test_texts_and_pairs" for task in CASES},
    "tagging": "test_tags",
    "answering": "test_answers",
    "choice": "test_choices_by_command_python_and_http",
    "embedding": "test_the_pooling_is_kept_and_sentence_transformers_gives_the_same_vectors",
}


def test_every_kind_is_predicted():
    assert_same_names(KINDS, PREDICTED, "PREDICTED in this file, the test that predicts with a kind of task")
    missing = {*PREDICTED.values()} - globals().keys() - {*dir(test_embedding)}
    assert not missing, f"PREDICTED names {missing}, which are no tests"


@pytest.mark.parametrize("task", CASES)
def test_texts_and_pairs(model, tmp_path, capsys, task):
    header, rows, overrides = CASES[task]
    expected = trained(model, tmp_path, task, header, rows, *overrides)
    pairs = task.startswith("pair")
    asked = [{"text": row[0]} | ({"pair": row[1]} if pairs else {}) for row in rows[:10]]
    found = ask(capsys, "classify", tmp_path / "run", asked, path=tmp_path / "asked.jsonl")
    for ours, theirs in zip(found, expected, strict=True):
        scores = {(each.get("column"), each["label"]): each["score"] for each in ours["labels"]}
        if task == "pair-regression":
            assert list(scores.values()) == [pytest.approx(theirs["prediction"], abs=1e-5)]
            continue
        chances = theirs["probabilities"]
        if task != "label-columns":
            chances = {None: chances}
        assert scores == {
            (column, label): pytest.approx(chance, abs=1e-5)
            for column, parts in chances.items()
            for label, chance in parts.items()
        }
        best = {column: max(parts, key=parts.get) for column, parts in chances.items()}
        if task == "label-columns":
            assert theirs["prediction"] == best
        elif task != "multi-label":
            assert theirs["prediction"] == best[None] == ours["labels"][0]["label"]


CUTS = {  # what is longer than the run's 32 or 31 tokens, in each way; pairs with room odd and even, ties and not
    "head": ("classification", ()),
    "tail": ("classification", ("--keep", "tail")),
    "head_tail": ("classification", ("--keep", "head_tail", "--head_tokens", 9)),
    "pairs": ("pair-classification", ()),
    "pairs, odd": ("pair-classification", ("--max_length", 31)),
    "tails of pairs": ("pair-classification", ("--keep", "tail", "--max_length", 31)),
}


@pytest.mark.parametrize("case", CUTS)
def test_long_texts_are_cut_as_in_training(model, tmp_path, capsys, case):
    task, overrides = CUTS[case]
    pairs = task.startswith("pair")

    def words(count: int) -> str:
        return " ".join(RNG.choices((*GOOD, *OTHERS), k=count))

    rows = [
        (words(20 + n % 5), words(20 + n % 3), "xy"[n % 2]) if pairs else (words(34 + n), "xy"[n % 2])
        for n in range(16)
    ]
    header = ("text_a", "text_b", "label") if pairs else ("text", "label")
    expected = trained(model, tmp_path, task, header, rows, *overrides)
    asked = [{"text": row[0]} | ({"pair": row[1]} if pairs else {}) for row in rows[:10]]
    found = ask(capsys, "classify", tmp_path / "run", asked, path=tmp_path / "asked.jsonl")
    for ours, theirs in zip(found, expected, strict=True):
        scores = {each["label"]: each["score"] for each in ours["labels"]}
        assert scores == pytest.approx(theirs["probabilities"], abs=1e-5) and ours["cut_tokens"] > 0
    # transformers loads the folder, and says the same of what is left of a text.
    folder = tmp_path / "run" / "model"
    assert AutoConfig.from_pretrained(folder).model_type == "bert"
    keep = json.loads((folder / "config.json").read_text())["cloze_truncation"]["keep"]
    if keep != "head_tail":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.truncation_side == ("right" if keep == "head" else "left")
        tokenizer.model_max_length = dict(zip(overrides[::2], overrides[1::2], strict=True)).get("--max_length", 32)
        reference = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        with torch.no_grad():
            logits = [
                reference(**tokenizer(*row[:-1], truncation=True, return_tensors="pt")).logits[0] for row in rows[:10]
            ]
        chances = [list(theirs["probabilities"].values()) for theirs in expected]
        np.testing.assert_allclose(torch.stack(logits).softmax(-1), chances, atol=1e-5)


def test_tags(model, tmp_path, capsys):
    text = ""
    for number in range(30):
        words = RNG.choices(OTHERS, k=RNG.randint(3, 12))
        place = number % len(words)
        words[place] = GOOD[number % 3]
        tags = ["O"] * place + (["S-x"] if place > len(words) - 3 else ["B-x", "M-x", "E-x"]) + ["O"] * len(words)
        text += "".join(f"{word} {tag}\n" for word, tag in zip(words, tags, strict=False)) + "\n"
    for name in ("train", "dev"):
        (tmp_path / f"{name}.conll").write_text(text)
    finetune("ner", model, tmp_path / "train.conll", tmp_path / "dev.conll", tmp_path / "run", "--epochs", 16)
    expected = lines(tmp_path / "run" / "predictions" / "validation.jsonl")
    asked = [{"text": " ".join(each["words"])} for each in expected]
    found = ask(capsys, "tag", tmp_path / "run", asked, path=tmp_path / "asked.jsonl")
    seen = 0
    for ours, theirs in zip(found, expected, strict=True):
        ends = np.cumsum([len(word) + 1 for word in theirs["words"]]) - 1
        words = [
            (tag, chance, int(end) - len(word), int(end))
            for word, tag, chance, end in zip(
                theirs["words"], theirs["prediction"], theirs["probabilities"], ends, strict=True
            )
        ]
        entities = [_entity(group) for group in _groups(words, _begins_entity)]
        expected_tags = [(kind, start, end) for kind, _, start, end in entities if kind != "O"]
        assert [(each["label"], each["start"], each["end"]) for each in ours["tags"]] == expected_tags
        for each, (_, score, _, _) in zip(ours["tags"], [e for e in entities if e[0] != "O"], strict=True):
            assert each["score"] == pytest.approx(score, abs=1e-5)
        assert {kind for kind, *_ in expected_tags} <= {"x"}, "as IOB2, which is put together"
        seen += len(expected_tags)
    assert seen
    tagger = Predictor.from_folder(tmp_path / "run")
    windows = [len(each) for each in tagger.prepare(TagWords(), Row(" ".join(RNG.choices(OTHERS, k=70))))]
    assert len(windows) > 2 and max(windows) == 32 < tagger.config.max_position_embeddings, "as trained"


@pytest.mark.parametrize("task", ["squad", "squad2"])
def test_answers(model, tmp_path, capsys, task):
    """The folder remembers windows, the longest answer, and whether there may be none: the command need not."""
    questions, rng = [], random.Random(5)
    for number in range(24):
        words = rng.choices(OTHERS, k=rng.randint(20, 60))
        place = rng.randrange(len(words))
        words[place] = GOOD[number % 3]
        answer = {"text": words[place], "answer_start": len(" ".join(words[:place])) + bool(place)}
        nothing = task == "squad2" and number % 4 > 0
        questions.append(
            {
                "context": " ".join(words),
                "qas": [
                    {
                        "id": str(number),
                        "question": "w1 ?",
                        "answers": [] if nothing else [answer],
                        "is_impossible": nothing,
                    }
                ],
            }
        )
    for name, chosen in (("train", questions), ("dev", questions[:8])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"data": [{"title": "", "paragraphs": chosen}]}))
    finetune(
        task,
        model,
        tmp_path / "train.json",
        tmp_path / "dev.json",
        tmp_path / "run",
        *FEW,
        "--max_length",
        32,
        "--window_step",
        16,
        "--max_answer_tokens",
        2,
    )
    expected = lines(tmp_path / "run" / "predictions" / "validation.jsonl")
    asked = [{"question": each["qas"][0]["question"], "context": each["context"]} for each in questions[:8]]
    found = ask(capsys, "answer", tmp_path / "run", asked, "--top_k", "2", path=tmp_path / "asked.jsonl")
    for ours, theirs in zip(found, expected, strict=True):
        first, second = ours["answers"]
        assert first["text"] == theirs["prediction"]
        best = first if first["text"] else second
        assert (best["text"], best["start"]) == (theirs.get("best", first["text"]), theirs["start"])
        assert best["probability"] == pytest.approx(theirs["probability"], abs=1e-5)
    assert (task == "squad2") == any(not each["answers"][0]["text"] for each in found)


def test_choices_by_command_python_and_http(model, tmp_path, capsys):
    header = ("text", "choice0", "choice1", "choice2", "choice3", "label")
    rows = [(SINGLE[n], *RNG.sample(SINGLE, 4), n % 4) for n in range(24)]
    expected = trained(model, tmp_path, "multiple-choice", header, rows, "--max_length", 64)
    asked = [{"text": row[0], "choices": list(row[1:5])} for row in rows[:10]]
    run = tmp_path / "run"
    found = ask(capsys, "choose", run, asked, path=tmp_path / "asked.jsonl")
    with server(run) as (address, _), httpx.Client(base_url=address) as client:
        served = client.post("/choose", json={"inputs": asked}).json()["results"]
        wrong = client.post("/choose", json={"inputs": [{"text": "w1", "choices": ["w2"]}]})
        assert wrong.status_code == 422 and "at least two choices" in wrong.json()["detail"]
        assert client.post("/choose", json={"inputs": ["w1"]}).status_code == 422
        vectors = client.post("/features", json={"inputs": ["w1 w2"]}).json()["results"][0]
        assert len(vectors["tokens"]) == 4
        weights = client.post("/attention", json={"inputs": ["w1 w2"]}).json()["results"][0]["weights"]
        assert np.allclose(np.sum(weights, -1), 1, atol=1e-5)
    for ours, theirs, by_http, row in zip(found, expected, served, asked, strict=True):
        assert ours["text"] == row["text"] and ours["choices"] == row["choices"]
        chances = {each["number"]: each["probability"] for each in ours["ranking"]}
        assert {str(number): chance for number, chance in chances.items()} == {
            label: pytest.approx(chance, abs=1e-5) for label, chance in theirs["probabilities"].items()
        }
        assert str(ours["ranking"][0]["number"]) == theirs["prediction"]
        assert [each["number"] for each in by_http["ranking"]] == [each["number"] for each in ours["ranking"]]
    capsys.readouterr()
    assert main(["predict", "choose", str(run), rows[0][0], *rows[0][1:5]]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["ranking"] == found[0]["ranking"]
    best = Predictor.from_folder(run).choose(rows[0][0], rows[0][1:5])[0]
    assert best.text == found[0]["ranking"][0]["text"] and best.number == found[0]["ranking"][0]["number"]
    assert main(["predict", "choose", str(run), "w1", "w2"]) == 2
    assert "at least two choices" in capsys.readouterr().err


def test_features_and_attention_of_a_fine_tuned_model(model, tmp_path, capsys):
    rows = CASES["classification"][1]
    trained(model, tmp_path, "classification", ("text", "label"), rows)
    (found,) = ask(capsys, "features", tmp_path / "run", [{"text": "w1 fine"}], path=tmp_path / "asked.jsonl")
    assert found["tokens"] == ["[CLS]", "w1", "fine", "[SEP]"] and np.shape(found["vectors"]) == (4, 32)
    assert main(["predict", "features", str(tmp_path / "run"), "w1 fine", "--attention", str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.svg").stat().st_size > 1000
