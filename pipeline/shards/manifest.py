"""The manifest of a prepared folder, published last: a folder with a manifest is complete."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints, overload

import numpy as np

from cloze.pipeline.config import MaskingConfig, Objective
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.records import SpecialTokens
from cloze.pipeline.storage import publish_text, readable_errors
from cloze.pipeline.stores import shared
from cloze.pipeline.stores.places import Place, to_place
from cloze.pipeline.untrusted import MOST_COUNTED, are_counts, check_readable, is_number, load_json

FILE_NAME = "manifest.json"
HOW_MASKED = ("by_mask", "by_random", "kept")  # what a masked token is replaced by; counted as masked_...
TOKENIZER_FOLDER = "tokenizer"
FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)  # differences of format 1: docs/data-format.md
SPLITS = ("train", "validation", "test")
WORK_FOLDER = ".work"  # of an interrupted preparation; removed when the manifest is published
# What helps against every damage, and whoever finds it: `cloze prepare` refuses to change what is complete.
REPAIR = "restore the file or prepare the data into another folder"
# What a manifest may say at most: more than any preparation writes, and little enough for the tables made from it.
_MOST_NUMBERS = {"vocab_size": 1 << 24, "max_length": (1 << 16) - 1, "mask_sets": 1000, "pair_sets": 1 << 16}
_MOST_TOKENS_PER_BYTE = 1 << 16  # zstd makes equal bytes some 2^15 times smaller
_NEEDED_OF_MASKING = ("strategy", "selection", "random_from", "max_predictions_per_sequence", "span_p", "max_span")


@dataclass(frozen=True)
class ShardInfo:
    """One shard file: its name below the folder, its counts, size and hash."""

    file: str
    pair_set: int
    samples: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardTable(Sequence[ShardInfo]):
    """A sequence of ShardInfo, stored by columns: there may be 100,000, which would be slow as objects."""

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

    The last three are None in a manifest of an earlier version.

    Args:
        unigram_entropy: in nats, of the ordinary tokens of the train split: the loss of predictions by frequency, which
            a masked language model must undercut.
        more_lengths: lengths of the folders length-N below.
        tokenizer_files: SHA-256 by name.
        sha256: hash of manifest.json with this value empty.
    """

    tokenizer_fingerprint: str
    vocab_size: int
    special_tokens: SpecialTokens
    objective: str
    max_length: int
    mask_sets: int
    pair_sets: int
    seed: int
    preparation: Fields
    sources: list[Fields]
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
        return json.dumps(content, indent=1, ensure_ascii=False, default=vars) + "\n"

    def save(self, folder: str | Place) -> None:
        """Publish into `folder`, atomically, with its own hash."""
        before, key, after = replace(self, sha256="").to_json().rpartition('"sha256": "')
        digest = hashlib.sha256(f"{before}{key}{after}".encode()).hexdigest()
        publish_text(to_place(folder) / FILE_NAME, f"{before}{key}{digest}{after}")

    @cached_property
    def own_hash(self) -> str:
        """The expected `sha256`; for a manifest that was read, computed from the bytes of its file."""
        return replace(self, sha256="").hash

    @property
    def is_old(self) -> bool:
        """Whether an earlier version wrote it, without hashes of the manifest and the tokenizer's files."""
        return self.format_version == 1 and self.sha256 is None and self.tokenizer_files is None

    @property
    def remark(self) -> str | None:
        """A remark for the user about missing hashes, or None."""
        if not self.is_old:
            return None
        return (
            f"{self.folder / FILE_NAME}: an earlier version wrote it without hashes of itself and of the "
            "tokenizer's files; not every change of them can be detected"
        )

    @property
    def damage(self) -> str | None:
        """One line if the manifest does not match its own hash, else None."""
        if self.is_old or self.sha256 == self.own_hash:
            return None
        return (
            f"{self.folder / FILE_NAME}: found SHA-256 {self.own_hash[:12]}…, expected {str(self.sha256)[:12]}…: "
            "it was changed after it was written"
        )

    @cached_property
    def fault(self) -> str | None:
        """One line if the content can't be that of a prepared folder, which a right hash does not rule out; else None.
        Loops and tables are as large as these numbers say.
        """
        try:
            wrong = _first_fault(self)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            wrong = f"damaged ({error!r}), expected a manifest"
        return wrong and f"{self.folder / FILE_NAME}: {wrong}"

    @cached_property
    def hash(self) -> str:
        """SHA-256 of manifest.json."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def tokenizer_folder(self) -> Place:
        """The folder of the tokenizer."""
        return self.folder / TOKENIZER_FOLDER

    @property
    def tokenizer_hashes(self) -> dict[str, str]:
        """SHA-256 of the tokenizer's files by name; of a manifest without them none."""
        return self.tokenizer_files or {}

    @property
    def masking(self) -> Fields:
        """The configuration of masking."""
        return self.preparation["masking"]

    @property
    def masked_share(self) -> float:
        """Share of the train split's tokens that is predicted, as counted; with masks drawn at load time the configured
        rate.
        """
        counts = self.splits["train"].counts
        return counts["masked"] / counts["tokens"] if self.mask_sets else self.masking["rate"]

    @classmethod
    def load(cls, folder: str | Place) -> "Manifest":
        """Read a prepared folder's manifest.

        Raises:
            UserError: there is none, or it is damaged.
        """
        manifest = cls.read(folder)
        if wrong := manifest.damage or manifest.fault:
            raise UserError(f"{wrong}; {REPAIR}")
        return manifest

    @classmethod
    def read(cls, folder: str | Place) -> "Manifest":
        """Read a manifest without checking its hash and values; `damage` and `fault` report. For `cloze verify`."""
        folder = to_place(folder)
        check_prepared(folder)
        path = folder / FILE_NAME
        try:
            with readable_errors(path):
                check_readable(path)
                raw = shared.read(path)
            content = load_json(raw)
            version = content["format_version"]
            if version not in READABLE_VERSIONS:
                readable = " or ".join(map(str, READABLE_VERSIONS))
                raise UserError(
                    f"{path}: found format_version {version!s:.60}, expected {readable}; prepare the data into "
                    "another folder"
                )
            content["special_tokens"] = SpecialTokens(**content["special_tokens"])
            for split in content["splits"].values():
                found = split["shards"]
                split["shards"] = (
                    ShardTable.of(ShardInfo(**row) for row in found) if version == 1 else ShardTable(**found)
                )
            content["splits"] = {name: SplitInfo(**split) for name, split in content["splits"].items()}
            manifest = cls(**content, folder=folder)
            # Hash of the file's bytes: serializing again would be slow with many shards.
            blank = raw.replace(f'"sha256": "{manifest.sha256}"'.encode(), b'"sha256": ""')
            manifest.__dict__.update(own_hash=hashlib.sha256(blank).hexdigest(), hash=hashlib.sha256(raw).hexdigest())
            return manifest
        except UserError:  # also a ValueError, but with its own message
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{path}: damaged ({error!r}), expected a manifest; {REPAIR}") from error


def _first_fault(manifest: Manifest) -> str | None:
    """What is wrong with the values of a manifest first, or None. Raises KeyError, TypeError or ValueError where they
    have another form.
    """
    for name, most in _MOST_NUMBERS.items():
        if not are_counts([value := getattr(manifest, name)], most) or not (value or name == "mask_sets"):
            return f"found {name} {value!r:.60}, expected a number up to {most}"
    special = vars(manifest.special_tokens)
    if not are_counts(special.values(), manifest.vocab_size - 1):
        return f"found special_tokens {special!s:.200}, expected ids below vocab_size {manifest.vocab_size}"
    if not are_counts(manifest.counts.values()):
        return "counts: found a value that is no number, expected counts"
    lengths = [] if manifest.more_lengths is None else manifest.more_lengths
    if any(
        "/" in name or name in ("", ".", "..") or not _is_name(name) or type(digest) is not str
        for name, digest in manifest.tokenizer_hashes.items()
    ):
        return "tokenizer_files: found another entry than the SHA-256 of a file by its name"
    if not are_counts(lengths, _MOST_NUMBERS["max_length"]):
        return f"found more_lengths {lengths!r:.60}, expected lengths"
    shares = [manifest.preparation["samples"]["random_share"]]
    shares += [manifest.masking[name] for name in ("rate", "mask_share", "random_share")]
    if not all(is_number(value) and 0 <= value <= 1 for value in shares):
        return f"found shares {shares!s:.200}, expected numbers from 0 to 1"
    if not is_number(value := manifest.unigram_entropy) or value < 0:
        return f"found unigram_entropy {value!r:.60}, expected a number from 0 on"
    texts = [manifest.tokenizer_fingerprint, manifest.objective, *manifest.masking, *manifest.tokenizer_hashes]
    if not all(type(text) is str for text in texts) or type(manifest.seed) is not int or manifest.seed < 0:
        return "found a fingerprint, an objective or a seed of another kind, expected texts and a number"
    if manifest.objective not in get_args(Objective):
        return f"found the objective {manifest.objective!r:.60}, expected one of {', '.join(get_args(Objective))}"
    if wrong := _fault_of_section(MaskingConfig, manifest.masking, _NEEDED_OF_MASKING):
        return f"masking: {wrong}"
    if not all(
        type(source["name"]) is str and are_counts([source["bytes"], source.get("source", 0)])
        for source in manifest.sources
    ):
        return "sources: found one of other values than its name and its bytes"
    for name, split in manifest.splits.items():
        if wrong := _fault_of_split(manifest, split):
            return f"{name}: {wrong}"
    missing = [name for name in SPLITS if name not in manifest.splits]
    return f"found no split {missing[0]!r}, expected {', '.join(SPLITS)}" if missing else None


def _fault_of_section(section: type, values: Fields, needed: Sequence[str]) -> str | None:
    """What is wrong with the values of a section that a file holds, or None. Fields that it does not know are those of
    another version.

    Args:
        needed: names of fields that must be there.
    """
    kinds = get_type_hints(section)
    for name in needed:
        if name not in values:
            return f"found no {name}, expected one"
    known = {name: value for name, value in values.items() if name in kinds}
    for name, value in known.items():
        kind = kinds[name]
        options = get_args(kind) or (kind,)  # values of a Literal, or types
        types = (*options, int) if float in options else options
        is_option = any(value == option and type(value) is type(option) for option in options)  # True == 1
        if not (is_option if get_origin(kind) is Literal else type(value) in types):
            expected = " or ".join(getattr(each, "__name__", each) for each in options)
            return f"found {name} {value!r:.60}, expected {expected}"
    try:
        section(**known)
    except UserError as error:
        return str(error)
    return None


def _is_name(name: str) -> bool:
    """Whether a file can have this name: no NUL, no half of a character."""
    return "\0" not in name and not any("\ud800" <= letter <= "\udfff" for letter in name)


def _fault_of_split(manifest: Manifest, split: SplitInfo) -> str | None:
    shards, counts = split.shards, split.counts
    columns = [getattr(shards, each.name) for each in fields(ShardInfo)]
    if not all(type(column) is list for column in columns) or {len(column) for column in columns} != {len(shards)}:
        return "shards: found no columns of one length, expected a value for each shard"
    if not are_counts(shards.pair_set, manifest.pair_sets - 1):
        return f"shards: found a pair_set, expected numbers below pair_sets {manifest.pair_sets}"
    for shard_counts in (shards.samples, shards.tokens, shards.bytes):
        if not are_counts(shard_counts) or sum(shard_counts) > MOST_COUNTED:
            return f"shards: found a count, expected numbers from 0 that sum up to at most {MOST_COUNTED}"
    for name, samples, tokens, size in zip(shards.file, shards.samples, shards.tokens, shards.bytes, strict=True):
        if not samples <= tokens <= size * _MOST_TOKENS_PER_BYTE:
            return (
                f"{name}: found {samples} samples of {tokens} tokens in {size} bytes, expected a token a sample "
                f"and at most {_MOST_TOKENS_PER_BYTE} tokens a byte"
            )
        if name.startswith("/") or ".." in name.split("/") or not _is_name(name):
            return f"found shard {name!r:.200}, expected a file below the folder"
    if any(type(digest) is not str for digest in shards.sha256):
        return "shards: found a sha256 that is no text"
    if not are_counts(split.length_histogram) or not 1 <= len(split.length_histogram) <= manifest.max_length + 1:
        return f"found a length_histogram of other values than counts of the lengths 0 to {manifest.max_length}"
    histogram = np.array(split.length_histogram, dtype=object)  # whole numbers of any size
    for name, of_shards, of_lengths in (
        ("samples", shards.samples, histogram.sum()),
        ("tokens", shards.tokens, (histogram * np.arange(len(histogram))).sum()),
    ):
        if len({counts.get(name, 0), sum(of_shards), of_lengths}) > 1:
            return (
                f"found {counts.get(name, 0)} {name} in counts, {sum(of_shards)} in shards and {of_lengths} in "
                "length_histogram, expected one number"
            )
    needed = ("samples", "tokens", *(["masked"] if manifest.mask_sets else [])) if len(shards) else ()
    if not are_counts(counts.values()) or any(
        counts[each] < (each != "masked" and any(shards.samples)) for each in needed
    ):
        return f"found counts {dict(counts)!r:.120}, expected samples and tokens of its {len(shards)} shards"
    masked, parts = counts.get("masked", 0), sum(counts.get(f"masked_{how}", 0) for how in HOW_MASKED)
    if not parts <= masked <= counts.get("tokens", 0):
        return f"found {masked} masked tokens of {counts.get('tokens', 0)}, and {parts} by how they are masked"
    return None


def check_prepared(folder: str | Place) -> None:
    """Raise UserError for a folder without a manifest."""
    folder = to_place(folder)
    if not shared.is_file(folder / FILE_NAME):
        advice = REPAIR if has_lost_manifest(folder) else "run (or run again) `cloze prepare`"
        raise UserError(f"{folder}: found no {FILE_NAME}, expected a folder that `cloze prepare` completed; {advice}")


def has_lost_manifest(folder: Place) -> bool:
    """Whether a folder without a manifest has shards, but nothing of a preparation that could complete it."""
    return (folder / SPLITS[0]).is_dir() and not (folder / WORK_FOLDER).is_dir()


def entropy(unigram_counts: np.ndarray) -> float:
    """Entropy in nats of a table of counts; 0 for an empty one."""
    counts = unigram_counts[unigram_counts > 0].astype(np.float64)
    total = counts.sum()
    # max(): the entropy of a single symbol would be -0.0
    return round(max(0.0, float(np.log(total) - (counts * np.log(counts)).sum() / total)), 6) if total else 0.0
