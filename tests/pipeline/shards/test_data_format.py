"""docs/data-format.md as a reader in another language would follow it: with Arrow, JSON, SHA-256 and CRC-32 alone."""

import base64
import hashlib
import json
import re
import zlib

import numpy as np
import pyarrow as pa

from cloze.pipeline.config import MixtureSource, SamplesConfig, SourceConfig, SplitConfig
from cloze.pipeline.jobs.prepare import prepare
from tests.pipeline import corpus

SPLITS = ("validation", "test", "train")  # from the lowest hashes to the highest


def crc32(*arrays: pa.Array) -> bytes:
    """Of columns, one after another: lists as int32 offsets from 0 and their items, other columns as they are."""
    found = 0
    for array in arrays:
        if pa.types.is_list(array.type):
            offsets = array.offsets.to_numpy()
            found = zlib.crc32((offsets - offsets[0]).astype("<i4"), found)
            array = array.flatten()
        values = array.fill_null(0).to_numpy(zero_copy_only=False)
        found = zlib.crc32(np.ascontiguousarray(values, values.dtype.newbyteorder("<")), found)
    return str(found).encode()


def read(folder) -> tuple[dict, dict[str, list[pa.Table]]]:
    """The manifest, and the tables of each split's shards; everything that can be checked is."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert manifest["format_version"] == 2
    tables = {}
    for split in SPLITS:
        tables[split] = []
        listed = manifest["splits"][split]["shards"]
        for shard in (dict(zip(listed, row, strict=True)) for row in zip(*listed.values(), strict=True)):
            content = (folder / shard["file"]).read_bytes()
            assert (len(content), hashlib.sha256(content).hexdigest()) == (shard["bytes"], shard["sha256"])
            file = pa.ipc.open_file(content)
            batches = [file.get_batch_with_custom_metadata(n) for n in range(file.num_record_batches)]
            blocks = min(shard["samples"], -(-shard["tokens"] // 131_072))
            rows = -(-shard["samples"] // blocks)
            assert all(len(batch) == rows for batch, _ in batches[:-1]) and 0 < len(batches[-1][0]) <= rows
            index = base64.b64decode(file.metadata[b"cloze.byte_ranges"])
            bounds = np.frombuffer(index, "<i8").reshape(len(batches), manifest["mask_sets"] + 2)
            for (batch, checksums), bound in zip(batches, bounds.tolist(), strict=True):
                check_ranges(content, file.schema, batch, bound)
                base = ("input_ids", "segment_b_start", "next_sentence_label", "document", "source")
                assert checksums[b"crc32.base"] == crc32(*map(batch.column, base))
                for k in range(manifest["mask_sets"]):
                    columns = batch.column(f"masked_positions_{k}"), batch.column(f"masked_ids_{k}")
                    assert checksums[b"crc32.%d" % k] == crc32(*columns)
            tables[split].append(file.read_all())
            assert len(tables[split][-1]) == shard["samples"]
            assert len(tables[split][-1]["input_ids"].combine_chunks().flatten()) == shard["tokens"]
        counts = manifest["splits"][split]["counts"]
        assert sum(map(len, tables[split])) == counts["samples"]
    return manifest, tables


def check_ranges(content: bytes, schema: pa.Schema, batch: pa.RecordBatch, bounds: list[int]) -> None:
    """What lies between two bounds is all that decoding those columns takes."""
    for k in range(-1, len(bounds) - 2):
        stripped = bytearray(bounds[-1] - bounds[0])
        for low, high in {(bounds[0], bounds[1]), (bounds[k + 1], bounds[k + 2])}:
            stripped[low - bounds[0] : high - bounds[0]] = content[low:high]
        fields = [*range(5), *([] if k < 0 else [5 + 2 * k, 6 + 2 * k])]
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        stream = pa.ipc.open_stream(schema.serialize().to_pybytes() + bytes(stripped), options=options)
        assert stream.read_next_batch().equals(batch.select(fields))


def document(*segments: str) -> int:
    """What the column `document` holds of a text, or of the two of a pair."""
    spaced = [re.sub("[\t\n\r\v\f ]+", " ", segment).strip(" ") for segment in segments]
    return int.from_bytes(hashlib.sha256("\t".join(spaced).encode()).digest()[:8], "big")


def test_documents_their_places_and_the_form_of_samples(tmp_path):
    texts = [text.replace(" ", "\t\v \f\r\n", 2) for text in corpus.documents(300, sentences=(1, 10))]
    path = corpus.write_jsonl(tmp_path / "a.jsonl", texts)
    prepare(corpus.config(tmp_path, [path], shards=corpus.ShardsConfig(target_tokens=4096)))
    manifest, tables = read(tmp_path / "data")
    assert all(len(tables[split]) >= least for split, least in zip(SPLITS, (1, 1, 3), strict=True))
    column = [number for split in SPLITS for table in tables[split] for number in table["document"].to_pylist()]
    assert column == sorted(column)  # splits and shards are ranges of hashes, and documents in order
    assert set(column) == {document(text) for text in texts}
    special = manifest["special_tokens"]
    for row in tables["train"][0].to_pylist():
        ids, start = row["input_ids"], row["segment_b_start"]
        assert ids[0] == special["classification"] and ids[start - 1] == ids[-1] == special["separator"]
        assert (row["next_sentence_label"] is None) == (start == len(ids))
        for k in range(manifest["mask_sets"]):
            positions, shown = row[f"masked_positions_{k}"], row[f"masked_ids_{k}"]
            assert positions == sorted(set(positions)) and len(shown) == len(positions)
            assert not {ids[position] for position in positions} & set(special.values())
    for split in SPLITS:
        counts = manifest["splits"][split]["counts"]
        ids = np.concatenate([table["input_ids"].combine_chunks().flatten() for table in tables[split]])
        ordinary = ~np.isin(ids, [special["classification"], special["separator"]])
        assert counts["tokens_out"] == ordinary.sum()
        assert counts["tokens_in"] + counts["tokens_borrowed"] - counts["tokens_left_out"] == counts["tokens_out"]


def test_blocks_sources_and_given_pairs(tmp_path):
    words = corpus.words()
    pairs = [(f"{words[n % 200]} {words[n // 200]}" + " ka" * 60, f" {words[n % 99]}  e") for n in range(4200)]
    lines = ["\t".join(pair) for pair in pairs]
    for name, some in (("a", lines[:1000]), ("b", lines[1000:])):
        (tmp_path / f"{name}.txt").write_text("\n".join(some))
    sources = [MixtureSource([str(tmp_path / f"{name}.txt")], 1.0, SourceConfig(format="pairs")) for name in "ab"]
    config = corpus.config(
        tmp_path,
        [],
        samples=SamplesConfig(objective="given_pairs"),
        mask_sets=1,
        mixture=sources,
        split=SplitConfig(0, 0),
        shards=corpus.ShardsConfig(),
    )
    prepare(config)
    _, tables = read(tmp_path / "data")
    (table,) = tables["train"]
    assert [len(batch) for batch in table.to_batches()] == [1400, 1400, 1400]
    assert table["document"].to_pylist() == sorted(document(*pair) for pair in pairs)
    first = {document(*pair) for pair in pairs[:1000]}
    assert table["source"].to_pylist() == [0 if number in first else 1 for number in table["document"].to_pylist()]
