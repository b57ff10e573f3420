"""Extractive question answering: overlapping windows over long texts, and the best span over all of them."""

from dataclasses import asdict, dataclass

import numpy as np
import torch

from cloze.launch.config import FinetuneConfig
from cloze.launch.config.tasks import Task
from cloze.launch.finetune.examples.base import Examples, remarks
from cloze.launch.finetune.examples.prediction_errors import AnswerErrors, CharacterAnswerErrors
from cloze.launch.finetune.kind import Kind, Read
from cloze.launch.finetune.squad import (
    Question,
    best_threshold,
    read_squad,
    squad_metrics,
    squad_scores,
)
from cloze.launch.texts.encoding import windows
from cloze.launch.texts.sequences import Sequences
from cloze.launch.texts.settings import ANSWERING, Answering
from cloze.launch.texts.tables import json_value
from cloze.launch.texts.windows import answer_spans, counts_once, is_unanswered, null_score
from cloze.model.heads import exponentials_by_group
from cloze.model.tasks import BertForQuestionAnswering, SpanOutput, shared_softmax_losses
from cloze.pipeline import ragged
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields, MicroBatch
from cloze.pipeline.samples.assembly import assemble
from cloze.pipeline.tokenization.tokenizer import Tokenizer

_BEST = 20  # number of best starts and ends of each window that are combined (BERT release, run_squad.py: n_best_size)


@dataclass(frozen=True)
class Window:
    """A question with a part of its text."""

    question: int
    first: int
    """First token of the text that is in the window."""
    count: int
    """Tokens of the text in the window."""
    begins: int
    """Position of the first of them in the sequence."""


class AnswerExamples(Examples):
    """Windows `[CLS] question [SEP] part of the text [SEP]`; in a window without the answer the target is [CLS].

    A unit is a window; with `answer_softmax: document` it is a question with all its windows, whose tokens compete in
    one softmax (Clark and Gardner 2018, arXiv 1710.10723, section 3.4: shared normalization), each token of the text
    in the one window where it counts. A question that may have no answer has every window's [CLS] for it.
    """

    width, by_token, errors = 2, True, AnswerErrors

    def __init__(self, path: str, config: FinetuneConfig, tokenizer: Tokenizer, version_2: bool) -> None:
        self._contexts, self._questions, self.labelled = read_squad(path)
        self._longest_answer, self._version_2 = config.max_answer_tokens, version_2
        self.errors = CharacterAnswerErrors if config.answer_units == "characters" else AnswerErrors
        self._units = self.errors.units
        self.measured = (
            f"f1 ({config.answer_units} in common with the nearest right answer, mean over questions, in "
            "percent), exact_match (the same)"
        )
        if not version_2 and self.labelled:
            for question in self._questions:
                if not question.answers:
                    raise UserError(
                        f"{path}: question {question.id}: found no answer, expected one; files in which "
                        "questions may have none are for the task squad2"
                    )
        encoded = tokenizer.encode_with_offsets(self._contexts)
        self._offsets = [np.array(each.offsets, np.int64).reshape(-1, 2) for each in encoded]
        ids = [np.array(each.ids, np.int64) for each in encoded]
        self._windows, self._sequences, cut = self._build(tokenizer, ids, config, path)
        self._of_question = ragged.to_offsets(
            np.bincount([window.question for window in self._windows], minlength=len(self._questions))
        )
        self._shared = config.answer_softmax == "document"
        self._of_unit = self._of_question if self._shared else np.arange(len(self._windows) + 1)
        self.lengths = np.diff(self._sequences.offsets[self._of_unit])
        if self.labelled and self._shared:
            self._candidates, self._right = self._shared_targets()
        elif self.labelled:
            self._positions = np.array([self._positions_in(window) for window in self._windows])
        questions = remarks([(question.text,) for question in self._questions], tokenizer)
        contexts = remarks([(text,) for text in self._contexts], tokenizer)
        self.facts = (
            f"{len(self._questions):,} questions{questions} on {len(self._contexts):,} texts{contexts}, "
            f"{len(self._windows):,} windows, {self.lengths.sum():,} tokens, {cut:,} questions cut"
        )

    def _build(
        self, tokenizer: Tokenizer, texts: list[np.ndarray], config: FinetuneConfig, path: str
    ) -> tuple[list[Window], Sequences, int]:
        longest = config.max_query_tokens
        length, step = config.lengths
        flat, bounds = tokenizer.encode_batch([question.text for question in self._questions])
        kept = np.minimum(np.diff(bounds), longest)
        built, in_context = [], []
        begins_in = len(flat) + ragged.to_offsets(np.array([len(text) for text in texts]))
        for number, question in enumerate(self._questions):
            asked = int(kept[number])
            room = length - asked - 3
            if room < step:
                raise UserError(
                    f"window_step: found {config.window_step}, expected at most {room}, the tokens that "
                    f"question {question.id} of {path} leaves of max_length {config.max_length}; lower it "
                    "or raise --max_length, so that every token is in a window"
                )
            for first, end in windows(len(texts[question.context]), room, step):
                built.append(Window(number, first, end - first, asked + 2))
                in_context.append(begins_in[question.context] + first)
        questions = np.array([window.question for window in built])
        counts = np.array([window.count for window in built])
        sequences = Sequences(
            *assemble(
                np.concatenate([flat, *texts]).astype(np.int64),
                [[(bounds[:-1][questions], kept[questions])], [(np.array(in_context), counts)]],
                tokenizer.special_tokens,
            )
        )
        return built, sequences, int((np.diff(bounds) > longest).sum())

    def _answer_tokens(self, question: Question) -> tuple[int, int] | None:
        """First and last token of the first correct answer in the text; None if there is none."""
        if not question.answers:
            return None
        text, start = question.answers[0]
        offsets = self._offsets[question.context]
        inside = np.flatnonzero(np.minimum(offsets[:, 1], start + len(text)) > np.maximum(offsets[:, 0], start))
        return (int(inside[0]), int(inside[-1])) if len(inside) else None

    def _positions_in(self, window: Window) -> tuple[int, int]:
        """First and last position of the correct answer in a window; both 0, the position of [CLS], if it is not
        completely in the window.
        """
        answer = self._answer_tokens(self._questions[window.question])
        if answer is None or answer[0] < window.first or answer[1] >= window.first + window.count:
            return 0, 0
        shift = window.begins - window.first
        return answer[0] + shift, answer[1] + shift

    def _shared_targets(self) -> tuple[np.ndarray, np.ndarray]:
        """For every position whether it competes (positions,), and whether it is a correct start and end (positions,
        2).
        """
        candidates, right = np.zeros(self.num_places, bool), np.zeros((self.num_places, 2), bool)
        for number, question in enumerate(self._questions):
            rows = np.arange(self._of_question[number], self._of_question[number + 1])
            firsts = np.array([self._windows[row].first for row in rows])
            counts = np.array([self._windows[row].count for row in rows])
            begins = self._sequences.offsets[rows] + self._windows[rows[0]].begins
            chosen = counts_once(list(zip(firsts, firsts + counts, strict=True)))
            places, tokens = ragged.ranges(begins, counts)[chosen], ragged.ranges(firsts, counts)[chosen]
            candidates[places] = True
            answer = self._answer_tokens(question)
            if self._version_2 or answer is None:  # an answer without a token is not in any other window either
                candidates[self._sequences.offsets[rows]] = True
            if answer is None:
                right[self._sequences.offsets[rows]] = True
            else:
                for side, token in enumerate(answer):
                    right[places[tokens == token], side] = True
        return candidates, right

    def sequences(self, units: np.ndarray) -> np.ndarray:
        return ragged.ranges(self._of_unit[:-1][units], np.diff(self._of_unit)[units])

    def targets(self, units: np.ndarray) -> Fields:
        if self._shared:
            places = self.places(units)
            question = np.repeat(np.arange(len(units)), self.lengths[units])
            starts, ends = torch.from_numpy(self._right[places]).unbind(1)
            return {
                "softmax": torch.from_numpy(np.where(self._candidates[places], question, -1)),
                "start_targets": starts,
                "end_targets": ends,
                "num_softmaxes": len(units),
            }
        starts, ends = torch.from_numpy(self._positions[units]).unbind(1)
        return {"start_positions": starts, "end_positions": ends}

    def num_targets(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Number of targets of starts and of ends."""
        if self._shared:
            return torch.full((2,), micro_batch["num_softmaxes"])
        return torch.stack([(micro_batch[name] >= 0).sum() for name in ("start_positions", "end_positions")])

    def losses(self, output: SpanOutput) -> torch.Tensor:
        assert output.start_losses is not None and output.end_losses is not None, "training has positions"
        return torch.stack([output.start_losses.sum(), output.end_losses.sum()]) / 2

    def outputs(self, output: SpanOutput) -> torch.Tensor:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)

    def _answer(self, number: int, outputs: np.ndarray) -> tuple[str, int, float, float]:
        """Text, first character and probability of the best span over all windows of a question, and the minimum over
        windows of the [CLS] score minus the best span's (Devlin et al. 2019, section 4.3).
        """
        scored = []
        for row in range(self._of_question[number], self._of_question[number + 1]):
            at, (low, high) = self._windows[row], self._sequences.offsets[row : row + 2]
            inside = slice(at.begins, at.begins + at.count)
            allowed, offsets = np.zeros(high - low, bool), np.zeros((high - low, 2), np.int64)
            allowed[inside] = True
            offsets[inside] = self._offsets[self._questions[number].context][at.first : at.first + at.count]
            scored.append((outputs[low:high, 0], outputs[low:high, 1], allowed, offsets))
        text = self._contexts[self._questions[number].context]
        best = answer_spans(text, scored, _BEST, self._longest_answer)
        if not best:  # the text is empty
            return "", 0, 0.0, np.inf
        (start, end), score = best[0]
        nothing = null_score(scored)
        rivals = np.array([rival for _, rival in best] + ([nothing] if self._version_2 else []))
        probability = 1.0 / float(np.exp(np.clip(rivals - score, None, 700.0)).sum())
        return text[start:end], start, probability, nothing - score

    def _answers(self, outputs: np.ndarray) -> tuple[list[tuple[str, int, float]], np.ndarray]:
        answers = [self._answer(number, outputs) for number in range(len(self._questions))]
        return [each[:3] for each in answers], np.array([each[3] for each in answers])

    def metrics(self, outputs: np.ndarray) -> dict[str, float]:
        answers, odds = self._answers(outputs)
        best = [text for text, _, _ in answers]
        given = ["" if self._version_2 and is_unanswered(odd) else text for text, odd in zip(best, odds, strict=True)]
        values = {"loss": self._loss(outputs)} | squad_metrics(self._questions, given, self._units, self._version_2)
        if self._version_2:
            none = np.array([not question.answers for question in self._questions])
            answered = np.array([text != "" for text in best])
            scores = squad_scores(self._questions, best, self._units, True)
            for name, column in (("exact", scores[:, 0]), ("f1", scores[:, 1])):
                value, threshold = best_threshold(column, none, answered, odds)
                values |= {f"best_{name}": 100 * value, f"best_{name}_thresh": threshold}
        return values

    def _loss(self, outputs: np.ndarray) -> float:
        """Mean over units of the mean of the start and end losses."""
        scores = torch.from_numpy(outputs).double()
        if self._shared:
            targets = self.targets(np.arange(len(self)))
            losses = [
                shared_softmax_losses(scores[:, side], targets["softmax"], targets[f"{name}_targets"], len(self))
                for side, name in enumerate(("start", "end"))
            ]
            return torch.stack(losses).mean().item()
        offsets = torch.from_numpy(self._sequences.offsets)
        at = offsets[:-1, None] + torch.from_numpy(self._positions)
        sequence = torch.arange(len(self._sequences)).repeat_interleave(offsets.diff())
        total = 0.0
        for side in (0, 1):
            _, sums, largest = exponentials_by_group(scores[:, side], sequence, len(self._sequences))
            total += (sums.log() + largest - scores[at[:, side], side]).mean().item() / 2
        return total

    @property
    def num_examples(self) -> int:
        """The questions; the units are windows of their contexts."""
        return len(self._questions)

    def text(self, number: int) -> str:
        return self._questions[number].text

    def predictions(self, outputs: np.ndarray) -> list[Fields]:
        answers, odds = self._answers(outputs)
        described = []
        for question, (text, start, probability), odd in zip(self._questions, answers, odds, strict=True):
            entry: Fields = {
                "id": json_value(question.id),
                "question": question.text,
                "prediction": text,
                "start": start,
                "probability": probability,
            }
            if self._version_2:
                # infinite for an empty text, which JSON cannot represent
                known = float(odd) if np.isfinite(odd) else None
                entry |= {"best": text, "no_answer_odds": known} | ({"prediction": ""} if is_unanswered(odd) else {})
            right = {"label": [text for text, _ in question.answers]} if self.labelled else {}
            described.append(entry | right)
        return described


class QuestionAnswering(Kind):
    """A span of a text that answers a question."""

    fields = ("answer_softmax", "answer_units")
    question = 'predict answer {run} "QUESTION" --context "TEXT"'

    def joins(self, config: FinetuneConfig, task: Task) -> bool:
        return True

    def truncation(self, config: FinetuneConfig) -> None:
        return None  # long texts are read in windows

    def read(self, config: FinetuneConfig, task: Task, tokenizer: Tokenizer, hidden_size: int) -> Read:
        def examples(path: str) -> AnswerExamples:
            return AnswerExamples(path, config, tokenizer, config.task == "squad2")

        return BertForQuestionAnswering, None, examples(config.train_file), examples

    def notes(self, config: FinetuneConfig, task: Task, train: AnswerExamples) -> Fields:
        """How answers are found, too."""
        kind = Answering(*config.lengths, config.max_answer_tokens, config.task == "squad2")
        return super().notes(config, task, train) | {ANSWERING: asdict(kind)}


ANSWERS = QuestionAnswering()
