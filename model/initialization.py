"""Random initial weights of all parameters, and word embeddings from a word2vec file."""

import math
import os
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cloze.model.config import BertConfig, ModelError
from cloze.model.embeddings import Embeddings, Norm
from cloze.model.heads import LayerMix, VocabularyProjection
from cloze.model.parametrization import parameter_share

# Modules whose outputs are added to the residual stream (Megatron-LM, arXiv 1909.08053), and the masked-LM head's,
# which ModernBERT starts alike.
_SCALED = ("attention.output", "feed_forward.down", "masked_lm.dense", "masked_lm.decoder")


def init_weights(model: nn.Module, seed: int) -> None:
    """Initialize all weights of `model` in place, with a generator of its own.

    | parameter                                   | initial value                                     |
    |---------------------------------------------|---------------------------------------------------|
    | weights of linear maps, untied vocabulary projection | N(0, initializer_range²)                 |
    | of `_SCALED`, if initialization is megatron | N(0, initializer_range² / (2 num_hidden_layers)) |
    | word and segment embeddings                 | N(0, embedding_initializer_range²), the same if unset |
    | learned positions                           | N(0, position_initializer_range²), the same if unset |
    | vectors of distances                        | N(0, initializer_range²)                          |
    | embedding rows of padding (token, segment) and of the vocabulary's padding | 0           |
    | biases                                      | 0                                                 |
    | normalisation                               | weight 1, bias 0                                  |
    | factor of scaled sinusoids                  | 1/sqrt(embedding width)                           |
    | learned sum of layers                       | weights 0 (equal shares), scale 1                 |

    With initializer_cutoff c, the normal distributions are truncated at c standard deviations. With parametrization
    mup, standard deviations, norms and the factor of sinusoids are multiplied by `parameter_share`.size.
    """
    config = model.config
    assert isinstance(config, BertConfig)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        drawn: set[int] = set()
        for name, module in model.named_modules():
            size = parameter_share(config, module, f"{name}.weight").size
            if isinstance(module, Norm):
                module.weight.fill_(size)
            elif isinstance(module, Embeddings) and config.position_embedding == "scaled_sinusoidal":
                size = parameter_share(config, module, f"{name}.position_scale").size
                module.position_scale.fill_(size * config.embedding_width**-0.5)
            elif isinstance(module, LayerMix):
                module.weights.zero_()
                module.scale.fill_(1.0)
            elif getattr(module, "weight", None) is not None and id(module.weight) not in drawn:
                drawn.add(id(module.weight))  # a tied weight is drawn once
                values = _drawn(config, module.weight.shape, size * _deviation(config, name), generator)
                if getattr(module, "padding_idx", None) is not None:
                    values[module.padding_idx] = 0
                if name.endswith("embeddings.word") or isinstance(module, VocabularyProjection):
                    values[config.vocab_size :] = 0
                module.weight.copy_(values)
            if isinstance(getattr(module, "bias", None), Tensor):
                module.bias.zero_()


def _drawn(config: BertConfig, shape: torch.Size, deviation: float, generator: torch.Generator) -> Tensor:
    values = torch.empty(shape)
    if config.initializer_cutoff is None:
        return values.normal_(0.0, deviation, generator=generator)
    bound = config.initializer_cutoff * deviation
    return nn.init.trunc_normal_(values, 0.0, deviation, -bound, bound, generator=generator)


def _deviation(config: BertConfig, name: str) -> float:
    """Standard deviation of the initial weights of the module `name`."""
    given = None
    if config.initialization == "megatron" and name.endswith(_SCALED):
        return config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    if name.endswith("embeddings.position"):
        given = config.position_initializer_range
    elif name.endswith(("embeddings.word", "embeddings.segment")):
        given = config.embedding_initializer_range
    return config.initializer_range if given is None else given


_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


def init_word_embeddings(model: nn.Module, path: str | os.PathLike[str], tokens: Mapping[str, int]) -> int:
    """Set word embeddings from a word2vec text file.

    The file: a line for each word, the word and its numbers separated by spaces; the first line may hold the two
    counts. Tokens that the file lacks keep their values.

    Returns:
        How many of `tokens` (token -> id) it contains.

    Raises:
        ModelError: with the line, for another format or width, and if no token is found at all.
    """
    weight = next(module for name, module in model.named_modules() if name.endswith("embeddings.word")).weight
    found: set[str] = set()
    words, expected, width = 0, None, 0
    with open(path, encoding="utf-8-sig", errors="replace") as lines, torch.no_grad():
        for number, line in enumerate(lines, start=1):
            word, *values = line.rstrip().split(" ")
            if number == 1 and len(values) == 1:  # the counts of words and dimensions
                expected = int(word) if re.fullmatch("[0-9]{1,18}", word) else None
                continue
            width = width or len(values)
            words += bool(word or values)  # an empty line is no word; gensim writes the empty one with its numbers
            if word not in tokens:
                continue
            more = values[: max(0, len(values) - weight.shape[1])]
            of_width = width == weight.shape[1]  # by its first word; what is more belongs to a word, also numbers
            if more and all(more) and (of_width or not all(map(_NUMBER.fullmatch, more))):
                continue  # a word with spaces, as some of GloVe's
            numbers = [float(value) for value in values if _NUMBER.fullmatch(value)]
            vector = torch.tensor(numbers)
            if len(numbers) != len(values) or not vector.isfinite().all():
                raise ModelError(f"{path}:{number}: found {line[:40]!r}, expected a word and numbers in fp32's range")
            if len(vector) != weight.shape[1]:
                raise ModelError(
                    f"{path}:{number}: found {len(vector)} numbers, expected {weight.shape[1]}, the width of the "
                    "embeddings (model.hidden_size, or model.embedding_size where that is given)"
                )
            weight[tokens[word]] = vector
            found.add(word)
    if expected is not None and words != expected:
        raise ModelError(
            f"{path}: found {words} words, expected {expected}, as its first line says; fetch it again, or correct it"
        )
    if not found:
        raise ModelError(f"{path}: found none of the {len(tokens)} tokens, expected a word2vec text file of them")
    return len(found)
