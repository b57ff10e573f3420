"""Log-likelihoods of many texts.

Pseudo-log-likelihoods (arXiv 1910.14659): each token is masked in turn and predicted from all others, or with the rest
of its word masked too (arXiv 2305.10588), so that vocabularies compare that cut words differently; in batches of
sequences of one length, without padding (Salazar et al. 2020).

Causal ones, for models trained on next tokens: each token is predicted from those before it, all in one forward.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from cloze.launch.predict.blanks import hidden_log_probabilities
from cloze.launch.predict.predictor import batches
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.system.console import Console, Tell, clock
from cloze.launch.system.devices import to_device
from cloze.launch.texts.encoding import Encoding
from cloze.model.bert import BertForPreTraining, PreTrainingOutput, encode_masked
from cloze.pipeline import ragged
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.loading.collate import concatenated

# Tokens of one forward. Of 2,048 to 16,384 the fastest on two cores for 8 layers of 256, in bf16 and in fp32.
BATCH_TOKENS = 8192
# The same for causal likelihoods, where each token has a row of the vocabulary's scores: 120 MB of them, if it has
# 30,000 tokens.
CAUSAL_TOKENS = 1024
# Forwards at once on a CPU: each holds BATCH_TOKENS rows of the widest layer.
_AT_ONCE = 8


Hidden = Literal["token", "rest_of_word", "later"]
"""What is hidden of a text when a token is predicted: it alone; it and the later tokens of its word; or it and all
later tokens, by causal attention."""
_Part = TypeVar("_Part")


class ScoringProgress:
    """Tells how many tokens have been scored and the time left."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._began, self._done = tell, time.monotonic(), 0
        self.total = 0
        """Tokens in all, as far as is known yet."""

    def __call__(self, tokens: int) -> None:
        """Count tokens that have been scored since the last call."""
        self._done += tokens
        self._tell(self._line)

    def _line(self) -> str:
        left = (time.monotonic() - self._began) / self._done * (self.total - self._done)
        return f"scored {self._done:,} of {self.total:,} tokens, {clock(left)} left"


def log_likelihoods(
    loaded: LoadedModel,
    encodings: Sequence[Encoding],
    hidden: Hidden,
    *,
    bf16: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> np.ndarray:
    """Sum of the natural log-probabilities of each sequence's tokens, special tokens apart; (n,) float64.

    Args:
        bf16: whether the encoder's matrix products are made in bf16.
        progress: called with the tokens processed since its last call.
    """
    unknown = loaded.tokenizer.special_tokens.unknown
    scored = [token for each in encodings for token, part in zip(each.ids, each.parts, strict=True) if part > 0]
    if counted := scored.count(unknown):
        Console().warn(
            f"{counted:,} of {len(scored):,} tokens ({counted / len(scored):.1%}) are "
            f"{loaded.tokenizer.names['unknown']}: words that the vocabulary lacks are scored as this token"
        )
    if hidden == "later":
        return causal_log_likelihoods(loaded, encodings, bf16=bf16, progress=progress)
    rest = hidden == "rest_of_word"
    return pseudo_log_likelihoods(loaded, encodings, bf16=bf16, rest_of_word=rest, progress=progress)


def warn_of_longer(loaded: LoadedModel, encodings: Sequence[Encoding]) -> None:
    """Warn of sequences with positions that the model has not been trained on."""
    longest = loaded.encoder.truncation.max_length
    if longer := sum(len(each) > longest for each in encodings):
        Console().warn(
            f"{longer:,} of {len(encodings):,} sequences have more than the {longest} tokens that the model was "
            "trained on; expect lower probabilities there, or divide them (of lines: --max_length)"
        )


def check_finite(scores: np.ndarray, place: Callable[[int], str]) -> None:
    """Raise UserError if one of the scores (n,) is not finite.

    Args:
        place: names the text of a score by its number, for the message.
    """
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        raise UserError(
            f"{place(int(wrong[0]))}: found a log-likelihood that is not finite, expected a number; the model's "
            "weights overflow on this text"
        )


def causal_log_likelihoods(
    loaded: LoadedModel, encodings: Sequence[Encoding], *, bf16: bool, progress: Callable[[int], None]
) -> np.ndarray:
    """`log_likelihoods` by causal attention. A sequence's first token, which none is before, has no probability."""
    model = _EncoderInBf16(loaded.model) if bf16 else loaded.model
    sums = np.zeros(len(encodings))

    def score(numbers: list[int]) -> int:
        batch = [encodings[number] for number in numbers]
        ids = np.concatenate([each.ids for each in batch])
        offsets = ragged.to_offsets(np.array([len(each) for each in batch]))
        predicted = np.concatenate([each.parts for each in batch]) > 0
        predicted[offsets[:-1]] = False
        places = np.flatnonzero(predicted)
        (inputs,) = concatenated(ids, offsets, np.diff(offsets), np.array([len(batch)]), loaded.config.segments)
        with torch.inference_mode():
            found = _log_probabilities(loaded, model, inputs | {"causal": True}, places - 1, ids[places])
        sequence = np.searchsorted(offsets, places, side="right") - 1
        sums[numbers] = np.bincount(sequence, found, minlength=len(batch))
        return len(ids)

    for size in _on_each_core(score, list(batches([*map(len, encodings)], CAUSAL_TOKENS)), loaded.device):
        progress(size)
    return sums


def pseudo_log_likelihoods(
    loaded: LoadedModel,
    encodings: Sequence[Encoding],
    *,
    bf16: bool = False,
    rest_of_word: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> np.ndarray:
    """`log_likelihoods` by masks.

    Args:
        rest_of_word: whether the later tokens of a token's word are masked with it (arXiv 2305.10588): the sum over a
            word is then its log-probability given the other words, and no piece is predicted from those after it.
    """
    # positions of the special tokens -> numbers of the sequences
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, encoding in enumerate(encodings):
        alike[tuple(encoding.parts)].append(number)
    model = _EncoderInBf16(loaded.model) if bf16 else loaded.model
    groups = [
        _Alike(encodings, numbers, rest_of_word) for _, numbers in sorted(alike.items(), key=lambda item: -len(item[0]))
    ]

    def score(batch: tuple[_Alike, range]) -> int:
        group, variants = batch
        rows, columns, masked = group.variants(np.asarray(variants))
        with torch.inference_mode():
            group.values[variants.start : variants.stop] = _hidden(loaded, model, rows, columns, masked)
        return rows.size

    for size in _on_each_core(score, [(group, part) for group in groups for part in group.batches()], loaded.device):
        progress(size)
    sums = np.zeros(len(encodings))
    for group in groups:
        sums[group.numbers] = group.values.reshape(len(group.numbers), -1).sum(axis=1)
    return sums


class _Alike:
    """Sequences with special tokens at the same positions. A variant is a sequence of which one token is predicted."""

    def __init__(self, encodings: Sequence[Encoding], numbers: list[int], rest_of_word: bool) -> None:
        self.numbers = numbers
        self._rest_of_word = rest_of_word
        # A special token, which never continues a word, ends the last one.
        self._words = np.cumsum([[not each for each in encodings[number].continues] for number in numbers], axis=1)
        self._places = np.flatnonzero(encodings[numbers[0]].parts)
        self._ids = np.array([encodings[number].ids for number in numbers])
        self.values = np.empty(len(numbers) * len(self._places))
        """Log-probability of the predicted token of each variant, which are ordered by sequence and position."""

    def batches(self) -> list[range]:
        """Numbers of the variants that are processed together."""
        at_once = max(1, BATCH_TOKENS // self._ids.shape[1])
        count = len(self.values)
        return [range(start, min(start + at_once, count)) for start in range(0, count, at_once)]

    def variants(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids (N, L), not yet masked, the position (N,) to predict, and which positions (N, L) are masked for it."""
        rows, columns = numbers // len(self._places), self._places[numbers % len(self._places)]
        distance = np.arange(self._ids.shape[1]) - columns[:, None]
        masked = distance == 0
        if self._rest_of_word:
            words = self._words[rows]
            masked |= (distance > 0) & (words == np.take_along_axis(words, columns[:, None], axis=1))
        return self._ids[rows], columns, masked


def _on_each_core(score: Callable[[_Part], int], batches: Sequence[_Part], device: str) -> Iterator[int]:
    """Results in order. On a CPU each core takes batches of its own: products of small models are too small to share
    (8 layers of 256 in bf16, two cores: 9 seconds where it took 12).
    """
    cores = torch.get_num_threads() if torch.device(device).type == "cpu" else 1
    workers = min(cores, _AT_ONCE, len(batches))
    if workers < 2:
        yield from map(score, batches)
        return
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(cores // workers,))
    try:
        yield from pool.map(score, batches)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(cores)  # the last number set is also that of threads started later


def num_tokens(encodings: Sequence[Encoding], hidden: Hidden = "token") -> int:
    """Tokens that the model processes: every sequence once for each of its ordinary tokens, or once for all."""
    if hidden == "later":
        return sum(map(len, encodings))
    return sum(len(encoding) * int(np.count_nonzero(encoding.parts)) for encoding in encodings)


class _EncoderInBf16:
    """A model with masked-LM head of which only the encoder uses bf16: bf16 logits would double the error, and the head
    takes little time, at one token per sequence.
    """

    def __init__(self, model: BertForPreTraining) -> None:
        self.model = model

    def __call__(self, masked_positions: torch.Tensor, **inputs: Any) -> PreTrainingOutput:
        with torch.autocast(masked_positions.device.type, torch.bfloat16):
            _, hidden = encode_masked(self.model.bert, masked_positions, **inputs)
        return PreTrainingOutput(prediction_logits=self.model.masked_lm(hidden.float()))


def _hidden(
    loaded: LoadedModel,
    model: BertForPreTraining | _EncoderInBf16,
    rows: np.ndarray,
    columns: np.ndarray,
    masked: np.ndarray,
) -> np.ndarray:
    """Log-probabilities (N,) of the token at `columns` (N,) of each row of ids (N, L), of which `masked` (N, L) are
    masked.
    """
    count, length = rows.shape
    hidden = rows[np.arange(count), columns]
    rows = np.where(masked, loaded.tokenizer.special_tokens.mask, rows)
    (inputs,) = concatenated(
        rows.reshape(-1),
        np.arange(0, rows.size + 1, length),
        np.full(count, length),
        np.array([count]),
        loaded.config.segments,
    )
    return _log_probabilities(loaded, model, inputs, np.arange(count) * length + columns, hidden)


def _log_probabilities(
    loaded: LoadedModel,
    model: BertForPreTraining | _EncoderInBf16,
    inputs: Fields,
    positions: np.ndarray,
    ids: np.ndarray,
) -> np.ndarray:
    """Log-probabilities (N,) float64 of `ids` (N,) by the model's predictions at `positions` (N,)."""
    there = to_device(
        inputs | {"positions": torch.from_numpy(positions), "ids": torch.from_numpy(ids)}, torch.device(loaded.device)
    )
    positions_there, ids_there = there.pop("positions"), there.pop("ids")
    found: torch.Tensor = hidden_log_probabilities(model, there, positions_there, ids_there)
    return found.double().cpu().numpy()
