"""Ranks that sum gradients in buckets, and write into a folder what came of it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from tests.gpu.cases import Case, configuration

MICRO_STEPS = 3
STEPS = 4
POISONED = 2
"""The step whose gradient is NaN on one rank."""


@dataclass(frozen=True)
class Variant:
    """How the engine runs."""

    size: int
    """Bytes of a bucket."""
    precision: str = "fp32"
    gradient_checkpointing: str = "none"
    copies: bool = False
    compiled: bool = False
    by_deepspeed: bool = False
    """Whether DeepSpeed sums, after backward: the reference."""


@contextlib.contextmanager
def joined():
    """This process as the rank that its environment says, with what begins a sum noted: elements of each."""
    from cloze.launch.system import distributed
    from cloze.launch.system.environment.launchers import read_environment
    from cloze.launch.system.environment.process import prepare_deepspeed

    torch.set_num_threads(1)
    environment = read_environment()
    prepare_deepspeed(environment)
    distributed.initialize(environment)
    begin, sent = distributed.begin_sum, []

    def noted(values):
        sent.append(values.numel())
        return begin(values)

    distributed.begin_sum = noted
    yield environment, sent
    distributed.shutdown()


# ---- the real engine -------------------------------------------------------------------------------------------------


def engine_main(variants: list[Variant], folder: Path, _command: list[str]) -> int:
    """Trains with each variant, from the same weights on the same batches."""
    with joined() as (environment, sent):
        found = [_trained(variant, environment, sent) for variant in variants]
        torch.save(found, folder / f"{environment.rank}.pt")
    return 0


def batch_of(model, *key: int) -> dict:
    """A micro-batch that the key decides."""
    generator = torch.Generator().manual_seed(int("".join(map(str, key))))
    lengths = torch.randint(5, 40, (3,), generator=generator).tolist()
    total = sum(lengths)
    positions = torch.arange(1, total, 7)
    return {
        "input_ids": torch.randint(model.vocab_size, (total,), generator=generator),
        "token_type_ids": torch.zeros(total, dtype=torch.long),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "sequence_offsets": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "max_sequence_length": max(lengths),
        "masked_positions": positions,
        "labels": torch.randint(model.vocab_size, positions.shape, generator=generator),
        "next_sentence_label": torch.randint(2, (3,), generator=generator),
    }


def _trained(variant: Variant, environment, sent: list[int]) -> dict:
    """Gradients of each step as they come to clipping, weights after the last one, and what was sent in it."""
    from cloze.launch.engine import summing
    from cloze.launch.engine.config import deepspeed_config
    from cloze.launch.engine.engine import Engine
    from cloze.launch.pretrain.first_model import build_model
    from cloze.model.weight_copies import WeightCopies

    summing.BUCKET_BYTES, world_size = variant.size, environment.world_size
    config = configuration(Case(precision=variant.precision, gradient_checkpointing=variant.gradient_checkpointing))
    config = replace(config, train=replace(config.train, global_batch_size=3 * MICRO_STEPS * world_size))
    engine = Engine(build_model(config), config, deepspeed_config(config, world_size), torch.device("cpu"))
    if variant.by_deepspeed:
        engine._deepspeed.enable_backward_allreduce, engine._averaging_over_ranks = True, contextlib.nullcontext
    if variant.compiled:
        engine.model.bert.encoder.compile_layers("aot_eager")
    if variant.copies:
        engine._copies = WeightCopies(engine.model, torch.bfloat16)
    gradients, clip, inside = [], engine._clip, []

    def keep_and_clip() -> torch.Tensor:
        gradients.append({name: each.grad.clone() for name, each in engine.model.named_parameters()})
        return clip()

    engine._clip = keep_and_clip
    finish = summing.GradientSums.finish

    def note_and_finish(sums) -> None:
        inside.append(len(sent))
        finish(sums)

    summing.GradientSums.finish = note_and_finish
    engine.model.train()
    for step in range(STEPS):
        sent.clear()
        for micro_step in range(MICRO_STEPS):
            last = micro_step == MICRO_STEPS - 1
            output = engine(**batch_of(config.model, environment.rank + 1, step, micro_step), dropout_seed=step + 1)
            loss = output.mlm_losses.sum()
            # Now and then the head of pairs has no gradient: in one micro-step, or on one rank.
            if not (last and step == 1) and not (environment.rank == 1 and step == POISONED):
                loss = loss + output.next_sentence_losses.sum()
            if step == POISONED and last and environment.rank == 1:
                loss = loss * float("nan")
            engine.backward(loss, last=last)
        engine.step(config.train.peak_rate)
    summing.GradientSums.finish = finish
    hooks = sum(len(each._post_accumulate_grad_hooks or ()) for each in engine.model.parameters())
    return {
        "gradients": gradients,
        "sent": list(sent),
        "inside": inside,
        "hooks": hooks,
        "weights": {name: each.detach().clone() for name, each in engine.model.named_parameters()},
    }


# ---- small models of which nothing is usual --------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of odd lengths; a tied one, one that only rank 0 uses, one that none does."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator))

        self.unused, self.only_0, self.tied, self.first = made(11), made(3, 5), made(7, 5), made(5, 5)
        self.second, self.bias, self.scalar, self.empty = made(5, 5), made(5), made(1), made(0)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, ids: torch.Tensor, rank: int) -> torch.Tensor:
        """The ranks use the inner matrices in different orders, so that backward does, too."""
        hidden = self.tied[ids] * self.frozen
        for weight in (self.first, self.second) if rank % 2 else (self.second, self.first):
            hidden = torch.tanh(hidden @ weight + self.bias)
        if rank == 0:
            hidden = hidden + torch.tanh(hidden @ self.only_0.T) @ self.only_0
        return (hidden @ self.tied.T).logsumexp(-1).sum() * self.scalar.sum()


def odd_main(sizes: list[int], folder: Path, _command: list[str]) -> int:
    """Gradients of the odd model by buckets of each size: sent in backward, sent after it, and each summed alone."""
    from cloze.launch.engine.summing import GradientSums
    from cloze.launch.system import distributed

    with joined() as (environment, sent):
        rank, found = environment.rank, []
        for size in sizes:
            for way in ("in backward", "after", "alone"):
                model = Odd()
                learning = [each for each in model.parameters() if each.requires_grad and each.numel()]
                model(torch.arange(4) + rank, rank).backward()  # a micro-step before the last
                sums = GradientSums(learning, environment.world_size, size)
                sent.clear()
                with sums.sending() if way == "in backward" else contextlib.nullcontext():
                    model((torch.arange(9) * (rank + 2)) % 7, rank).backward()
                inside = len(sent)
                if way == "alone":
                    for each in learning:
                        each.grad = torch.zeros_like(each) if each.grad is None else each.grad
                        distributed.reduce_sum(each.grad).mul_(1 / environment.world_size)
                else:
                    sums.finish()
                found.append(
                    {
                        "size": size,
                        "way": way,
                        "sent": list(sent),
                        "inside": inside,
                        "gradients": [each.grad.clone() for each in learning],
                        "aligned": [each.grad.data_ptr() % 16 == 0 for each in learning if not each.numel() % 4],
                        "others": [each.grad for each in (model.frozen, model.empty)],
                    }
                )
        torch.save(found, folder / f"{rank}.pt")
    return 0


class _Fails(torch.autograd.Function):
    """Backward of it fails."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no backward")


def failing_main(ranks: list[int], folder: Path, _command: list[str]) -> int:
    """Backward fails on some ranks when a bucket is under way; those that all come to it go on with another step."""
    from cloze.launch.engine import summing
    from cloze.launch.system import distributed

    with joined() as (environment, sent):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        summing.BUCKET_BYTES = 1
        averaged = partial(summing.averaged_gradients, list(model.parameters()), environment.world_size)
        given, fails = torch.ones(2, 8) * (environment.rank + 1), environment.rank in ranks
        try:
            hidden = model[:2](given)
            loss = model[2:](_Fails.apply(hidden) if fails else hidden).sum()
            with averaged():
                loss.backward()
        except (ValueError, RuntimeError) as error:
            if not fails:
                (folder / f"{environment.rank}.txt").write_text(str(distributed.lost_others(error)))
                raise
        assert len(sent) == (4 if fails else 8), sent
        if len(ranks) == 1:
            return 3  # gone, and the others wait for what it would have sent
        sent.clear()
        model.zero_grad()
        loss = model(given).sum()
        with averaged():
            loss.backward()
        torch.save([each.grad for each in model.parameters()], folder / f"{environment.rank}.pt")
        assert len(sent) == 8 and not any(each._post_accumulate_grad_hooks for each in model.parameters())
    return 0
