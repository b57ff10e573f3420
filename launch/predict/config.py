"""Fields of the commands of operations beside the operation's own options: the model and the sources of texts."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from cloze.launch.config.model import ModelConfig
from cloze.launch.predict.operation import Operation, Row, shown
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import is_same_file


def typed_text() -> Any:
    """A text field that is not parsed as YAML, where "#1" and "null" would become null."""
    return field(default=None, metadata={"typed_text": True})


@dataclass(frozen=True)
class Input(ModelConfig, Operation):
    """An operation with its model, the source of its texts and the format of its results."""

    outputs: ClassVar[tuple[str, ...]] = (".csv", ".tsv", ".parquet", ".jsonl")
    second: ClassVar[str | None] = None
    """The field with the second text of all pairs on the command line."""

    text: list[str] = field(default_factory=list, metadata={"typed_text": True})
    """Texts; without any (and without --file) standard input is read."""
    file: str | None = None
    """A table with one text per row (.csv, .tsv, .parquet, .jsonl, or the folder of a saved data set); any other file
    has one text per line, with a tab between the two texts of a pair; -: standard input."""
    text_columns: list[str] = field(default_factory=list)
    """Columns of a table that hold the text, or the two texts; empty: the columns that the model was trained on,
    otherwise the operation's names: text and pair, question and context, text and choices."""
    lines: Literal["text", "json"] | None = None
    """Format of the lines of a file or of standard input: text, or JSON objects; null: by the file's name, otherwise
    text."""
    output: str | None = None
    """File for the results: *.csv, *.tsv, *.parquet: the input table's columns and those of the results; *.jsonl: JSON
    objects; null: they are printed."""
    format: Literal["table", "json"] | None = None
    """table, or one JSON object per line; null: a table on a terminal, JSON elsewhere."""

    def __post_init__(self) -> None:
        super().__post_init__()  # the operation's, which comes last among the bases
        if self.text and self.file:
            raise UserError(f"file: found {self.file} beside texts on the command line, expected one of them")
        if self.second_text is not None and not self.text:
            raise UserError(
                f"{self.second}: found {shown(self.second_text)} without texts on the command line, expected none: the "
                "rows of a file or of standard input bring theirs, behind a tab or in a column"
            )
        if self.text_columns and self.file in (None, "-"):
            raise UserError(
                f"text_columns: found {', '.join(self.text_columns)} without a table, expected none; name the table "
                "with --file"
            )
        if self.lines is not None and self.text:
            raise UserError(
                f"lines: found {self.lines} with texts on the command line, expected none: it is the format of a file "
                "or of standard input"
            )
        if self.format and self.output:
            raise UserError(
                f"format: found {self.format} beside output {self.output}, expected null: it is the format in which "
                "results are printed; leave --format out"
            )
        source = "/dev/stdin" if self.file == "-" or not (self.file or self.text) else self.file
        if self.output and source and is_same_file(self.output, source):
            raise UserError(
                f"output: found {self.output}, the file of the texts, which it would replace, expected another name"
            )
        if self.output and not self.output.endswith(self.outputs):
            raise UserError(f"output: found {self.output}, expected a name that ends in {', '.join(self.outputs)}")

    def given(self) -> Iterator[Row]:
        """The texts of the command line."""
        for number, text in enumerate(self.text, 1):
            yield Row(text, self.second_text, "text" if len(self.text) == 1 else f"text {number}")

    @property
    def second_text(self) -> str | None:
        """The second text of all pairs on the command line; None: no pairs."""
        return None if self.second is None else getattr(self, self.second)


@dataclass(frozen=True)
class PairInput(Input):
    """Texts that may be pairs."""

    second = "pair"

    pair: str | None = typed_text()
    """Second text for each text on the command line."""
