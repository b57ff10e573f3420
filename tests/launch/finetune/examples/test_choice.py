"""Multiple choice, against transformers."""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForMultipleChoice, AutoTokenizer

from cloze.launch.commands import parse
from cloze.launch.finetune.models import start_model
from cloze.launch.pretrained.source import find_source
from cloze.model.tasks import BertForMultipleChoice
from tests.launch.finetune.running import finetune, lines
from tests.launch.finetune.small import OTHERS, write_tsv
from tests.launch.tiny_models import save_model


def test_choices_and_their_twin_in_transformers(model, tmp_path):
    rng = random.Random(0)
    rows = []
    for _ in range(24):
        right, word = rng.randrange(4), rng.choice(OTHERS)
        endings = [rng.choice(OTHERS) for _ in range(4)]
        endings[right] = "superb"
        rows.append((f"w1 {word}", "w2", *endings, right))
    header = ("sent1", "sent2", *(f"ending{n}" for n in range(4)), "label")
    path = write_tsv(tmp_path / "train.tsv", header, rows)
    test = write_tsv(tmp_path / "test.tsv", header, [(*row[:-1], -1) for row in rows])  # as its owners publish it
    results, said = finetune("swag", model, path, path, tmp_path / "run", "--epochs", 6, "--test", test)
    assert results["validation"]["accuracy"] > 0.5
    assert results["test/test"] == {"examples": 24} and "no labels: predicted only" in said
    reference, report = AutoModelForMultipleChoice.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    for row, ours in zip(rows, lines(tmp_path / "run" / "predictions" / "validation.jsonl"), strict=True):
        encoded = tokenizer([row[0]] * 4, [f"w2 {ending}" for ending in row[2:6]], padding=True, return_tensors="pt")
        with torch.no_grad():
            chances = reference(**{name: value[None] for name, value in encoded.items()}).logits[0].softmax(-1)
        assert np.allclose(chances, list(ours["probabilities"].values()), atol=1e-5)
        assert ours["label"] == str(row[-1])


def test_stories_have_two_endings(model, tmp_path):
    header = (
        "InputStoryid",
        *(f"InputSentence{n}" for n in range(1, 5)),
        "RandomFifthSentenceQuiz1",
        "RandomFifthSentenceQuiz2",
        "AnswerRightEnding",
    )
    path = tmp_path / "story.csv"
    path.write_text(",".join(header) + "\n" + 'id,w1,w2,w3,"w4, w5",fine,dull,2\n' * 8)
    results, _ = finetune("rocstories", model, path, path, tmp_path / "run", "--epochs", 2)
    assert results["validation"]["examples"] == 8
    assert lines(tmp_path / "run" / "predictions" / "validation.jsonl")[0]["label"] == "2"


@pytest.mark.parametrize("kind, drawn", [("BertForSequenceClassification", True), ("BertForMultipleChoice", False)])
def test_a_regressions_head_is_not_taken_for_that_of_choices(tmp_path, kind, drawn):
    save_model(tmp_path, kind, num_labels=1)  # both have one score
    config = parse("finetune", ["swag", "--model", str(tmp_path), "--train", "t", "--validation", "v", "--output", "o"])
    _, origin = start_model(BertForMultipleChoice, find_source(config), None, config)
    assert origin == str(tmp_path) + ("; initialized: classifier.weight, classifier.bias" if drawn else "")
