"""Tagging: a class for each word; CoNLL files, long sentences split, entities scored strictly."""

import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch.nn import functional

from cloze.launch.config import FinetuneConfig
from cloze.launch.config.tasks import Task
from cloze.launch.finetune.examples.base import Examples, remarks
from cloze.launch.finetune.examples.classification import unknown_label
from cloze.launch.finetune.examples.prediction_errors import TagErrors
from cloze.launch.finetune.kind import Kind, Read
from cloze.launch.finetune.schemes import OUTSIDE, PREFIXES, split_tag, to_iob2
from cloze.launch.texts.encoding import characters
from cloze.launch.texts.labels import looking_alike
from cloze.launch.texts.sequences import Sequences
from cloze.launch.texts.settings import TRUNCATION, described
from cloze.launch.texts.tables import ENDINGS, ending, read_text
from cloze.model.problems import HeadConfig
from cloze.model.tasks import BertForTokenClassification
from cloze.pipeline import ragged
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.records import NO_LABEL
from cloze.pipeline.samples.assembly import assemble
from cloze.pipeline.tokenization.tokenizer import Tokenizer

_CONLL_U, _ID = 10, re.compile("[0-9]+([-.][0-9]+)?")  # fields of a word in CoNLL-U, the first of them
_DOCUMENT = "-DOCSTART-"  # CoNLL-2003 puts it between documents

_Tag = TypeVar("_Tag")


@dataclass(frozen=True)
class Sentences:
    """The sentences of a CoNLL file: words (W,), their tags or None, the line of each, first word of each sentence
    (sentences + 1,).

    Args:
        scheme: of entities, that of the file; tags are in IOB2. None: tags are those of the file.
    """

    path: Path
    words: list[str]
    tags: list[str] | None
    lines: np.ndarray
    bounds: np.ndarray
    scheme: str | None = None

    @property
    def by_character(self) -> bool:
        """Whether each word is a single character, as in Chinese tagging."""
        return all(len(characters(word)) < 2 for word in self.words)

    def of_each(self, tags: list[_Tag]) -> list[list[_Tag]]:
        """Split a list with one entry per word (W,) into one list per sentence."""
        bounds = self.bounds.tolist()
        return [tags[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]


def read_conll(path: str | Path) -> Sentences:
    """Read CoNLL: one word per line with its tag in the last field, an empty line between sentences; one field: no
    tags.

    Raises:
        UserError: a line has another number of fields than the first one.
    """
    path = Path(path)
    fields_of: list[list[str]] = []
    lines: list[int] = []
    ends = [0]
    separator = None
    for number, line in enumerate([*re.split("\r\n|\r|\n", read_text(path)), ""], 1):  # the last sentence ends too
        if not line.strip():
            if ends[-1] != len(lines):
                if len(ends) == 1:
                    _refuse_conll_u(path, lines[0], fields_of, separator)
                ends.append(len(lines))
            continue
        if not lines:
            separator = "\t" if "\t" in line else None
        fields = line.split(separator)
        if fields[0] == _DOCUMENT:
            continue
        if not fields[-1].strip():
            raise UserError(f"{path}: row {number}: found no tag in {line.strip()!r:.60}, expected one; fix the line")
        if fields_of and len(fields) != len(fields_of[0]) or not fields[0]:
            raise UserError(
                f"{path}: row {number}: found {len(fields)} fields in {line.strip()!r:.60}, expected "
                f"{len(fields_of[0]) if fields_of else 'a word'}, as in the first row; fix the line"
                + (", or give CoNLL: a word and its tag on each line" if ending(path) in ENDINGS else "")
            )
        fields_of.append(fields)
        lines.append(number)
    if not lines:
        raise UserError(f"{path}: found no rows, expected a word with its tag a line")
    tags = [fields[-1] for fields in fields_of] if len(fields_of[0]) > 1 else None
    return Sentences(path, [fields[0] for fields in fields_of], tags, np.array(lines), np.array(ends))


def _refuse_conll_u(path: Path, number: int, sentence: list[list[str]], separator: str | None) -> None:
    """Raise UserError for CoNLL-U, by the file's name or by its first sentence: ten fields, the first of which are
    numbers, or ranges of them for words of several tokens (universaldependencies.org/format.html).
    """
    numbered = len(sentence[0]) == _CONLL_U and separator == "\t" and all(_ID.fullmatch(word) for word, *_ in sentence)
    numbered = numbered and (len(sentence) > 1 or len(sentence[0][0]) == 1)  # a sentence may be one number
    if numbered or ".conllu" in path.name.lower():
        raise UserError(
            f"{path}: row {number}: found CoNLL-U, of {_CONLL_U} fields, expected a word, its tag last; write the "
            "second field and that of the tags into a *.conll"
        )


def read_entities(path: str | Path) -> Sentences:
    """Read CoNLL with entity tags, converted to IOB2 from the scheme of the file.

    Raises:
        UserError: as `read_conll`, or a tag belongs to no scheme.
    """
    sentences = read_conll(path)
    if sentences.tags is None:
        return sentences
    parts = [split_tag(tag) for tag in sentences.tags]
    if None in parts:
        wrong = parts.index(None)
        raise UserError(
            f"{path}: row {sentences.lines[wrong]}: found the tag {sentences.tags[wrong]!r}, expected O, "
            f"or a kind of entity behind one of {'-, '.join(PREFIXES)}- (B-PER); tags of words that are "
            "no entities are for the task pos"
        )
    tags, scheme = to_iob2(sentences.of_each([part for part in parts if part is not None]))
    read = [tag for sentence in tags for tag in sentence]
    if scheme == "IOB2" and read != sentences.tags:
        scheme = "IOB2 without kinds"
    return replace(sentences, tags=read, scheme=scheme)


def find_tags(sentences: Sentences, listed: list[str]) -> HeadConfig:
    """The head with its tags: those listed, else those of the training file sorted by name, O first.

    Raises:
        UserError: the file has no tags, or too few of them.
    """
    if sentences.tags is None:
        raise UserError(f"{sentences.path}: row {sentences.lines[0]}: found 1 field, expected a word and its tag")
    foreign = [tag for tag in listed if tag != OUTSIDE and not tag.startswith(("B-", "I-"))]
    if foreign and sentences.scheme:
        raise UserError(
            f"labels: found {', '.join(foreign)}, expected O, B-KIND and I-KIND, as which the tags of "
            f"{sentences.path} ({sentences.scheme}) are read"
        )
    tags = set(sentences.tags)
    if sentences.scheme not in (None, "IOB2"):  # one tag of the file may represent both
        tags |= {f"{prefix}-{tag[2:]}" for tag in tags - {OUTSIDE} for prefix in "BI"}
    kinds = {tag[2:] if sentences.scheme else tag for tag in tags}
    if not listed and (alike := looking_alike(tags) or looking_alike(kinds)):
        raise UserError(
            f"{sentences.path}: found the tags {alike}, which look alike, expected one way to write each; correct the "
            "file, or name all tags with --labels"
        )
    return HeadConfig(tuple(listed) or tuple(sorted(tags, key=lambda tag: (tag != OUTSIDE, tag))))


class TagExamples(Examples):
    """Sentences, split between words if they are too long; every word is tagged once.

    A word's tag is trained and predicted at its first token. A word without tokens becomes [UNK].

    Args:
        by_character: whether the words of the training file are single characters, between which texts have no space.
    """

    errors, by_token = TagErrors, True

    def __init__(
        self,
        sentences: Sentences,
        task: Task,
        head: HeadConfig,
        tokenizer: Tokenizer,
        max_length: int,
        by_character: bool = False,
    ) -> None:
        self.by_character = by_character
        self._sentences, self._head, self._task = sentences, head, task
        self._words = self._build(tokenizer, max_length - 2)
        self.lengths = self._sequences.lengths
        self.width = len(head.labels)
        self.labelled = sentences.tags is not None
        if self.labelled:
            self._true = self._numbers()
            self._labels = np.full(self.num_places, NO_LABEL, np.int64)
            self._labels[self._words] = self._true
        self.measured = "accuracy (words)"
        if task.metrics[0] == "f1":
            self.measured = f"f1, precision, recall (entities, micro, strict), {self.measured}"
        count, said = len(sentences.bounds) - 1, remarks(sentences.of_each(sentences.words), tokenizer)
        self.facts = (
            f"{count:,} sentences{said}, {len(sentences.words):,} words, {self.lengths.sum():,} tokens; "
            f"{self._num_split:,} sentences split, {self._num_cut:,} words longer than a sequence cut"
        )
        if sentences.scheme not in (None, "IOB2"):
            self.facts += f"; tags of {sentences.scheme} read as IOB2"
        if by_character:
            self.facts += "; a word is a character"

    def _build(self, tokenizer: Tokenizer, room: int) -> np.ndarray:
        """Build the sequences.

        Returns:
            The position of each word's first token.
        """
        flat, offsets = tokenizer.encode_batch(self._as_in_text(tokenizer))
        lengths = np.diff(offsets)
        kept = np.clip(lengths, 1, room)
        self._num_cut = int((lengths > room).sum())
        firsts = _pieces(kept, self._sentences.bounds, room)  # first word of each piece
        further = np.setdiff1d(firsts, self._sentences.bounds)
        self._num_split = len(np.unique(np.searchsorted(self._sentences.bounds, further)))
        words_of = np.diff(np.append(firsts, len(kept)))
        ends = ragged.to_offsets(kept)
        counts = ends[np.append(firsts[1:], len(kept))] - ends[firsts]
        piece = np.repeat(np.arange(len(firsts)), words_of)
        # A word without tokens becomes [UNK].
        ids = np.full(ends[-1], tokenizer.special_tokens.unknown, np.int64)
        copied = np.minimum(lengths, kept)
        ids[ragged.ranges(ends[:-1], copied)] = flat[ragged.ranges(offsets[:-1], copied)]
        self._sequences = Sequences(*assemble(ids, [[(ends[firsts], counts)]], tokenizer.special_tokens))
        return ends[:-1] + 2 * piece + 1

    def _as_in_text(self, tokenizer: Tokenizer) -> list[str]:
        """Words as in running text: for byte-level tokenizers the space before a word is a part of it."""
        if self.by_character or not tokenizer.first_word_differs:
            return self._sentences.words
        begins = set(self._sentences.bounds.tolist())
        return [word if number in begins else f" {word}" for number, word in enumerate(self._sentences.words)]

    def _numbers(self) -> np.ndarray:
        labels, tags = {label: number for number, label in enumerate(self._head.labels)}, self._sentences.tags or []
        for line, tag in zip(self._sentences.lines, tags, strict=True):
            if tag not in labels:
                raise unknown_label(f"{self._sentences.path}: row {line}", tag, self._head.labels)
        return np.array([labels[tag] for tag in tags])

    def targets(self, units: np.ndarray) -> Fields:
        return {"labels": torch.from_numpy(self._labels[self._sequences.tokens(units)])}

    def _tags(self, numbers: np.ndarray) -> list[list[str]]:
        """Names of tags (W,), one list per sentence."""
        return self._sentences.of_each([self._head.labels[number] for number in numbers])

    def metrics(self, outputs: np.ndarray) -> dict[str, float]:
        scores = outputs[self._words]
        guesses = scores.argmax(1)
        loss = functional.cross_entropy(torch.from_numpy(scores), torch.from_numpy(self._true)).item()
        values = {"loss": loss, "accuracy": float(np.mean(guesses == self._true))}
        if self._task.metrics[0] == "accuracy":
            return values
        return values | entity_scores(self._tags(self._true), self._tags(guesses))

    def majority(self) -> dict[str, float]:
        values = {"accuracy": float(np.bincount(self._true).max() / len(self._true))}
        # the baseline predicts no entity
        return values if self._task.metrics[0] == "accuracy" else values | {"f1": 0.0}

    def text(self, number: int) -> str:
        low, high = self._sentences.bounds[number : number + 2]
        return " ".join(self._sentences.words[low:high])

    def predictions(self, outputs: np.ndarray) -> list[Fields]:
        scores = torch.from_numpy(outputs[self._words]).double().softmax(-1)
        chances, guesses = (part.numpy() for part in scores.max(-1))
        bounds, described = self._sentences.bounds.tolist(), []
        tagged = self._tags(guesses)
        true = self._tags(self._true) if self.labelled else None
        for number, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
            entry = {
                "place": f"row {self._sentences.lines[low]}",
                "words": self._sentences.words[low:high],
                "prediction": tagged[number],
                "probabilities": chances[low:high].tolist(),
            }
            described.append(entry | ({"label": true[number]} if true else {}))
        return described


def _pieces(lengths: np.ndarray, bounds: np.ndarray, room: int) -> np.ndarray:
    """First word of each piece: a new piece begins with each sentence, and before a word that does not fit."""
    firsts, begins, used = [], set(bounds[:-1].tolist()), 0
    for word, length in enumerate(lengths.tolist()):
        if word in begins or used + length > room:
            firsts.append(word)
            used = 0
        used += length
    return np.array(firsts)


def entity_scores(true: list[list[str]], guessed: list[list[str]]) -> dict[str, float]:
    """Precision, recall and F1 over whole entities in IOB2, all kinds together (micro), strict: seqeval's."""
    from seqeval import metrics, scheme

    with warnings.catch_warnings():  # seqeval's warning that no entity was predicted, which the recall of 0 shows too
        warnings.simplefilter("ignore")
        return {
            name: float(
                getattr(metrics, f"{name}_score")(true, guessed, mode="strict", scheme=scheme.IOB2, zero_division=0)
            )
            for name in ("f1", "precision", "recall")
        }


class Tagging(Kind):
    """A class for each word of a sentence."""

    fields = ("read_layers", "labels")
    question = 'predict tag {run} "TEXT"'

    def read(self, config: FinetuneConfig, task: Task, tokenizer: Tokenizer, hidden_size: int) -> Read:
        read_file = read_conll if task.metrics[0] == "accuracy" else read_entities
        sentences = read_file(config.train_file)
        head = find_tags(sentences, config.labels)
        if config.read_layers != "last":
            head = replace(head, layers=config.read_layers, pooling="cls")  # nothing is pooled; cls works for any model

        def examples(read: Sentences) -> TagExamples:
            return TagExamples(read, task, head, tokenizer, config.lengths[0], sentences.by_character)

        return BertForTokenClassification, head, examples(sentences), lambda path: examples(read_file(path))

    def notes(self, config: FinetuneConfig, task: Task, train: TagExamples) -> Fields:
        """Also whether words are single characters, as in a training file with one character a line."""
        notes = super().notes(config, task, train)
        if train.by_character:
            truncation = self.truncation(config)
            assert truncation is not None, "sentences are not read in pieces"
            notes[TRUNCATION] = described(replace(truncation, words="characters"))
        return notes


TAGGING = Tagging()
