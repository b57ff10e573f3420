"""`PrepareConfig`: the configuration of `cloze vocab` and `cloze prepare`."""

import re
from dataclasses import asdict, dataclass, field
from typing import Literal

from cloze.pipeline.bounds import MOST_PROCESSES, POSITIVE_SHARE, SEED, SHARE, bounds, check_bounds
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

Objective = Literal["next_sentence", "sentence_order", "full_sentences", "single_sentences", "given_pairs"]
_LENGTH = bounds(at_least=8, at_most=1 << 15)
PAIR_OBJECTIVES = ("next_sentence", "sentence_order", "given_pairs")


_WORD = re.compile(r"[^\W_]+([-'’.]+[^\W_]+)*[-'’.]*|[\W_]*")  # only letters and digits, or only punctuation


def is_word(name: str) -> bool:
    """Whether a name is an ordinary word or punctuation, which texts contain, so that it can't be a special token."""
    return _WORD.fullmatch(name) is not None


@dataclass(frozen=True)
class SourceConfig:
    """How the input files are read."""

    format: str = "auto"
    """Form of the input."""
    text_field: str = "text"
    """Field of JSONL, Parquet and data sets that holds the text; a name."""
    id_field: str | None = None
    """Field that holds a document's id, whose hash is stored in the column `document`; null: the hash of the text."""
    dataset_config: str | None = None
    """Configuration of a data set on the hub, such as 20231101.en; null if it has only one."""
    dataset_split: str = "train"
    """Split of a data set that is read; a name."""
    encoding_errors: Literal["stop", "replace"] = "stop"
    """Handling of bytes that are not UTF-8: stop with an error, or replace each by U+FFFD and count the documents."""
    binary_files: Literal["stop", "skip"] = "stop"
    """Handling of PDF, Office files, images and the like: stop with an error, or skip them and say which."""

    def __post_init__(self) -> None:
        if self.id_field == self.text_field:
            raise UserError(
                f"source.id_field: found {self.id_field!r}, expected another field than text_field, or null for the "
                "hash of the text"
            )


@dataclass(frozen=True)
class MixtureSource:
    """One of several weighted sources."""

    input: list[str] = field(default_factory=list)
    """Files, folders or globs (names of data sets, if format is dataset); at least one."""
    weight: float = field(default=1.0, metadata=bounds(above=0, at_most=1000))
    """Copies of each document; the fractional part is the share of documents that get one copy more."""
    source: SourceConfig = field(default_factory=SourceConfig)
    """How these files are read."""

    def __post_init__(self) -> None:
        check_bounds("mixture", self)
        if not self.input:
            raise UserError(f"mixture.input: found {self.input!r}, expected at least one file, folder or glob")


@dataclass(frozen=True)
class SentencesConfig:
    """How documents are split into sentences."""

    splitter: Literal["rules", "lines", "none"] = "rules"
    """rules: punctuation, with abbreviations, also Chinese and Japanese; lines: as given, one per line; none: a
    paragraph is a sentence."""


@dataclass(frozen=True)
class VocabularyConfig:
    """What `cloze vocab` trains."""

    model: Literal["wordpiece", "words", "bytes", "characters", "unigram"] = "wordpiece"
    """wordpiece: BERT's; words: whole words split at white space; bytes: byte-level BPE, as in RoBERTa; characters;
    unigram: pieces with scores and a ▁ for each space, as in XLM-R."""
    lowercase: bool = True
    """Whether case is removed (bytes always keep it)."""
    strip_accents: bool | None = None
    """Whether accents are removed; true, false, or null: same as lowercase."""
    alphabet: int = field(default=1000, metadata=bounds(at_least=1, at_most=60000))
    """Number of characters that wordpiece and unigram keep, the most frequent first (Chinese needs about 7000)."""
    min_frequency: int = field(default=2, metadata=bounds(at_least=1))
    """Minimum occurrences of a word or pair in the vocabulary."""
    pad_token: str = "[PAD]"
    """Name of the padding token; letters or digits with marks around them."""
    unknown_token: str = "[UNK]"
    """Name of the token of unknown words; letters or digits with marks around them."""
    classification_token: str = "[CLS]"
    """Name of the token that starts a sample; letters or digits with marks around them."""
    separator_token: str = "[SEP]"
    """Name of the token that ends a segment; letters or digits with marks around them."""
    mask_token: str = "[MASK]"
    """Name of the mask token; letters or digits with marks around them."""
    add: int = 0
    """With extend: number of tokens that are added, at most; at least 1."""
    special_order: list[Literal["pad", "unknown", "classification", "separator", "mask"]] = field(
        default_factory=lambda: ["pad", "unknown", "classification", "separator", "mask"]
    )
    """Roles of the special tokens in the order of their ids 0 to 4; each of the five once."""

    def __post_init__(self) -> None:
        check_bounds("vocabulary", self)
        roles = ["pad", "unknown", "classification", "separator", "mask"]
        if sorted(self.special_order) != sorted(roles):
            raise UserError(
                f"vocabulary.special_order: found {self.special_order!r}, expected each of {', '.join(roles)} once"
            )
        names = list(self.special_tokens.values())
        if len(set(names)) < len(names):
            raise UserError(f"vocabulary: special tokens: found {names!r}, expected five different names")
        for role, name in self.special_tokens.items():
            if is_word(name) or not name.isprintable() or " " in name:
                raise UserError(
                    f"vocabulary.{role}_token: found {name!r}, expected a name that no text has as a word: letters or "
                    "digits with marks around them, such as [MASK] or <mask>, without white space"
                )

    @property
    def special_tokens(self) -> dict[str, str]:
        """Role -> name, in the order of the ids."""
        return {role: getattr(self, f"{role}_token") for role in self.special_order}


@dataclass(frozen=True)
class SamplesConfig:
    """How samples are built from sentences."""

    objective: Objective = "next_sentence"
    """next_sentence: BERT's pairs; sentence_order: ALBERT's; full_sentences: RoBERTa's; single_sentences; given_pairs:
    the two segments that the source gives."""
    random_share: float = field(default=0.5, metadata=SHARE)
    """Probability of a random (or, with sentence_order, swapped) segment B. With given_pairs 0 means never."""
    short_share: float = field(default=0.1, metadata=SHARE)
    """Probability that a pair has a random shorter target length, as in the BERT release."""
    cross_documents: bool = True
    """Whether full sentences continue into the next document (after a separator)."""
    single_share: float = field(default=0.0, metadata=SHARE)
    """full_sentences with cross_documents false: probability that each sentence of a document becomes a sample of its
    own instead."""
    pair_sets: int = field(default=1, metadata=bounds(at_least=1, at_most=1 << 16))
    """Number of times that samples are built anew, with new cuts and partners; epochs cycle through them, and 1 where
    nothing is random: single_sentences, full_sentences with single_share 0, given_pairs with random_share 0."""
    min_document_tokens: int = field(default=1, metadata=bounds(at_least=1))
    """Minimum tokens of a document; shorter ones are skipped and counted."""

    def __post_init__(self) -> None:
        check_bounds("samples", self)
        within = self.objective == "full_sentences" and not self.cross_documents
        if self.single_share and not within:
            raise UserError(
                f"samples.single_share: found {self.single_share!r}, expected 0, unless objective is full_sentences "
                "and cross_documents is false"
            )
        draws = self.objective in PAIR_OBJECTIVES and (self.objective != "given_pairs" or self.random_share > 0)
        draws = draws or 0 < self.single_share < 1
        if self.pair_sets != 1 and not draws:
            raise UserError(
                f"samples.pair_sets: found {self.pair_sets!r}, expected 1: {self.objective} draws no cuts or partners, "
                "so that all sets would have the same samples; for more masks raise mask_sets, or draw them at load "
                "time (masking.mode dynamic)"
            )


@dataclass(frozen=True)
class MaskingConfig:
    """Which tokens are masked, and how."""

    mode: Literal["precomputed", "dynamic"] = "precomputed"
    """precomputed: mask_sets sets are stored in the shards; dynamic: drawn anew at each epoch when a batch is
    loaded."""
    strategy: Literal["token", "whole_word", "span"] = "token"
    """Unit of masking: a token; a whole word; a span of words, as in SpanBERT."""
    rate: float = field(default=0.15, metadata=POSITIVE_SHARE)
    """Share of a sample's tokens that is predicted."""
    mask_share: float = field(default=0.8, metadata=SHARE)
    """Share of the predicted tokens that the mask token replaces."""
    random_share: float = field(default=0.1, metadata=SHARE)
    """Share of the predicted tokens that a random token replaces; the remaining ones are unchanged."""
    selection: Literal["count", "independent"] = "count"
    """count: min(cap, max(1, round(rate × length))) per sample; independent: each token (or word) independently, so
    that a sample may have none."""
    random_from: Literal["ordinary", "ordinary_other", "all"] = "ordinary"
    """Source of random tokens: the ordinary ones, those except the original, or the whole vocabulary."""
    max_predictions_per_sequence: int | None = field(default=None, metadata=bounds(at_least=1, at_most=65_535))
    """Cap on the predicted tokens of a sample; null: round(rate × max_length)."""
    span_p: float = field(default=0.2, metadata=POSITIVE_SHARE)
    """Parameter of the geometric distribution of span lengths in words."""
    max_span: int = field(default=10, metadata=bounds(at_least=1, at_most=65_535))
    """Longest span, in words."""

    def __post_init__(self) -> None:
        check_bounds("masking", self)
        replaced = self.mask_share + self.random_share
        if replaced > 1 + 1e-9:
            raise UserError(f"masking.mask_share + masking.random_share: found {replaced!r}, expected at most 1")
        if self.strategy == "span" and self.selection != "count":
            raise UserError(f"masking.selection: found {self.selection!r}, expected count, with strategy span")


@dataclass(frozen=True)
class SplitConfig:
    """Shares of the documents that are held out, by content hash."""

    validation: float = field(default=0.01, metadata=bounds(at_least=0, at_most=0.25))
    """Share of the validation split."""
    test: float = field(default=0.0, metadata=bounds(at_least=0, at_most=0.25))
    """Share of the test split."""

    def __post_init__(self) -> None:
        check_bounds("split", self)


@dataclass(frozen=True)
class ShardsConfig:
    """The files that are written."""

    target_tokens: int = field(default=1 << 21, metadata=bounds(at_least=1024, at_most=1 << 24))
    """Target size of a shard in tokens of text (a worker holds a shard, 50 bytes per token)."""
    compression: Literal["zstd", "none"] = "zstd"
    """zstd: smaller; none: reading is zero-copy."""

    def __post_init__(self) -> None:
        check_bounds("shards", self)


@dataclass(frozen=True)
class PrepareConfig:
    """Text in, vocabulary (`cloze vocab`) or shards (`cloze prepare`) out."""

    input: list[str] = field(default_factory=list)
    """Files, folders or globs, or their URLs in a store (s3://, gs://, az://, hf://); files may be compressed (.gz,
    .bz2, .lz4, .xz, .zst)."""
    output: str = ""
    """Output folder, or its URL (s3://, gs://, az://): a new one, or that of an interrupted run of the same command.
    vocab replaces an existing vocabulary."""
    tokenizer: str | None = None
    """For prepare: folder of a tokenizer, its tokenizer.json, or a vocab.txt; or its URL."""
    vocab_size: int = field(default=30522, metadata=bounds(at_least=6, at_most=1 << 24))
    """For vocab: number of entries, special tokens included."""
    extend: str | None = None
    """For vocab: folder of a tokenizer, a model or a run whose vocabulary gets the words of the input that it cuts into
    many pieces (vocabulary.add), instead of a new vocabulary."""
    max_length: int = field(default=128, metadata=_LENGTH)
    """Longest sample in tokens, special tokens included."""
    more_lengths: list[int] = field(default_factory=list, metadata=_LENGTH)
    """Further lengths, each prepared into OUTPUT/length-N from the same tokenized text."""
    mask_sets: int = field(default=10, metadata=bounds(at_least=1, at_most=1000))
    """Number of precomputed mask sets, through which epochs cycle (unused if masking.mode is dynamic)."""
    seed: int = field(default=42, metadata=SEED)
    """Seed of every random draw."""
    workers: int = field(default=1, metadata=bounds(at_least=1, at_most=MOST_PROCESSES))
    """Processes on this machine. The output does not depend on their number."""
    executor: Literal["local", "dask"] = "local"
    """local: processes on this machine; dask: the workers of a Dask cluster."""
    scheduler: str | None = None
    """Address of the Dask scheduler, such as tcp://10.0.0.1:8786; for executor dask."""
    source: SourceConfig = field(default_factory=SourceConfig)
    """How the input is read."""
    mixture: list[MixtureSource] = field(default_factory=list)
    """Weighted sources, instead of input and source."""
    sentences: SentencesConfig = field(default_factory=SentencesConfig)
    """How documents are split into sentences."""
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    """What `cloze vocab` trains."""
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    """How samples are built."""
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    """Which tokens are masked."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """What is held out."""
    shards: ShardsConfig = field(default_factory=ShardsConfig)
    """The files that are written."""

    def __post_init__(self) -> None:
        check_bounds("", self)
        if len(set(self.lengths)) < len(self.lengths):
            raise UserError(f"more_lengths: found {self.more_lengths!r}, expected each length once")
        add, extends = self.vocabulary.add, bool(self.extend)
        if (extends and add < 1) or (not extends and add != 0):
            raise UserError(f"vocabulary.add: found {add!r}, expected at least 1 with extend, else 0")
        if self.executor == "dask" and not self.scheduler:
            raise UserError(f"scheduler: found {self.scheduler!r}, expected an address, with executor dask")
        if self.executor != "dask" and self.scheduler is not None:
            raise UserError(f"scheduler: found {self.scheduler!r}, expected null, unless executor is dask")
        if self.input and self.mixture:
            raise UserError(f"input: found {self.input!r}, expected nothing beside mixture")
        if self.samples.objective == "given_pairs":
            formats = {part.source.format for part in self.all_sources}
            if not formats <= {"pairs"}:
                raise UserError(f"source.format: found {sorted(formats)!r}, expected pairs, with objective given_pairs")

    @property
    def lengths(self) -> list[int]:
        return [self.max_length, *self.more_lengths]

    @property
    def all_sources(self) -> list[MixtureSource]:
        """The sources as one list, whether given as input or mixture.

        Raises:
            UserError: there are none.
        """
        if self.mixture:
            return self.mixture
        return [MixtureSource(self.input, 1.0, self.source)] if self.input else []

    @property
    def stored_mask_sets(self) -> int:
        return self.mask_sets if self.masking.mode == "precomputed" else 0

    def preparation(self, max_length: int) -> Fields:
        """The fields that determine the shards' bytes, besides input and tokenizer; saved in the manifest."""
        everything = asdict(self)
        kept = ("seed", "sentences", "samples", "masking", "split", "shards")
        sources = [{"weight": part.weight, **asdict(part.source)} for part in self.all_sources]
        for source in sources:
            del source["binary_files"]  # that it says which files are the input, no more
        return {name: everything[name] for name in kept} | {
            "max_length": max_length,
            "mask_sets": self.stored_mask_sets,
            "sources": sources,
        }


@dataclass(frozen=True)
class InspectConfig:
    """What `cloze inspect` shows of a prepared folder."""

    data: str
    """Folder written by `cloze prepare`, or its URL in a store."""
    split: Literal["train", "validation", "test"] = "train"
    """Split whose samples are shown."""
    samples: int = field(default=4, metadata=bounds(at_least=0))
    """Number of samples that are decoded and shown."""
    mask_set: int = field(default=0, metadata=bounds(at_least=0))
    """Mask set that is shown (with dynamic masking: the epoch)."""
    tensorboard: str | None = None
    """Folder for histograms and examples as TensorBoard events; null: none are written."""

    def __post_init__(self) -> None:
        check_bounds("", self)


@dataclass(frozen=True)
class VerifyConfig:
    """What `cloze verify` checks."""

    data: str
    """Folder written by `cloze prepare`, or its URL in a store."""
