"""Masking: draws the tokens to predict and their replacements, for many samples at once."""

from dataclasses import dataclass

import numpy as np

from cloze.pipeline import ragged
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.records import Masks, Samples, SpecialTokens
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.tokenization.backends import model_of
from cloze.pipeline.tokenization.tokenizer import Tokenizer

_SAMPLES_AT_ONCE = 4096  # samples whose masks are drawn together, so that the arrays stay in the cache
_SELECT, _LENGTH, _REPLACE, _RANDOM_ID = range(4)  # purposes, so that different decisions are independent


class StreamDraws:
    """Draws from a sequential generator: the fastest, for a whole shard in a fixed order."""

    def __init__(self, *key: int):
        self._generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))

    def uniform(self, rows: np.ndarray, purpose: int, turn: int = 0) -> np.ndarray:
        """A number in [0, 1) for each entry of `rows` (ascending sample indices, one entry per number)."""
        return self._generator.random(len(rows), dtype=np.float32)


class KeyedDraws:
    """Draws that depend only on (seed, epoch, sample), not on the other samples drawn together.

    A counter goes through the finalizer of splitmix64 (Steele et al. 2014), once with the sample's key.
    """

    def __init__(self, seed: int, epoch: int, samples: np.ndarray):
        key = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)[0]
        self._keys = _mix(samples.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key)

    def uniform(self, rows: np.ndarray, purpose: int, turn: int = 0) -> np.ndarray:
        """As that of `StreamDraws`."""
        first = np.flatnonzero(_changes(rows))
        sizes = np.diff(first, append=len(rows))
        place = np.arange(len(rows)) - np.repeat(first, sizes)
        counter = (np.uint64(turn) << np.uint64(32)) + place.astype(np.uint64) * np.uint64(4) + np.uint64(purpose)
        mixed = _mix(self._keys[rows] + counter * np.uint64(0xD1B54A32D192ED03))
        return (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


Draws = StreamDraws | KeyedDraws


def _changes(values: np.ndarray) -> np.ndarray:
    """Whether each value differs from the one before it; true for the first."""
    changes = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def check_words(strategy: str, tokenizer: Tokenizer) -> None:
    """Raise UserError for whole-word strategies with a tokenizer whose tokens don't show where words begin."""
    if strategy == "token":
        return
    model = model_of(tokenizer.backend)
    kind = model["type"]
    rules = tokenizer.backend.pre_tokenizer
    if kind == "WordLevel" and rules is not None and len(rules.pre_tokenize_str("ab")) > 1:
        kind = "characters"
    unmarked = kind in ("BPE", "Unigram") and not tokenizer.space_begins_word
    if kind == "WordPiece" and not model["continuing_subword_prefix"]:
        kind, unmarked = "WordPiece without a continuing_subword_prefix", True
    if kind == "characters" or unmarked:
        raise UserError(
            f"masking.strategy: found {strategy} with a tokenizer of kind {kind}, expected one whose tokens say where "
            "words begin (WordPiece, words, byte-level BPE, SentencePiece's ▁); choose token, or another --tokenizer"
        )


@dataclass(frozen=True)
class MaskingRules:
    """The parameters of masking from configuration and tokenizer.

    continues_word (vocab_size,) bool: ids that continue the word of the token before.

    Args:
        config: MaskingConfig as a dict (saved in the manifest).
    """

    config: Fields
    max_length: int
    vocab_size: int
    special_tokens: SpecialTokens
    continues_word: np.ndarray

    def caps(self, rates: np.ndarray) -> np.ndarray:
        """Maximum number of predicted tokens of samples with these masking rates, (n,) -> (n,) int64."""
        given = self.config["max_predictions_per_sequence"]
        follow = np.maximum(1, np.rint(rates * self.max_length)).astype(np.int64)
        return np.full_like(follow, given) if given else follow


@dataclass(frozen=True)
class RateSchedule:
    """A masking rate by the position in the stream of samples: `first` up to position `begin`, then linear to `last`,
    which is reached at position `end`.
    """

    first: float
    last: float
    begin: int
    end: int

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Rates (n,) float64 of the samples at positions (n,)."""
        return np.interp(positions, [self.begin, self.end], [self.first, self.last])

    @property
    def most(self) -> float:
        """The highest rate."""
        return max(self.first, self.last)


@dataclass(frozen=True)
class RatePhases:
    """A masking rate by the position in the stream of samples: rates[0] up to position ends[0], then rates[1] up to
    ends[1], and so on; the last one has no end."""

    rates: tuple[float, ...]
    ends: tuple[int, ...]

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Rates (n,) float64 of the samples at positions (n,)."""
        return np.array(self.rates)[np.searchsorted(self.ends, positions, side="right")]

    @property
    def most(self) -> float:
        """The highest rate."""
        return max(self.rates)


class Masker:
    """Draws mask sets for some samples; what all sets share is computed once.

    begins (T,) bool: tokens that begin a word although their ids may not show it; None: ids always show it. rates (n,)
    float: masking rate of each sample, which also determines the default cap; None: the rate of the rules.
    """

    def __init__(
        self, rules: MaskingRules, samples: Samples, begins: np.ndarray | None = None, rates: np.ndarray | None = None
    ):
        self.rules = rules
        self.config = rules.config
        self.samples = samples
        self._rates = np.full(len(samples), self.config["rate"]) if rates is None else rates
        ordinary = np.ones(rules.vocab_size, bool)
        ordinary[rules.special_tokens.ids] = False
        self._ordinary_ids = np.flatnonzero(ordinary)
        if len(self._ordinary_ids) < 2:
            raise UserError(
                f"vocabulary: found {len(self._ordinary_ids)} ordinary tokens, expected at least 2 to mask with"
            )
        # Candidates: flat indices of the tokens that may be masked; `offsets` counts them by sample.
        self._candidates = np.flatnonzero(ordinary[samples.input_ids])
        self._offsets = np.searchsorted(self._candidates, samples.offsets)
        self._sizes = np.diff(self._offsets)
        self._rows = np.repeat(np.arange(len(samples), dtype=np.int32), self._sizes)
        wanted = np.maximum(1, np.rint(self._rates * samples.lengths)).astype(np.int64)
        self._wanted = np.minimum(np.minimum(wanted, rules.caps(self._rates)), self._sizes)
        if self.config["strategy"] != "token":
            self._find_words(begins)
        elif self.config["selection"] == "count":
            # If more than half are chosen, draw those that are not: fewer collisions.
            self._inverted = self._wanted * 2 > self._sizes
            drawn = np.where(self._inverted, self._sizes - self._wanted, self._wanted)
            self._drawn_rows = np.repeat(np.arange(len(samples)), drawn)
            self._drawn_starts = self._offsets[self._drawn_rows]
            self._drawn_sizes = self._sizes[self._drawn_rows].astype(np.float32)
            # The number per sample is known; only the choice is drawn.
            self._chosen_offsets = ragged.to_offsets(self._wanted)
            self._chosen_rows = np.repeat(np.arange(len(samples)), self._wanted)
            self._chosen_starts = samples.offsets[self._chosen_rows]

    def draw(self, draws: Draws) -> Masks:
        """One mask set."""
        strategy, count = self.config["strategy"], self.config["selection"] == "count"
        spans = None
        rows: np.ndarray
        if strategy == "token":
            taken = self._count_tokens(draws) if count else self._independent(draws, self._rows)
        elif strategy == "whole_word":
            words = self._count_words(draws) if count else self._independent(draws, self._word_rows)
            taken = np.repeat(words, self._word_sizes)
        else:
            taken, spans = self._count_spans(draws)
        chosen = np.flatnonzero(taken)
        flat = self._candidates[chosen]
        if strategy == "token" and count:
            rows, starts, offsets = self._chosen_rows, self._chosen_starts, self._chosen_offsets
        else:
            rows = self._rows[chosen]
            starts, offsets = self.samples.offsets[rows], np.searchsorted(flat, self.samples.offsets)
        ids = self._replace(draws, rows, flat, None if spans is None else spans[chosen])
        return Masks((flat - starts).astype(np.uint16), ids, offsets)

    def _independent(self, draws: Draws, rows: np.ndarray) -> np.ndarray:
        return draws.uniform(rows, _SELECT) < self._rates[rows]

    def _count_tokens(self, draws: Draws) -> np.ndarray:
        """A fixed number of tokens per sample, all subsets equally likely: draw, and redraw collisions."""
        rows, starts, sizes = self._drawn_rows, self._drawn_starts, self._drawn_sizes
        taken = np.zeros(len(self._candidates), bool)
        last = np.empty(len(self._candidates), np.int32)  # the last draw that hit a candidate; earlier ones collide
        turn = 0
        while len(rows):
            hit = starts + (draws.uniform(rows, _SELECT, turn) * sizes).astype(np.int64)
            number = np.arange(len(rows), dtype=np.int32)
            last[hit] = number
            collided = last[hit] != number
            if turn:
                collided |= taken[hit]
            collided = np.flatnonzero(collided)
            taken[hit] = True
            rows, starts, sizes = rows[collided], starts[collided], sizes[collided]
            turn += 1
        if self._inverted.any():
            taken ^= np.repeat(self._inverted, self._sizes)
        return taken

    def _find_words(self, begins: np.ndarray | None) -> None:
        """Words among the candidates: first candidate, size and sample of each, and the segment that limits spans."""
        apart = np.ones(len(self._candidates), bool)
        np.greater(self._candidates[1:], self._candidates[:-1] + 1, out=apart[1:])  # after a special token
        apart[self._offsets[:-1][self._sizes > 0]] = True
        starts = apart | ~self.rules.continues_word[self.samples.input_ids[self._candidates]]
        if begins is not None:
            starts |= begins[self._candidates]
        self._word_starts = np.flatnonzero(starts)
        self._word_sizes = np.diff(self._word_starts, append=len(self._candidates))
        self._word_rows = self._rows[self._word_starts]
        self._word_offsets = np.searchsorted(self._word_starts, self._offsets)
        if self.config["strategy"] == "span":
            self._word_of = np.cumsum(starts) - 1
            segment = np.cumsum(apart)[self._word_starts]
            self._segment_end = np.cumsum(np.bincount(segment))[segment]  # first word after this one's segment

    def _count_words(self, draws: Draws) -> np.ndarray:
        """Words in random order, each taken if it fits within the count (as in the BERT release)."""
        # Sample, draw and place combined to one number, which sorts in a quarter of the time.
        first = self._word_offsets[self._word_rows]
        keys = self._word_rows.astype(np.uint64) << np.uint64(40)
        keys |= (draws.uniform(self._word_rows, _SELECT) * np.float32(2.0**24)).astype(np.uint64) << np.uint64(16)
        keys |= (np.arange(len(first)) - first).astype(np.uint64)
        order = first + (np.sort(keys) & np.uint64(0xFFFF)).astype(np.int64)
        words = np.zeros(len(self._word_starts), bool)
        left = self._wanted.copy()
        num_words = np.diff(self._word_offsets)
        rows = np.flatnonzero(num_words)
        turn = 0
        while len(rows):
            word = order[self._word_offsets[rows] + turn]
            fits = self._word_sizes[word] <= left[rows]
            words[word[fits]] = True
            left[rows[fits]] -= self._word_sizes[word[fits]]
            turn += 1
            rows = rows[(num_words[rows] > turn) & (left[rows] > 0)]
        return words

    def _count_spans(self, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
        """Runs of whole words of geometric length until the count is reached (SpanBERT, Joshi et al. 2020).

        Also returns the span of each candidate: all tokens of a span get the same kind of replacement.
        """
        lengths = np.arange(1, self.config["max_span"] + 1)
        weights = (1 - self.config["span_p"]) ** (lengths - 1) * self.config["span_p"]
        cumulative = np.cumsum(weights / weights.sum())
        taken = np.zeros(len(self._candidates), bool)
        spans = np.zeros(len(self._candidates), np.int64)
        left = self._wanted.copy()
        rows = np.flatnonzero(left)
        turn = 0
        while len(rows):
            anchor = self._offsets[rows] + (draws.uniform(rows, _SELECT, turn) * self._sizes[rows]).astype(np.int64)
            length = np.minimum(np.searchsorted(cumulative, draws.uniform(rows, _LENGTH, turn)), len(lengths) - 1)
            free = ~taken[anchor]
            first = self._word_of[anchor[free]]
            after = np.minimum(first + length[free] + 1, self._segment_end[first])
            start = self._word_starts[first]
            size = self._word_starts[after - 1] + self._word_sizes[after - 1] - start
            hit = ragged.ranges(start, size)
            row = np.repeat(rows[free], size)
            fresh = ~taken[hit]
            hit, row = hit[fresh], row[fresh]
            place = np.arange(len(row)) - np.searchsorted(row, row)  # rows ascend
            keep = place < left[row]
            hit, row = hit[keep], row[keep]
            taken[hit] = True
            spans[hit] = turn
            left -= np.bincount(row, minlength=len(left))
            turn += 1
            rows = rows[left[rows] > 0]
        return taken, spans + self._rows.astype(np.int64) * max(turn, 1)

    def _replace(self, draws: Draws, rows: np.ndarray, flat: np.ndarray, spans: np.ndarray | None) -> np.ndarray:
        """Replace by the mask token, a random token, or keep the original; decided per token, or per span."""
        kind = draws.uniform(rows, _REPLACE)
        if spans is not None:
            _, first, span = np.unique(spans, return_index=True, return_inverse=True)
            kind = kind[first][span]
        mask_share, random_share = self.config["mask_share"], self.config["random_share"]
        ids = np.full(len(flat), self.rules.special_tokens.mask, self.samples.input_ids.dtype)
        others = np.flatnonzero(kind >= mask_share)
        original = self.samples.input_ids[flat[others]]
        ids[others] = original
        swapped = np.flatnonzero(kind[others] < mask_share + random_share)
        random = others[swapped]
        ids[random] = self._random_ids(draws, rows[random], original[swapped])
        return ids

    def _random_ids(self, draws: Draws, rows: np.ndarray, original: np.ndarray) -> np.ndarray:
        number = draws.uniform(rows, _RANDOM_ID)
        if self.config["random_from"] == "all":
            return (number * self.rules.vocab_size).astype(np.int64)
        ids = self._ordinary_ids
        if self.config["random_from"] == "ordinary":
            return ids[(number * len(ids)).astype(np.int64)]
        chosen = (number * (len(ids) - 1)).astype(np.int64)
        return ids[chosen + (chosen >= np.searchsorted(ids, original))]  # excludes the original


def draw_sets(
    rules: MaskingRules, samples: Samples, key: tuple[int, ...], count: int, begins: np.ndarray | None = None
) -> list[Masks]:
    """`count` mask sets that depend on `key`.

    Args:
        begins: as in `Masker`.
    """
    draws = [StreamDraws(*key, number) for number in range(count)]
    parts: list[list[Masks]] = [[] for _ in draws]
    for start in range(0, max(1, len(samples)), _SAMPLES_AT_ONCE):
        stop = min(start + _SAMPLES_AT_ONCE, len(samples))
        part = slice(samples.offsets[start], samples.offsets[stop])
        masker = Masker(rules, samples.part(start, stop), None if begins is None else begins[part])
        for drawn, stream in zip(parts, draws, strict=True):
            drawn.append(masker.draw(stream))
    return [Masks.joined(drawn) for drawn in parts]


class DynamicMasking:
    """Masks drawn when a batch is loaded: a function of (seed, epoch, sample), independent of rank and batch.

    Args:
        strategy: token, whole_word or span; None: the manifest's.

    Raises:
        UserError: for whole words if the tokens don't show where words begin, and for spans with a manifest that
            chooses each token independently.
    """

    def __init__(self, manifest: Manifest, strategy: str | None = None):
        tokenizer = Tokenizer.from_folder(manifest.tokenizer_folder)
        config = manifest.masking
        if strategy is not None:
            check_words(strategy, tokenizer)
            if strategy == "span" and config["selection"] != "count":
                raise UserError(
                    f"masking.strategy: found span with {manifest.folder}, whose masking.selection is "
                    f"{config['selection']}, expected count; prepare the data with it"
                )
            config = {**config, "strategy": strategy}
        self.rules = MaskingRules(
            config=config,
            max_length=manifest.max_length,
            vocab_size=manifest.vocab_size,
            special_tokens=manifest.special_tokens,
            continues_word=tokenizer.continues_word,
        )

    def draw(
        self, samples: Samples, seed: int, epoch: int, indices: np.ndarray, rates: np.ndarray | None = None
    ) -> Masks:
        return Masker(self.rules, samples, rates=rates).draw(KeyedDraws(seed, epoch, indices))
