"""Which documents are duplicates: those whose texts have one hash. The first in the order of the source stays."""

import hashlib

import numpy as np

_WHITE_SPACE = bytes.maketrans(b"\t\r\n\v\f", b"     ")
_WHITE_SPACE_IN_PAIRS = bytes.maketrans(b"\r\n\v\f", b"    ")  # a tab separates the segments
_SPACE = 0x20


def content_hashes(data: bytes, starts: np.ndarray, pieces: list[int], pairs: bool = False) -> list[tuple[int, int]]:
    """128-bit hashes of texts after normalisation of white space, as two 64-bit numbers.

    starts (N+1,): offsets in `data`. The number is hashed too: equal pieces of one document (a table, a log, a poem)
    are not duplicates and must not all be in one shard.

    Args:
        pairs: each text has two segments separated by a tab.
        pieces: numbers of pieces of long documents from 1, or 0.
    """
    values = np.frombuffer(data.translate(_WHITE_SPACE_IN_PAIRS if pairs else _WHITE_SPACE), np.uint8)
    space = values == _SPACE
    again = np.flatnonzero(space[1:] & space[:-1]) + 1  # white space after white space
    text = np.delete(values, again).tobytes()
    bounds = (starts - np.searchsorted(again, starts)).tolist()
    hashes = []
    for low, high, piece in zip(bounds[:-1], bounds[1:], pieces, strict=True):
        segments = [segment.strip() for segment in text[low:high].split(b"\t")]  # one segment, two for a pair
        if piece:
            segments.append(b"%d" % piece)
        digest = hashlib.sha256(b"\t".join(segments)).digest()
        hashes.append((int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")))
    return hashes


def distinct(table: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of a table without duplicates in the order of their hashes, of each text the first in the order of the
    source; and for each row the number of its duplicates, and of their tokens.
    """
    by_hash = np.lexsort((table["order"], table["hash_rest"], table["hash"]))
    first = np.zeros(len(by_hash), bool)
    first[:1] = True
    for name in ("hash", "hash_rest"):
        column = table[name][by_hash]
        first[1:] |= column[1:] != column[:-1]
    rows, starts = by_hash[first], np.flatnonzero(first)
    if len(rows) == len(by_hash):
        return rows, table["duplicates"][rows], table["duplicate_tokens"][rows]
    # without a dtype reduceat widens integers
    documents = np.add.reduceat(table["duplicates"][by_hash] + np.uint32(1), starts, dtype=np.uint32)
    tokens = np.add.reduceat((table["duplicate_tokens"] + table["num_tokens"])[by_hash], starts, dtype=np.uint64)
    return rows, documents - np.uint32(1), tokens - table["num_tokens"][rows]
