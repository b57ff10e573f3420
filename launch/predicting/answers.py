"""What a question answerer says: the spans of a text that answer a question."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from launch.config.checks import at_least
from launch.decoding import answer_spans, null_score
from launch.predicting.operation import Batch, Operation, Row
from pipeline.encoding import Encoder, Encoding

if TYPE_CHECKING:
    from launch.predict import Predictor


@dataclass(frozen=True)
class Span:
    """An answer: characters `start` to `end` (one past the last) of the context; an empty text says there is none."""

    text: str
    start: int
    end: int
    score: float
    """Sum of the start's and the end's logit."""
    probability: float
    """Among the candidates, by softmax of their scores, as in the BERT release."""


@dataclass(frozen=True)
class AnswerQuestion(Operation):
    """The best answers to a question, in a context of any length: a long one is read in overlapping windows."""

    name, head, key = "answer", "span", "answers"
    fields, takes_pair = ("question", "context"), "always"

    top_k: int = 1
    """Answers given, at least 1."""
    max_answer_tokens: int = 30
    """Longest answer, as in the BERT release."""
    max_length: int = 384
    """Tokens of a window, the question included; at most the model's positions."""
    window_step: int = 128
    """Tokens between the starts of two windows."""
    candidates: int = 20
    """Starts and ends considered in each window, the most probable ones; also the spans that share the probability."""
    allow_no_answer: bool = False
    """For models trained on SQuAD 2.0: no answer, which is the score of [CLS], competes with the spans."""

    def __post_init__(self) -> None:
        at_least("predict", self, top_k=1, max_answer_tokens=1, max_length=8, window_step=1, candidates=1)
        super().__post_init__()

    def encode(self, encoder: Encoder, row: Row) -> Iterable[Encoding]:
        return encoder.windows(row.pair, row.text, length=self.max_length, step=self.window_step, place=row.place)

    def numbers(self, predictor: "Predictor", encodings: Sequence[Encoding]) -> int:
        return sum(min(self.candidates, len(each)) ** 2 for each in encodings)

    def read(self, model: Any, batch: Batch) -> list[Any]:
        output = model(**batch.inputs)
        return list(zip(batch.split(output.start_logits), batch.split(output.end_logits), strict=True))

    def finish(
        self, predictor: "Predictor", row: Row, encodings: Sequence[Encoding], values: Sequence[Any]
    ) -> list[Span]:
        windows = [(starts, ends, np.array(encoding.parts) == 2, encoding.offsets)
                   for encoding, (starts, ends) in zip(encodings, values, strict=True)]
        best = answer_spans(windows, self.candidates, self.max_answer_tokens)
        if self.allow_no_answer:
            best = sorted([*best, ((0, 0), null_score(windows))], key=lambda item: (-item[1], item[0]))
        weights = np.exp([score - best[0][1] for _, score in best])
        return [Span(row.pair[start:end], start, end, score, float(share)) for ((start, end), score), share in
                zip(best[: self.top_k], weights / weights.sum(), strict=False)]
