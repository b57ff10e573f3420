"""Initial weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.config import BertConfig
from model.embeddings import Norm
from model.heads import VocabularyProjection


def init_weights(model: nn.Module, seed: int) -> None:
    """Draw all weights of `model` in place, from a generator of its own.

    | parameter                                   | initial value                                     |
    |---------------------------------------------|---------------------------------------------------|
    | weights of linear maps, word and segment embeddings, vocabulary projection | N(0, initializer_range²) |
    | learned positions                           | N(0, position_initializer_range²), the same if unset |
    | embedding rows of padding (token, segment) and of the vocabulary's padding | 0           |
    | biases                                      | 0                                                 |
    | normalisation                               | weight 1, bias 0                                  |
    """
    config: BertConfig = model.config
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        drawn: set[int] = set()
        for name, module in model.named_modules():
            if isinstance(module, Norm):
                module.weight.fill_(1.0)
            elif getattr(module, "weight", None) is not None and id(module.weight) not in drawn:
                drawn.add(id(module.weight))  # a tied weight is drawn once
                deviation = config.initializer_range
                if name.endswith("embeddings.position") and config.position_initializer_range is not None:
                    deviation = config.position_initializer_range
                values = torch.empty(module.weight.shape).normal_(0.0, deviation, generator=generator)
                if getattr(module, "padding_idx", None) is not None:
                    values[module.padding_idx] = 0
                if name.endswith("embeddings.word") or isinstance(module, VocabularyProjection):
                    values[config.vocab_size :] = 0
                module.weight.copy_(values)
            if isinstance(getattr(module, "bias", None), Tensor):
                module.bias.zero_()
