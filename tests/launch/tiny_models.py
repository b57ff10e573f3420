"""Tiny models with random weights, saved by transformers: what predictions are measured against."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from cloze.pipeline.tokenization.backends import wordpiece_backend
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.synthetic import NAMES

WORDS = (
    "the man went to store and bought a gallon of milk sky sea is blue cat sat on mat paris capital france who where "
    "name into form from apple fruit phone i ate an good bad film . , ? ! ' # é"
).split()
PIECES = ["##ing", "##ed", "##s", "##er", "##a", "##b", "w", "x", "walk", "play", "new", "##york"]
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
POSITIONS = 48


def tokenizer() -> Tokenizer:
    tokens = [*NAMES.values(), *WORDS, *PIECES]
    return Tokenizer(wordpiece_backend({token: i for i, token in enumerate(tokens)}, NAMES, True, None), NAMES)


def save_model(
    folder: Path, kind: str = "BertForPreTraining", seed: int = 0, ours: Tokenizer | None = None, **changes
) -> Path:
    """A folder as transformers makes it, of a class of theirs; weights so large that tokens differ visibly."""
    ours = ours or tokenizer()
    ours.save(folder)
    torch.manual_seed(seed)
    values = {
        "vocab_size": ours.vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.4,
    }
    config = transformers.BertConfig(**(values | changes))
    getattr(transformers, kind)(config).eval().save_pretrained(folder)
    return folder


def labels(*names: str) -> dict:
    """The fields of a classifier with these labels."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
