"""The manifest: what a prepared folder holds. It is published last, so a folder with a manifest is complete."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from cloze.pipeline.errors import UserError
from cloze.pipeline.records import SpecialTokens
from cloze.pipeline.storage import publish_text

FILE_NAME = "manifest.json"
FORMAT_VERSION = 1
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class ShardInfo:
    """One shard file: its name below the folder, what it holds, and what proves it undamaged."""

    file: str
    pair_set: int
    samples: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SplitInfo:
    """One split: counts over its shards, and the histogram of lengths (index: tokens, value: samples)."""

    counts: dict[str, int]
    length_histogram: list[int]
    shards: list[ShardInfo]


@dataclass(frozen=True)
class Manifest:
    """Schema, counts, hashes, objective and tokenizer of a prepared folder (docs/data-format.md).

    unigram_entropy: nats, of the ordinary tokens of the train split; predicting by frequency alone reaches it,
    so a masked language model must get below it.
    more_lengths: those of the folders length-N below. tokenizer_files: SHA-256 by name. sha256: of
    manifest.json with this value empty. The three are None in a manifest of an earlier version.
    """

    tokenizer_fingerprint: str
    vocab_size: int
    special_tokens: SpecialTokens
    objective: str
    max_length: int
    mask_sets: int
    pair_sets: int
    seed: int
    preparation: dict
    sources: list[dict]
    counts: dict[str, int]
    unigram_entropy: float
    splits: dict[str, SplitInfo]
    format_version: int = FORMAT_VERSION
    more_lengths: list[int] | None = None
    tokenizer_files: dict[str, str] | None = None
    sha256: str | None = None
    folder: Path = field(default=Path("."), compare=False)

    def to_json(self) -> str:
        content = {name: value for name, value in asdict(self).items() if name != "folder" and value is not None}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def save(self, folder: str | Path) -> None:
        """Publish into `folder`, atomically, with the hash of itself."""
        publish_text(Path(folder) / FILE_NAME, replace(self, sha256=self.own_hash).to_json())

    @property
    def own_hash(self) -> str:
        """What `sha256` must be."""
        return replace(self, sha256="").hash

    @cached_property
    def hash(self) -> str:
        """SHA-256 of manifest.json."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def masking(self) -> dict:
        """The parameters of masking, as configured."""
        return self.preparation["masking"]

    @property
    def masked_share(self) -> float:
        """Share of the train split's tokens that is predicted: counted; with masks drawn at load time, their rate."""
        counts = self.splits["train"].counts
        return counts["masked"] / counts["tokens"] if self.mask_sets else self.masking["rate"]

    @classmethod
    def load(cls, folder: str | Path) -> "Manifest":
        """Read a prepared folder's manifest. Raises UserError if there is none, or not one of ours."""
        folder = Path(folder)
        path = folder / FILE_NAME
        if not path.is_file():
            raise UserError(
                f"{folder}: found no {FILE_NAME}, expected a folder that `cloze prepare` completed; "
                "run (or run again) `cloze prepare`"
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content["format_version"]
            if version != FORMAT_VERSION:
                raise UserError(
                    f"{path}: found format_version {version}, expected {FORMAT_VERSION}; prepare the data again"
                )
            content["special_tokens"] = SpecialTokens(**content["special_tokens"])
            content["splits"] = {
                name: SplitInfo(
                    counts=split["counts"],
                    length_histogram=split["length_histogram"],
                    shards=[ShardInfo(**shard) for shard in split["shards"]],
                )
                for name, split in content["splits"].items()
            }
            return cls(**content, folder=folder)
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UserError(f"{path}: damaged ({error!r}), expected a manifest; prepare the data again") from error


def entropy(unigram_counts: np.ndarray) -> float:
    """Entropy in nats of a table of counts; 0 for an empty one."""
    counts = unigram_counts[unigram_counts > 0].astype(np.float64)
    total = counts.sum()
    # max(): an entropy of one symbol comes out as -0.0
    return round(max(0.0, float(np.log(total) - (counts * np.log(counts)).sum() / total)), 6) if total else 0.0
