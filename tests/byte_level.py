"""Byte-level BPE, as configs/prepare/roberta.yaml and modernbert.yaml have it, on the words of a test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from cloze.pipeline.tokenization.backends import add_special_tokens
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.synthetic import NAMES


def byte_tokenizer(texts: Iterable[str], special_tokens: Sequence[str] = tuple(NAMES.values())) -> Tokenizer:
    """Of the texts' pieces that occur twice; any other text in bytes. Special tokens have the first ids."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=1000,
            min_frequency=2,
            special_tokens=list(special_tokens),
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    add_special_tokens(backend, NAMES)
    return Tokenizer(backend, NAMES)
