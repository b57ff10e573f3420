"""Tables of hostile fields, written by a simple writer and read by Cloze, and the same tables damaged."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from cloze.launch.texts.tables import read_table
from cloze.pipeline.errors import UserError

# What separates, quotes, escapes or ends something somewhere, beside ordinary and wide characters.
PARTS = (
    "a",
    "text",
    " ",
    ",",
    ";",
    "\t",
    '"',
    '""',
    "'",
    "\\",
    "\n",
    "\r",
    "\r\n",
    "\u2028",
    "\x85",
    "\x0c",
    "é",
    "猫",
    "😀",
    "NaN",
)
COLUMNS = ("text", "label", "third column")


def rows_of(rng: random.Random, forbidden: str) -> list[list[str]]:
    """Rows of fields that hold no character of `forbidden`."""
    parts = [part for part in PARTS if not set(part) & set(forbidden)]
    width = rng.randint(1, len(COLUMNS))
    # a line that is empty is no row: the first field has something in it
    return [
        ["x" * (number == 0) + "".join(rng.choices(parts, k=rng.randrange(8))) for number in range(width)]
        for _ in range(rng.randint(1, 6))
    ]


def write(kind: str, rng: random.Random) -> tuple[str, list[dict[str, str]]]:
    """The text of a table, and what must be read of it."""
    rows = rows_of(rng, "\t\n\r\x85\u2028\x0c" if kind == "tsv" else "")
    columns = COLUMNS[: len(rows[0])]
    expected = [dict(zip(columns, row, strict=True)) for row in rows]
    if kind == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=rng.random() < 0.5) + "\n" for row in expected), expected
    if kind == "tsv":
        return "".join("\t".join(line) + "\n" for line in (columns, *rows)), expected
    separator = rng.choice(",;\t")
    lines = [[f'"{field.replace(chr(34), chr(34) * 2)}"' for field in line] for line in (columns, *rows)]
    return "".join(separator.join(line) + rng.choice(("\n", "\r\n")) for line in lines), expected


def readings(folder: Path, count: int, seed: int) -> Iterator[tuple[str, str | None]]:
    """So many tables; yields the format, and what was wrong about the reading of one, None if nothing was."""
    rng = random.Random(seed)
    for number in range(count):
        kind = ("csv", "tsv", "jsonl")[number % 3]
        text, expected = write(kind, rng)
        path = folder / f"table.{kind}"
        content = text.encode()
        damaged = rng.random() < 0.5
        if damaged:
            place = rng.randrange(len(content))
            content = (
                content[:place] + rng.choice((b"", rng.randbytes(3), b'"', b"\0")) + content[place + rng.randrange(3) :]
            )
        path.write_bytes(content)
        try:
            found = [row.values for row in read_table(path).rows]
        except UserError as error:
            yield kind, None if damaged and "\n" not in str(error) else f"{content!r}: {error}"
        except Exception as error:
            yield kind, f"{content!r}: a traceback, {error!r}"
        else:
            yield kind, None if damaged or found == expected else f"{content!r}: read as {found}"


def flipped_page_heads(path: Path) -> Iterator[list[str]]:
    """A Parquet file again and again, each time with another bit flipped in the head of a page, which no checksum
    covers: Arrow passes over pages of a kind that it does not know. Yields its texts.
    """
    made = [f"text {number}" for number in range(12)]
    small = {"data_page_size": 1, "write_batch_size": 2, "use_dictionary": False, "write_statistics": False}
    parquet.write_table(pa.table({"text": made}), path, row_group_size=6, write_page_checksum=True, **small)
    whole, place = path.read_bytes(), parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    for bit in range(8 * 8):  # of its kind and sizes
        changed = bytearray(whole)
        changed[place + bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        yield made


def flipped_footers(path: Path) -> Iterator[list[str]]:
    """A Parquet file again and again, each time with another bit flipped in its footer, of those for which Arrow reads
    another number of rows for it or for one of its row groups. Yields its texts.
    """
    made = [f"text {number}" for number in range(12)]
    parquet.write_table(pa.table({"text": made}), path, row_group_size=4)
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for bit in range(8 * (len(whole) - 8 - footer)):
        changed = bytearray(whole)
        changed[footer + bit // 8] ^= 1 << bit % 8
        try:
            metadata = parquet.read_metadata(io.BytesIO(changed))
            rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        except (pa.ArrowException, OSError, UnicodeError):
            continue
        if (metadata.num_rows, rows) != (12, [4, 4, 4]):
            path.write_bytes(changed)
            yield made


def write_numbers(path: Path, values: list[str], number: int, nested: bool = False) -> None:
    """Write a Parquet file whose column `text` is a dictionary's values, 60 of them, by a number each: all of them this
    one, which no value has. The page has no checksum, as none has that is not asked for.

    Args:
        nested: each is the field of an object.
    """
    written, column = io.BytesIO(), pa.array(values).dictionary_encode()
    if nested:
        column = pa.StructArray.from_arrays([column], ["of"])
    table = pa.table({"text": column, "name": [str(each) for each in range(len(values))]})
    parquet.write_table(table, written, compression="none")
    content = bytearray(written.getvalue())
    column = parquet.ParquetFile(io.BytesIO(bytes(content))).metadata.row_group(0).column(0)
    # Behind the page's header: the length of the levels, and one run of 60 of level 1 or 2; then the width of a number
    # in bits, and runs of numbers.
    assert len(values) == 60
    place = content.index(struct.pack("<I", 2) + bytes([0x78, 1 + nested]), column.data_page_offset) + 6
    run = bytes([32, 0x78]) + struct.pack("<i", number)
    content[place : place + len(run)] = run
    path.write_bytes(content)
