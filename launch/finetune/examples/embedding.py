"""Text vectors: contrastive learning from pairs; evaluation by retrieval, or by how cosines correlate with scores."""

from abc import abstractmethod
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from cloze.launch.config import FinetuneConfig
from cloze.launch.config.tasks import Task
from cloze.launch.finetune import scoring
from cloze.launch.finetune.contrastive import ContrastiveObjective
from cloze.launch.finetune.examples.base import Examples, remarks
from cloze.launch.finetune.examples.classification import number_in, predicted
from cloze.launch.finetune.examples.prediction_errors import RankErrors
from cloze.launch.finetune.kind import TABLE_FIELDS, Kind, Read, check_roles
from cloze.launch.texts.sequences import Cut, Sequences, build_sequences
from cloze.launch.texts.settings import VECTORS, Truncation, Vectors, normalized
from cloze.launch.texts.tables import Table, missing_columns, open_table, read_table
from cloze.launch.training.objective import TrainingObjective
from cloze.model.config import BertConfig, VectorPooling
from cloze.model.sentence_vectors import POOLINGS, SentenceEncoder, SentenceOutput
from cloze.pipeline import ragged
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.tokenization.tokenizer import Tokenizer

# Column names by which files with scores are recognized: STS-B as in GLUE, SICK as SemEval distributes it.
_SCORES = ("score", "relatedness_score")
_SCORED = (("sentence1", "sentence2"), ("sentence_A", "sentence_B"))
_SCORED_METRICS = ("spearman", "pearson")


def _columns(config: FinetuneConfig, path: str) -> tuple[str, ...]:
    """Names of a file's columns; in JSON lines those of the first row."""
    return open_table(path, (), "", config.skip_malformed_rows).columns


def columns_of_file(
    config: FinetuneConfig, task: Task, path: str, found: tuple[str, ...]
) -> tuple[tuple[str, ...], str | None]:
    """The columns of the texts to read from a file with the columns `found`, and that of their score; None: they are
    pairs (retrieval).

    Raises:
        UserError: it has neither two texts with a score nor pairs.
    """
    given = config.texts_of(task)
    scores = tuple(config.label_columns) or _SCORES
    score = next((name for name in scores if name in found), None)
    if config.label_columns and score is None:
        raise missing_columns(path, found, {"label_columns": list(scores)})
    if score is None:
        if len(given) < 2:
            raise UserError(
                f"{path}: found no column {' or '.join(map(repr, scores))}, expected scores of pairs of "
                f"texts, since a text alone ({given[0]}) has no score; name their columns with "
                "--label_columns"
            )
        texts = given[:2] + tuple(name for name in given[2:] if name in found)  # it may lack hard negatives
        flag = "text_columns"
    else:
        known = [pair for pair in (*_SCORED, given[:2]) if len(pair) == 2 and set(pair) <= set(found)]
        texts = tuple(config.embedding.scored_columns) or (known[0] if known else _SCORED[0])
        flag = "embedding.scored_columns"
    if missing := [name for name in texts if name not in found]:
        raise missing_columns(path, found, {flag: missing})
    measured = () if score is None else (score,)
    for field, names in (("text_columns", given), (flag, texts)):
        check_roles({field: names}, measured)
    return texts, score


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
    found = np.array([[numbers.setdefault(row.text(column), len(numbers)) for column in columns] for row in table.rows])
    texts = list(numbers)
    return texts, found, *build_sequences(tokenizer, texts, None, truncation)


def _different(texts: list[str], tokenizer: Tokenizer) -> str:
    """The number of distinct texts, with what is remarkable in them."""
    return f"{len(texts):,} different texts{remarks([(text,) for text in texts], tokenizer)}"


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
            f"{len(table.rows):,} rows ({kinds}), {_different(self._texts, tokenizer)} of at most "
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


class VectorExamples(Examples):
    """The distinct texts of a file; each is a unit whose output is its vector.

    Args:
        columns: of the texts.
        sizes: smaller sizes of vectors that are evaluated too.
        width: size of the model's vectors.
    """

    labelled = True
    errors = RankErrors

    def __init__(
        self,
        table: Table,
        columns: tuple[str, ...],
        tokenizer: Tokenizer,
        truncation: Truncation,
        sizes: list[int],
        width: int,
    ) -> None:
        self._rows, self._sizes, self.width = table.rows, sizes, width
        self._texts, self._found, self._sequences, cut = distinct_texts(table, columns, tokenizer, truncation)
        self.lengths = self._sequences.lengths
        self.facts = (
            f"{len(table.rows):,} rows, {_different(self._texts, tokenizer)}, {self.lengths.sum():,} tokens, "
            f"at most {self.lengths.max()}, {cut}{table.left_out}"
        )

    @property
    def num_examples(self) -> int:
        return len(self._rows)

    def targets(self, units: np.ndarray) -> Fields:
        raise NotImplementedError("texts are measured, not learned from")

    def outputs(self, output: SentenceOutput) -> torch.Tensor:
        return output.vectors

    def metrics(self, outputs: np.ndarray) -> dict[str, float]:
        """Metrics of whole vectors by name, those of smaller sizes as NAME/SIZE."""
        metrics = self._metrics(normalized(outputs))
        for size in sorted(self._sizes, reverse=True):
            smaller = self._metrics(normalized(outputs[:, :size]))
            metrics |= {f"{name}/{size}": value for name, value in smaller.items()}
        return metrics

    @abstractmethod
    def _metrics(self, vectors: np.ndarray) -> dict[str, float]:
        """Metrics from the unit vectors of all texts, (num_places, size)."""


class ScoredPairs(VectorExamples):
    """Pairs of texts with a score each: the cosines of their vectors should rank them in the same order.

    Args:
        score: column of the scores.
    """

    measured = ", ".join(_SCORED_METRICS) + " (of cosines with scores)"

    def __init__(self, score: str, table: Table, *reading: Any) -> None:
        super().__init__(table, *reading)
        self._true = np.array([number_in(row, score) for row in table.rows])

    def _cosines(self, vectors: np.ndarray) -> np.ndarray:
        return np.einsum("nh,nh->n", vectors[self._found[:, 0]], vectors[self._found[:, 1]]).astype(np.float64)

    def _metrics(self, vectors: np.ndarray) -> dict[str, float]:
        return scoring.measure(_SCORED_METRICS, self._true, self._cosines(vectors))

    def text(self, number: int) -> str:
        return " / ".join(self._texts[place] for place in self._found[number])

    def predictions(self, outputs: np.ndarray) -> list[Fields]:
        """Cosines; `rank_error`: how far apart a pair's ranks by cosine and by score are, as a share of all pairs."""
        cosines = self._cosines(normalized(outputs))
        apart = np.abs(scoring.ranks(cosines) - scoring.ranks(self._true)) / len(cosines)
        return [
            predicted(row, {"prediction": cosine, "rank_error": error, "label": score})
            for row, cosine, error, score in zip(
                self._rows, cosines.tolist(), apart.tolist(), self._true.tolist(), strict=True
            )
        ]


class HeldOutPairs(VectorExamples):
    """Retrieval on pairs: each first text should find its second texts among the second texts (and hard negatives) of
    all rows.

    A text does not compete with itself: a first text that is also a second text of another row is excluded.
    """

    measured = scoring.explained(scoring.RETRIEVAL, dict.fromkeys(scoring.RETRIEVAL[-1:], "of the texts of the file"))

    def __init__(self, table: Table, *reading: Any) -> None:
        super().__init__(table, *reading)
        self._queries, number = np.unique(self._found[:, 0], return_inverse=True)
        self._documents, place = np.unique(self._found[:, 1:], return_inverse=True)
        wanted = np.unique(np.stack([number, place.reshape(len(table.rows), -1)[:, 0]], 1), axis=0)
        self._wanted, self._wanted_of = wanted[:, 1], ragged.to_offsets(np.bincount(wanted[:, 0]))
        # Index of each query's own text among the documents; -1 if it is not among them, or is one of its answers.
        own = np.searchsorted(self._documents, self._queries).clip(max=len(self._documents) - 1)
        own = np.where(self._documents[own] == self._queries, own, -1)
        kept = np.array([place in self._of(query) for query, place in enumerate(own)])
        self._own = np.where(kept, -1, own)

    def _of(self, query: int) -> np.ndarray:
        """Indices of the documents that a query should find."""
        return self._wanted[self._wanted_of[query] : self._wanted_of[query + 1]]

    def _ranked(self, vectors: np.ndarray) -> list[scoring.Ranked]:
        return scoring.ranked(
            vectors[self._queries],
            vectors[self._documents],
            self._own,
            [self._of(query) for query in range(len(self._queries))],
        )

    def _metrics(self, vectors: np.ndarray) -> dict[str, float]:
        return scoring.measure_ranks([found.ranks for found in self._ranked(vectors)])

    def text(self, number: int) -> str:
        return self._texts[self._queries[number]]

    def predictions(self, outputs: np.ndarray) -> list[Fields]:
        """For each query the nearest text, and `rank_error`: number of texts nearer than the first right one."""
        described = []
        firsts = {query: place for place, query in reversed(list(enumerate(self._found[:, 0].tolist())))}
        for query, found in enumerate(self._ranked(normalized(outputs))):
            row = self._rows[firsts[int(self._queries[query])]]
            described.append(
                {
                    "place": row.place.rsplit(": ", 1)[1],
                    "text": self.text(query),
                    "prediction": self._texts[self._documents[found.nearest]],
                    "rank_error": int(found.ranks.min()) - 1,
                    "label": [self._texts[self._documents[place]] for place in self._of(query)],
                }
            )
        return described


class TextEmbedding(Kind):
    """Nothing but vectors of texts, which are alike where the texts are."""

    fields, saved_as = ("pooling", "embedding", *TABLE_FIELDS), "BertModel"  # a bare encoder, for other libraries
    question = 'predict similarity {run} "TEXT" "TEXT"'

    def check(self, config: FinetuneConfig, task: Task) -> None:
        """Raise UserError for settings by which a headless encoder has nothing to train, or no vector."""
        found, batch = f"with the task {config.task}, expected", config.train.global_batch_size
        if config.pooling == "pooler":
            raise UserError(
                f"pooling: found pooler {found} one of {', '.join(POOLINGS)}: sentence-transformers has no pooler"
            )
        if config.freeze in ("encoder", "below_0"):
            raise UserError(
                f"freeze: found {config.freeze} {found} none or below_1 and more: there is no head that could learn "
                "instead"
            )
        if config.unfreeze_every_epochs is not None:
            raise UserError(
                f"unfreeze_every_epochs: found {config.unfreeze_every_epochs:g} {found} null: there is no head that "
                "learns at first"
            )
        if len(config.label_columns) > 1:
            raise UserError(f"label_columns: found {', '.join(config.label_columns)} {found} one: that of the scores")
        if batch < 2:
            raise UserError(
                f"train.global_batch_size: found {batch} {found} at least 2: the other rows of a batch are what a row "
                "is distinguished from"
            )

    def check_model(self, config: FinetuneConfig, shape: BertConfig) -> None:
        """Raise UserError for sizes not below that of the model's vectors, and for dropout pairs without dropout."""
        for size in config.embedding.dimensions:
            if size >= shape.hidden_size:
                raise UserError(
                    f"embedding.dimensions: found {size}, expected less than {shape.hidden_size}, the size of "
                    "the model's vectors, which is always trained"
                )
        rates = (
            [config.dropout]
            if config.dropout is not None
            else [shape.hidden_dropout_prob, shape.attention_output_dropout, shape.attention_probs_dropout_prob]
        )
        if len(config.text_columns) == 1 and not any(rates):
            raise UserError(
                f"dropout: found 0 with one column of texts ({config.text_columns[0]}), expected more: dropout "
                "alone makes a text's two vectors differ; add --dropout 0.1"
            )

    def check_columns(self, config: FinetuneConfig, task: Task) -> None:
        found, texts = _columns(config, config.train_file), config.texts_of(task)
        if missing := [name for name in texts if name not in found]:
            raise missing_columns(config.train_file, found, {"text_columns": missing})
        for path in (config.validation, *config.test):
            columns_of_file(config, task, path, _columns(config, path))

    def measured(self, config: FinetuneConfig, task: Task) -> Task:
        _, score = columns_of_file(config, task, config.validation, _columns(config, config.validation))
        return replace(task, metrics=scoring.RETRIEVAL if score is None else _SCORED_METRICS)

    def pooling(self, learned: VectorPooling | None, has_pooler: bool) -> VectorPooling:
        return learned or "mean"

    def read(self, config: FinetuneConfig, task: Task, tokenizer: Tokenizer, hidden_size: int) -> Read:
        truncation = self.truncation(config)
        assert truncation is not None, "`check_fields` refuses pieces"

        def table(path: str) -> Table:
            return read_table(path, skip_malformed=config.skip_malformed_rows)

        columns = config.texts_of(task)
        train = ContrastiveExamples(table(config.train_file), columns, tokenizer, truncation)

        def examples(path: str) -> VectorExamples:
            read = table(path)
            texts, score = columns_of_file(config, task, path, read.columns)
            given = read, texts, tokenizer, truncation, config.embedding.dimensions, hidden_size
            return HeldOutPairs(*given) if score is None else ScoredPairs(score, *given)

        return SentenceEncoder, None, train, examples

    def objective(self, config: FinetuneConfig, train: ContrastiveExamples, rank: int) -> TrainingObjective:
        return ContrastiveObjective(config.embedding, train.group_size, rank)

    def notes(self, config: FinetuneConfig, task: Task, train: ContrastiveExamples) -> Fields:
        """How vectors are made, too."""
        assert config.pooling is not None and config.pooling != "pooler", "`check` refuses it"
        vectors = Vectors(config.pooling, normalize=True)
        return super().notes(config, task, train) | {VECTORS: asdict(vectors)}


EMBEDDING = TextEmbedding()
