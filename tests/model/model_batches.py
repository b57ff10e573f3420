"""Batches of unequal lengths in both layouts, and pairs of equal models, for the tests of this folder."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
import transformers

from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig
from cloze.model.huggingface import config_to_huggingface
from cloze.model.initialization import init_weights
from cloze.model.weight_names import to_huggingface

TINY = BertConfig(
    vocab_size=211,  # prime, so that the padding to 256 is never zero
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=48,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)

# Of two orders of summation in float32: rtol is eight units in the last place, for large sums.
TOLERANCE = dict(atol=1e-5, rtol=1e-6)

INPUTS = ("input_ids", "token_type_ids", "attention_mask")
FLAT = ("input_ids", "token_type_ids", "position_ids", "sequence_offsets", "max_sequence_length")


def scramble(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Draw weights, then move every parameter (biases and norms too) away from its initial value."""
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def batch(config: BertConfig = TINY, lengths: tuple[int, ...] = (3, 48, 17, 9, 30), seed: int = 0) -> dict:
    """A padded batch with pairs, labels at about a fifth of the tokens, and both kinds of pair."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    shape = (len(lengths), longest)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    ids = torch.randint(5, config.vocab_size, shape, generator=generator).masked_fill(~mask, config.pad_token_id)
    segments = (torch.arange(longest) >= torch.tensor(lengths)[:, None] // 2).long() * mask
    masked = (torch.rand(shape, generator=generator) < 0.2) & mask
    masked[0, 1] = True
    return {
        "input_ids": ids,
        "token_type_ids": segments,
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~masked, -100),
        "next_sentence_label": torch.arange(len(lengths)) % 2,
    }


def concatenate(padded: dict) -> dict:
    """The same batch without padding: what pipeline's collate emits."""
    mask = padded["attention_mask"].bool()
    lengths = mask.sum(1).tolist()
    labels = padded["labels"][mask]
    positions = (labels != -100).nonzero()[:, 0]
    return {
        "input_ids": padded["input_ids"][mask],
        "token_type_ids": padded["token_type_ids"][mask],
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "sequence_offsets": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        "max_sequence_length": max(lengths),
        "masked_positions": positions,
        "labels": labels[positions],
        "next_sentence_label": padded["next_sentence_label"],
    }


def both_inputs() -> tuple[dict, dict, dict]:
    """The padded batch, and what goes into an encoder of it in either layout."""
    padded = batch()
    return padded, {name: padded[name] for name in INPUTS}, {name: concatenate(padded)[name] for name in FLAT}


def reference(
    model: torch.nn.Module, architecture: str = "BertForPreTraining", **fields
) -> transformers.PreTrainedModel:
    """The same model in transformers, weights copied. Every key must be accounted for."""
    config = model.config
    values = config_to_huggingface(config, architecture, torch.float32, getattr(model, "head", None))
    values = {name: value for name, value in values.items() if name not in ("model_type", "dtype", "architectures")}
    if "id2label" in values:
        values["id2label"] = {int(number): label for number, label in values["id2label"].items()}
    theirs = getattr(transformers, architecture)(
        transformers.BertConfig(**values, attn_implementation="eager", **fields)
    )
    missing, unexpected = theirs.load_state_dict(_their_names(model.state_dict(), config, theirs), strict=False)
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert not unexpected and set(missing) <= tied
    theirs.tie_weights()
    return theirs.train(model.training)


def theirs_of(model, **fields):
    """The namesake of `model` with its weights, in training mode with no dropout."""
    theirs = reference(model, type(model).__name__, **fields)
    return theirs.train()


def _their_names(weights: dict, config: BertConfig, model: torch.nn.Module) -> dict:
    if hasattr(model, "bert"):
        return to_huggingface(weights, config, type(model).__name__)
    weights = to_huggingface({f"bert.{name}": tensor for name, tensor in weights.items()}, config)
    return {name.removeprefix("bert."): tensor for name, tensor in weights.items()}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Our gradients under the names of transformers."""
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    return _their_names(found, model.config, model)


def assert_equal_gradients(model: torch.nn.Module, theirs: torch.nn.Module, tolerance: float = 1e-5) -> None:
    """Every gradient of `theirs` has its equal here."""
    ours = gradients(model)
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert set(ours) == set(expected)
    for name, gradient in expected.items():
        gradient = torch.zeros_like(ours[name]) if gradient is None else gradient
        torch.testing.assert_close(
            ours[name], gradient, atol=tolerance, rtol=TOLERANCE["rtol"], msg=lambda text, n=name: f"{n}: {text}"
        )


def pretraining_model(config: BertConfig = TINY, **arguments) -> BertForPreTraining:
    """A BertForPreTraining with scrambled weights, in training mode."""
    return scramble(BertForPreTraining(config, **arguments))


def add_strange_fields(folder: Path, fingerprint: str = "old") -> dict[str, object]:
    """Put fields into config.json that nothing here knows, and leave out one with its default; returns all but the
    notes of an earlier training.

    Args:
        fingerprint: of the tokenizer, in these notes.
    """
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"of_another_tool": {"deep": [1, None]}, "bos_token_id": 7, "_note": "é"}
    values.pop("initializer_range", None)
    path.write_text(json.dumps(values | {"cloze_truncation": {"max_length": 9}, "tokenizer_fingerprint": fingerprint}))
    return values
