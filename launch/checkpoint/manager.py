"""The checkpoints of a run that trains: save, publish, load, convert and delete them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import serialization

from cloze.launch.checkpoint.converting import convert_to_universal
from cloze.launch.checkpoint.deepspeed_files import (
    MODEL_FILE,
    known_content,
    load_own,
    load_pickled,
    plain_path,
    written_by,
)
from cloze.launch.checkpoint.folder import CheckpointFolder
from cloze.launch.checkpoint.shared_reading import read_once
from cloze.launch.checkpoint.state import (
    STATE,
    TrainState,
    damage,
    read_state,
    sharding_stage,
    train_state,
    write_state,
)
from cloze.launch.checkpoint.writing import BackgroundWriter
from cloze.launch.engine.content import OtherContent, check_tensor, of_file
from cloze.launch.engine.engine import Engine
from cloze.launch.run.runs import CONFIG, RUN
from cloze.launch.system import distributed
from cloze.launch.system.environment.launchers import Environment
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import clear, readable_errors, sync_folder

# Per parameter: fp32 master weight, two Adam moments, a moving average, a 16-bit or fp32 copy of the weight.
_BYTES_PER_PARAMETER = 20
# What says how files are read; it has its methods at run time alone.
_READING: Any = serialization.config
# Suffix of a checkpoint's name while a new one of the same step replaces it.
_REPLACED = ".replaced.tmp"


@dataclass(frozen=True)
class _Writing:
    """A checkpoint that is being written."""

    writer: BackgroundWriter
    aside: Path
    state: TrainState
    facts: Fields
    local: bool
    """Whether it is only for a restart on the same machines."""


class CheckpointManager(CheckpointFolder):
    """The checkpoints that a run saves and goes on from. Saving and loading are collective."""

    def __init__(
        self,
        folder: Path,
        environment: Environment,
        device: torch.device,
        *,
        keep_last: int = 2,
        warn: Callable[[str], None],
        run: CheckpointManager | None = None,
    ) -> None:
        """run: for the checkpoints of another run, from which this run starts: those of this run, beside which
        converted ones are stored until they are loaded; None: these are this run's own.
        """
        super().__init__(folder, warn)
        self._for = run
        self.environment = environment
        self.device = device
        self.keep_last = keep_last
        self._writing: _Writing | None = None
        self._best: set[int] = set()  # the step of the best evaluation by the newest checkpoint
        self._found: set[int] = set()  # steps of the checkpoints that were there when the run went on

    @property
    def leads(self) -> bool:
        """Whether this process makes room in the folder, publishes there and converts checkpoints."""
        return self._for.leads if self._for else self.environment.is_main

    @property
    def workplace(self) -> Path:
        """The folder of converted checkpoints."""
        return self._for.folder if self._for else self.folder

    @staticmethod
    def _rank_file(rank: int) -> str:
        return f"rank-{rank:05d}.pt"

    def finish_replacements(self) -> None:
        """Complete replacements of checkpoints that were interrupted between the two renames: publish the new
        checkpoint if it is undamaged, else the old one. For the one process that holds the run; one that reads
        another run's leaves them, since that may be at work.
        """
        for replaced in self.folder.glob("step-*" + _REPLACED):
            final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
            if final.exists():
                continue
            if self._for is not None:
                self.warn(f"{final}: is being replaced, or was when its run was killed, which mends it; skipped")
                continue
            aside = final.with_name(final.name + ".tmp")
            with readable_errors(final):
                os.replace(aside if aside.is_dir() and damage(aside) is None else replaced, final)
            self.warn(f"{final}: an earlier process died while it replaced this checkpoint; completed the replacement")

    def agree_on_latest(self) -> int | None:
        """Rank 0's `latest`, on every rank, after `finish_replacements`. Collective."""
        if self.environment.is_main:
            self.finish_replacements()
        found = self.latest() if self.environment.is_main else None
        step = distributed.from_main(-1 if found is None else found, self.device)
        return None if step < 0 else step

    def save(
        self,
        engine: Engine,
        state: TrainState,
        facts: Fields,
        rank_state: dict[str, torch.Tensor],
        files: Mapping[str, Fields] = MappingProxyType({}),
        *,
        local: bool = False,
    ) -> None:
        """Copy everything to host memory and begin to write it; `publish` completes the checkpoint. Collective.

        Args:
            facts: plain values kept in state.json beside the state.
            rank_state: tensors of this rank only; its random state is added.
            files: contents of further files of this rank by name, tensors and plain values.
            local: whether a run in a store keeps it only on its machines' scratch (checkpoint.local).

        Raises:
            UserError: the disk has too little space, or the checkpoint before could not be written.
        """
        self.publish()
        aside = self.path(state.step).with_name(self.path(state.step).name + ".tmp")
        with self._together("make room"), readable_errors(aside):
            if self.leads:
                self._make_room(engine, aside)
        writer = BackgroundWriter()

        def submit(content: Fields, path: Path) -> None:
            writer.submit(content | written_by(state.step, facts.get(RUN), path.name), path)

        with readable_errors(aside):
            engine.save(aside, submit)
        own = {self._rank_file(self.environment.rank): {**rank_state, **_rng_state(self.device)}, **files}
        for name, content in own.items():
            submit(content, aside / name)
        self._writing = _Writing(
            writer,
            aside,
            state,
            {
                **asdict(state),
                "world_size": self.environment.world_size,
                **facts,
            },
            local,
        )

    def _together(self, what: str) -> AbstractContextManager[None]:
        return distributed.together(what, self.folder, self.device)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written, or waits to be published; alike on all ranks."""
        return self._writing is not None

    def publish_votes(self) -> int:
        """This rank's votes for `publish`, which all ranks call once the votes of all add up to the world size: 1 if
        this rank has finished or failed writing its part of an unpublished checkpoint.
        """
        return int(self._writing is not None and self._writing.writer.done())

    @property
    def must_end(self) -> bool:
        """Whether the run must stop, as decided in `publish`: it is then saved, and `finish` raises the reason."""
        return False

    def publish(self) -> None:
        """Wait until every rank has written its files, then publish them. Collective.

        Raises:
            UserError: the disk is full or can't be written; no incomplete folder has the name of a checkpoint.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        step, mine = writing.state.step, {}
        with self._together("write its part of a checkpoint"):
            mine = writing.writer.result(writing.aside)
        parts = distributed.gather_texts(json.dumps(mine), self.device)
        here, facts = self._in_this_folder(parts, writing.facts)
        with self._together("publish a checkpoint"), readable_errors(writing.aside):
            if self.leads:
                self._publish(writing.aside, self.path(step), here, facts)
        self._good.add(step)
        self._best = {writing.state.best_step}
        self._published(step, parts, facts, writing.local)

    def _in_this_folder(self, parts: list[str], facts: Fields) -> tuple[list[str], Fields]:
        """The ranks' lists of files restricted to this folder, and the content of its state.json."""
        return parts, facts

    def _published(self, step: int, parts: list[str], state: Fields, local: bool) -> None:
        """Called on every rank after a checkpoint was published in the folder."""
        self._damaged.discard(step)

    def finish(self, best: int | None, beat: Callable[[], None]) -> None:
        """Publish what is written, and with `best`, as in `retire`, remove old checkpoints, at the end of a run.
        Collective.

        Args:
            beat: called while it waits.

        Raises:
            UserError: as `publish`; or the newest checkpoint is not there any more.
        """
        beat()
        self.publish()
        with self._together("look for the last checkpoint"):
            if self.leads:
                self.check_last()
        if best is not None:
            self.retire(best)

    def check_last(self) -> None:
        """Raise UserError if the newest checkpoint that was good, or that of the best evaluation, is not there any
        more, by the sizes of its files.
        """
        last = max(self._good, default=None)
        for step in sorted((self._good | self._found & self._best) & {last, *self._best}):
            if problem := damage(self.path(step), sizes_only=True):
                run, again = self.folder.parent, "the same command goes on from the newest one that is left"
                if step != last:
                    again = "the best weights are lost; the same command goes on from the last ones"
                elif not (run / CONFIG).exists():
                    again = f"remove what is left of {run}, and the same command begins anew"
                raise UserError(
                    f"{self.path(step)}: found that {problem}, expected the checkpoint as it was saved: something was "
                    f"removed while the run used the folder; {again}"
                )

    def _make_room(self, engine: Engine, aside: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.folder, os.W_OK | os.X_OK):  # DeepSpeed says nothing of it
            raise PermissionError(errno.EACCES, "permission denied", str(self.folder))
        for stale in self.folder.glob("step-*.tmp"):
            try:
                clear(stale)
            except OSError as error:  # a file that is open over NFS, say
                if stale == aside:
                    raise
                self.warn(f"{stale}: could not be removed ({error.strerror}); the next save tries again")
        count = sum(getattr(p, "ds_numel", p.numel()) for p in engine.model.parameters())
        free = shutil.disk_usage(self.folder).free
        if free < count * _BYTES_PER_PARAMETER:
            raise UserError(
                f"{aside.with_suffix('')}: found {free:,} bytes free, expected at least "
                f"{count * _BYTES_PER_PARAMETER:,} for a checkpoint; free space and run again"
            )

    def _publish(self, aside: Path, final: Path, parts: list[str], state: Fields) -> None:
        checksums: dict[str, tuple[int, str]] = {}
        for rank, part in enumerate(parts):
            files = json.loads(part)
            checksums.update(files)
            if missing := [name for name in files if not (aside / name).is_file()]:
                why = "--output must be a folder that all machines share"
                if rank == self.environment.rank:
                    why = "something was removed while the run used the folder; repeat the command to go on"
                raise UserError(
                    f"output: found no {missing[0]} of process {rank} in {aside}, expected the files of "
                    f"all processes; {why}"
                )
        write_state(aside, checksums, state)
        # One of the same step: damaged, so that `latest` has skipped it, or written before the step's evaluation.
        replaced = final.with_name(final.name + _REPLACED)
        if final.exists():  # an interruption between the two renames is handled by `finish_replacements`
            os.replace(final, replaced)
        os.replace(aside, final)
        sync_folder(self.folder)
        clear(replaced, ignore_errors=True)  # leftovers are removed by the next save

    def outlived(self, steps: Sequence[int], *best: int) -> set[int]:
        """Which of these checkpoints, in ascending order, are to be removed: all but the newest `keep_last` and the
        best ones: those of `best`, and what the newest checkpoint says.
        """
        return set(steps[: -self.keep_last]) - {*best, *self._best}

    def retire(self, best: int) -> None:
        """Remove all but the newest good checkpoints and that of the best evaluation.

        Call it after a good step from the newest one: weights may be NaN before any loss has shown it, and such a
        checkpoint must not replace good ones. Damaged ones stay, since they may only be temporarily unreadable.

        Args:
            best: step of the best evaluation. The best one by the newest checkpoint stays too.
        """
        if not self.environment.is_main:
            return
        old = self.outlived(self.steps(), best)
        # Checkpoints from before a resume are verified here at the latest: a damaged one must not count among those
        # kept.
        kept = islice(self.good_steps(), self.keep_last) if old else ()
        for step in old.difference(kept) - self._damaged:
            # Renamed first: an interrupted removal must not leave a folder that looks like a checkpoint.
            doomed = self.path(step).with_name(self.path(step).name + ".tmp")
            try:
                clear(doomed, ignore_errors=True)
                os.replace(self.path(step), doomed)
                clear(doomed)
            except OSError as error:  # a file that is open over NFS, say; the next save tries again
                self.warn(f"{doomed}: an old checkpoint could not be removed ({error.strerror})")

    def is_elastic(self, step: int) -> bool:
        """Whether a checkpoint was saved at another world size, so that it must be converted."""
        state = self.state(step)
        return sharding_stage(state) > 0 and state["world_size"] != self.environment.world_size

    def _universal(self, step: int) -> Path:
        # Removed after loading; with this suffix the next save removes it if the process dies before.
        return self.workplace / (self.path(step).name + ".universal.tmp")

    def bring(self, step: int | None) -> int | None:
        """Bring all files of a checkpoint (None: the newest) into this machine's folder; returns its step. Collective.

        Raises:
            UserError: it is damaged, or can't be fetched.
        """
        return step

    def convert(self, step: int) -> None:
        """Write the universal form of a checkpoint, which can be loaded at any world size. Collective.

        Raises:
            UserError: the disk has too little space or can't be written, or the checkpoint holds anything but tensors.
        """
        room = readable_errors(self._universal(step))
        with self._together("convert a checkpoint"), room, known_content(self.path(step)):
            if self.leads:
                self.workplace.mkdir(parents=True, exist_ok=True)
                convert_to_universal(self.path(step), self._universal(step), self.environment.world_size)

    def _read(self, path: str) -> Fields:
        """Content of a file that the engine asks for. Collective for the one that every rank asks for."""
        # A converted form is of files that were looked at when it was made.
        load = load_own if (Path(path).parent / STATE).is_file() else load_pickled
        if Path(path).name == MODEL_FILE:
            return read_once(partial(load, Path(path)), path, self.device)
        return load(Path(path))

    def load(self, engine: Engine, step: int) -> tuple[TrainState, list[dict[str, torch.Tensor]]]:
        """Restore weights, optimizer and random state from a published checkpoint, converted if it is elastic.

        Returns:
            The state, and the rank states for this rank to resume from: its own; at another world size all of them on
            rank 0, and none on other ranks.

        Raises:
            UserError: it was saved at another ZeRO stage, or holds the weights of another model.
        """
        folder = self.path(step)
        state = read_state(folder)
        world_size, stage = state["world_size"], sharding_stage(state)
        if stage != engine.sharding_stage:
            raise UserError(
                f"{folder}: found a checkpoint of zero.stage {stage}, expected "
                f"{engine.stage}; continue with --zero.stage {stage}"
            )
        restored = train_state(state)
        source = self._universal(step) if self.is_elastic(step) else folder
        # Of converted files, which hold whole tensors, each process reads its part alone.
        with (
            known_content(folder),
            plain_path(source.parent) as place,
            _READING.patch("load.mmap", source != folder),
        ):
            loaded = engine.load(place / source.name, self._read, restored.optimizer_steps)
        if not loaded:
            raise UserError(
                f"{folder}: DeepSpeed found nothing to load there, expected its sharded files; "
                "remove the folder to continue from an older checkpoint"
            )
        if source != folder:
            distributed.barrier()
            if self.leads:
                clear(source, ignore_errors=True)  # leftovers are removed by the next save
        if world_size == self.environment.world_size:
            name = self._rank_file(self.environment.rank)
            rank_states = [load_own(folder / name)]
            with known_content(folder), of_file(name):
                _set_rng_state(rank_states[0], self.device)
        else:
            ranks = range(world_size) if self.environment.is_main else ()
            rank_states = [load_own(folder / self._rank_file(rank)) for rank in ranks]
        self._best, self._found = {restored.best_step}, set(self.steps())
        return restored, rank_states


def _rng_state(device: torch.device) -> Fields:
    state = {"rng_cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["rng_cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_rng_state(state: Fields, device: torch.device) -> None:
    """Go on with the random state of a checkpoint, or raise OtherContent if it is none."""
    own = _rng_state(device)
    for name in [name for name in own if name == "rng_cpu" or name in state]:
        check_tensor(state.get(name), name, own[name].shape, own[name].dtype)
        try:
            if name == "rng_cpu":
                torch.set_rng_state(state[name])
            else:
                torch.cuda.set_rng_state(state[name], device)
        except RuntimeError as error:  # torch knows which of the values are a generator's
            raise OtherContent(f"{name} is no random state ({error!s:.60})") from error
