"""Records of the data floor: documents, samples, masks, and the schema of shards."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from cloze.pipeline import ragged

NO_LABEL = -100  # no next-sentence label; null in the shards

INPUT_IDS = "input_ids"
SEGMENT_B_START = "segment_b_start"
NEXT_SENTENCE_LABEL = "next_sentence_label"
DOCUMENT = "document"
SOURCE = "source"
BASE_COLUMNS = (INPUT_IDS, SEGMENT_B_START, NEXT_SENTENCE_LABEL, DOCUMENT, SOURCE)


def mask_columns(mask_set: int) -> tuple[str, str]:
    """Names of the two columns of a mask set."""
    return f"masked_positions_{mask_set}", f"masked_ids_{mask_set}"


def token_type(vocab_size: int) -> pa.DataType:
    """The Arrow type of a token id: two bytes if the vocabulary allows it."""
    return pa.uint16() if vocab_size <= 1 << 16 else pa.uint32()


def numpy_type(integers: pa.DataType) -> np.dtype:
    """The NumPy dtype of an Arrow integer type. pyarrow's to_pandas_dtype may need pandas, which is not a
    dependency.
    """
    return np.dtype(str(integers))


def shard_schema(vocab_size: int, mask_sets: int) -> pa.Schema:
    """Columns of a shard; docs/data-format.md explains them."""
    token = token_type(vocab_size)
    fields = [
        pa.field(INPUT_IDS, pa.list_(token), nullable=False),
        pa.field(SEGMENT_B_START, pa.uint16(), nullable=False),
        pa.field(NEXT_SENTENCE_LABEL, pa.int8()),
        pa.field(DOCUMENT, pa.uint64(), nullable=False),
        pa.field(SOURCE, pa.uint16(), nullable=False),
    ]
    for mask_set in range(mask_sets):
        positions, ids = mask_columns(mask_set)
        fields += [
            pa.field(positions, pa.list_(pa.uint16()), nullable=False),
            pa.field(ids, pa.list_(token), nullable=False),
        ]
    return pa.schema(fields)


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the five special tokens, by role."""

    pad: int
    unknown: int
    classification: int
    separator: int
    mask: int

    @property
    def ids(self) -> list[int]:
        return sorted({getattr(self, role) for role in ROLES})


ROLES = tuple(field.name for field in dataclasses.fields(SpecialTokens))


@dataclass(frozen=True)
class Document:
    """One document as a reader yields it.

    A given pair is two lines.

    Args:
        order: place in the source (file number << 40 | byte or row); of exact duplicates the lowest is kept.
        text: UTF-8.
        id: the document's id in the source, or None.
        piece: a document too long for memory arrives in pieces, numbered from 1; 0 is a whole document.
        damaged: bytes that weren't UTF-8 have been replaced.
    """

    order: int
    text: bytes
    id: str | None = None
    piece: int = 0
    damaged: bool = False


@dataclass(frozen=True)
class Masks:
    """One mask set for B samples: flat arrays and offsets.

    positions (M,): positions within their samples, ascending. ids (M,): the ids there in the input.
    offsets (B+1,) int64: sample i owns positions[offsets[i]:offsets[i + 1]].
    """

    positions: np.ndarray
    ids: np.ndarray
    offsets: np.ndarray

    @classmethod
    def none(cls, count: int) -> "Masks":
        """Those of `count` samples without any masked token."""
        return cls(np.empty(0, np.uint16), np.empty(0, np.uint16), np.zeros(count + 1, np.int64))

    def part(self, start: int, stop: int) -> "Masks":
        """Masks of samples [start, stop), over the same memory."""
        offsets = self.offsets[start : stop + 1]
        low, high = offsets[0], offsets[-1]
        return Masks(self.positions[low:high], self.ids[low:high], offsets - low)

    @classmethod
    def joined(cls, parts: "list[Masks]") -> "Masks":
        """One after another."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            positions=np.concatenate([part.positions for part in parts]),
            ids=np.concatenate([part.ids for part in parts]),
            offsets=ragged.to_offsets(np.concatenate([np.diff(part.offsets) for part in parts])),
        )


@dataclass(frozen=True)
class Samples:
    """B samples as flat arrays, without padding and without an object per sample.

    input_ids (T,): unmasked ids, special tokens included. offsets (B+1,) int64: cumulative lengths.
    segment_b_start (B,): first position of segment B, or the length. document (B,) uint64.
    next_sentence_label (B,) int8: 0 follows, 1 random or swapped, -100 none.
    source (B,) uint16: index of the document's source in the prepared mixture.
    """

    input_ids: np.ndarray
    offsets: np.ndarray
    segment_b_start: np.ndarray
    next_sentence_label: np.ndarray
    document: np.ndarray
    source: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def part(self, start: int, stop: int) -> "Samples":
        """Samples [start, stop), over the same memory."""
        offsets = self.offsets[start : stop + 1]
        return Samples(
            input_ids=self.input_ids[offsets[0] : offsets[-1]],
            offsets=offsets - offsets[0],
            segment_b_start=self.segment_b_start[start:stop],
            next_sentence_label=self.next_sentence_label[start:stop],
            document=self.document[start:stop],
            source=self.source[start:stop],
        )
