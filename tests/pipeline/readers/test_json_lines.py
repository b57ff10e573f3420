"""Documents of JSON lines."""

import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from cloze.pipeline import readers
from cloze.pipeline.readers import files, lines
from tests.pipeline.readers.inputs import compress, read


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_json_lines_too_long_to_be_held(tmp_path, monkeypatch, suffix, ascii_only):
    """Escapes, quotes, surrogate pairs and text without spaces, cut everywhere."""
    texts_in = [
        "short",
        'He said: "a\\b" \n' * 300 + "end",
        "中文😀\t" * 700,
        "",
        " ".join(f"w{n}é" for n in range(900)) + "\\",
    ]
    records = [{"id": n, "meta": {"a": [1, "}"]}, "text": text, "tail": "x" * 50} for n, text in enumerate(texts_in)]
    data = "".join(json.dumps(record, ensure_ascii=ascii_only) + "\n" for record in records * 2).encode()
    compress(tmp_path / f"a.jsonl{suffix}", data)
    for held, block in ((500, 64), (700, 333), (2000, 100)):
        monkeypatch.setattr(lines, "LONGEST_JSON_LINE", held)
        monkeypatch.setattr(lines, "LONGEST_PIECE", 200)
        monkeypatch.setattr(files, "BLOCK_BYTES", block)
        monkeypatch.setattr(readers, "_STRIPE_BYTES", 1000)
        found = sorted(read([tmp_path], id_field="id"), key=lambda document: document.order)
        whole: dict[int, str] = {}
        count = 0
        for document in found:
            count += document.piece <= 1
            whole[count] = whole.get(count, "") + document.text.decode()
            assert len(document.text) <= 800
            assert document.id == str((count - 1) % 5)
        assert list(whole.values()) == texts_in * 2


def test_a_null_id_is_none(tmp_path, monkeypatch):
    made = {"id": ["a", None, "3"], "text": ["ka", "lo", "mi"]}
    parquet.write_table(pa.table(made), tmp_path / "a.parquet")
    records = [{"id": name, "text": text} for name, text in zip(*made.values(), strict=True)]
    records.append({"id": None, "text": "x " * 2000})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert [d.id for d in read([tmp_path / "a.parquet"], id_field="id")] == made["id"]
    monkeypatch.setattr(lines, "LONGEST_JSON_LINE", 500)
    monkeypatch.setattr(files, "BLOCK_BYTES", 100)
    assert [d.id for d in read([tmp_path / "a.jsonl"], id_field="id")] == [*made["id"], None]
