"""The lines of a held-out text."""

from __future__ import annotations

import json

import pytest

from cloze.launch.evaluate.pairs import read_pairs
from cloze.pipeline.errors import UserError


def test_lines_end_at_line_breaks_alone_and_other_bytes_are_one_line(tmp_path):
    rows = [{"sentence_good": "a\u2028b", "sentence_bad": "b\u0085a"}] * 2
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    assert [pair.good for pair in read_pairs(tmp_path)] == ["a\u2028b"] * 2
    (tmp_path / "pairs.jsonl").write_bytes(b'{"sentence_good": "\xff"}\n')
    with pytest.raises(UserError, match="pairs.jsonl:1: found no pair"):
        read_pairs(tmp_path)
