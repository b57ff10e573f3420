"""Ranks that train with the engine at each ZeRO stage, through its public methods only, and write down what came of it.

The same steps by a plain loop in torch, over the micro-batches of all ranks, are the reference.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from tests.gpu.cases import Case, configuration
from tests.summed import batch_of, joined

STAGES = 0, 1, 2, 3
MICRO_STEPS = 2
RATES = 1e-3, 2e-3, 3e-3, 1e-3, 2e-3
POISONED = 2
"""The step whose loss is infinite on the last rank, so that all skip it."""
SAVED = 3
"""The step before which a checkpoint is saved, from which a second engine goes on."""
CLIPPING = 0.1


def config_of(stage: int, precision: str, world_size: int, optimizer: str = "adamw"):
    """A tiny model without dropout, so that the reference need not draw the same."""
    config = configuration(
        Case(stage, optimizer, precision=precision, hidden_dropout=0.0, attention_dropout=0.0, world_size=world_size)
    )
    train = replace(config.train, global_batch_size=3 * MICRO_STEPS * world_size, gradient_clipping=CLIPPING)
    model = replace(config.model, vocab_size=200, hidden_size=32, intermediate_size=64)
    return replace(config, model=model, train=train)


def equal_tensors(left: dict, right: dict) -> bool:
    """Whether both have the same names and, for each, the same bits."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def losses_of(model, config, rank: int, step: int, micro_step: int) -> torch.Tensor:
    """Sum of the losses of a micro-batch over a number of losses that differs from step to step."""
    output = model(**batch_of(config.model, rank + 1, step, micro_step))
    return (output.mlm_losses.sum() + output.next_sentence_losses.sum()) / (100 + 7 * step)


def plain(world_size: int) -> dict:
    """Weights after each step, and norms, by torch alone: one process, gradients added up, its own AdamW."""
    from cloze.launch.engine.optimizers import parameter_groups
    from cloze.launch.pretrain.first_model import build_model

    torch.set_num_threads(1)
    config = config_of(0, "fp32", world_size)
    model = build_model(config)
    groups = parameter_groups(model, config.optimizer)
    optimizer = torch.optim.AdamW(
        groups, lr=1.0, betas=tuple(config.optimizer.betas), eps=config.optimizer.eps, fused=True
    )
    weights, norms = [], []
    for step, rate in enumerate(RATES):
        optimizer.zero_grad()
        for rank in range(world_size):
            for micro_step in range(MICRO_STEPS):
                losses_of(model, config, rank, step, micro_step).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        if step != POISONED:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        weights.append({name: each.detach().clone() for name, each in model.named_parameters()})
    return {"weights": weights, "norms": norms}


def contract_main(precisions: list[tuple[int, str]], folder: Path, _command: list[str]) -> int:
    """What `cloze.launch.engine.engine.Engine` does, for each (stage, precision)."""
    with joined() as (environment, _):
        found = {key: _trained(*key, environment, folder) for key in precisions}
        torch.save(found, folder / f"{environment.rank}.pt")
    return 0


def _trained(stage: int, precision: str, environment, folder: Path) -> dict:
    from cloze.launch.checkpoint.deepspeed_files import load_pickled

    config = config_of(stage, precision, environment.world_size)
    engine = _engine(config, environment)
    seen = _Seen()
    found: dict = {"dtype": str(engine.dtype), "precision": engine.precision, "outcomes": [], "weights": []}
    for step, rate in enumerate(RATES):
        if step == SAVED:
            _save(engine, place := folder / f"{stage}-{precision}")
            found["files"] = sorted(path.name for path in place.iterdir())
        outcome = _step(engine, config, environment, step, rate, seen)
        found["outcomes"].append((float(outcome.skipped), float(outcome.gradient_norm), outcome.rate))
        found["weights"].append({name: engine.full_parameter(each) for name, each in engine.model.named_parameters()})
    found["masters"] = {each.name: (each.start, each.values.flatten().clone()) for each in engine.fragments()}
    found["seen"] = seen.norms
    other = _engine(config, environment)
    assert other.load(place, load_pickled, SAVED - 1), "DeepSpeed's files are there"
    for step in range(SAVED, len(RATES)):
        _step(other, config, environment, step, RATES[step])
    found["resumed"] = {name: other.full_parameter(each) for name, each in other.model.named_parameters()}
    name, parameter = next(iter(other.model.named_parameters()))
    other.set_parameter(parameter, torch.arange(found["resumed"][name].numel(), dtype=torch.float32))
    found["set"] = other.full_parameter(parameter)
    other.close()
    engine.close()
    return found


def _engine(config, environment):
    from cloze.launch.engine.config import deepspeed_config
    from cloze.launch.engine.engine import Engine
    from cloze.launch.pretrain.first_model import build_model

    settings = deepspeed_config(config, environment.world_size)
    engine = Engine(build_model(config), config, settings, torch.device("cpu"))
    engine.model.train()
    return engine


def _step(engine, config, environment, step: int, rate: float, seen=None, micro_steps: int = MICRO_STEPS):
    for micro_step in range(micro_steps):
        loss = losses_of(engine, config, environment.rank, step, micro_step)
        if step == POISONED and environment.rank == environment.world_size - 1 and micro_step == 0:
            loss = loss + float("inf")
        engine.backward(loss, last=micro_step == micro_steps - 1)
    if seen is None:
        return engine.step(rate)
    seen.sums = [0.0, 0.0]
    with engine.watch_update(seen.before, seen.after):
        outcome = engine.step(rate)
    seen.norms.append(tuple(seen.sums))
    return outcome


class _Seen:
    """Squares of gradient and update of what this process updates, in each step."""

    def __init__(self) -> None:
        self.norms: list[tuple[float, float]] = []
        self.sums = [0.0, 0.0]
        self._before: list[torch.Tensor] = []

    def before(self, parts) -> None:
        parts = list(parts)
        self.sums[0] += sum(float(gradient.double().square().sum()) for _, _, gradient in parts)
        self._before = [weight.clone() for _, weight, _ in parts]

    def after(self, parts) -> None:
        pairs = zip(parts, self._before, strict=True)
        self.sums[1] += sum(float((weight - before).double().square().sum()) for (_, weight, _), before in pairs)


# ---- whole tensors, divided among the ranks ------------------------------------------------------------------------

WHOLE = "lamb", "muon", "stable_adamw"
"""Optimizers that update whole tensors."""
RUNS = (0, 2), (1, 2), (0, 1), (2, 1), (2, 2)
"""Stages and numbers of micro-batches of a step: at stage 2 the ranks sum after each."""


def plain_division(name: str, world_size: int, micro_steps: int, *, ranks_first: bool) -> dict[str, torch.Tensor]:
    """Weights after all steps, by one process with the optimizer alone.

    Args:
        ranks_first: whether the gradients of a micro-batch are added over the ranks before those of the next.
    """
    from cloze.launch.engine.optimizers import build_optimizer
    from cloze.launch.pretrain.first_model import build_model

    torch.set_num_threads(1)
    config = config_of(0, "fp32", world_size, name)
    model = build_model(config)
    optimizer = build_optimizer(model, config.optimizer, 1.0)
    parameters = list(model.parameters())

    def gradients(rank: int, step: int, micro_steps: range) -> list[torch.Tensor]:
        optimizer.zero_grad()
        for micro_step in micro_steps:
            losses_of(model, config, rank, step, micro_step).backward()
        return [each.grad.clone() for each in parameters]

    for step, rate in enumerate(RATES):
        parts = [range(number, number + 1) for number in range(micro_steps)] if ranks_first else [range(micro_steps)]
        sums: list[torch.Tensor] | None = None
        for part in parts:
            of_ranks = [gradients(rank, step, part) for rank in range(world_size)]
            added = [torch.stack(each).sum(0) if len(each) > 2 else sum(each) for each in zip(*of_ranks, strict=True)]
            sums = added if sums is None else [before + now for before, now in zip(sums, added, strict=True)]
        for parameter, gradient in zip(parameters, sums, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(parameters, CLIPPING)
        if step != POISONED:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["lr_scale"]
            optimizer.step()
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def division_main(folder: Path, _command: list[str]) -> int:
    """Trains with each optimizer that needs whole tensors, at each stage; saves what `loads_main` reads."""
    with joined() as (environment, _):
        found = {}
        for name, (stage, micro_steps) in product(WHOLE, RUNS):
            config = config_of(stage, "fp32", environment.world_size, name)
            train = replace(config.train, global_batch_size=3 * micro_steps * environment.world_size)
            engine = _engine(replace(config, train=train), environment)
            gradients = _noted_gradients(engine)
            for step, rate in enumerate(RATES):
                _step(engine, config, environment, step, rate, micro_steps=micro_steps)
            if micro_steps == 2:
                _save(engine, folder / f"{name}-{stage}")
            found[name, stage, micro_steps] = {
                "weights": {name: each.detach().clone() for name, each in engine.model.named_parameters()},
                "states": _states(engine),
                "gradients": gradients,
                "owners": engine._division.owners if engine._division else None,
                "fragments": [each.name for each in engine.fragments()],
            }
            engine.close()
        torch.save(found, folder / f"{environment.rank}-of-{environment.world_size}.pt")
    return 0


def loads_main(source: Path, folder: Path, _command: list[str]) -> int:
    """Loads what `division_main` saved at each stage, here at each stage; an engine forgets one before the next."""
    from cloze.launch.checkpoint.deepspeed_files import load_pickled
    from cloze.launch.engine.fragments import base_optimizer

    with joined() as (environment, _):
        found = {}
        for name, stage in product(WHOLE, (0, 1, 2)):
            engine = _engine(config_of(stage, "fp32", environment.world_size, name), environment)
            for saved in (0, 1, 2):
                assert engine.load(source / f"{name}-{saved}", load_pickled, len(RATES) - 1)
                weights = {name: each.detach().clone() for name, each in engine.model.named_parameters()}
                found[name, saved, stage] = {"weights": weights, "states": _states(engine)}
                for each in engine.model.parameters():
                    each.data.zero_()
                base_optimizer(engine._deepspeed).state.clear()
            engine.close()
        torch.save(found, folder / f"{environment.rank}-of-{environment.world_size}.pt")
    return 0


def _noted_gradients(engine) -> list[list[str]]:
    """Names of the parameters that have a gradient when it is clipped, in each step from now on."""
    clip, noted = engine._clip, []

    def note_and_clip() -> torch.Tensor:
        noted.append([name for name, each in engine.model.named_parameters() if each.grad is not None])
        return clip()

    engine._clip = note_and_clip
    return noted


def _save(engine, place: Path) -> None:
    from cloze.launch.checkpoint.writing import BackgroundWriter
    from cloze.launch.system import distributed

    writer = BackgroundWriter()
    engine.save(place, writer.submit)
    writer.result(place)
    distributed.barrier()


def _states(engine) -> dict[str, dict[str, torch.Tensor]]:
    """This rank's optimizer states by the names of the parameters."""
    from cloze.launch.engine.fragments import base_optimizer

    names = {each: name for name, each in engine.model.named_parameters()}
    states = base_optimizer(engine._deepspeed).state
    return {names[each]: {key: value.clone() for key, value in state.items()} for each, state in states.items()}
