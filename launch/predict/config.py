"""Configuration of `cloze predict` and `cloze tokenize`: options of the operation, sources of texts."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from cloze.launch.config.model import ModelConfig
from cloze.launch.predict.answers import AnswerQuestion
from cloze.launch.predict.blanks import FillMask, Score
from cloze.launch.predict.choices import Choose
from cloze.launch.predict.labels import Classify
from cloze.launch.predict.operation import Operation, Row
from cloze.launch.predict.tags import TagWords
from cloze.launch.predict.tokens import Tokenize
from cloze.launch.predict.vectors import Compare, Embed, Features
from cloze.pipeline.errors import UserError


def typed_text() -> Any:
    """A text field that is not parsed as YAML, where "#1" and "null" would become null."""
    return field(default=None, metadata={"typed_text": True})


@dataclass(frozen=True)
class Input(ModelConfig, Operation):
    """An operation with its model, the source of its texts and the format of its results."""

    outputs: ClassVar[tuple[str, ...]] = (".csv", ".tsv", ".parquet", ".jsonl")

    text: list[str] = field(default_factory=list)
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
        if self.text and self.file:
            raise UserError(f"file: found {self.file} beside texts on the command line, expected one of them")
        if self.text_columns and not self.file:
            raise UserError(
                f"text_columns: found {', '.join(self.text_columns)} without a table, expected none; name "
                "the table with --file"
            )
        if self.output and not self.output.endswith(self.outputs):
            raise UserError(f"output: found {self.output}, expected a name that ends in {', '.join(self.outputs)}")

    def given(self) -> Iterator[Row]:
        """The texts of the command line.

        Raises:
            UserError: a text is missing.
        """
        pair = self.second_text()
        for number, text in enumerate(self.text, 1):
            yield Row(text, pair, "text" if len(self.text) == 1 else f"text {number}")

    def second_text(self) -> str | None:
        """The second text of all pairs on the command line; None: no pairs.

        Raises:
            UserError: the operation needs one and has none.
        """
        return None


@dataclass(frozen=True)
class PairInput(Input):
    """Texts that may be pairs."""

    pair: str | None = typed_text()
    """Second text for each text on the command line."""

    def second_text(self) -> str | None:
        return self.pair


@dataclass(frozen=True)
class FillMaskConfig(FillMask, Input):
    """Fill the blanks of texts."""


@dataclass(frozen=True)
class ScoreConfig(Score, Input):
    """Rank texts by how probable the model finds them."""


@dataclass(frozen=True)
class ClassifyConfig(Classify, PairInput):
    """Label texts or pairs of texts."""


@dataclass(frozen=True)
class TagConfig(TagWords, Input):
    """Tag the words of texts."""


@dataclass(frozen=True)
class AnswerConfig(AnswerQuestion, Input):
    """Answer questions from a text; the texts on the command line are the questions."""

    context: str | None = typed_text()
    """Text in which the questions on the command line are answered."""

    def second_text(self) -> str | None:
        if self.context is None:
            raise UserError("context: found none, expected --context with the text in which the question is answered")
        return self.context


@dataclass(frozen=True)
class ChooseConfig(Choose, Input):
    """Choose the best continuation of a text: on the command line and in a line (with tabs) a text, then its
    choices.
    """

    def given(self) -> Iterator[Row]:
        yield Row(self.text[0], choices=tuple(self.text[1:]))


@dataclass(frozen=True)
class SimilarityConfig(Compare, Input):
    """Compare texts: on the command line the first one with each of the others, in a file the two texts of each
    line.
    """

    def given(self) -> Iterator[Row]:
        if len(self.text) == 1:
            raise UserError("text: found one text, expected at least two to compare")
        yield from (Row(self.text[0], other) for other in self.text[1:])


@dataclass(frozen=True)
class EmbedConfig(Embed, PairInput):
    """One vector for each text."""

    outputs = (*Input.outputs, ".npy")

    output: str | None = None
    """File for the vectors: *.npy, an array (texts, hidden) fp32; *.parquet, *.csv, *.tsv: with the input table's
    columns; *.jsonl: JSON objects; null: they are printed."""


@dataclass(frozen=True)
class FeaturesConfig(Features, PairInput):
    """A vector for each token, or for all occurrences of a word."""

    word: str | None = typed_text()
    """Print only the vectors of this word, each with its cosine to the word's static vector and to the other
    vectors."""
    attention: str | None = None
    """Image file (*.png, *.pdf, *.svg) for the attention heads of the single text that is given."""

    def __post_init__(self) -> None:
        if self.output and (self.word or self.attention):
            raise UserError(
                f"output: found {self.output} with {'word' if self.word else 'attention'}, expected null: "
                "the vectors of all tokens are written; leave --output out"
            )
        super().__post_init__()


@dataclass(frozen=True)
class TokenizeConfig(Tokenize, PairInput):
    """The inputs of a model for texts: tokens, ids, segments, mask, and the characters of each token."""
