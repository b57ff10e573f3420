"""The operations `fill-mask` and `score` of a masked-LM head: predictions for blanks, pseudo-log-likelihoods."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cloze.launch.predict.config import Input
from cloze.launch.predict.operation import Batch, Model, Operation, Row, Value
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.system.console import figure
from cloze.launch.texts.encoding import Encoding, TextEncoder
from cloze.pipeline.bounds import bounds
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields


@dataclass(frozen=True)
class Guess:
    """A word for a blank, with its probability."""

    token: str
    probability: float


@dataclass(frozen=True)
class FillMask(Operation):
    """The most probable tokens for each [MASK] of a text."""

    name, head, key = "fill-mask", "masked_lm", "blanks"

    top_k: int = field(default=5, metadata=bounds(at_least=1))
    """Number of guesses for each blank."""

    def check(self, loaded: LoadedModel) -> None:
        if self.top_k > (size := loaded.config.vocab_size):
            raise UserError(f"top_k: found {self.top_k}, expected at most {size}, the vocabulary")

    def encode(self, encoder: TextEncoder, row: Row) -> list[Encoding]:
        return [encoder.encode(row.text, row.pair, blanks=True, place=row.place)]

    def numbers(self, loaded: LoadedModel, encodings: Sequence[Encoding]) -> int:
        return self.top_k * sum(len(each.blanks) for each in encodings)

    def read(self, model: Model, batch: Batch) -> list[Value]:
        blanks = batch.inputs["input_ids"].new_tensor(batch.blanks())
        logits = model(masked_positions=blanks, **batch.inputs).prediction_logits
        best = logits.float().softmax(-1).topk(self.top_k)
        counts = [len(each.blanks) for each in batch.encodings]
        ids, shares = best.indices.cpu().split(counts), best.values.cpu().split(counts)
        return [(i.tolist(), s.tolist()) for i, s in zip(ids, shares, strict=True)]

    def table_lines(self, row: Row, result: list[list[Guess]]) -> Iterator[dict[str, str]]:
        for number, blank in enumerate(result, 1):
            guesses = "  ".join(f"{guess.token} {figure(guess.probability)}" for guess in blank)
            yield {"text": row.text, "blank": str(number), "guesses": guesses}

    def finish(
        self, loaded: LoadedModel, row: Row, encodings: Sequence[Encoding], values: Sequence[Value]
    ) -> list[list[Guess]]:
        ((ids, shares),) = values
        decode = loaded.tokenizer.decode
        return [
            [Guess(decode([token]), share) for token, share in zip(*blank, strict=True)]
            for blank in zip(ids, shares, strict=True)
        ]


@dataclass(frozen=True)
class FillMaskConfig(FillMask, Input):
    """Fill the blanks of texts."""


@dataclass(frozen=True)
class TokenScore:
    """A token and its log-probability given the rest of the sentence."""

    token: str
    log_probability: float


@dataclass(frozen=True)
class SentenceScore:
    """Pseudo-log-likelihood of a sentence (arXiv 1910.14659): natural logarithms."""

    log_probability: float
    """Sum over the tokens; the higher, the more the model expects the sentence."""
    mean_log_probability: float
    """The sum over the number of tokens."""
    tokens: list[TokenScore]


@dataclass(frozen=True)
class Score(Operation):
    """Pseudo-log-likelihood of a text: each token is masked in turn and predicted from all others."""

    name, head, takes_pair = "score", "masked_lm", "never"

    def encode(self, encoder: TextEncoder, row: Row) -> Iterable[Encoding]:
        whole = encoder.encode(row.text, place=row.place)
        return (replace(whole, blanks=(place,)) for place, part in enumerate(whole.parts) if part)

    def read(self, model: Model, batch: Batch) -> list[Value]:
        ids = batch.inputs["input_ids"]
        hidden = ids.new_tensor([_hidden(each) for each in batch.encodings])
        return hidden_log_probabilities(model, batch.inputs, ids.new_tensor(batch.blanks()), hidden).tolist()

    def table_lines(self, row: Row, result: SentenceScore) -> Iterator[dict[str, str]]:
        yield {
            "text": row.both,
            "log-probability": figure(result.log_probability),
            "mean": figure(result.mean_log_probability),
            "tokens": str(len(result.tokens)),
        }

    def finish(
        self, loaded: LoadedModel, row: Row, encodings: Sequence[Encoding], values: Sequence[Value]
    ) -> SentenceScore:
        names = loaded.tokenizer.tokens
        tokens = [TokenScore(names[_hidden(each)], value) for each, value in zip(encodings, values, strict=True)]
        return SentenceScore(sum(values), sum(values) / len(values), tokens)


@dataclass(frozen=True)
class ScoreConfig(Score, Input):
    """Rank texts by how probable the model finds them."""


def hidden_log_probabilities(model: Any, inputs: Fields, positions: Any, hidden: Any) -> Any:
    """Natural log-probabilities (N,) fp32 of the tokens `hidden` (N,) at the masked `positions` (N,) of concatenated
    `inputs`.
    """
    logits = model(masked_positions=positions, **inputs).prediction_logits.float()
    return logits.gather(1, hidden[:, None])[:, 0] - logits.logsumexp(-1)


def _hidden(encoding: Encoding) -> int:
    """The token replaced by the only mask."""
    return encoding.ids[encoding.blanks[0]]
