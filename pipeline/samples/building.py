"""Builds samples from documents by the objective (next sentence, sentence order, full sentences, pairs).

Building works on lengths of sentences: a segment is a range of the flat array of tokens, and all samples of a shard are
assembled in one gather. Tokens that do not fit into a sample begin the next one: no objective loses tokens.
"""

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod

import numpy as np

from cloze.pipeline.fields import Fields
from cloze.pipeline.records import NO_LABEL, Samples, SpecialTokens
from cloze.pipeline.samples.assembly import assemble

FOLLOWS, RANDOM = 0, 1


@dataclass(frozen=True)
class Documents:
    """Documents of a shard as flat arrays: tokens (T,), sentences as offsets into them, documents as offsets into
    the sentences (D+1,). ids (D,) uint64, sources (D,) uint16: for the columns `document` and `source`. keys (D,):
    equal for copies of one document."""

    tokens: np.ndarray
    sentence_offsets: np.ndarray
    document_offsets: np.ndarray
    ids: np.ndarray
    keys: np.ndarray
    sources: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class Segments:
    """Samples as ranges: segment A [a, a_end), segment B [b, b_end) (empty: none), label, document."""

    rows: list[tuple[int, int, int, int, int, int]]
    borrowed: int = 0  # tokens of random segments B, which also occur in a sample of their own document
    left_out: int = 0  # tokens that the objective omits: only with given pairs


class SampleBuilder:
    """Builds the samples of a shard. Draws use only Python's `random.random()`, which is the same in every version."""

    def __init__(self, config: Fields, max_length: int, special_tokens: SpecialTokens):
        self.config = config
        self.max_length = max_length
        self.special = special_tokens

    def build(self, documents: Documents, key: tuple[int | str, ...]) -> tuple[Samples, dict[str, int]]:
        """Samples, and counts of tokens. The draws depend only on `key`.

        tokens_in + tokens_borrowed - tokens_left_out = tokens_out, without special tokens.
        """
        draw = random.Random("/".join(map(str, key))).random
        source, segments = getattr(self, f"_{self.config['objective']}")(documents, draw)
        samples = self._assemble(source, segments, documents)
        separators = len(source) - len(documents.tokens)
        counts = {
            "tokens_in": len(documents.tokens),
            "tokens_borrowed": segments.borrowed,
            "tokens_left_out": segments.left_out,
            "tokens_out": sum(row[1] - row[0] + row[3] - row[2] for row in segments.rows) - separators,
        }
        return samples, counts

    # ---- objectives: each returns the tokens that ranges refer to, and the ranges ----

    def _pairs(self, documents: Documents, draw: Callable[[], float], *, swaps: bool) -> tuple[np.ndarray, Segments]:
        """BERT's pairs (Devlin et al. 2019; google-research/bert), but truncated tokens begin the next sample.

        Args:
            swaps: ALBERT's pairs (Lan et al. 2020): two neighbouring segments, swapped or not; no random ones.
        """
        ends = documents.sentence_offsets[1:].tolist()
        bounds = documents.document_offsets.tolist()
        keys = documents.keys.tolist()
        takes_others = not swaps and len(set(keys)) > 1
        share = self.config["random_share"]
        segments = Segments([])
        for number in range(len(documents)):
            first, after = bounds[number], bounds[number + 1]
            place, document_end = int(documents.sentence_offsets[first]), ends[after - 1]
            while place < document_end:
                target = self._target(self.max_length - 3, draw)
                sentence = bisect_right(ends, place, first, after)
                last = min(bisect_left(ends, place + target, sentence, after), after - 1)
                stop = min(ends[last], place + target)
                if last > sentence:  # cut between two sentences
                    cut = ends[sentence + int(draw() * (last - sentence))]
                elif swaps or stop < document_end or stop - place == target:
                    # A sentence of the target's length, or alone: cut inside. A single token stays whole.
                    cut = place + 1 + int(draw() * (stop - place - 1))
                else:  # the last sentence is alone: only a random segment can follow, if configured
                    cut = stop
                if takes_others and (share > 0 if cut == stop else draw() < share):
                    low, high = self._random_range(keys, number, ends, bounds, target - (cut - place), draw)
                    segments.rows.append((place, cut, low, high, RANDOM, number))
                    segments.borrowed += high - low
                    place = cut
                else:
                    if swaps and cut < stop and draw() < share:
                        segments.rows.append((cut, stop, place, cut, RANDOM, number))
                    else:
                        segments.rows.append((place, cut, cut, stop, FOLLOWS if stop > cut else NO_LABEL, number))
                    place = stop
                first = sentence
        return documents.tokens, segments

    _next_sentence = partialmethod(_pairs, swaps=False)
    _sentence_order = partialmethod(_pairs, swaps=True)

    def _target(self, most: int, draw: Callable[[], float]) -> int:
        """Target length of a pair: the maximum, or sometimes a random smaller number, at least 2."""
        return 2 + int(draw() * (most - 1)) if draw() < self.config["short_share"] else most

    @staticmethod
    def _random_range(
        keys: list[int], number: int, ends: list[int], bounds: list[int], most: int, draw: Callable[[], float]
    ) -> tuple[int, int]:
        """Tokens of another document, from the beginning of a random sentence of it."""
        other = number
        while keys[other] == keys[number]:  # ends: there is another document
            other = int(draw() * len(keys))
        first, after = bounds[other], bounds[other + 1]
        sentence = first + int(draw() * (after - first))
        low = ends[sentence - 1] if sentence else 0
        return low, min(ends[after - 1], low + most)

    def _full_sentences(self, documents: Documents, draw: Callable[[], float]) -> tuple[np.ndarray, Segments]:
        """RoBERTa's FULL-SENTENCES (Liu et al. 2019), or DOC-SENTENCES if samples may not cross documents; a share of
        the documents may give single sentences.
        """
        most = self.max_length - 2
        ends = documents.sentence_offsets[1:]
        if not self.config["cross_documents"]:
            owners = np.repeat(np.arange(len(documents)), np.diff(documents.document_offsets))
            share = self.config["single_share"]
            single = np.array([share > 0 and draw() < share for _ in range(len(documents))], bool)
            stop = single[owners]  # sentences after which a sample ends
            stop[documents.document_offsets[1:] - 1] = True
            segments = self._pack(ends.tolist(), ends[stop].tolist(), most)
            owners = owners[stop].tolist()
            segments.rows = [(*row[:5], owners[row[5]]) for row in segments.rows]
            return documents.tokens, segments
        # One stream with a separator between documents; a separator belongs to the sentence before it.
        last = documents.document_offsets[1:-1] - 1
        source = np.insert(documents.tokens, ends[last], self.special.separator)
        shift = np.searchsorted(last, np.arange(len(ends)), side="right")
        ends = ends + shift
        segments = self._pack(ends.tolist(), [int(ends[-1])], most)
        starts = documents.sentence_offsets[documents.document_offsets[:-1]] + np.arange(len(documents))
        owners = np.searchsorted(starts, [row[0] for row in segments.rows], side="right") - 1
        segments.rows = [(*row[:5], int(owner)) for row, owner in zip(segments.rows, owners, strict=True)]
        return source, segments

    @staticmethod
    def _pack(ends: list[int], stops: list[int], most: int) -> Segments:
        """Fill samples with as many whole sentences as fit, up to each stop; a long sentence is cut."""
        segments = Segments([])
        place = first = 0
        for number, stop in enumerate(stops):
            while place < stop:
                fitting = bisect_right(ends, place + most, first)
                end = ends[fitting - 1] if fitting else 0
                end = min(end if end > place else place + most, stop)
                segments.rows.append((place, end, end, end, NO_LABEL, number))
                place, first = end, max(first, fitting - 1)
        return segments

    def _single_sentences(self, documents: Documents, draw: Callable[[], float]) -> tuple[np.ndarray, Segments]:
        """One sentence per sample; a long one is cut."""
        most = self.max_length - 2
        owner = np.repeat(np.arange(len(documents)), np.diff(documents.document_offsets)).tolist()
        offsets = documents.sentence_offsets.tolist()
        segments = Segments([])
        for number, (start, stop) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
            for low in range(start, stop, most):
                high = min(low + most, stop)
                segments.rows.append((low, high, high, high, NO_LABEL, owner[number]))
        return documents.tokens, segments

    def _given_pairs(self, documents: Documents, draw: Callable[[], float]) -> tuple[np.ndarray, Segments]:
        """The two segments of each line; B swapped for another line's with the configured probability.

        A pair that is too long loses the end of its longer segment, since there is no next sample for it.
        """
        offsets = documents.sentence_offsets.tolist()
        bounds = documents.document_offsets.tolist()
        several = len(set(documents.keys.tolist())) > 1
        most = self.max_length - 3
        segments = Segments([])
        for number in range(len(documents)):
            a, b, end = offsets[bounds[number] : bounds[number] + 3]
            a_end, label, own = b, FOLLOWS, end - a
            if several and draw() < self.config["random_share"]:
                other = number
                while documents.keys[other] == documents.keys[number]:
                    other = int(draw() * len(documents))
                _, b, end = offsets[bounds[other] : bounds[other] + 3]
                label, own = RANDOM, a_end - a
                segments.left_out += offsets[bounds[number] + 2] - a_end  # its own B, which is in no sample now
            a_size, b_size = a_end - a, end - b
            if a_size + b_size > most:
                shorter = min(a_size, b_size, most // 2)
                a_size, b_size = (shorter, most - shorter) if a_size <= b_size else (most - shorter, shorter)
                segments.left_out += max(0, own - (a_size if label == RANDOM else a_size + b_size))
            segments.rows.append((a, a + a_size, b, b + b_size, label, number))
            segments.borrowed += b_size if label == RANDOM else 0
        return documents.tokens, segments

    # ---- assembling ----

    def _assemble(self, source: np.ndarray, segments: Segments, documents: Documents) -> Samples:
        """The samples of all rows."""
        rows = np.array(segments.rows, np.int64).reshape(-1, 6)
        a, a_end, b, b_end, label, number = rows.T
        has_b = (b_end > b) | (label != NO_LABEL)
        ids, offsets, segment_b_start = assemble(source, [[(a, a_end - a)], [(b, b_end - b)]], self.special, has_b)
        return Samples(
            input_ids=ids,
            offsets=offsets,
            segment_b_start=segment_b_start.astype(np.uint16),
            next_sentence_label=label.astype(np.int8),
            document=documents.ids[number],
            source=documents.sources[number],
        )
