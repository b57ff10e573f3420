"""The operation `tag`: classes of words, with their characters in the text."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from cloze.launch.predict.config import Input
from cloze.launch.predict.operation import Batch, Model, Operation, Row, Value
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.system.console import figure
from cloze.launch.texts.encoding import Encoding, TextEncoder
from cloze.launch.texts.windows import counts_once

_Item = TypeVar("_Item")
_Named = tuple[str, float, int, int]  # label, score, first character, end (exclusive)


@dataclass(frozen=True)
class Tag:
    """A tagged piece of a text: characters `start` to `end` (exclusive)."""

    label: str
    score: float
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class TagWords(Operation):
    """Entities, or other tags of words, in a text of any length: a long one is read in overlapping windows."""

    name, head, takes_pair, key = "tag", "BertForTokenClassification", "never", "tags"

    aggregation: Literal["none", "simple", "first", "average", "max"] = "first"
    """none: a tag for each token; simple: neighbouring tokens of one entity joined; first, average, max: each word has
    the tag of its first token, of the mean of its tokens or of the most confident one; neighbouring words of one entity
    joined."""
    ignored_label: str = "O"
    """Label that is not reported."""

    def encode(self, encoder: TextEncoder, row: Row) -> Iterable[Encoding]:
        length = encoder.truncation.max_length  # as in training: later positions may be untrained
        return encoder.windows(row.text, length=length, step=max(1, length // 2), place=row.place)

    def read(self, model: Model, batch: Batch) -> list[Value]:
        return batch.split(model(**batch.inputs).logits.float().softmax(-1))

    def table_lines(self, row: Row, result: list[Tag]) -> Iterator[dict[str, str]]:
        for tag in result:
            yield {
                "text": row.text,
                "label": tag.label,
                "words": tag.text,
                "characters": f"{tag.start}-{tag.end}",
                "score": figure(tag.score),
            }

    def finish(
        self, loaded: LoadedModel, row: Row, encodings: Sequence[Encoding], values: Sequence[Value]
    ) -> list[Tag]:
        labels = loaded.model.head.labels
        continues = [
            each.continues
            if loaded.encoder.truncation.words == "characters"
            else loaded.tokenizer.continues_word[each.ids]
            for each in encodings
        ]
        pieces = _pieces(encodings, values, continues)
        if self.aggregation not in ("none", "simple"):
            words = [_word(group, self.aggregation) for group in _groups(pieces, lambda piece, _: not piece.continues)]
            pieces = [word for word in words if word.end > word.start]  # a piece without characters is white space
        named = [(labels[piece.shares.argmax()], float(piece.shares.max()), piece.start, piece.end) for piece in pieces]
        tags = named if self.aggregation == "none" else [_entity(group) for group in _groups(named, _begins_entity)]
        return [
            Tag(label, score, start, end, row.text[start:end])
            for label, score, start, end in tags
            if label != self.ignored_label
        ]


@dataclass(frozen=True)
class TagConfig(TagWords, Input):
    """Tag the words of texts."""


@dataclass(frozen=True)
class _Piece:
    """A token or word with the probabilities of its labels."""

    start: int
    end: int
    shares: np.ndarray
    continues: bool


def _pieces(
    encodings: Sequence[Encoding], values: Sequence[np.ndarray], continues: Sequence[Sequence[bool] | np.ndarray]
) -> list[_Piece]:
    """Every token of the text once, from the window with most context around it."""
    inside = [(each.first_token, each.first_token + len(each) - 2) for each in encodings]  # without [CLS] and [SEP]
    pieces = [
        _Piece(*encoding.offsets[place], shares[place], bool(continuing[place]))
        for encoding, shares, continuing in zip(encodings, values, continues, strict=True)
        for place in range(1, len(encoding) - 1)
    ]
    return [piece for piece, counts in zip(pieces, counts_once(inside), strict=True) if counts]


def _groups(items: Iterable[_Item], begins: Callable[[_Item, _Item], bool]) -> Iterator[list[_Item]]:
    """Consecutive items in groups; `begins` says of an item and the one before it whether it begins a new group."""
    group: list[_Item] = []
    for item in items:
        if group and begins(item, group[-1]):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _word(group: list[_Piece], aggregation: str) -> _Piece:
    if aggregation == "first":
        shares = group[0].shares
    elif aggregation == "max":
        shares = max(group, key=lambda piece: piece.shares.max()).shares
    else:
        shares = np.mean([piece.shares for piece in group], axis=0)
    return _Piece(group[0].start, group[-1].end, shares, False)


def _begins_entity(tag: _Named, before: _Named) -> bool:
    """Whether a word begins an entity: by a B- tag, or since the word before it is of another kind."""
    return tag[0].startswith("B-") or _kind(tag[0]) != _kind(before[0])


def _entity(group: list[_Named]) -> _Named:
    """The entity of a group, named as in transformers' pipeline: by the part after the first dash."""
    return group[0][0].split("-", 1)[-1], float(np.mean([tag[1] for tag in group])), group[0][2], group[-1][3]


def _kind(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label
