"""Small tasks and models for the tests of fine-tuning."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from cloze.pipeline.tokenization.backends import wordpiece_backend
from cloze.pipeline.tokenization.tokenizer import Tokenizer

NAMES = {"pad": "[PAD]", "unknown": "[UNK]", "classification": "[CLS]", "separator": "[SEP]", "mask": "[MASK]"}
GOOD, BAD = ("fine", "great", "superb"), ("awful", "dull", "poor")
OTHERS = tuple(f"w{number}" for number in range(20))
WORDS = (*GOOD, *BAD, *OTHERS, *"abcdefghijklmnopqrstuvwxyz0123456789", "##s", "##ly", ".", ",", "?", "'", "-")

# A run of seconds: fp32, a line a step, a batch that a small file fills.
QUICK = (
    "--train.precision",
    "fp32",
    "--train.log_every_steps",
    "1",
    "--train.global_batch_size",
    "8",
    "--train.micro_batch_size",
    "4",
    "--train.learning_rate",
    "3e-3",
    "--max_length",
    "32",
)


def make_tokenizer() -> Tokenizer:
    """WordPiece over WORDS."""
    backend = wordpiece_backend({name: i for i, name in enumerate([*NAMES.values(), *WORDS])}, NAMES, True, None)
    return Tokenizer(backend, NAMES)


def make_model(
    folder: Path, dropout: float = 0.1, layers: int = 2, tokenizer: Tokenizer | None = None, seed: int = 0
) -> Path:
    """A Hugging Face folder of a bare BERT, made by transformers, with a WordPiece tokenizer or another one."""
    tokenizer = tokenizer or make_tokenizer()
    torch.manual_seed(seed)
    BertModel(
        BertConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            of_another_tool={"deep": [1, None]},
        )
    ).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def sentence(rng: random.Random, word: str, longest: int = 12) -> str:
    """Random words with one that decides among them."""
    words = rng.choices(OTHERS, k=rng.randint(2, longest))
    words[rng.randrange(len(words))] = word
    return " ".join(words)


def sentiment(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Sentences with their label: 1 where a word is good."""
    labels = [rng.randrange(2) for _ in range(count)]
    return [(sentence(rng, rng.choice(GOOD if label else BAD)), str(label)) for label in labels]


def write_tsv(path: Path, header: tuple[str, ...], rows: list[tuple]) -> Path:
    """A table with tabs; no header if it is empty."""
    lines = ([header] if header else []) + rows
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in lines), encoding="utf-8")
    return path


def sst2(folder: Path, train: int = 120, validation: int = 21) -> tuple[Path, Path]:
    """Training and validation file in the form of SST-2."""
    rng = random.Random(0)
    header = ("sentence", "label")
    return (
        write_tsv(folder / "train.tsv", header, sentiment(rng, train)),
        write_tsv(folder / "dev.tsv", header, sentiment(rng, validation)),
    )


def squad(path: Path, rng: random.Random, count: int, impossible: bool = False) -> Path:
    """Write a file of SQuAD in whose texts the answer to "? WORD" is the number behind WORD."""
    paragraphs = []
    for number in range(count):
        keys = rng.sample(OTHERS, rng.randint(3, 12))
        values = [str(rng.randrange(10)) for _ in keys]
        context = " ".join(f"{key} {value}," for key, value in zip(keys, values, strict=True))
        chosen = rng.randrange(len(keys))
        start = sum(len(key) + 4 for key in keys[:chosen]) + len(keys[chosen]) + 1
        answers = [{"text": values[chosen], "answer_start": start}]
        question = {"id": f"q{number}", "question": f"{keys[chosen]} ?", "answers": answers}
        if impossible and number % 3 == 0:
            question |= {"question": "superb ?", "answers": [], "is_impossible": True}
        paragraphs.append({"context": context, "qas": [question]})
    path.write_text(json.dumps({"version": "x", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return path
