"""The lines of a held-out text."""

from __future__ import annotations

import gzip
import json

import pytest

from cloze.launch.cli import main
from cloze.launch.evaluate.lines import read_lines
from cloze.launch.evaluate.pairs import read_pairs
from cloze.pipeline.errors import UserError
from tests.launch.evaluate.plain_scores import GOOD, plain_score
from tests.launch.tiny_models import save_model


def test_lines_end_at_line_breaks_alone_and_other_bytes_are_one_line(tmp_path):
    rows = [{"sentence_good": "a\u2028b", "sentence_bad": "b\u0085a"}] * 2
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    assert [pair.good for pair in read_pairs(tmp_path)] == ["a\u2028b"] * 2
    (tmp_path / "pairs.jsonl").write_bytes(b'{"sentence_good": "\xff"}\n')
    with pytest.raises(UserError, match="pairs.jsonl:1: found no pair"):
        read_pairs(tmp_path)


def test_options_that_only_prepare_has_are_said_to_be_its(tmp_path):
    (tmp_path / "lines.jsonl").write_text('{"content": "the sky"}\n')
    with pytest.raises(UserError, match=r"--source.* .options of `cloze prepare`: make a file of plain text.$"):
        read_lines(str(tmp_path / "lines.jsonl"), 1)
    with pytest.raises(UserError) as raised:
        read_lines(str(tmp_path / "datasets--owner--name/lines.txt"), 1)
    assert "options of" not in str(raised.value), "as in the hub's cache"


def test_what_a_score_hides_is_said(model, tmp_path, capsys):
    (tmp_path / "held-out.txt").write_text("the man went\nder Mann\n" + 60 * "the " + "\n")
    words = ["evaluate", str(model), "--suite", "lines", "--data", str(tmp_path / "held-out.txt")]
    assert main([*words, "--max_length", "999"]) == 0
    said = capsys.readouterr().err
    assert "warning: max_length: found 999, the model has " in said and "2 of 65 tokens (3.1%) are [UNK]" in said
    (tmp_path / "held-out.txt").write_text("the man went\n")
    assert main(words) == 0 and "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("suite", ["lines", "blimp"])
def test_sequences_longer_than_those_of_the_training_are_said(tmp_path, capsys, suite):
    short = save_model(tmp_path / "short", "BertForMaskedLM", cloze_truncation={"max_length": 6})
    (tmp_path / "texts").mkdir()
    pair = {"sentence_good": "the man went to the store", "sentence_bad": "the man"}
    text = json.dumps(pair if suite == "blimp" else {"text": "the man went to the store\nthe man"})
    (tmp_path / "texts" / "a.jsonl").write_text(text + "\n")
    assert main(["evaluate", str(short), "--suite", suite, "--data", str(tmp_path / "texts")]) == 0
    said = "warning: 1 of 2 sequences have more than the 6 tokens that the model was trained on"
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize("masked", [None, "token", "rest_of_word", "causal"])
def test_a_line_counts_by_its_characters_and_is_cut_where_it_is_long(model, tmp_path, capsys, masked):
    """By default a word's pieces are predicted from left to right, so that none tells those before it."""
    lines = [*GOOD[:3], "the man went to the store and bought a gallon of milk", GOOD[0], "newyork walkings playedab"]
    with gzip.open(tmp_path / "held-out.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "\n".join(lines[:2]) + "\n\n"}) + "\n")
        file.write(json.dumps({"text": " \n" + "\n".join(lines[2:])}) + "\n")
    assert (
        main(
            [
                "evaluate",
                str(model),
                "--suite",
                "lines",
                "--data",
                str(tmp_path / "held-out.jsonl.gz"),
                "--max_length",
                "8",
                "--json",
                str(tmp_path / "found.json"),
                *(["--score", masked] if masked == "causal" else ["--masked", masked] if masked else []),
            ]
        )
        == 0
    )
    score = plain_score(model, causal=masked == "causal")
    expected = sum(score(line, pieces=6, rest_of_word=masked != "token") for line in lines)
    result = json.loads((tmp_path / "found.json").read_text())
    assert result["lines"] == 6 and result["characters"] == sum(map(len, lines))
    assert result["log_likelihood"] == pytest.approx(expected, abs=1e-3)
    assert result["log_likelihood_per_character"] == pytest.approx(expected / result["characters"], abs=1e-5)
    assert "log likelihood per character" in capsys.readouterr().out


def test_a_line_without_tokens_is_named(model, tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("the cat\n\nthe cat\n\x01\u200b\nthe man\n", encoding="utf-8")
    assert main(["evaluate", str(model), "--suite", "lines", "--data", str(tmp_path / "lines.txt")]) == 2
    assert r"error: the line '\x01\u200b': found an empty text" in capsys.readouterr().err
