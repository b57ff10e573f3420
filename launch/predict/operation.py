"""The interface of operations: encode texts, read the outputs of the model, make results of them."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.system.console import figure
from cloze.launch.texts.encoding import Encoding, TextEncoder
from cloze.launch.texts.tables import Columns
from cloze.model.config import field_of_another_kind
from cloze.pipeline.bounds import check_bounds
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

Model: TypeAlias = Any
"""A module with the head that the operation reads."""
Value: TypeAlias = Any
"""Values that an operation reads from the model's output for one sequence."""
Result: TypeAlias = Any
"""The result of an operation for a text: a dataclass, a number or a list of them."""


@dataclass(frozen=True)
class Row:
    """A text, a pair of texts, or a text with its choices; and its source (for messages)."""

    text: str
    pair: str | None = None
    place: str = "text"
    choices: tuple[str, ...] = ()
    values: Fields | None = None
    """All columns of the row of a table that it is from."""

    @property
    def both(self) -> str:
        """The text, or both texts of a pair, in one line."""
        return self.text if self.pair is None else f"{self.text} | {self.pair}"

    @property
    def second(self) -> str:
        """The second text of a pair, for operations that always take one."""
        assert self.pair is not None, "check_row asks for it"
        return self.pair


@dataclass(frozen=True)
class Batch:
    """Concatenated sequences, without padding."""

    encodings: Sequence[Encoding]
    bounds: list[int]
    """(B + 1,): where each sequence begins, on the host."""
    inputs: Fields
    """What a model's forward takes (cloze.pipeline.loading.collate.concatenated), with [MASK] at the blanks."""

    def blanks(self) -> list[int]:
        """Positions of all masks among the T tokens."""
        starts = zip(self.bounds, self.encodings, strict=False)
        return [start + blank for start, each in starts for blank in each.blanks]

    def split(self, tokens: Any) -> list[Value]:
        """(T, ...) -> for each sequence (n, ...), as fp32 arrays."""
        host = tokens.float().cpu().numpy()
        return [host[low:high] for low, high in zip(self.bounds, self.bounds[1:], strict=False)]


_SHOWN_NUMBERS = 4  # numbers of a vector shown in a table


def shown_vector(vector: np.ndarray) -> str:
    """The first numbers of a vector, and its size."""
    return " ".join(figure(number) for number in vector[:_SHOWN_NUMBERS]) + f" ... ({len(vector)})"


def plain(value: object) -> object:
    """Convert dataclasses, arrays and tuples to dicts and lists; fields that are None are omitted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name: plain(each) for name, each in pairs if each is not None}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


_NAMES = {int: "a whole number", str: "text", NoneType: "None"}


def check_options(options: object) -> None:
    """Raise UserError for the first field of a dataclass whose value is not of the declared type, or not one of its
    names.
    """
    if wrong := field_of_another_kind(options, _is_of, _NAMES):
        name, value, expected = wrong
        raise UserError(f"{name}: found {shown(value)}, expected {expected}")


def _is_of(value: object, kind: type) -> bool:
    if kind is int:  # numpy's integers count as whole numbers
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, kind)


def shown(value: object) -> str:
    """A value as one short line."""
    text = " ".join(repr(value).splitlines())
    return text if len(text) <= 60 else text[:57] + "..."


class Operation:
    """An operation of a model on texts. Subclasses are frozen dataclasses of their options.

    Args:
        head: attribute of a model that the operation needs, None for any encoder.
        fields: names of its one or two texts in JSON.
        takes_pair: whether there is a second text (never, maybe, always).
        takes_choices: the second one is a list.
        key: name in JSON of a result that is not an object.
    """

    if TYPE_CHECKING:  # each subclass is a dataclass; jsonargparse would read the annotation as a field
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]

    name: ClassVar[str]
    head: ClassVar[str | None] = None
    fields: ClassVar[tuple[str, str]] = ("text", "pair")
    takes_pair: ClassVar[str] = "maybe"
    takes_choices: ClassVar[bool] = False
    key: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_options(self)
        check_bounds("", self)
        # A command's configuration inherits from an operation and from Input: each checks its own fields.
        if checks := getattr(super(), "__post_init__", None):
            checks()

    def check(self, loaded: LoadedModel) -> None:
        """Raise UserError for options that this model does not support."""

    def with_model_defaults(self, loaded: LoadedModel) -> "Operation":
        """The operation with the model's values for options that are not given."""
        return self

    def encode(self, encoder: TextEncoder, row: Row) -> Iterable[Encoding]:
        """Encode a text to one or more sequences, lazily if there may be many.

        Raises:
            UserError: as `TextEncoder.encode`.
        """
        return [encoder.encode(row.text, row.pair, place=row.place)]

    def read(self, model: Model, batch: Batch) -> list[Value]:
        """Run the model; returns one value per sequence, on the host."""
        raise NotImplementedError

    def finish(self, loaded: LoadedModel, row: Row, encodings: Sequence[Encoding], values: Sequence[Value]) -> Result:
        """The result of a text from the values of its sequences."""
        raise NotImplementedError

    def columns(self, loaded: LoadedModel | None, result: Result) -> Fields:
        """A result as columns of a table, with the same names for every text.

        Args:
            loaded: None for an operation without a model.
        """
        content = plain(result)
        return content if isinstance(content, dict) else {self.key: content}

    def table_lines(self, row: Row, result: Result) -> Iterator[dict[str, str]]:
        """A result as lines of a table for the terminal, by column."""
        raise NotImplementedError

    def numbers(self, loaded: LoadedModel, encodings: Sequence[Encoding]) -> int:
        """Count of numbers in the result of a text, which a server bounds; 0 if they are few."""
        return 0

    def check_row(self, row: Row, learned: Columns | None) -> None:
        """Raise UserError for one text where two are needed, or the reverse.

        Args:
            learned: columns that the model was trained on; None: unknown.
        """
        if self.takes_pair == "always" and row.pair is None:
            raise UserError(
                f"{row.place}: found one text, expected {self.fields[0]} and {self.fields[1]}: two "
                "texts with a tab between them, or two fields of JSON"
            )
        if self.takes_pair == "never" and row.pair is not None:
            raise UserError(f"{row.place}: found a pair of texts, expected one text for {self.name}")
