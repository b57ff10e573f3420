"""The interface of operations: encode texts, read the outputs of the model, make results of them."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cloze.launch.predict.arguments import check_options
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.system.console import figure
from cloze.launch.texts.encoding import Encoder, Encoding
from cloze.launch.texts.tables import Columns
from cloze.pipeline.errors import UserError


@dataclass(frozen=True)
class Row:
    """A text, a pair of texts, or a text with its choices; and where it comes from (for messages)."""

    text: str
    pair: str | None = None
    place: str = "text"
    choices: tuple[str, ...] = ()
    values: dict[str, Any] | None = None
    """All columns of the row of a table that it is from."""

    @property
    def both(self) -> str:
        """The text, or the two of a pair in one line."""
        return self.text if self.pair is None else f"{self.text} | {self.pair}"

    @property
    def second(self) -> str:
        """The second text of a pair, where an operation always takes one."""
        assert self.pair is not None, "check_row asks for it"
        return self.pair


@dataclass(frozen=True)
class Batch:
    """Sequences one after another, without padding."""

    encodings: Sequence[Encoding]
    bounds: list[int]
    """(B + 1,): where each sequence begins, on the host."""
    inputs: dict[str, Any]
    """What a model's forward takes (cloze.pipeline.loading.collate.concatenated), with [MASK] at the blanks."""

    def blanks(self) -> list[int]:
        """Positions of all blanks among the T tokens."""
        starts = zip(self.bounds, self.encodings, strict=False)
        return [start + blank for start, each in starts for blank in each.blanks]

    def split(self, tokens: Any) -> list[Any]:
        """(T, ...) -> for each sequence (n, ...), as fp32 arrays."""
        host = tokens.float().cpu().numpy()
        return [host[low:high] for low, high in zip(self.bounds, self.bounds[1:], strict=False)]


_SHOWN_NUMBERS = 4  # of a vector in a table


def shown_vector(vector: np.ndarray) -> str:
    """The first numbers of a vector, and how many it has."""
    return " ".join(figure(number) for number in vector[:_SHOWN_NUMBERS]) + f" ... ({len(vector)})"


def plain(value: Any) -> Any:
    """Dataclasses, arrays and tuples as dicts and lists; a field that is None is left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name: plain(each) for name, each in pairs if each is not None}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


class Operation:
    """Something to ask a model for. Subclasses are frozen dataclasses of their options.

    head: the attribute of a model that the operation needs, None for any encoder. fields: names of its one or two
    texts in JSON; `takes_pair`: never, maybe or always the second; `takes_choices`: the second is a list of them. key:
    name of a result that is no object, in JSON.
    """

    if TYPE_CHECKING:  # each subclass is one; jsonargparse would take the annotation for a field
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    name: ClassVar[str]
    head: ClassVar[str | None] = None
    fields: ClassVar[tuple[str, str]] = ("text", "pair")
    takes_pair: ClassVar[str] = "maybe"
    takes_choices: ClassVar[bool] = False
    key: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_options(self)
        # A command's configuration is an operation and what it reads its texts from: each checks its own fields.
        if checks := getattr(super(), "__post_init__", None):
            checks()

    def check(self, loaded: LoadedModel) -> None:
        """Raise UserError for options that this model cannot serve."""

    def settled(self, loaded: LoadedModel) -> "Operation":
        """The same with the options that are left to the model."""
        return self

    def encode(self, encoder: Encoder, row: Row) -> Iterable[Encoding]:
        """Sequences of a text, one after another where they may be many. Raises UserError."""
        return [encoder.encode(row.text, row.pair, place=row.place)]

    def read(self, model: Any, batch: Batch) -> list[Any]:
        """Run the model; one value a sequence, on the host."""
        raise NotImplementedError

    def finish(self, loaded: LoadedModel, row: Row, encodings: Sequence[Encoding], values: Sequence[Any]) -> Any:
        """The result of a text from the values of its sequences."""
        raise NotImplementedError

    def columns(self, loaded: LoadedModel | None, result: Any) -> dict[str, Any]:
        """A result as columns of a table, the same names for every text. loaded: None for what runs no model."""
        content = plain(result)
        return content if isinstance(content, dict) else {self.key: content}

    def table_lines(self, row: Row, result: Any) -> Iterator[dict[str, str]]:
        """A result as lines of a table that people read, column by column."""
        raise NotImplementedError

    def numbers(self, loaded: LoadedModel, encodings: Sequence[Encoding]) -> int:
        """Numbers that the result of a text is made of, where they may be many for its tokens: a server bounds them."""
        return 0

    def check_row(self, row: Row, learned: Columns | None) -> None:
        """Raise UserError for one text where two are needed, or two where one is. learned: the columns that the model
        has learned from; None: it is not known."""
        if self.takes_pair == "always" and row.pair is None:
            raise UserError(f"{row.place}: found one text, expected {self.fields[0]} and {self.fields[1]}: two "
                            "texts with a tab between them, or two fields of JSON")
        if self.takes_pair == "never" and row.pair is not None:
            raise UserError(f"{row.place}: found a pair of texts, expected one text for {self.name}")
