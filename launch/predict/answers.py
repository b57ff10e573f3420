"""The operation `answer`: the spans of a text that answer a question."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from cloze.launch.predict.config import Input, typed_text
from cloze.launch.predict.operation import Batch, Model, Operation, Row, Value, plain
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.system.console import figure
from cloze.launch.texts.encoding import Encoding, TextEncoder
from cloze.launch.texts.settings import Answering
from cloze.launch.texts.windows import answer_spans, is_unanswered, null_score
from cloze.pipeline.bounds import bounds
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields


@dataclass(frozen=True)
class Span:
    """An answer: characters `start` to `end` (exclusive) of the context; an empty text means no answer."""

    text: str
    start: int
    end: int
    score: float
    """Sum of the start's and the end's logit."""
    probability: float
    """Probability among the candidates, by softmax of their scores, as in the BERT release."""


@dataclass(frozen=True)
class AnswerQuestion(Operation):
    """The best answers to a question, in a context of any length: a long one is read in overlapping windows."""

    name, head, key = "answer", "span", "answers"
    fields, takes_pair = ("question", "context"), "always"

    top_k: int = field(default=1, metadata=bounds(at_least=1))
    """Number of answers."""
    max_answer_tokens: int | None = field(default=None, metadata=bounds(at_least=1))
    """Longest answer in tokens; null: as in the model's fine-tuning, or 30."""
    max_length: int | None = field(default=None, metadata=bounds(at_least=8))
    """Longest window in tokens, question included; at most the model's positions; null: as in its fine-tuning, or
    384."""
    window_step: int | None = field(default=None, metadata=bounds(at_least=1))
    """Tokens between the starts of two windows; null: as in the model's fine-tuning, or 128."""
    candidates: int = field(default=20, metadata=bounds(at_least=1))
    """Number of most probable starts and ends considered in each window; also of the spans that share the
    probability."""
    allow_no_answer: bool | None = None
    """Whether no answer, which is the score of [CLS], competes with the spans; null: if questions without an answer
    were in the model's fine-tuning (SQuAD 2.0)."""

    def encode(self, encoder: TextEncoder, row: Row) -> Iterable[Encoding]:
        asked = self._as_learned(encoder.answering)
        return encoder.windows(row.second, row.text, length=asked.max_length, step=asked.window_step, place=row.place)

    def _as_learned(self, answering: Answering) -> Answering:
        """The options as given, else those saved with the model."""
        asked = {name: getattr(self, name) for name in asdict(answering)}
        return replace(answering, **{name: value for name, value in asked.items() if value is not None})

    def numbers(self, loaded: LoadedModel, encodings: Sequence[Encoding]) -> int:
        return sum(min(self.candidates, len(each)) ** 2 for each in encodings)

    def read(self, model: Model, batch: Batch) -> list[Value]:
        output = model(**batch.inputs)
        return list(zip(batch.split(output.start_logits), batch.split(output.end_logits), strict=True))

    def table_lines(self, row: Row, result: list[Span]) -> Iterator[dict[str, str]]:
        for span in result:
            yield {
                "question": row.text,
                "answer": span.text or "(none)",
                "characters": f"{span.start}-{span.end}",
                "probability": figure(span.probability),
            }

    def columns(self, loaded: LoadedModel | None, result: list[Span]) -> Fields:
        """Whether there is an answer, and the best one (empty if there is none; null for an empty context); with
        `top_k` a list of all.
        """
        if self.top_k > 1:
            return {self.key: plain(result)}
        names = {"answer": "text", "start": "start", "end": "end", "probability": "probability"}
        best = {name: getattr(result[0], field) if result else None for name, field in names.items()}
        return {"answered": bool(best["answer"])} | best

    def finish(
        self, loaded: LoadedModel, row: Row, encodings: Sequence[Encoding], values: Sequence[Value]
    ) -> list[Span]:
        windows = [
            (starts, ends, np.array(encoding.parts) == 2, encoding.offsets)
            for encoding, (starts, ends) in zip(encodings, values, strict=True)
        ]
        asked = self._as_learned(loaded.encoder.answering)
        best = answer_spans(row.second, windows, self.candidates, asked.max_answer_tokens)
        if asked.allow_no_answer:
            nothing = null_score(windows)
            better = sum(not is_unanswered(nothing - score) for _, score in best)
            best.insert(better, ((0, 0), nothing))
        weights = np.exp([score - best[0][1] for _, score in best])
        return [
            Span(row.second[start:end], start, end, score, float(share))
            for ((start, end), score), share in zip(best[: self.top_k], weights / weights.sum(), strict=False)
        ]


@dataclass(frozen=True)
class AnswerConfig(AnswerQuestion, Input):
    """Answer questions from a text; the texts on the command line are the questions."""

    second = "context"

    context: str | None = typed_text()
    """Text in which the questions on the command line are answered."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text and self.context is None:
            raise UserError("context: found none, expected --context with the text in which the question is answered")
