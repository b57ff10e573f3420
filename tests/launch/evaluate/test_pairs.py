"""`cloze evaluate --suite blimp`: minimal pairs, against a plain loop."""

from __future__ import annotations

import json
import os

import pytest

from cloze.launch.cli import main
from cloze.launch.evaluate import pairs
from cloze.launch.evaluate.pairs import Pair, accuracies, read_pairs
from cloze.pipeline.errors import UserError
from tests.launch.evaluate.plain_scores import BAD, GOOD, TERMS, plain_score, write_pairs


@pytest.mark.parametrize(
    "precision, slowdown, in_bf16", [("auto", 1.0, [True, False]), ("auto", 2.0, [False]), ("fp32", 1.0, [False])]
)
def test_pairs_are_decided_as_by_a_plain_loop(model, tmp_path, capsys, monkeypatch, precision, slowdown, in_bf16):
    """With auto pairs that are close in bf16 are scored again; where bf16 is slow, all are in fp32 at once."""
    scored, score_all = [], pairs.log_likelihoods

    def score(*given, bf16=False, **named):
        scored.append(bf16)
        return score_all(*given, bf16=bf16, **named)

    monkeypatch.setattr(pairs, "log_likelihoods", score)
    monkeypatch.setattr(pairs, "bf16_slowdown", lambda device: slowdown)
    data, found = write_pairs(tmp_path / "pairs"), tmp_path / "new" / "found.json"
    assert (
        main(
            [
                "evaluate",
                str(model),
                "--suite",
                "blimp",
                "--data",
                str(data),
                "--json",
                str(found),
                "--precision",
                precision,
                "--picture",
                str(tmp_path / "found.svg"),
            ]
        )
        == 0
    )
    assert scored == in_bf16
    score = plain_score(model)
    right = {
        uid: [score(good) > score(bad) for good, bad in zip(GOOD[number:], BAD[number:], strict=True)]
        for number, uid in enumerate(TERMS)
    }
    assert not right["first"][4], "a tie is wrong"
    expected = {uid: 100 * sum(values) / len(values) for uid, values in right.items()}
    phenomena = {"argument_structure": (expected["first"] + expected["second"]) / 2, "binding": expected["third"]}
    result = json.loads(found.read_text())
    assert result.keys() == {"paradigms", "phenomena", "mean_of_paradigms", "mean_of_phenomena"}
    assert result["paradigms"] == pytest.approx(expected) and result["phenomena"] == pytest.approx(phenomena)
    assert result["mean_of_paradigms"] == pytest.approx(sum(expected.values()) / 3)
    assert result["mean_of_phenomena"] == pytest.approx(sum(phenomena.values()) / 2)
    assert f"{result['mean_of_phenomena']:.2f}" in capsys.readouterr().out
    assert "binding" in (tmp_path / "found.svg").read_text()


def test_only_a_more_probable_good_sentence_is_right():
    alike = [Pair("a", "b", "p", "q", "here")] * 4
    assert accuracies(alike, [1e-9, 0.0, -1e-9, float("nan")])["paradigms"] == {"p": 25.0}


def test_a_suite_is_of_regular_files(tmp_path):
    """A pipe has no end, and a device, or a file of holes, more than the memory holds."""
    os.mkfifo(tmp_path / "pairs.jsonl")
    with pytest.raises(UserError, match="pairs.jsonl: found no regular file"):
        read_pairs(tmp_path)
    (tmp_path / "pairs.jsonl").unlink()
    with open(tmp_path / "pairs.jsonl", "wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(UserError, match="found 4,398,046,511,104 bytes, expected at most"):
        read_pairs(tmp_path)
