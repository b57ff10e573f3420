"""`cloze evaluate --suite blimp`: minimal pairs, against a plain loop."""

from __future__ import annotations

import json
import os

import pytest
from safetensors.torch import load_file, save_file

from cloze.launch.cli import main
from cloze.launch.evaluate import pairs
from cloze.launch.evaluate.pairs import Pair, accuracies, read_pairs
from cloze.pipeline.errors import UserError
from tests.launch.evaluate.plain_scores import BAD, GOOD, TERMS, plain_score, write_pairs
from tests.launch.tiny_models import save_model


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


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [{"UID": "u", "linguistics_term": "a"}, {"UID": "u", "linguistics_term": "b"}],
            "jsonl:2: found the phenomenon",
        ),
        (
            [{"UID": "u"}, {"UID": "u", "linguistics_term": "b"}],
            "'b' of the paradigm 'u', expected 'u', as in the lines",
        ),
        ([{"UID": 1}], "jsonl:1: found 1, expected the name of a paradigm"),
        ([{"linguistics_term": ["a"]}], r"jsonl:1: found \['a'\], expected the name of a paradigm"),
    ],
)
def test_a_paradigm_has_one_phenomenon_and_a_name(tmp_path, lines, message):
    rows = [{"sentence_good": "a", "sentence_bad": "b"} | line for line in lines]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=message):
        read_pairs(tmp_path)


def test_of_every_nth_pair_the_first_of_each_file_is_one(tmp_path):
    """Empty lines are none."""
    rows = [json.dumps({"sentence_good": str(number), "sentence_bad": "b"}) for number in range(5)]
    (tmp_path / "whole.jsonl").write_text("\n".join(rows))
    (tmp_path / "spaced.jsonl").write_text("\n\n" + "\n\n".join(rows) + "\n")
    chosen = [(pair.paradigm, pair.good, pair.place.rpartition(":")[2]) for pair in read_pairs(tmp_path, 3)]
    assert chosen == [("spaced", "0", "3"), ("spaced", "3", "9"), ("whole", "0", "1"), ("whole", "3", "4")]


@pytest.mark.parametrize("suite", ["blimp", "lines"])
def test_scores_that_are_not_finite_are_refused_by_their_text(tmp_path, capsys, suite):
    """The weights are finite, and what they make of one word is not: such a pair was counted as wrong."""
    folder = save_model(tmp_path / "hf", "BertForMaskedLM")
    weights = load_file(folder / "model.safetensors")
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    weights["bert.embeddings.word_embeddings.weight"][words["cat"]] = 3e38
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (tmp_path / "pairs.jsonl").write_text('{"sentence_good": "the sky", "sentence_bad": "the cat"}\n')
    (tmp_path / "lines.txt").write_text("the sky\nthe cat\n")
    data = tmp_path / "lines.txt" if suite == "lines" else tmp_path
    assert main(["evaluate", str(folder), "--suite", suite, "--data", str(data), "--precision", "fp32"]) == 2
    place = "the line 'the cat'" if suite == "lines" else f"{tmp_path}/pairs.jsonl:1"
    assert f"error: {place}: found a log-likelihood that is not finite" in capsys.readouterr().err


def test_files_that_are_left_out_are_counted(tmp_path, capsys):
    rows = '{"sentence_good": "a", "sentence_bad": "b"}\n'
    for name in ("pairs.jsonl", "OTHER.JSONL", "more/pairs.jsonl", "pairs.jsonl.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(rows)
    assert len(read_pairs(tmp_path)) == 1
    assert "left out 3 files that are no *.jsonl of the folder itself" in capsys.readouterr().err


def test_a_suite_is_of_regular_files(tmp_path):
    """A pipe has no end, and a device, or a file of holes, more than the memory holds."""
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="empty.jsonl: found no pair, expected one in each line"):
        read_pairs(tmp_path)
    (tmp_path / "empty.jsonl").unlink()
    os.mkfifo(tmp_path / "pairs.jsonl")
    with pytest.raises(UserError, match="pairs.jsonl: found no regular file"):
        read_pairs(tmp_path)
    (tmp_path / "pairs.jsonl").unlink()
    with open(tmp_path / "pairs.jsonl", "wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(UserError, match="found 4,398,046,511,104 bytes, expected at most"):
        read_pairs(tmp_path)


@pytest.mark.parametrize("field", ["UID", "linguistics_term", None])
def test_a_name_with_half_of_a_character_is_refused_before_anything_is_scored(tmp_path, field):
    """No table could show it. Of names of files it is a byte that is no UTF-8."""
    path = tmp_path / ("a.jsonl" if field else os.fsdecode(b"a\xff.jsonl"))
    named = f'"{field}": "x\\ud800", ' if field else ""
    path.write_text(f'{{{named}"sentence_good": "a b", "sentence_bad": "b a"}}\n')
    with pytest.raises(UserError, match="half of a character, .* in the name of a paradigm or a phenomenon; correct"):
        read_pairs(tmp_path)
