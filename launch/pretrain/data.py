"""Training and validation data of a pretraining run: opened and checked to fit each other and the model."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cloze.launch.config import MixtureConfig, PretrainConfig
from cloze.launch.run import runs
from cloze.model.config import BertConfig
from cloze.pipeline.config import PAIR_OBJECTIVES
from cloze.pipeline.errors import UserError
from cloze.pipeline.loading.mixture import Phase
from cloze.pipeline.loading.streams import RunMasking
from cloze.pipeline.shards.manifest import REPAIR, Manifest
from cloze.pipeline.stores.places import StorePath
from cloze.pipeline.tokenization.tokenizer import FETCHED, Tokenizer
from cloze.pipeline.untrusted import check_readable


@dataclass(frozen=True)
class TrainingData:
    """The prepared folders of a run.

    Args:
        names: names of the sources of a mixture; empty for one folder.
        manifests: manifest of each source.
        phases: by position, the share of each source of the samples; shares sum to 1.
    """

    names: tuple[str, ...]
    manifests: tuple[Manifest, ...]
    phases: tuple[Phase, ...]

    @property
    def manifest(self) -> Manifest:
        """The first source's manifest: tokenizer, vocabulary and special tokens are the same in all."""
        return self.manifests[0]

    @property
    def max_length(self) -> int:
        """Length in tokens of the longest sample."""
        return max(manifest.max_length for manifest in self.manifests)

    @property
    def num_samples(self) -> int:
        """Number of samples in one pass over all sources."""
        return sum(_counts(manifest)[1] // manifest.pair_sets for manifest in self.manifests)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in one pass over all sources."""
        return sum(_counts(manifest)[0] // manifest.pair_sets for manifest in self.manifests)

    @cached_property
    def length_histogram(self) -> np.ndarray:
        """Number of samples by length, float64 (max_length + 1,); for a mixture, of the phase with the longest
        samples.
        """
        table = np.zeros((len(self.manifests), self.max_length + 1))
        for row, manifest in zip(table, self.manifests, strict=True):
            histogram = manifest.splits["train"].length_histogram
            row[: len(histogram)] = histogram
        if not self.names:
            return table[0]
        table /= table.sum(axis=1, keepdims=True)
        means = table @ np.arange(table.shape[1])
        return max((np.array(phase.shares) for phase in self.phases), key=means.dot) @ table

    @property
    def mean_length(self) -> float:
        """Mean tokens of a sample; of the last phase of a mixture."""
        return float(np.average(_mean_lengths(self.manifests), weights=self.phases[-1].shares))

    def position(self, tokens: int) -> int:
        """Position (in samples) at which a run has seen `tokens` tokens, by the mean length of the samples: the same on
        all ranks without communication.
        """
        if not self.names:
            total, samples = _counts(self.manifest)
            return -(-tokens * samples // total)
        return _position(tokens, self.phases, _mean_lengths(self.manifests))

    def most_masked(self, masking: RunMasking) -> float:
        """The largest masking rate of any source at any time."""
        return max(
            manifest.masked_share if manifest.mask_sets or masking.rate is None else masking.rate.most
            for manifest in self.manifests
        )

    @property
    def facts(self) -> dict[str, str | int]:
        """Hashes of the data, which must be the same at a resume."""
        if not self.names:
            return runs.data_facts(self.manifest)
        shares = "; ".join(
            f"from sample {phase.begin}: " + ", ".join(f"{share:.9g}" for share in phase.shares)
            for phase in self.phases
        )
        return {
            **{
                f"{runs.MANIFEST_HASH}.{name}": manifest.hash
                for name, manifest in zip(self.names, self.manifests, strict=True)
            },
            "tokenizer_fingerprint": self.manifest.tokenizer_fingerprint,
            runs.TRAINED_LENGTH: self.max_length,
            "source_names": ", ".join(self.names),
            "source_shares": shares,
        }

    def described(self) -> list[tuple[str, str]]:
        """Rows of the table printed at the start: the sources and their shares."""
        rows = []
        for number, phase in enumerate(self.phases if self.names else ()):
            shares = ", ".join(
                f"{name} {share:.1%}" for name, share in zip(self.names, phase.shares, strict=True) if share
            )
            rows.append(("mixture" if number == 0 else f"from sample {phase.begin:,}", f"{shares} of the samples"))
        return rows


def _counts(manifest: Manifest) -> tuple[int, int]:
    """Tokens and samples of the train split."""
    counts = manifest.splits["train"].counts
    return counts["tokens"], counts["samples"]


def _mean_lengths(manifests: tuple[Manifest, ...]) -> np.ndarray:
    return np.array([tokens / samples for tokens, samples in map(_counts, manifests)])


def _position(tokens: float, phases: tuple[Phase, ...], lengths: np.ndarray) -> int:
    """Position at which the phases have given `tokens` tokens; the last phase has no end."""
    for phase, following in zip(phases, (*phases[1:], None), strict=True):
        mean = float(np.average(lengths, weights=phase.shares))
        samples = tokens / mean
        if following is None or samples <= following.begin - phase.begin:
            return phase.begin + int(np.ceil(samples))
        tokens -= (following.begin - phase.begin) * mean
    raise AssertionError("unreachable: the last phase has no following")


def open_data(config: PretrainConfig) -> tuple[TrainingData, BertConfig]:
    """The data of a run, and the model's configuration with the fields that the data decides (vocabulary).

    Raises:
        UserError: a folder does not match the model or another folder.
    """
    model = config.model
    manifests: list[Manifest] = []
    tokenizer: Tokenizer | None = None
    before: list[bytes | None] | None = None
    for source in config.sources:
        manifest = Manifest.load(source.path)
        if manifests:
            check_alike(manifests, manifest, "data.sources")
        # A large one takes a tenth of a second, and the sources of a mixture, of which there may be thousands, have
        # copies of one.
        contents = _tokenizer_files(manifest)
        if tokenizer is None or contents is None or contents != before:
            tokenizer, before = Tokenizer.from_folder(manifest.folder / runs.TOKENIZER), contents
        model = check_manifest(manifest, model, config.train.sequence_length, tokenizer)
        manifests.append(manifest)
    if not isinstance(config.data, MixtureConfig):
        return TrainingData((), tuple(manifests), (Phase(0, (1.0,)),)), model
    for manifest in manifests:
        if not _counts(manifest)[1]:
            raise UserError(
                f"{manifest.folder}: found no samples in split 'train'; prepare more text, or leave the source out"
            )
    names = tuple(source.label for source in config.sources)
    return TrainingData(names, tuple(manifests), _phases(config.data, names, tuple(manifests))), model


def _tokenizer_files(manifest: Manifest) -> list[bytes | None] | None:
    """Contents of the files of a folder's tokenizer; None: it is in a store.

    Raises:
        UserError: one is no regular file, or too large.
    """
    if isinstance(manifest.folder, StorePath):
        return None
    paths = [manifest.folder / runs.TOKENIZER / name for name in FETCHED]
    for path in paths:
        check_readable(path)
    return [path.read_bytes() if path.is_file() else None for path in paths]


def check_alike(manifests: list[Manifest], manifest: Manifest, field: str) -> None:
    """Raise UserError, naming the field, if a folder does not match those before it."""
    first, folder = manifests[0], manifest.folder
    for name, what in (
        ("tokenizer_fingerprint", "a tokenizer with fingerprint"),
        ("vocab_size", "a vocabulary of"),
        ("special_tokens", "special tokens"),
    ):
        found, expected = getattr(manifest, name), getattr(first, name)
        if found != expected:
            raise UserError(
                f"{field}: found {what} {_short(found)} in {folder}, expected {_short(expected)}, that "
                f"of {first.folder}; prepare them with one --tokenizer"
            )
    if manifest.objective in PAIR_OBJECTIVES:  # folders without pairs have no label and can be mixed with any
        paired = (other for other in manifests if other.objective in PAIR_OBJECTIVES)
        if (other := next(paired, manifest)).objective != manifest.objective:  # those before it are alike
            raise UserError(
                f"{field}: found objective {manifest.objective} in {folder}, expected "
                f"{other.objective}, that of {other.folder}, or one without pairs: next_sentence_label "
                "has another meaning in each; prepare them with one samples.objective"
            )


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) else f"{value}"


def _phases(config: MixtureConfig, names: tuple[str, ...], manifests: tuple[Manifest, ...]) -> tuple[Phase, ...]:
    """The phases of a mixture by its configuration: shares of the samples by position."""
    lengths = _mean_lengths(manifests)
    by_tokens = config.proportions == "tokens"
    if config.phases:
        weights = [[phase.weights.get(name, 0.0) for name in names] for phase in config.phases]
        ends = [phase.until_tokens or 0 for phase in config.phases[:-1]]  # each phase has an end: MixtureConfig.check
    else:
        weights, ends = [[source.weight for source in config.sources if source.weight is not None]], []
        if not weights[0]:
            sizes = [_counts(manifest)[0 if by_tokens else 1] / manifest.pair_sets for manifest in manifests]
            largest = max(sizes)
            weights = [[(size / largest) ** (1 / (config.temperature or 1.0)) for size in sizes]]
    phases: tuple[Phase, ...] = ()
    for number, row in enumerate(weights):
        # By a power of two, which rounds nothing, so that no sum overflows.
        shares = np.ldexp(row, -math.frexp(max(row))[1]) / (lengths if by_tokens else 1.0)
        shares /= shares.sum()
        for name, weight, share in zip(names, row, shares.tolist(), strict=True):
            if not share and (weight or not config.phases):  # a phase may leave a source out
                raise UserError(
                    f"data: found a share of {name} that is too small for a number, expected weights (sizes with "
                    f"temperature {config.temperature}) less far apart"
                )
        begin = _position(ends[number - 1], phases, lengths) if phases else 0
        phases = (*phases, Phase(begin, tuple(shares.tolist())))
    return phases


def check_manifest(
    manifest: Manifest, model: BertConfig, longest: int | None, tokenizer: Tokenizer | None = None
) -> BertConfig:
    """The model's configuration with the fields that the data decides.

    Args:
        longest: maximum length in tokens that the run expects; None: any.
        tokenizer: that of the shards' folder; None: it is read there.

    Raises:
        UserError: vocabulary, length or tokenizer of the shards do not match the model.
    """
    data = manifest.folder
    if not manifest.splits["train"].counts.get("samples"):
        raise UserError(f"{data}: found no sample in its split train, expected some; prepare more text")
    if model.vocab_size not in (0, manifest.vocab_size):
        raise UserError(
            f"model.vocab_size: found {model.vocab_size}, expected {manifest.vocab_size}, the vocabulary "
            f"of the shards in {data}; leave it at 0 to take theirs"
        )
    if fault := (tokenizer or Tokenizer.from_folder(data / runs.TOKENIZER)).fault_in(manifest):
        raise UserError(f"{fault}; {REPAIR}")
    if longest is not None and manifest.max_length > longest:
        raise UserError(
            f"train.sequence_length: found {longest}, expected at least {manifest.max_length}, the "
            f"max_length of the shards in {data}; give the shards that the run is meant for, or set it to "
            "null"
        )
    if manifest.max_length > model.max_position_embeddings:
        raise UserError(
            f"model.max_position_embeddings: found {model.max_position_embeddings}, expected at least "
            f"{manifest.max_length}, the max_length of the shards in {data}"
        )
    return replace(model, vocab_size=manifest.vocab_size, pad_token_id=manifest.special_tokens.pad)
