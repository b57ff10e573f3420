"""What each rank of a large world updates and saves: one rank by a live engine, all others by DeepSpeed's own code.

A real engine of one rank is built on the fake GPU. What its code would give to every other rank is asked of the same
methods, told that they run there; test_large_world.py compares both for ranks that are built as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

from tests.gpu.cases import Case, batch_size, configuration, join

# (parameter, first element, elements) of what a rank updates.
Fragment = tuple[str, int, int]


LAYERS = 2  # of BERT-base's width: as many small parameters a layer, in a sixth of the time


@dataclass(frozen=True)
class Place:
    """One rank of a run."""

    stage: int
    rank: int = 0
    world_size: int = 1024
    everyone: bool = True
    """Whether what all other ranks do is asked for too."""


@dataclass(frozen=True)
class Part:
    """What a rank updates, and what it writes into a checkpoint."""

    parameters: dict[str, int]
    """Elements of each."""
    padded: int
    """Elements of its partitions, with what pads them to one length."""
    own: list[Fragment]
    files: dict[str, int]
    """Bytes of tensors by file name: weights, masters, moments."""
    fragments: list[list[Fragment]]
    """Of every rank; empty if not asked for."""
    names: list[list[str]]
    """Files of every rank; empty if not asked for."""


def part(place: Place) -> dict:
    """What one rank has; to be called in a process of its own, which has joined no world yet."""
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size))
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.gpu.fake_cuda import watch

    join(place.rank, place.world_size)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, watch():
        mode.cache_enabled = False  # no two ranks' parts have the same place, and entries cost more than they save
        engine = _engine(place)
        found = Part(
            {
                name: getattr(parameter, "ds_numel", parameter.numel())
                for name, parameter in engine.module.named_parameters()
            },
            _padded(engine),
            _fragments(engine, place.rank),
            _files(engine, place.rank),
            [],
            [],
        )
        if place.everyone:
            ranks = range(place.world_size)
            found = replace(
                found,
                fragments=[_of_rank(engine, rank, _linked) for rank in ranks],
                names=[_of_rank(engine, rank, _names) for rank in ranks],
            )
    return asdict(found)


def _engine(place: Place):
    """Its engine, with the optimizer's states made."""
    import torch

    from cloze.launch.engine.building import build_deepspeed
    from cloze.launch.engine.config import deepspeed_config
    from cloze.launch.engine.fragments import base_optimizer
    from cloze.launch.pretrain.first_model import build_model
    from cloze.model.config import BertConfig

    config = configuration(Case(place.stage))
    config = replace(
        config,
        model=BertConfig(vocab_size=30522, num_hidden_layers=LAYERS),
        train=replace(config.train, global_batch_size=batch_size(place.world_size)),
    )
    engine = build_deepspeed(
        build_model(config), config, deepspeed_config(config, place.world_size), torch.device("cuda", 0)
    )
    optimizer = base_optimizer(engine)
    if place.stage == 3:
        engine.optimizer._set_fp32_optimizer_param_groups()  # which are there while it saves or steps, and not between
    for group in optimizer.param_groups:
        for flat in group["params"]:
            flat.grad = torch.zeros_like(flat)
    optimizer.step()
    if place.stage == 3:
        engine.optimizer._clear_fp32_optimizer_param_groups()
    return engine


def _padded(engine) -> int:
    if engine.zero_optimization_stage() == 3:
        return sum(parameter.partition_numel() for parameter in engine.module.parameters())
    return sum(flat.numel() for group in engine.optimizer.optimizer.param_groups for flat in group["params"])


def _fragments(engine, rank: int) -> list[Fragment]:
    """What the engine's own rank updates."""
    if engine.zero_optimization_stage() < 3:
        return [
            (name, mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel)
            for name, parameter in engine.module.named_parameters()
            if (mapping := parameter._hp_mapping) is not None
        ]
    return _of_stage_3(engine, rank)


def _of_stage_3(engine, rank: int) -> list[Fragment]:
    """Each parameter in equal parts (partition_parameters.py, _partition_param), the last ones of which may be short,
    or padding alone."""
    found = []
    for name, parameter in engine.module.named_parameters():
        size = parameter.ds_tensor.ds_numel
        assert size == parameter.partition_numel()
        start, end = rank * size, min((rank + 1) * size, parameter.ds_numel)
        if start < end:
            found.append((name, start, end - start))
    return found


def _of_rank(engine, rank: int, ask: Callable):
    """What DeepSpeed would do as that rank."""
    import deepspeed.comm

    with mock.patch.object(deepspeed.comm, "get_rank", lambda group=None: rank):
        return ask(engine, rank)


def _linked(engine, rank: int) -> list[Fragment]:
    if engine.zero_optimization_stage() < 3:
        engine.optimizer._link_all_hp_params()
    return _fragments(engine, rank)


def _names(engine, rank: int) -> list[str]:
    """Files that a rank writes: DeepSpeed decides who writes which when an engine is made."""
    from deepspeed.utils import groups

    from cloze.launch.checkpoint.manager import CheckpointManager

    engine.save_non_zero_checkpoint = False
    with mock.patch.object(groups, "_get_sequence_data_parallel_rank", lambda: rank):
        engine._configure_checkpointing()
    names = [CheckpointManager._rank_file(rank)]
    if engine.save_non_zero_checkpoint:
        names.append(Path(engine._get_ckpt_name("", "")).name)
    if engine.save_zero_checkpoint:
        names.append(Path(engine._get_zero_ckpt_name("", "")).name)
    return sorted(names)


def _files(engine, rank: int) -> dict[str, int]:
    """What `CheckpointManager.save` hands over to be written, by the name of its file."""
    import torch
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
    from torch.utils._pytree import tree_leaves

    from cloze.launch.checkpoint.manager import CheckpointManager

    files = {CheckpointManager._rank_file(rank): 0}  # random state and sums of the window: some kilobytes

    class Noting(CheckpointEngine):
        def create(self, info) -> None: ...
        def makedirs(self, *_, **__) -> None: ...

        def save(self, state_dict, path: str) -> None:
            storages = {
                leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes()
                for leaf in tree_leaves(state_dict)
                if isinstance(leaf, torch.Tensor)
            }
            files[Path(path).name] = sum(storages.values())

        def load(self, path: str, map_location=None) -> None: ...

        def commit(self, info) -> bool:
            return True

    engine.checkpoint_engine = Noting()
    with mock.patch.object(engine, "_copy_recovery_script", lambda _: None):
        engine.save_checkpoint("nowhere", tag="step", save_latest=False)
    return files
