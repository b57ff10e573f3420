"""`cloze vocab --extend`: adds the words and pieces of a text to a tokenizer that cuts them into many.

The words of the text, as the old tokenizer cuts them, are merged further: again and again the two neighbours that stand
together most often become one token (Sennrich et al. 2016), which saves as many tokens as it has occurrences. For BPE
the merges are appended to the old ones, which keep their precedence. For WordPiece and Unigram a token needs no steps
on the way to it: those that later ones have used up are left out. Old tokens keep their ids and scores.
"""

import heapq
import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import tokenizers

from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.shards.manifest import TOKENIZER_FOLDER
from cloze.pipeline.storage import publish_text
from cloze.pipeline.stores.places import Place, to_place
from cloze.pipeline.tokenization.backends import content_of, model_of, parts
from cloze.pipeline.tokenization.tokenizer import Tokenizer, copy_tokenizer

ADDED = "added.tsv"  # in the new tokenizer's folder: the tokens, what each saves, its count and its pieces
_SHOWN = 40  # characters of a word in a message
_MARGIN = 0.1  # by which a Unigram token's score is above the sum of the pieces that it replaces, at least


@dataclass(frozen=True)
class Added:
    """A new token, its occurrences in the text, and the old tokens that it replaces."""

    token: str
    count: int
    pieces: tuple[str, ...]

    @property
    def saved(self) -> int:
        """Tokens that it saves in the text."""
        return self.count * (len(self.pieces) - 1)


@dataclass(frozen=True)
class Extension:
    """A tokenizer with new tokens, best first, and the numbers of words and tokens of the text before and after."""

    tokenizer: Tokenizer
    added: list[Added]
    words: int
    tokens_before: int
    tokens_after: int
    without_pieces: str | None
    """A sentence about words that the old tokenizer has no pieces for, which no merge mends; None without such."""


def tokenizer_to_extend(path: str) -> Tokenizer:
    """The tokenizer of a folder, a model or a run.

    Raises:
        UserError: there is none, or it can't be extended.
    """
    place = to_place(path)
    folder = place / TOKENIZER_FOLDER if (place / TOKENIZER_FOLDER).is_dir() else place
    tokenizer = Tokenizer.from_folder(folder)
    model = model_of(tokenizer.backend)
    where = f"extend: found a tokenizer of kind {model['type']} in {folder}"
    if model["type"] not in ("WordPiece", "BPE", "Unigram"):
        raise UserError(
            f"{where}, whose words are in the vocabulary or unknown, expected one that cuts words into pieces "
            "(WordPiece, BPE, Unigram); train a new vocabulary"
        )
    if len(parts(tokenizer.backend, "a a")) < 2:
        raise UserError(
            f"{where} without a pre-tokenizer that cuts words, expected one; a merge could go over spaces: train a "
            "new vocabulary"
        )
    if model.get("end_of_word_suffix"):
        raise UserError(f"{where} with end_of_word_suffix, expected none; train a new vocabulary")
    for token in _behind(tokenizer, model):
        # As a part of the vocabulary, which it becomes, the model could cut it out of a longer word.
        whole = model["type"] == "WordPiece" or model.get("ignore_merges") or len(token) == 1
        if whole and model["type"] != "Unigram" and len(parts(tokenizer.backend, token)) < 2:
            raise UserError(
                f"{where} with the added token {token!r:.60}, which words may contain, behind its vocabulary, expected "
                "only added tokens such as [MASK] there; train a new vocabulary"
            )
    return tokenizer


def _behind(tokenizer: Tokenizer, model: Fields) -> dict[str, int]:
    """The added tokens that the model's own vocabulary lacks, and their ids."""
    known = {token for token, _ in model["vocab"]} if model["type"] == "Unigram" else model["vocab"]
    return {token: number for number, token in enumerate(tokenizer.tokens) if token and token not in known}


def extend(old: Tokenizer, counts: dict[str, int], add: int, min_frequency: int, output: Place) -> Extension:
    """Add at most `add` tokens, and write the new tokenizer to `output`.

    Args:
        counts: normalised words of the text, as the pre-tokenizer cuts them, and their occurrences.
        min_frequency: minimum occurrences of a new token.

    Raises:
        UserError: the text has no pieces to join.
    """
    content = content_of(old.as_given())
    kind = content["model"]["type"]
    words, lacking = _cut(old, content["model"], counts)
    without_pieces = _said_of_lacking(lacking, content["model"].get("max_input_chars_per_word")) if lacking else None
    merges = _Merges(words, content["model"].get("continuing_subword_prefix") or "", set(old.tokens))
    wanted = add if kind == "BPE" else add + add // 4 + 8  # the model may not choose some of them
    merges.learn(wanted, min_frequency, steps_stay=kind == "BPE")
    chosen = merges.chosen(wanted, min_frequency, steps_stay=kind == "BPE")
    before = sum(len(pieces) * count for pieces, count in words)
    while True:
        if not chosen:
            raise UserError(
                f"input: found no pieces that stand together {min_frequency} times, expected some to add; "
                + (without_pieces or "give more text")
            )
        new = _extended(old, content, [token.token for token in chosen], merges, before)
        used = _used(new, words)
        # A model that does not merge chooses some tokens never or rarely, and without these others more or less often.
        frequent = [token for token in chosen if used[token.token] >= min_frequency][:add]
        if kind == "BPE" or frequent == chosen:
            break
        chosen = frequent
    added = [Added(token.token, used[token.token], token.pieces) for token in chosen]
    added.sort(key=lambda token: (-token.saved, token.token))
    after = sum(used.values())
    extension = Extension(new, added, sum(count for _, count in words), before, after, without_pieces)
    if (output / ADDED).is_file():  # of an earlier one
        (output / ADDED).unlink()
    copy_tokenizer(new, output)
    publish_text(output / ADDED, _listed(added))
    return extension


def _said_of_lacking(words: list[str], longest: int | None) -> str:
    """A sentence about words that the old tokenizer has no pieces for.

    Args:
        longest: characters of the longest word that the model cuts; None: of any length.
    """
    too_long = [word for word in words if longest is not None and len(word) > longest]
    unknown = [word for word in words if longest is None or len(word) <= longest]
    kinds = (
        (too_long, f"are longer than the {longest} characters that the tokenizer cuts", "stay one unknown token"),
        (unknown, "have characters that the tokenizer lacks", "stay unknown; train a new vocabulary for them"),
    )
    return "; ".join(
        f"{len(found):,} different words {what} ({', '.join(f'{word[:_SHOWN]!r}' for word in found[:3])}"
        f"{', ...' if len(found) > 3 else ''}): they {so}"
        for found, what, so in kinds
        if found
    )


def _cut(old: Tokenizer, model: Fields, counts: dict[str, int]) -> tuple[list[tuple[list[str], int]], list[str]]:
    """The words, cut by the old model, and those that have unknown parts or lose some, the most frequent first."""
    cutter, unknown = old.backend.model, old.special_tokens.unknown
    drops = model["type"] == "BPE" and model.get("unk_token") is None  # what it has no token for, without a sign
    cut: list[tuple[list[str], int]] = []
    lacking: list[str] = []
    for word, count in counts.items():
        pieces = cutter.tokenize(word)
        kept = pieces[-1].offsets[1] if pieces else 0
        if any(piece.id == unknown for piece in pieces) or (drops and kept < len(word.encode())):
            lacking.append(word)
        elif pieces:
            cut.append(([piece.value for piece in pieces], count))
    return cut, sorted(lacking, key=lambda word: (-counts[word], word))


class _Merges:
    """Joins neighbours in words, the most frequent first; ties by their texts, so that results are the same.

    Args:
        words: pieces and count of each word; the pieces change.
        prefix: what the model puts before a piece inside a word.
        known: tokens that exist.
    """

    def __init__(self, words: list[tuple[list[str], int]], prefix: str, known: set[str]) -> None:
        self.words = [(list(pieces), count) for pieces, count in words]
        self.prefix, self.known = prefix, known
        self.pairs: list[tuple[str, str]] = []
        self.pieces: dict[str, tuple[str, ...]] = {}  # new token -> old ones
        self.counts: Counter[str] = Counter()  # of new tokens
        self._found: Counter[tuple[str, str]] = Counter()
        self._where: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        for number, (pieces, count) in enumerate(self.words):
            for pair in zip(pieces, pieces[1:], strict=False):
                self._found[pair] += count
                self._where[pair].add(number)

    def learn(self, add: int, least: int, steps_stay: bool) -> None:
        """Merge until there are `add` new tokens, or no pair occurs `least` times."""
        heap = [(-count, pair) for pair, count in self._found.items() if count >= least]
        heapq.heapify(heap)
        num_new = 0
        while heap and num_new < add:
            count, pair = heapq.heappop(heap)
            if -count != self._found[pair]:  # it has changed since
                if self._found[pair] >= least:
                    heapq.heappush(heap, (-self._found[pair], pair))
                continue
            token = pair[0] + pair[1].removeprefix(self.prefix)
            if token in self.known:  # the model has it and prefers another cut
                continue
            for changed in self._merge(pair, token):
                if self._found[changed] >= least:
                    heapq.heappush(heap, (-self._found[changed], changed))
            num_new = len(self.pairs) if steps_stay else sum(count >= least for count in self.counts.values())

    def _merge(self, pair: tuple[str, str], token: str) -> list[tuple[str, str]]:
        """Join a pair in all words; returns the pairs that occur more often than before."""
        self.pairs.append(pair)
        self.known.add(token)
        old = self.pieces
        old[token] = tuple(piece for part in pair for piece in old.get(part, (part,)))
        grown: dict[tuple[str, str], None] = {}
        for number in sorted(self._where.pop(pair)):
            pieces, count = self.words[number]
            for neighbours in zip(pieces, pieces[1:], strict=False):
                self._found[neighbours] -= count
                if neighbours != pair:
                    self._where[neighbours].discard(number)
            place = 0
            while place < len(pieces) - 1:
                if (pieces[place], pieces[place + 1]) == pair:
                    pieces[place : place + 2] = [token]
                    self.counts[token] += count
                    for part in pair:
                        if part in self.counts:
                            self.counts[part] -= count
                place += 1
            for neighbours in zip(pieces, pieces[1:], strict=False):
                self._found[neighbours] += count
                self._where[neighbours].add(number)
                if token in neighbours:
                    grown[neighbours] = None
        return list(grown)

    def chosen(self, add: int, least: int, steps_stay: bool) -> list[Added]:
        """The new tokens in the order of their merges."""
        added = [Added(token, self.counts[token], pieces) for token, pieces in self.pieces.items()]
        return added[:add] if steps_stay else [each for each in added if each.count >= least][:add]


def _extended(old: Tokenizer, content: Fields, tokens: list[str], merges: _Merges, total: int) -> Tokenizer:
    """The old tokenizer with further tokens, whose ids follow the highest one."""
    content = json.loads(json.dumps(content))
    model = content["model"]
    first = len(old.tokens)
    if model["type"] == "Unigram":
        # Ids are places in the list: special tokens that stand behind it get places, with a score that no text chooses.
        lowest = min(score for _, score in model["vocab"]) - 100
        behind = old.tokens[len(model["vocab"]) :]
        if "" in behind:
            raise UserError(
                f"extend: found ids without a token from {len(model['vocab'])} on in {old.folder}, expected none: new "
                "pieces of a Unigram model would get them; train a new vocabulary"
            )
        scores = dict(model["vocab"])
        model["vocab"] += [[token, lowest] for token in behind]
        model["vocab"] += [[token, _score(merges, token, scores, total)] for token in tokens]
    else:
        # The library numbers added tokens that the vocabulary lacks anew, behind its end.
        model["vocab"] |= _behind(old, model) | {token: first + number for number, token in enumerate(tokens)}
    if model["type"] == "BPE":
        as_text = bool(model["merges"]) and isinstance(model["merges"][0], str)
        model["merges"] += [" ".join(pair) if as_text else list(pair) for pair in merges.pairs[: len(tokens)]]
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)), old.names, old.folder)


def _score(merges: _Merges, token: str, scores: dict[str, float], total: int) -> float:
    """The logarithm of a piece's share of the text's tokens, as in the estimate of a Unigram model (Kudo 2018), and
    more than the pieces together that it replaces, so that it is chosen where they stood.
    """
    share = math.log(max(merges.counts[token], 1) / total)
    return max(share, sum(scores[piece] for piece in merges.pieces[token]) + _MARGIN)


def _used(tokenizer: Tokenizer, words: list[tuple[list[str], int]]) -> Counter[str]:
    """How often each token occurs in the words, new ones or not."""
    model, used = tokenizer.backend.model, Counter[str]()
    inside = model_of(tokenizer.backend).get("continuing_subword_prefix") or ""
    for pieces, count in words:
        for piece in model.tokenize(pieces[0] + "".join(each.removeprefix(inside) for each in pieces[1:])):
            used[piece.value] += count
    return used


def _listed(added: list[Added]) -> str:
    """As TSV without quotes: no token has white space."""
    rows = [(each.token, str(each.saved), str(each.count), " ".join(each.pieces)) for each in added]
    return "".join("\t".join(row) + "\n" for row in [("token", "saved_tokens", "count", "pieces"), *rows])
