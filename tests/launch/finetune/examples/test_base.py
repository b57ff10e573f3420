"""How the examples of a global batch are divided among ranks and micro-steps."""

import json

import numpy as np
import pytest

from cloze.launch.commands import parse
from cloze.launch.finetune.examples.base import deal
from cloze.launch.finetune.job import read_job


def test_lengths_at_a_micro_step_are_alike_over_ranks():
    lengths = np.random.default_rng(0).integers(5, 100, 64)
    rows = [deal(lengths, 4, rank, 4) for rank in range(4)]
    for step in range(4):
        found = np.concatenate([lengths[rows[rank][step]] for rank in range(4)])
        assert found.max() <= np.sort(lengths)[16 * (step + 1) - 1] and found.min() >= np.sort(lengths)[16 * step]
    assert np.array_equal(np.sort(np.concatenate([np.concatenate(r) for r in rows])), np.arange(64))


CHOICES = {"text": "w1", "a": "w2 [SEP] w3", "b": "", "label": "0"}
ASKED = {
    "question": "w1 [SEP]",
    "id": "0",
    "answers": [{"text": "w2", "answer_start": 0}],
}


@pytest.mark.parametrize(
    ("task", "lines", "said"),
    [
        (
            "multiple-choice",
            [CHOICES, CHOICES],
            "2 rows of 2 choices (2 with an empty text, 2 that spell a special token), ",
        ),
        ("embed", [{"anchor": "w1", "positive": "w2 [CLS]"}], "2 different texts (1 that spell a special token) "),
        (
            "squad",
            [{"data": [{"paragraphs": [{"context": "w2 [PAD]", "qas": [ASKED]}]}]}],
            "1 questions (1 that spell a special token) on 1 texts (1 that spell a special token), ",
        ),
        ("ner", ["w1 O\n[MASK] B-X\n\nw2 O"], "2 sentences (1 that spell a special token), 3 words"),
    ],
)
def test_texts_that_may_not_be_what_was_meant_are_counted(task, lines, said, model, tmp_path):
    path = tmp_path / ("train.txt" if task == "ner" else "train.json" if task == "squad" else "train.jsonl")
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    words = [task, "--model", str(model), "--train", str(path), "--validation", str(path), "--output", "o"]
    if task == "multiple-choice":
        words += ["--text_columns", "text", "--choice_columns", "a", "b", "--label_columns", "label"]
    assert said in read_job(parse("finetune", words)).train.facts
