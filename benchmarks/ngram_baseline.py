"""BLiMP by n-grams of a text: what of a model's score stands in the text's short-range statistics.

    python benchmarks/ngram_baseline.py --text 'mix/train-*.jsonl.gz' --tokenizer runs/strict-data/tokenizer \\
        --blimp blimp [--order 5] [--beside blimp.json] [--json FILE]

Interpolated Kneser-Ney (Chen and Goodman 1999, section 3; one discount for each order) over the word pieces of each
sentence by itself. --beside: the report of `cloze evaluate --suite blimp --json`, for the correlation over paradigms,
and for the paradigms in which the model is below chance. --quick: on made text, to see that it runs.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from compute_curve import quick_data

END_OF_SENTENCE = re.compile(r"(?<=[.!?])[\"')]*\s+|\n+")
SHIFT = 40  # bits of the number of a shorter n-gram, below a word's in the key of a longer one


class KneserNey:
    """An n-gram model of sequences of words 1 to `words` - 1; 0 stands before each sequence.

    Args:
        sequences: what is counted.
        words: number of words, 0 included.
        order: the longest n-gram, at least 2.
    """

    def __init__(self, sequences: list[list[int]], words: int, order: int) -> None:
        self._words, self._order = words, order
        flat = self._joined(sequences)
        places = np.flatnonzero(flat)
        numbers = {1: flat}  # of the n-gram that ends at each place
        self._known: dict[int, np.ndarray] = {}  # keys of the n-grams, ascending; the place is the number
        for n in range(2, order + 1):
            self._known[n], numbers[n] = np.unique(self._keys(flat, numbers[n - 1], n), return_inverse=True)
        self._orders: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = {}
        for n in range(order, 0, -1):
            grams, first, counts = np.unique(numbers[n][places], return_index=True, return_counts=True)
            if n < order:  # of how many longer n-grams it is the end
                _, one = np.unique(numbers[n + 1][places], return_index=True)
                _, counts = np.unique(numbers[n][places[one]], return_counts=True)
            context = numbers[n - 1][places[first] - 1] if n > 1 else np.zeros(len(grams), dtype=np.int64)
            once, twice = np.sum(counts == 1), np.sum(counts == 2)
            discount = (once + 1) / (once + 2 * twice + 2)  # never 0: an unseen word keeps a probability
            contexts, of = np.unique(context, return_inverse=True)
            total = np.bincount(of, counts)
            left = discount * np.bincount(of) / total
            self._orders[n] = grams, (counts - discount) / total[of], contexts, left

    def log_probabilities(self, sequences: list[list[int]]) -> np.ndarray:
        """Natural logarithms, (sequences,) float64."""
        flat = self._joined(sequences)
        places = np.flatnonzero(flat)
        numbers = {1: flat}
        for n in range(2, self._order + 1):
            keys = self._keys(flat, numbers[n - 1], n)
            numbers[n] = np.where(numbers[n - 1] < 0, -1, find(self._known[n], keys))
        found = np.full(len(places), 1 / (self._words - 1))
        for n in range(1, self._order + 1):
            grams, values, contexts, left = self._orders[n]
            own = find(grams, numbers[n][places])
            context = find(contexts, numbers[n - 1][places - 1]) if n > 1 else np.zeros(len(places), dtype=np.int64)
            seen = np.where(own < 0, 0.0, values[own])
            found = np.where(context < 0, found, seen + left[context] * found)
        sequence = np.repeat(np.arange(len(sequences)), [len(each) for each in sequences])
        return np.bincount(sequence, np.log(found), minlength=len(sequences))

    def _joined(self, sequences: list[list[int]]) -> np.ndarray:
        before = [0] * (self._order - 1)
        return np.concatenate([np.array([*before, *each], dtype=np.int64) for each in sequences])

    @staticmethod
    def _keys(flat: np.ndarray, shorter: np.ndarray, n: int) -> np.ndarray:
        """(places,) of the n-grams that end there: the first word, and the number of what follows it; -1: too early."""
        keys = np.full(len(flat), -1, dtype=np.int64)
        keys[n - 1 :] = (flat[: len(flat) - n + 1] << SHIFT) + shorter[n - 1 :]
        return keys


def find(sorted_values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Place of each wanted value, -1 where it is not there."""
    places = np.minimum(np.searchsorted(sorted_values, wanted), len(sorted_values) - 1)
    return np.where(sorted_values[places] == wanted, places, -1)


def sentences(texts: str) -> Iterator[str]:
    """Of the files of a glob, JSON lines with `text`."""
    paths = sorted(glob.glob(texts))
    if not paths:
        sys.exit(f"--text: found no file {texts}, expected JSON lines")
    for path in paths:
        with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
            for line in file:
                yield from filter(None, map(str.strip, END_OF_SENTENCE.split(json.loads(line)["text"])))


def main() -> int:
    from transformers import AutoTokenizer

    from cloze.launch.evaluate.pairs import accuracies, read_pairs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="glob of JSON lines")
    parser.add_argument("--tokenizer", type=Path, help="folder")
    parser.add_argument("--blimp", type=Path, help="folder of BLiMP's files")
    parser.add_argument("--order", type=int, default=5)
    parser.add_argument("--beside", type=Path, help="a model's report")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        if given.quick:
            data, _, given.blimp = quick_data(Path(made))
            given.text, given.tokenizer = f"{made}/text.jsonl", data / "tokenizer"
        for name in ("text", "tokenizer", "blimp"):
            if getattr(given, name) is None:
                parser.error(f"--{name}: found none, expected it; or --quick")
        tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
        texts, pairs = list(sentences(given.text)), read_pairs(given.blimp)

    def words(texts: list[str]) -> list[list[int]]:
        """Numbers from 1 on, and the tokenizer's separator at the end."""
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [[each + 1 for each in [*sequence, tokenizer.sep_token_id]] for sequence in ids]

    model = KneserNey(words(texts), len(tokenizer) + 1, given.order)
    good, bad = (model.log_probabilities(words([getattr(p, side) for p in pairs])) for side in ("good", "bad"))
    found = {"order": given.order, "sentences": len(texts)} | accuracies(pairs, good - bad)
    if given.beside:
        theirs = json.loads(given.beside.read_text())["paradigms"]
        names = sorted(theirs.keys() & found["paradigms"].keys())
        found["correlation"] = statistics.correlation(
            [theirs[n] for n in names], [found["paradigms"][n] for n in names]
        )
        found["below_chance"] = {n: [round(theirs[n]), round(found["paradigms"][n])] for n in names if theirs[n] < 50}
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
