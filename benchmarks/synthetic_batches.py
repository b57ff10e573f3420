"""What the benchmarks share: shapes, batches whose lengths are those of BERT's procedure, models; how they are run."""

from __future__ import annotations

import itertools
import platform
import shlex
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

SHAPES = {  # of BERT; others are presets of configs/model
    "small": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024),
    "base": dict(),
    "large": dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096),
}


def make_batch(
    vocab_size: int, length: int, full_share: float, num_sequences: int, seed: int, pairs: bool = True
) -> dict:
    """Padded ids, mask, labels at 15% of the tokens; of pairs their segments and labels, too."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    short = torch.rand(num_sequences, generator=generator) >= full_share
    lengths = torch.where(short, torch.randint(8, length, (num_sequences,), generator=generator), length)
    lengths = lengths.sort(descending=True).values
    shape = (num_sequences, length)
    mask = torch.arange(length) < lengths[:, None]
    ids = torch.randint(5, vocab_size, shape, generator=generator) * mask
    masked = (torch.rand(shape, generator=generator) < 0.15) & mask
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~masked, -100)}
    if pairs:
        batch["token_type_ids"] = ((torch.arange(length) >= lengths[:, None] // 2) & mask).long()
        batch["next_sentence_label"] = torch.randint(0, 2, (num_sequences,), generator=generator)
    return batch


def concatenate(padded: dict) -> dict:
    """The same batch as Cloze's pipeline makes it: tokens one after another, positions of the labels."""
    import torch

    mask = padded["attention_mask"].bool()
    lengths = mask.sum(1).tolist()
    labels = padded["labels"][mask]
    positions = (labels != -100).nonzero()[:, 0]
    batch = {
        "input_ids": padded["input_ids"][mask],
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "sequence_offsets": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        "max_sequence_length": max(lengths),
        "masked_positions": positions,
        "labels": labels[positions],
    }
    if "token_type_ids" in padded:
        batch["token_type_ids"] = padded["token_type_ids"][mask]
        batch["next_sentence_label"] = padded["next_sentence_label"]
    return batch


def shape_of(shape: str, vocab_size: int, length: int):
    """Configuration of a shape without dropout: one of `SHAPES`, or a preset."""
    from cloze.model.config import BertConfig

    sizes = dict(vocab_size=vocab_size, max_position_embeddings=length)
    if shape not in SHAPES:
        return replace(BertConfig.preset(shape, **sizes), attention_output_dropout_prob=0.0)
    return BertConfig(**SHAPES[shape], **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def peer(shape: str, vocab_size: int, length: int, attention: str):
    """transformers' class of the same model, without dropout."""
    from transformers import BertConfig, BertForPreTraining, ModernBertConfig, ModernBertForMaskedLM

    sizes = dict(vocab_size=vocab_size, max_position_embeddings=length, attn_implementation=attention)
    if shape not in SHAPES:  # its defaults are ModernBERT-base; sparse: scores are computed of masked tokens alone
        roles = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
        return ModernBertForMaskedLM(ModernBertConfig(**sizes, **roles, pad_token_id=0, sparse_prediction=True))
    no_dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForPreTraining(BertConfig(**SHAPES[shape], **sizes, **no_dropout))


def build(library: str, options: dict, shape: str, vocab_size: int, length: int, device: str):
    """A model in training mode without dropout."""
    import torch

    torch.manual_seed(0)
    if library == "cloze":
        from cloze.model.bert import BertForPreTraining
        from cloze.model.initialization import init_weights
        from cloze.model.tasks import BertForMaskedLM

        model = (BertForPreTraining if shape in SHAPES else BertForMaskedLM)(
            shape_of(shape, vocab_size, length),
            attention_kernel=options.get("attention", "auto"),
            gradient_checkpointing=options.get("checkpointing", "none"),
        )
        init_weights(model, 0)
        if options.get("compile"):
            model.bert.encoder.compile_layers()
    else:
        model = peer(shape, vocab_size, length, options["attention"])
        if options.get("compile"):
            model.compile()
    return model.train().to(device)


def hardware(device: str) -> str:
    """The name of what this ran on."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def command_line(command: list[str], variables: dict[str, str]) -> str:
    """A command as a shell takes it, behind its environment variables."""
    return shlex.join([f"{name}={value}" for name, value in variables.items()] + command)


def versions(*libraries: str) -> str:
    """Those of these libraries that are installed."""
    installed = {each.name: each.version for each in metadata.distributions()}
    return ", ".join(f"{name} {installed[name]}" for name in libraries if name in installed)


def own_command(*libraries: str, **variables: str) -> str:
    """The command that runs here, and the versions of what it measures against, as far as they are installed."""
    return f"{command_line([Path(sys.executable).name, *sys.argv], variables)}\n{versions(*libraries)}"
