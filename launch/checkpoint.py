"""Checkpoints: written aside, verified, published, found, retained; pickled files are read here and only here."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from launch import distributed
from launch.engine import base_optimizer
from launch.environment import Environment
from launch.saving import BackgroundWriter
from pipeline.errors import UserError
from pipeline.storage import publish_text, readable_errors, sha256_of, sync_folder

# Everything but tensors that DeepSpeed's files hold. A file with any other class in it is refused, by our loads and by
# DeepSpeed's own, which TORCH_FORCE_WEIGHTS_ONLY_LOAD (environment.py) holds to the same list.
ALLOWED_CLASSES = [LossScaler, DynamicLossScaler, fragment_address, ZeroStageEnum]
torch.serialization.add_safe_globals(ALLOWED_CLASSES)

CHECKSUMS = "checksums.json"
STATE = "state.json"
# fp32 master weight and two Adam moments, and a 16-bit or fp32 copy of the weight, for each parameter.
_BYTES_PER_PARAMETER = 16


@dataclass(frozen=True)
class TrainState:
    """Where a run stands; with the weights and optimizer states, all that a resume needs."""

    step: int = 0
    """Optimizer steps done."""
    samples_consumed: int = 0
    """Position in the endless stream of samples."""
    epoch: int = 0
    """Epoch of the last sample."""
    tokens: int = 0
    """Real tokens trained on, over all ranks."""
    seconds: float = 0.0
    """With a time budget, what was used of it before the last step, by rank 0's clock; 0 without."""
    evaluated_step: int = -1
    """Step of the last evaluation; -1: none yet."""
    best_step: int = -1
    """Step of the best evaluation; -1: none yet."""
    best_metric: str | None = None
    """The metric by which it is the best."""
    best_value: float | None = None
    """Its value there."""
    evaluations_since_best: int = 0
    """Evaluations without a better value."""
    skipped_steps: int = 0
    """Steps that changed nothing, since their gradient was infinite or NaN."""
    inherited_steps: int = 0
    """Steps that the optimizer had made in the run that this one took its moments from."""


@contextlib.contextmanager
def _only_tensors(path: str | Path) -> Iterator[None]:
    """Turn torch's refusal of anything but tensors, plain values and ALLOWED_CLASSES into a UserError."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; mend this, then run the same command again") from error
    except Exception as error:  # torch raises many kinds here; every one means the same to the user
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: found something other than tensors or a damaged file, expected a checkpoint; it was "
                        f"not loaded ({reason})") from error


def load_pickled(path: str | Path) -> dict:
    """Tensors and plain values of a file of torch.save, on the CPU.

    Raises:
        UserError: the file holds anything else, or is damaged.
    """
    with _only_tensors(path):
        return torch.load(path, map_location="cpu", weights_only=True)


class DurableCheckpointEngine(CheckpointEngine):
    """DeepSpeed's files through a BackgroundWriter on the way out and weights_only on the way in."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "cloze"
        self.writer = BackgroundWriter()

    def create(self, info) -> None:
        """Nothing to prepare."""

    def save(self, state_dict, path: str) -> None:
        partition = state_dict.get("optimizer_state_dict")
        if isinstance(partition, dict) and "partition_count" in partition:
            # BF16_Optimizer, which DeepSpeed takes for bf16 at stage 1, forgets it; its own tools ask for it.
            partition.setdefault("zero_stage", 1)
        self.writer.submit(state_dict, Path(path))

    def load(self, path: str, map_location=None) -> dict:
        return load_pickled(path)

    def commit(self, info) -> bool:
        return True


def damage(folder: Path) -> str | None:
    """What is wrong with a published checkpoint, or None if every file is as it was written."""
    try:
        checksums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        for name, (size, digest) in checksums.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, expected {size}"
            if sha256_of(path) != digest:
                return f"{name} has another SHA-256 than when it was written"
        read_state(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{CHECKSUMS} or {STATE} is missing or damaged ({type(error).__name__})"
    return None


def read_state(folder: Path) -> dict:
    """state.json of a checkpoint: the fields of TrainState, and `world_size`, `manifest_hash`, `zero_stage`, ..."""
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class _Writing:
    """A checkpoint on its way to the disk."""

    writer: BackgroundWriter
    aside: Path
    state: TrainState
    facts: dict


def optimizer_steps(state: dict) -> int:
    """Steps that an optimizer has made, of a state.json."""
    return state.get("inherited_steps", 0) + state["step"] - state["skipped_steps"]


class CheckpointManager:
    """The checkpoints of one run, `FOLDER/step-00001000/`. Saving and loading are collective."""

    def __init__(self, folder: Path, environment: Environment, device: torch.device, *, keep_last: int = 2,
                 warn: Callable[[str], None] = print) -> None:
        self.folder = folder
        self.environment = environment
        self.device = device
        self.keep_last = keep_last
        self.warn = warn
        self._good: set[int] = set()  # steps that verified or were written in this process
        self._damaged: set[int] = set()
        self._writing: _Writing | None = None
        self._best: set[int] = set()  # the step of the best evaluation, as the newest checkpoint has it

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    @staticmethod
    def _rank_file(rank: int) -> str:
        return f"rank-{rank:05d}.pt"

    def steps(self) -> list[int]:
        """Steps of the published checkpoints, ascending, damaged ones included."""
        if not self.folder.is_dir():
            return []
        names = (path.name.removeprefix("step-") for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(name) for name in names if name.isdigit())

    def latest(self) -> int | None:
        """Step of the newest checkpoint that verifies; each damaged one is reported and passed over."""
        for step in reversed(self.steps()):
            problem = None if step in self._good else damage(self._path(step))
            if problem is None:
                self._good.add(step)
                return step
            self._damaged.add(step)
            self.warn(f"{self._path(step)}: damaged ({problem}); passed over")
        return None

    def agree_on_latest(self) -> int | None:
        """`latest` of rank 0, on every rank."""
        found = self.latest() if self.environment.is_main else None
        step = distributed.from_main(-1 if found is None else found, self.device)
        return None if step < 0 else step

    def save(self, engine, state: TrainState, facts: dict, rank_state: dict[str, torch.Tensor]) -> None:
        """Copy everything to host memory and begin to write it; `publish` makes a checkpoint of it. Collective.

        Args:
            facts: plain values kept in state.json beside the state.
            rank_state: tensors that belong to this rank alone; its random state is added.

        Raises:
            UserError: the disk has too little room, or what was being written before could not be.
        """
        self.publish()
        aside = self._path(state.step).with_name(self._path(state.step).name + ".tmp")
        with self._together("make room"), readable_errors(aside):
            if self.environment.is_main:
                self._make_room(engine, aside)
        durable = DurableCheckpointEngine()
        engine.checkpoint_engine = durable
        with readable_errors(aside):
            engine.save_checkpoint(str(self.folder), tag=aside.name, save_latest=False)
        durable.save({**rank_state, **_rng_state(self.device)}, str(aside / self._rank_file(self.environment.rank)))
        self._writing = _Writing(durable.writer, aside, state, {
            **asdict(state), "world_size": self.environment.world_size, **facts,
        })

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """What fails on one rank fails on all: none is left waiting in a collective for one that is gone."""
        error = None
        try:
            yield
        except UserError as caught:
            error = caught
        failed = distributed.reduce_sum(torch.tensor([float(error is not None)], device=self.device)).item()
        if error is not None:
            raise error
        if failed:
            raise UserError(f"{self.folder}: found a process that could not {what}, expected all to; its own message "
                            "says why")

    def written(self) -> bool:
        """Whether this rank has written all of a checkpoint that is not published yet, or has failed to."""
        return self._writing is not None and self._writing.writer.done()

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
        with self._together("publish a checkpoint"), readable_errors(writing.aside):
            if self.environment.is_main:
                self._publish(writing.aside, self._path(step), parts, writing.facts)
        self._good.add(step)
        self._damaged.discard(step)
        self._best = {writing.state.best_step}

    def _make_room(self, engine, aside: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob("step-*.tmp"):
            shutil.rmtree(stale)
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
        publish_text(aside / STATE, json.dumps(state, indent=1) + "\n")
        checksums[STATE] = ((aside / STATE).stat().st_size, sha256_of(aside / STATE))
        publish_text(aside / CHECKSUMS, json.dumps(checksums, indent=1) + "\n")
        if final.exists():  # a damaged one of the same step, which `latest` has passed over
            shutil.rmtree(final)
        os.replace(aside, final)
        sync_folder(self.folder)

    def retire(self, best: int) -> None:
        """Remove all but the newest good checkpoints and that of the best evaluation.

        Call it when the newest has proven itself: the weights of a checkpoint may be lost without any loss having seen
        them yet, and it must not push out the good ones. Damaged ones stay, since some may only be out of reach.

        Args:
            best: step of the best evaluation. As long as the newest checkpoint knows of another, that one stays too.
        """
        if not self.environment.is_main or not self._good:
            return
        good = [step for step in self.steps() if step not in self._damaged]
        kept = {*good[-self.keep_last:], max(self._good), best, *self._best, *self._damaged}
        for step in set(self.steps()) - kept:
            # Renamed first: a removal that is cut short must not leave a folder that looks like a checkpoint.
            doomed = self._path(step).with_name(self._path(step).name + ".tmp")
            try:
                shutil.rmtree(doomed, ignore_errors=True)
                os.replace(self._path(step), doomed)
                shutil.rmtree(doomed)
            except OSError as error:  # a file that is open over NFS, say; the next save tries again
                self.warn(f"{doomed}: an old checkpoint could not be removed ({error.strerror})")

    def is_elastic(self, step: int) -> bool:
        """Whether a checkpoint was partitioned over another number of processes, so that it must be converted."""
        state = read_state(self._path(step))
        return state["zero_stage"] > 0 and state["world_size"] != self.environment.world_size

    def _universal(self, step: int) -> Path:
        # Removed after loading; of this ending, so that the next save removes it if the process dies before.
        return self._path(step).with_name(self._path(step).name + ".universal.tmp")

    def convert(self, step: int) -> None:
        """Make the universal form of a checkpoint, from which any number of processes can load. Collective."""
        if self.environment.is_main:
            folder, target = self._path(step), self._universal(step)
            shutil.rmtree(target, ignore_errors=True)
            arguments = Namespace(
                input_folder=str(folder), output_folder=str(target), keep_temp_folder=False, strict=True,
                # One worker runs in this process. Stages 1 and 2 lack what the converter wants of newer files.
                num_extract_workers=1, num_merge_workers=1, inject_missing_state=read_state(folder)["zero_stage"] < 3,
            )  # fmt: skip
            noise = io.StringIO()
            with _only_tensors(folder), contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
                ds_to_universal.main(arguments)
            (self.folder / "latest_universal").unlink(missing_ok=True)
        distributed.barrier()

    def load(self, engine, step: int) -> tuple[TrainState, list[dict[str, torch.Tensor]]]:
        """Restore weights, optimizer and random state from a published checkpoint, converted if it is elastic.

        Returns:
            The state, and the rank states that are this rank's to go on from: its own; with another number of
            processes all of them on rank 0 and none elsewhere.

        Raises:
            UserError: it was saved at another ZeRO stage.
        """
        folder = self._path(step)
        state = read_state(folder)
        world_size, stage = state["world_size"], state["zero_stage"]
        if stage != engine.zero_optimization_stage():
            raise UserError(f"{folder}: found a checkpoint of zero.stage {stage}, expected "
                            f"{engine.zero_optimization_stage()}; continue with --zero.stage {stage}")
        engine.checkpoint_engine = DurableCheckpointEngine()
        source = self._universal(step) if self.is_elastic(step) else folder
        with _kept_hyper_parameters(engine, optimizer_steps(state)):
            path, _ = engine.load_checkpoint(str(self.folder), tag=source.name)
        if path is None:
            raise UserError(f"{folder}: DeepSpeed found nothing to load there, expected its sharded files; "
                            "remove the folder to continue from an older checkpoint")
        if source != folder:
            distributed.barrier()
            if self.environment.is_main:
                shutil.rmtree(source)
        if world_size == self.environment.world_size:
            rank_states = [load_pickled(folder / self._rank_file(self.environment.rank))]
            _set_rng_state(rank_states[0], self.device)
        else:
            ranks = range(world_size) if self.environment.is_main else ()
            rank_states = [load_pickled(folder / self._rank_file(rank)) for rank in ranks]
        self._best = {state.get("best_step", -1)}
        # A field that a checkpoint of an earlier version lacks has its default.
        known = {name: state[name] for name in TrainState.__dataclass_fields__ if name in state}
        return TrainState(**known), rank_states


@contextlib.contextmanager
def _kept_hyper_parameters(engine, optimizer_steps: int) -> Iterator[None]:
    """Undo what DeepSpeed's loaders do to the optimizer, and prove it.

    Its ZeRO-3 universal loader gives every group the hyper-parameters of group 0, and all flat groups one and the
    same `step` tensor, which then advances once for each of them (stage3.py,
    load_hp_checkpoint_state_from_checkpoint_dir_stage3).
    """
    optimizer = base_optimizer(engine)
    # DeepSpeed's FusedAdam counts its steps in the group.
    before = [{name: value for name, value in group.items() if name not in ("params", "step")}
              for group in optimizer.param_groups]
    yield
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update(values)
    steps = []
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()
        if "step" in state:  # Muon's states have none
            steps.append(float(state["step"]))
    if not engine.zero_optimization():  # there a parameter may have begun to learn later than others
        steps = [max(steps)] if steps else []
    if set(steps) - {float(optimizer_steps)}:
        raise RuntimeError(f"the optimizer was loaded at steps {sorted(set(steps))}, expected {optimizer_steps}")


def _rng_state(device: torch.device) -> dict:
    state = {"rng_cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["rng_cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_rng_state(state: dict, device: torch.device) -> None:
    torch.set_rng_state(state["rng_cpu"])
    if device.type == "cuda" and "rng_cuda" in state:
        torch.cuda.set_rng_state(state["rng_cuda"], device)


def read_weights(run: Path, step: int | Literal["best"] | None = None, warn: Callable[[str], None] = print
                 ) -> tuple[int, dict[str, torch.Tensor]]:
    """fp32 weights of a run's checkpoint, whole, from any ZeRO stage; and its step.

    Args:
        step: None: the newest good one; best: that of the best evaluation which the newest good one knows of.

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
            step = read_state(manager._path(step))["best_step"]
    if step not in manager.steps() or (step not in manager._good and damage(manager._path(step))):
        found = ", ".join(map(str, manager.steps())) or "none"
        raise UserError(f"{run}: no good checkpoint of step {step}; the run has {found}"
                        + ("; train with --evaluation.keep_best true to keep the best" if wanted == "best" else ""))
    folder = manager._path(step)
    if read_state(folder)["zero_stage"] == 0:
        return step, load_pickled(folder / "mp_rank_00_model_states.pt")["module"]
    noise = io.StringIO()
    with _only_tensors(folder), contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
        weights = get_fp32_state_dict_from_zero_checkpoint(str(manager.folder), tag=folder.name)
    return step, {name: tensor.float() for name, tensor in weights.items()}
