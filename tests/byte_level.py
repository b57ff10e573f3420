"""Byte-level BPE, as configs/prepare/roberta.yaml and modernbert.yaml have it, on the words of a test."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from cloze.pipeline.tokenization.backends import add_special_tokens
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.synthetic import NAMES

# EuroBERT's, by role: what ends a text pads too, and no token is unknown.
EURO_NAMES = dict.fromkeys(NAMES, "<|end_of_text|>") | {"classification": "<|begin_of_text|>", "mask": "<|mask|>"}


def byte_tokenizer(
    texts: Iterable[str], special_tokens: Sequence[str] = (), names: Mapping[str, str] = NAMES
) -> Tokenizer:
    """Of the texts' pieces that occur twice; any other text in bytes. Special tokens have the first ids; none given:
    those of `names`, by role.
    """
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=1000,
            min_frequency=2,
            special_tokens=list(special_tokens or dict.fromkeys(names.values())),
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    add_special_tokens(backend, names)
    return Tokenizer(backend, dict(names))


def save_as_eurobert(texts: Iterable[str], folder: Path) -> Tokenizer:
    """A tokenizer in a folder that names its special tokens as EuroBERT's does."""
    tokenizer = byte_tokenizer(texts, names=EURO_NAMES)
    tokenizer.save(folder)
    (folder / "vocab.txt").unlink()
    named = {"bos_token": "classification", "eos_token": "separator", "pad_token": "pad", "mask_token": "mask"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **{name: EURO_NAMES[role] for name, role in named.items()}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer
