"""The operation `choose`: which of several texts continues another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cloze.launch.predict.config import Input
from cloze.launch.predict.operation import Batch, Model, Operation, Row, Value
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.system.console import figure
from cloze.launch.texts.encoding import Encoding, TextEncoder
from cloze.launch.texts.tables import Columns
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields


@dataclass(frozen=True)
class Choice:
    """One of the choices and its probability among them."""

    text: str
    number: int
    """Its place among the choices, from 0."""
    probability: float


@dataclass(frozen=True)
class Ranking:
    """The choices, the most probable first."""

    ranking: list[Choice]
    cut_tokens: int
    """Tokens of long texts that the model has not seen, over all choices."""


@dataclass(frozen=True)
class Choose(Operation):
    """Which of several choices continues a text best."""

    name, head, fields, takes_choices = "choose", "BertForMultipleChoice", ("text", "choices"), True

    def check_row(self, row: Row, learned: Columns | None) -> None:
        if len(row.choices) < 2:
            raise UserError(
                f"{row.place}: found {len(row.choices)} choices, expected a text and at least two choices: "
                "with tabs between them, or the fields text and choices of JSON"
            )

    def encode(self, encoder: TextEncoder, row: Row) -> list[Encoding]:
        return [encoder.encode(row.text, choice, cut=True, place=row.place) for choice in row.choices]

    def read(self, model: Model, batch: Batch) -> list[Value]:
        return model(**batch.inputs, num_choices=1).logits[:, 0].tolist()

    def table_lines(self, row: Row, result: Ranking) -> Iterator[dict[str, str]]:
        for choice in result.ranking:
            yield {"text": row.text, "choice": choice.text, "probability": figure(choice.probability)}

    def columns(self, loaded: LoadedModel | None, result: Ranking) -> Fields:
        """The most probable choice."""
        best = result.ranking[0]
        return {
            "choice": best.text,
            "number": best.number,
            "probability": best.probability,
            "cut_tokens": result.cut_tokens,
        }

    def finish(self, loaded: LoadedModel, row: Row, encodings: Sequence[Encoding], values: Sequence[Value]) -> Ranking:
        weights = np.exp(np.array(values) - max(values))
        chances = (weights / weights.sum()).tolist()
        order = sorted(range(len(chances)), key=lambda number: -chances[number])
        ranking = [Choice(row.choices[number], number, chances[number]) for number in order]
        return Ranking(ranking, sum(each.cut_tokens for each in encodings))


@dataclass(frozen=True)
class ChooseConfig(Choose, Input):
    """Choose the best continuation of a text: on the command line and in a line (with tabs) a text, then its
    choices.
    """

    def given(self) -> Iterator[Row]:
        yield Row(self.text[0], choices=tuple(self.text[1:]))
