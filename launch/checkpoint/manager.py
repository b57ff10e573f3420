"""The checkpoints folder of a run: publish, verify, find, load and delete checkpoints."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch

from cloze.launch.checkpoint.averages import whole_average
from cloze.launch.checkpoint.deepspeed_files import (
    DurableCheckpointEngine,
    convert_to_universal,
    load_pickled,
    plain_path,
    whole_weights,
)
from cloze.launch.checkpoint.saving import BackgroundWriter
from cloze.launch.checkpoint.state import TrainState, damage, describe, read_state
from cloze.launch.engine.repairs import kept_hyper_parameters, padding_can_be_loaded
from cloze.launch.engine.state import Engine
from cloze.launch.system import distributed
from cloze.launch.system.environment import Environment
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import readable_errors, sync_folder

# fp32 master weight, two Adam moments, a moving average, a 16-bit or fp32 copy of the weight, for each parameter.
_BYTES_PER_PARAMETER = 20
# What the name of a checkpoint ends with while another one takes its place.
_REPLACED = ".replaced.tmp"


@dataclass(frozen=True)
class _Writing:
    """A checkpoint on its way to the disk."""

    writer: BackgroundWriter
    aside: Path
    state: TrainState
    facts: dict
    local: bool
    """Whether it is only for a restart on the same machines."""


class CheckpointManager:
    """The checkpoints of one run, `FOLDER/step-00001000/`. Saving and loading are collective."""

    def __init__(self, folder: Path, environment: Environment, device: torch.device, *, keep_last: int = 2,
                 warn: Callable[[str], None] = print, run: CheckpointManager | None = None) -> None:
        """run: those of the run that these of another one are loaded for: beside them converted ones lie until they are
        loaded, on each machine that has a place of its own; None: these are the run's."""
        self.folder = folder
        self._for = run
        self.environment = environment
        self.device = device
        self.keep_last = keep_last
        self.warn = warn
        self._good: set[int] = set()  # steps that verified or were written in this process
        self._damaged: set[int] = set()
        self._writing: _Writing | None = None
        self._best: set[int] = set()  # the step of the best evaluation, as the newest checkpoint has it

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return self.folder / f"step-{step:08d}"

    @property
    def leads(self) -> bool:
        """Whether this process looks after the folder."""
        return self._for.leads if self._for else self.environment.is_main

    @property
    def workplace(self) -> Path:
        """Where converted checkpoints lie."""
        return self._for.folder if self._for else self.folder

    @staticmethod
    def _rank_file(rank: int) -> str:
        return f"rank-{rank:05d}.pt"

    def steps(self) -> list[int]:
        """Steps of the published checkpoints, ascending, damaged ones included."""
        if not self.folder.is_dir():
            return []
        names = (path.name.removeprefix("step-") for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(name) for name in names if name.isdigit())

    def _good_steps(self) -> Iterator[int]:
        """Steps of the checkpoints that verify, newest first; a damaged one is reported, once, and passed over."""
        for step in reversed(self.steps()):
            if step not in self._good | self._damaged:
                problem = damage(self.path(step))
                (self._damaged if problem else self._good).add(step)
                if problem:
                    self.warn(f"{self.path(step)}: damaged ({problem}); passed over")
            if step in self._good:
                yield step

    def latest(self) -> int | None:
        """Step of the newest checkpoint that verifies; each damaged one is reported and passed over."""
        return next(self._good_steps(), None)

    def take_up(self) -> None:
        """Publish what a process was replacing a checkpoint by when it died with both of them aside, or else the old
        one: as a rule the new one is whole by then. For the one process that holds the run."""
        for replaced in self.folder.glob("step-*" + _REPLACED):
            final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
            if final.exists():
                continue
            aside = final.with_name(final.name + ".tmp")
            with readable_errors(final):
                os.replace(aside if aside.is_dir() and damage(aside) is None else replaced, final)
            self.warn(f"{final}: an earlier process died while it replaced this checkpoint; it is taken up again")

    def agree_on_latest(self) -> int | None:
        """`latest` of rank 0, on every rank; for a process that holds the run."""
        if self.environment.is_main:
            self.take_up()
        found = self.latest() if self.environment.is_main else None
        step = distributed.from_main(-1 if found is None else found, self.device)
        return None if step < 0 else step

    def save(self, engine: Engine, state: TrainState, facts: dict, rank_state: dict[str, torch.Tensor],
             files: Mapping[str, dict] = MappingProxyType({}), *, local: bool = False) -> None:
        """Copy everything to host memory and begin to write it; `publish` makes a checkpoint of it. Collective.

        Args:
            facts: plain values kept in state.json beside the state.
            rank_state: tensors that belong to this rank alone; its random state is added.
            files: by their names what further files of this rank hold, tensors and plain values.
            local: whether a run in a store keeps it on its machines' scratch only (checkpoint.local).

        Raises:
            UserError: the disk has too little room, or what was being written before could not be.
        """
        self.publish()
        aside = self.path(state.step).with_name(self.path(state.step).name + ".tmp")
        with self._together("make room"), readable_errors(aside):
            if self.leads:
                self._make_room(engine, aside)
        durable = DurableCheckpointEngine()
        engine.checkpoint_engine = durable
        with readable_errors(aside):
            engine.save_checkpoint(str(self.folder), tag=aside.name, save_latest=False)
        durable.save({**rank_state, **_rng_state(self.device)}, str(aside / self._rank_file(self.environment.rank)))
        for name, content in files.items():
            durable.save(content, str(aside / name))
        self._writing = _Writing(durable.writer, aside, state, {
            **asdict(state), "world_size": self.environment.world_size, **facts,
        }, local)

    def _together(self, what: str) -> AbstractContextManager[None]:
        return distributed.together(what, self.folder, self.device)

    def votes(self) -> int:
        """This rank's for calling `publish`, which all do once there are as many as ranks: 1 if it has written all of a
        checkpoint that is not published yet, or has failed to."""
        return int(self._writing is not None and self._writing.writer.done())

    @property
    def must_end(self) -> bool:
        """Whether the run must stop, since `publish`: it is saved then, and `finish` says why."""
        return False

    def publish(self) -> None:
        """Wait until every rank has written and verified its files, then publish them. Collective.

        Raises:
            UserError: the disk is full or refuses; nothing half-written carries a checkpoint's name.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        step, mine = writing.state.step, {}
        with self._together("write its part of a checkpoint"):
            mine = writing.writer.result(writing.aside)
        # Each rank vouches for its own files.
        parts = distributed.gather_texts(json.dumps(mine), self.device)
        here, facts = self._as_here(parts, writing.facts)
        with self._together("publish a checkpoint"), readable_errors(writing.aside):
            if self.leads:
                self._publish(writing.aside, self.path(step), here, facts)
        self._good.add(step)
        self._best = {writing.state.best_step}
        self._published(step, parts, facts, writing.local)

    def _as_here(self, parts: list[str], facts: dict) -> tuple[list[str], dict]:
        """Of what each rank vouches for, what lies in this folder; and what state.json says there."""
        return parts, facts

    def _published(self, step: int, parts: list[str], state: dict, local: bool) -> None:
        """Called on every rank for what has just been published in the folder, where it counts."""
        self._damaged.discard(step)

    def finish(self, best: int | None, beat: Callable[[], None]) -> None:
        """End the run's saving: publish what is written, and with `best`, as in `retire`, remove old checkpoints.
        Collective.

        Args:
            beat: called while it waits.

        Raises:
            UserError: as `publish`.
        """
        beat()
        self.publish()
        if best is not None:
            self.retire(best)

    def _make_room(self, engine: Engine, aside: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob("step-*.tmp"):
            try:
                shutil.rmtree(stale)
            except OSError as error:  # a file that is open over NFS, say
                if stale == aside:
                    raise
                self.warn(f"{stale}: could not be removed ({error.strerror}); the next save tries again")
        count = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
        free = shutil.disk_usage(self.folder).free
        if free < count * _BYTES_PER_PARAMETER:
            raise UserError(f"{aside.with_suffix('')}: found {free:,} bytes free, expected at least "
                            f"{count * _BYTES_PER_PARAMETER:,} for a checkpoint; free space and run again")

    def _publish(self, aside: Path, final: Path, parts: list[str], state: dict) -> None:
        checksums: dict[str, tuple[int, str]] = {}
        for rank, part in enumerate(parts):
            files = json.loads(part)
            checksums.update(files)
            if missing := [name for name in files if not (aside / name).is_file()]:
                raise UserError(f"output: found no {missing[0]} of process {rank} in {aside}, expected the files of "
                                "all processes; --output must be a folder that all machines share")
        describe(aside, checksums, state)
        # One of the same step: damaged, so that `latest` has passed over it, or of before the step's evaluation.
        replaced = final.with_name(final.name + _REPLACED)
        if final.exists():  # a death between the two renames is made good by `take_up`
            os.replace(final, replaced)
        os.replace(aside, final)
        sync_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)  # what is left of it goes with the next save

    def retire(self, best: int) -> None:
        """Remove all but the newest good checkpoints and that of the best evaluation.

        Call it when the newest has proven itself: the weights of a checkpoint may be lost without any loss having seen
        them yet, and it must not push out the good ones. Damaged ones stay, since some may only be out of reach.

        Args:
            best: step of the best evaluation. As long as the newest checkpoint knows of another, that one stays too.
        """
        if not self.environment.is_main:
            return
        old = set(self.steps()[:-self.keep_last]) - {best, *self._best}
        # Those of before a resume are verified here at the latest: a damaged one must not take a good one's place.
        kept = islice(self._good_steps(), self.keep_last) if old else ()
        for step in old.difference(kept) - self._damaged:
            # Renamed first: a removal that is cut short must not leave a folder that looks like a checkpoint.
            doomed = self.path(step).with_name(self.path(step).name + ".tmp")
            try:
                shutil.rmtree(doomed, ignore_errors=True)
                os.replace(self.path(step), doomed)
                shutil.rmtree(doomed)
            except OSError as error:  # a file that is open over NFS, say; the next save tries again
                self.warn(f"{doomed}: an old checkpoint could not be removed ({error.strerror})")

    def state(self, step: int) -> dict:
        """What state.json of a checkpoint holds, the facts of `save` among it."""
        return read_state(self.path(step))

    def is_elastic(self, step: int) -> bool:
        """Whether a checkpoint was partitioned over another number of processes, so that it must be converted."""
        state = self.state(step)
        return state["zero_stage"] > 0 and state["world_size"] != self.environment.world_size

    def _universal(self, step: int) -> Path:
        # Removed after loading; of this ending, so that the next save removes it if the process dies before.
        return self.workplace / (self.path(step).name + ".universal.tmp")

    def bring(self, step: int | None) -> int | None:
        """Have all files of a checkpoint (None: of the newest) in this machine's folder; returns which one. Collective.

        Raises:
            UserError: it is damaged where it lies, or can't be brought.
        """
        return step

    def convert(self, step: int) -> None:
        """Make the universal form of a checkpoint, from which any number of processes can load. Collective.

        Raises:
            UserError: the disk has too little room or refuses, or the checkpoint holds anything but tensors.
        """
        with self._together("convert a checkpoint"), readable_errors(self._universal(step)):
            if self.leads:
                self.workplace.mkdir(parents=True, exist_ok=True)
                convert_to_universal(self.path(step), self._universal(step))

    def load(self, engine: Engine, step: int) -> tuple[TrainState, list[dict[str, torch.Tensor]]]:
        """Restore weights, optimizer and random state from a published checkpoint, converted if it is elastic.

        Returns:
            The state, and the rank states that are this rank's to go on from: its own; with another number of
            processes all of them on rank 0 and none elsewhere.

        Raises:
            UserError: it was saved at another ZeRO stage.
        """
        folder = self.path(step)
        state = read_state(folder)
        world_size, stage = state["world_size"], state["zero_stage"]
        if stage != engine.zero_optimization_stage():
            raise UserError(f"{folder}: found a checkpoint of zero.stage {stage}, expected "
                            f"{engine.zero_optimization_stage()}; continue with --zero.stage {stage}")
        # A field that a checkpoint of an earlier version lacks has its default.
        restored = TrainState(**{name: state[name] for name in TrainState.__dataclass_fields__ if name in state})
        engine.checkpoint_engine = DurableCheckpointEngine()
        source = self._universal(step) if self.is_elastic(step) else folder
        # DeepSpeed prints what it loads, on every rank.
        with (kept_hyper_parameters(engine, restored.optimizer_steps), padding_can_be_loaded(engine),
              contextlib.redirect_stdout(io.StringIO()), plain_path(source.parent) as place):
            path, _ = engine.load_checkpoint(str(place), tag=source.name)
        if path is None:
            raise UserError(f"{folder}: DeepSpeed found nothing to load there, expected its sharded files; "
                            "remove the folder to continue from an older checkpoint")
        if source != folder:
            distributed.barrier()
            if self.leads:
                shutil.rmtree(source, ignore_errors=True)  # what is left of it goes with the next save
        if world_size == self.environment.world_size:
            rank_states = [load_pickled(folder / self._rank_file(self.environment.rank))]
            _set_rng_state(rank_states[0], self.device)
        else:
            ranks = range(world_size) if self.environment.is_main else ()
            rank_states = [load_pickled(folder / self._rank_file(rank)) for rank in ranks]
        self._best = {restored.best_step}
        return restored, rank_states


def _rng_state(device: torch.device) -> dict:
    state = {"rng_cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["rng_cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_rng_state(state: dict, device: torch.device) -> None:
    torch.set_rng_state(state["rng_cpu"])
    if device.type == "cuda" and "rng_cuda" in state:
        torch.cuda.set_rng_state(state["rng_cuda"], device)


def read_weights(run: Path, step: int | Literal["best"] | None = None, warn: Callable[[str], None] = print, *,
                 ema: bool = False) -> tuple[int, dict[str, torch.Tensor]]:
    """fp32 weights of a run's checkpoint, whole, from any ZeRO stage; and its step.

    Args:
        step: None: the newest good one; best: that of the best evaluation which the newest good one knows of.
        ema: their moving average instead.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    manager = CheckpointManager(run / "checkpoints", Environment(), torch.device("cpu"), warn=warn)
    wanted = step
    if not isinstance(step, int):
        step = manager.latest()
        if step is None:
            raise UserError(f"{run}: found no good checkpoint under checkpoints/, expected a folder that `cloze "
                            "pretrain` wrote; train first, or give the run's folder")
        if wanted == "best":
            step = read_state(manager.path(step))["best_step"]
    if step not in manager.steps() or (step not in manager._good and damage(manager.path(step))):
        found = ", ".join(map(str, manager.steps())) or "none"
        raise UserError(f"{run}: no good checkpoint of step {step}; the run has {found}"
                        + ("; train with --evaluation.keep_best true to keep the best" if wanted == "best" else ""))
    weights = whole_weights(manager.path(step))
    return step, whole_average(manager.path(step), weights) if ema else weights


def checkpoint_steps(run: Path) -> list[int]:
    """Steps of a run's published checkpoints, ascending, damaged ones included."""
    return CheckpointManager(run / "checkpoints", Environment(), torch.device("cpu")).steps()


def read_average(run: Path, count: int, step: int | Literal["best"] | None = None,
                 warn: Callable[[str], None] = print, *, ema: bool = False
                 ) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The mean of the fp32 weights of the checkpoint that `step` names, as in `read_weights`, and of the `count` - 1
    before it; and their steps, ascending. Buffers and parameters alike; sums are made in fp64.

    Raises:
        UserError: as `read_weights`, or the run has fewer checkpoints up to there.
    """
    last, weights = read_weights(run, step, warn, ema=ema)
    steps = [each for each in checkpoint_steps(run) if each <= last][-count:]
    if len(steps) < count:
        raise UserError(f"{run}: found {len(steps)} checkpoints up to step {last}, expected the {count} that are to be "
                        "averaged; train with a larger --checkpoint.keep_last, or average fewer")
    sums = {name: tensor.double() for name, tensor in weights.items()}
    for each in steps[:-1]:
        for name, tensor in read_weights(run, each, warn, ema=ema)[1].items():
            sums[name] += tensor
    return steps, {name: (total / count).to(weights[name].dtype) for name, total in sums.items()}
