"""Examples for contrastive learning: an anchor, its positive, its hard negatives."""

import numpy as np
import torch

from cloze.launch.finetune.examples.base import Examples
from cloze.launch.finetune.examples.classification import text_of
from cloze.launch.texts.encoding import Truncation
from cloze.launch.texts.sequences import Cut, Sequences, build_sequences
from cloze.launch.texts.tables import Table
from cloze.pipeline.fields import Fields
from cloze.pipeline.tokenization.tokenizer import Tokenizer


def distinct_texts(
    table: Table, columns: tuple[str, ...], tokenizer: Tokenizer, truncation: Truncation
) -> tuple[list[str], np.ndarray, Sequences, Cut]:
    """The distinct texts of some columns; the index of each row's text in each column, (rows, columns) int64; the
    sequences of the texts, and what was truncated.

    Raises:
        UserError: a column is missing, or holds anything but texts.
    """
    table.need(columns, "text_columns")
    numbers: dict[str, int] = {}
    found = np.array(
        [[numbers.setdefault(text_of(row, column), len(numbers)) for column in columns] for row in table.rows]
    )
    texts = list(numbers)
    return texts, found, *build_sequences(tokenizer, texts, None, truncation)


class ContrastiveExamples(Examples):
    """Rows for training only; nothing is predicted for them.

    Args:
        columns: columns of the anchor, the positive and hard negatives; with one column each text is its own positive,
            with another vector by dropout (SimCSE; Gao et al. 2021, arXiv 2104.08821).
    """

    labelled, measured = True, ""

    def __init__(self, table: Table, columns: tuple[str, ...], tokenizer: Tokenizer, truncation: Truncation) -> None:
        self._texts, found, self._sequences, cut = distinct_texts(table, columns, tokenizer, truncation)
        self._groups = found if len(columns) > 1 else np.repeat(found, 2, axis=1)
        self.lengths = self._sequences.lengths[self._groups].sum(1)
        kinds = (
            "each text with itself"
            if len(columns) == 1
            else "pairs"
            if len(columns) == 2
            else (f"anchor, positive and {len(columns) - 2} hard negative{'s' * (len(columns) > 3)}")
        )
        self.facts = (
            f"{len(table.rows):,} rows ({kinds}), {len(self._texts):,} different texts of at most "
            f"{self.longest} tokens, {cut}{table.left_out}"
        )

    @property
    def group_size(self) -> int:
        """Number of texts in a row."""
        return self._groups.shape[1]

    def sequences(self, units: np.ndarray) -> np.ndarray:
        return self._groups[units].reshape(-1)

    def targets(self, units: np.ndarray) -> Fields:
        return {"texts": torch.from_numpy(self.sequences(units))}

    def metrics(self, outputs: np.ndarray) -> dict[str, float]:
        raise NotImplementedError("rows are learned from, not measured")

    def text(self, number: int) -> str:
        return " / ".join(self._texts[place] for place in self._groups[number])

    def predictions(self, outputs: np.ndarray) -> list[Fields]:
        raise NotImplementedError("rows are learned from, not measured")
