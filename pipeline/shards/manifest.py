"""The manifest: what a prepared folder holds. It is published last, so a folder with a manifest is complete."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, overload

import numpy as np

from cloze.pipeline.errors import UserError
from cloze.pipeline.records import SpecialTokens
from cloze.pipeline.storage import publish_text, readable_errors
from cloze.pipeline.stores import shared
from cloze.pipeline.stores.places import Place, to_place

FILE_NAME = "manifest.json"
FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)  # docs/data-format.md says how 1 differs
SPLITS = ("train", "validation", "test")
_SIMPLE = frozenset({bool, float, int, str, type(None)})  # JSON writes them on one line
_dumps = partial(json.dumps, ensure_ascii=False)


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
class ShardTable(Sequence[ShardInfo]):
    """A sequence of ShardInfo, held by columns: there may be 100,000, which as objects would take long to make."""

    file: list[str]
    pair_set: list[int]
    samples: list[int]
    tokens: list[int]
    bytes: list[int]
    sha256: list[str]

    @classmethod
    def of(cls, shards: Iterable[ShardInfo]) -> "ShardTable":
        rows = [astuple(shard) for shard in shards]
        return cls(*map(list, zip(*rows, strict=True))) if rows else cls(*([] for _ in fields(cls)))

    def __len__(self) -> int:
        return len(self.file)

    @overload
    def __getitem__(self, number: int) -> ShardInfo: ...
    @overload
    def __getitem__(self, number: slice) -> list[ShardInfo]: ...
    def __getitem__(self, number: int | slice) -> ShardInfo | list[ShardInfo]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        return ShardInfo(*(getattr(self, field.name)[number] for field in fields(ShardInfo)))


@dataclass(frozen=True)
class SplitInfo:
    """One split: counts over its shards, and the histogram of lengths (index: tokens, value: samples)."""

    counts: dict[str, int]
    length_histogram: list[int]
    shards: ShardTable


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
    folder: Place = field(default=Path("."), compare=False)

    def to_json(self) -> str:
        content = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "folder"}
        if self.format_version == 1:
            content["splits"] = {
                name: vars(split) | {"shards": list(split.shards)} for name, split in self.splits.items()
            }
        content = {name: value for name, value in content.items() if value is not None}
        return _indented(content) + "\n"

    def save(self, folder: str | Place) -> None:
        """Publish into `folder`, atomically, with the hash of itself."""
        before, key, after = replace(self, sha256="").to_json().rpartition('"sha256": "')
        digest = hashlib.sha256(f"{before}{key}{after}".encode()).hexdigest()
        publish_text(to_place(folder) / FILE_NAME, f"{before}{key}{digest}{after}")

    @cached_property
    def own_hash(self) -> str:
        """What `sha256` must be; of a manifest that was read: by the bytes of its file."""
        return replace(self, sha256="").hash

    @property
    def is_old(self) -> bool:
        """Whether a version wrote it that knew no hashes of the manifest itself and of the tokenizer's files."""
        return self.format_version == 1 and self.sha256 is None and self.tokenizer_files is None

    @property
    def remark(self) -> str | None:
        """A remark for the user about how far it can be trusted, or None."""
        if not self.is_old:
            return None
        return (f"{self.folder / FILE_NAME}: an earlier version wrote it without hashes of itself and of the "
                "tokenizer's files; not all changes of these can be seen")

    @property
    def damage(self) -> str | None:
        """What its own hash says against it, in one line."""
        if self.is_old or self.sha256 == self.own_hash:
            return None
        return (f"{self.folder / FILE_NAME}: found SHA-256 {self.own_hash[:12]}…, expected {str(self.sha256)[:12]}…: "
                "it was changed after it was written")

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
    def load(cls, folder: str | Place) -> "Manifest":
        """Read a prepared folder's manifest. Raises UserError if there is none, or it isn't as it was written."""
        manifest = cls.read(folder)
        if manifest.damage:
            raise UserError(f"{manifest.damage}; restore the file or prepare the data again")
        return manifest

    @classmethod
    def read(cls, folder: str | Place) -> "Manifest":
        """The same of a manifest that may have been changed: `damage` says so. For those who look for damage."""
        folder = to_place(folder)
        check_prepared(folder)
        path = folder / FILE_NAME
        try:
            with readable_errors(path):
                raw = shared.read(path)
            content = json.loads(raw)
            version = content["format_version"]
            if version not in READABLE_VERSIONS:
                readable = " or ".join(map(str, READABLE_VERSIONS))
                raise UserError(f"{path}: found format_version {version}, expected {readable}; prepare the data again")
            content["special_tokens"] = SpecialTokens(**content["special_tokens"])
            for split in content["splits"].values():
                found = split["shards"]
                split["shards"] = (
                    ShardTable.of(ShardInfo(**row) for row in found) if version == 1 else ShardTable(**found)
                )
            content["splits"] = {name: SplitInfo(**split) for name, split in content["splits"].items()}
            manifest = cls(**content, folder=folder)
            # Of the bytes as they are: to write them again takes long where there are many shards.
            blank = raw.replace(f'"sha256": "{manifest.sha256}"'.encode(), b'"sha256": ""')
            manifest.__dict__.update(
                own_hash=hashlib.sha256(blank).hexdigest(), hash=hashlib.sha256(raw).hexdigest()
            )
            return manifest
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UserError(f"{path}: damaged ({error!r}), expected a manifest; prepare the data again") from error


def _indented(value: Any, margin: str = "\n") -> str:
    """json.dumps(value, indent=1, ensure_ascii=False, default=vars): the same text, in a small part of the time.

    Python writes indented JSON step by step. A list of numbers or texts, or of objects of these, of which there may be
    a million, is written here by the encoder in C, with line breaks for separators: elsewhere JSON has none.
    """
    inner = margin + " "
    if isinstance(value, dict) and value:
        return "{" + ",".join(f"{inner}{_dumps(key)}: {_indented(each, inner)}" for key, each in value.items()) + (
            margin + "}")
    if isinstance(value, list) and value:
        if _SIMPLE.issuperset(map(type, value)):
            return f"[{inner}{_dumps(value, separators=(',' + inner, ': '))[1:-1]}{margin}]"
        if all(type(each) is dict and each and _SIMPLE.issuperset(map(type, each.values())) for each in value):
            deeper = inner + " "
            rows = _dumps(value, separators=("," + deeper, ": "))[2:-2].replace(
                f"}},{deeper}{{", f"{inner}}},{inner}{{{deeper}")
            return f"[{inner}{{{deeper}{rows}{inner}}}{margin}]"
        return "[" + ",".join(inner + _indented(each, inner) for each in value) + margin + "]"
    return _dumps(value) if isinstance(value, dict | list) or type(value) in _SIMPLE else _indented(vars(value), margin)


def check_prepared(folder: str | Place) -> None:
    """Raise UserError for a folder without a manifest."""
    folder = to_place(folder)
    if not shared.is_file(folder / FILE_NAME):
        raise UserError(
            f"{folder}: found no {FILE_NAME}, expected a folder that `cloze prepare` completed; "
            "run (or run again) `cloze prepare`"
        )


def entropy(unigram_counts: np.ndarray) -> float:
    """Entropy in nats of a table of counts; 0 for an empty one."""
    counts = unigram_counts[unigram_counts > 0].astype(np.float64)
    total = counts.sum()
    # max(): an entropy of one symbol comes out as -0.0
    return round(max(0.0, float(np.log(total) - (counts * np.log(counts)).sum() / total)), 6) if total else 0.0
