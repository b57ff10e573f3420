"""Pseudo-log-likelihoods of many texts (arXiv 1910.14659): each token is masked in turn and predicted from all others.

Texts run in batches of sequences of one length, without padding (Salazar et al. 2020).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from cloze.launch.predict.blanks import hidden_log_probabilities
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.system.devices import to_device
from cloze.launch.texts.encoding import Encoding
from cloze.model.bert import BertForPreTraining, PreTrainingOutput
from cloze.pipeline.loading.collate import concatenated

# Tokens of one forward. Of 2,048 to 16,384 the fastest on two cores for 8 layers of 256, in bf16 and in fp32.
BATCH_TOKENS = 8192


@torch.inference_mode()
def pseudo_log_likelihoods(
    loaded: LoadedModel, encodings: Sequence[Encoding], *, bf16: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> np.ndarray:
    """Sum of the natural log-probabilities of each sequence's tokens, special tokens apart; (n,) float64.

    Args:
        bf16: whether the encoder's matrix products are made in bf16.
        progress: called with the tokens processed since its last call.
    """
    sums = np.zeros(len(encodings))
    # positions of the special tokens -> numbers of the sequences
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, encoding in enumerate(encodings):
        alike[tuple(encoding.parts)].append(number)
    model = _EncoderInBf16(loaded.model) if bf16 else loaded.model
    for parts, numbers in sorted(alike.items(), key=lambda item: -len(item[0])):
        places = np.flatnonzero(parts)
        ids = np.array([encodings[number].ids for number in numbers])
        at_once = max(1, BATCH_TOKENS // len(parts))
        values = np.empty(len(numbers) * len(places))
        for start in range(0, len(values), at_once):
            variants = np.arange(start, min(start + at_once, len(values)))
            rows, columns = ids[variants // len(places)], places[variants % len(places)]
            values[variants] = _hidden(loaded, model, rows, columns)
            progress(rows.size)
        sums[numbers] = values.reshape(len(numbers), -1).sum(axis=1)
    return sums


def num_tokens(encodings: Sequence[Encoding]) -> int:
    """Tokens that the model processes: every sequence once for each of its ordinary tokens."""
    return sum(len(encoding) * int(np.count_nonzero(encoding.parts)) for encoding in encodings)


class _EncoderInBf16:
    """A model with masked-LM head of which only the encoder uses bf16: bf16 logits would double the error, and the head
    takes little time, at one token per sequence.
    """

    def __init__(self, model: BertForPreTraining) -> None:
        self.model = model

    def __call__(self, masked_positions: torch.Tensor, **inputs: Any) -> PreTrainingOutput:
        with torch.autocast(masked_positions.device.type, torch.bfloat16):
            encoded = self.model.bert(read_tokens=masked_positions, **inputs)
        return PreTrainingOutput(prediction_logits=self.model.masked_lm(encoded.last_hidden_state.float()))


def _hidden(loaded: LoadedModel, model: BertForPreTraining | _EncoderInBf16, rows: np.ndarray, columns: np.ndarray
            ) -> np.ndarray:
    """Log-probabilities (N,) of one masked token in each row of ids (N, L)."""
    count, length = rows.shape
    hidden = rows[np.arange(count), columns]
    rows = rows.copy()
    rows[np.arange(count), columns] = loaded.tokenizer.special_tokens.mask
    (inputs,) = concatenated(rows.reshape(-1), np.arange(0, rows.size + 1, length), np.full(count, length),
                             np.array([count]), loaded.config.segments)
    there = to_device(inputs | {"positions": torch.from_numpy(np.arange(count) * length + columns),
                                "hidden": torch.from_numpy(hidden)}, torch.device(loaded.device))
    positions, hidden_there = there.pop("positions"), there.pop("hidden")
    found = hidden_log_probabilities(model, there, positions, hidden_there)
    return found.double().cpu().numpy()
