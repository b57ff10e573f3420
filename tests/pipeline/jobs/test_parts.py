"""Files between the stages of preparation: what is written comes back, and every byte is checked."""

import random

import numpy as np
import pytest

from cloze.pipeline.jobs import parts
from cloze.pipeline.jobs.exchange_stage import END
from tests.pipeline.jobs.test_exchange_stage import table

pytestmark = pytest.mark.usefixtures("a_task_for_each_file")


def rows(found: parts.Table) -> list[tuple]:
    """A table as rows, in plain Python."""
    made, sentence, token = [], 0, 0
    for number in range(len(found["hash"])):
        sentences, tokens = int(found["num_sentences"][number]), int(found["num_tokens"][number])
        made.append(
            (
                *(int(found[name][number]) for name in ("hash", "hash_rest", "order", "document", "source")),
                found["sentences"][sentence : sentence + sentences].tolist(),
                found["tokens"][token : token + tokens].tolist(),
                int(found["duplicates"][number]),
                int(found["duplicate_tokens"][number]),
            )
        )
        sentence, token = sentence + sentences, token + tokens
    return made


def first_of_each(found: list[tuple]) -> list[tuple]:
    """The reference: of equal hashes the first, which counts the others."""
    kept: dict[tuple, list] = {}
    for row in sorted(found):
        if row[:2] in kept:
            kept[row[:2]][7] += 1 + row[7]
            kept[row[:2]][8] += len(row[6]) + row[8]
        else:
            kept[row[:2]] = list(row)
    return [tuple(row) for row in kept.values()]


@pytest.mark.parametrize("count", [0, 1, 300])
def test_a_part_gives_back_what_was_written(tmp_path, monkeypatch, count):
    monkeypatch.setattr(parts, "_BLOCK_BYTES", 1000)
    rng = random.Random(count)
    first, second = table(rng, count), table(rng, count)
    second["hash"][: count // 4], second["hash_rest"][: count // 4] = (
        first[name][: count // 4] for name in ("hash", "hash_rest")
    )
    dtype = np.dtype(np.uint16)
    for name, made in (("a", first), ("b", second)):
        written = parts.write(tmp_path / name, made)
        expected = first_of_each(rows(made))
        assert written == (len(expected), sum(len(row[6]) for row in expected))
        assert rows(parts.joined([parts.empty(dtype), *parts.read(tmp_path / name, 0, END, dtype)])) == expected
        bounds = sorted(rng.getrandbits(64) for _ in range(4)) + [row[0] for row in expected[:50]]
        for low, high in zip(bounds[:-1], bounds[1:], strict=True):
            found = parts.joined([parts.empty(dtype), *parts.read(tmp_path / name, low, high, dtype)])
            assert rows(found) == [row for row in expected if low <= row[0] < high]
            assert parts.read_hashes(tmp_path / name, high).tolist() == [row[0] for row in expected if row[0] < high]
    tables = [each for name in "ab" for each in parts.read(tmp_path / name, 0, END, dtype)]
    parts.write(tmp_path / "c", parts.joined([parts.empty(dtype), *tables]))
    merged = rows(parts.joined([parts.empty(dtype), *parts.read(tmp_path / "c", 0, END, dtype)]))
    assert merged == first_of_each(rows(first) + rows(second))


def test_every_byte_of_a_part_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_BLOCK_BYTES", 300)
    path, dtype = tmp_path / "part", np.dtype(np.uint16)
    parts.write(path, table(random.Random(1), 5))
    whole = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for place, byte in enumerate(whole):
            file.seek(place)
            file.write(bytes([byte ^ 1 << place % 8]))
            with pytest.raises(parts.DamagedPart):
                parts.read(path, 0, END, dtype)
            file.seek(place)
            file.write(bytes([byte]))
        assert len(parts.read(path, 0, END, dtype)) > 1
        for size in range(len(whole) - 1, -1, -1):
            file.truncate(size)
            with pytest.raises(parts.DamagedPart):
                parts.read(path, 0, END, dtype)
