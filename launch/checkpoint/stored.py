"""Checkpoints of a run whose output is in an object store: written to local scratch, uploaded in the background.

Each process uploads its own files; rank 0 sees in the listing when all are there with their sizes, writes the index and
commits (launch/run/commits.py). One checkpoint is on its way at a time; of those that are published during an upload
the newest waits, and older ones are left out. All of that is agreed where the ranks meet anyway (`votes`, `publish`),
so that no step waits for a store.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import torch

from cloze.launch.checkpoint.fetching import INDEX, Files, missing_part, owner_of, read_index, step_place
from cloze.launch.checkpoint.manager import CheckpointManager
from cloze.launch.checkpoint.scratch import ATTEMPT, WHOLE, Found, found_on, take_shared, whole_on_all
from cloze.launch.checkpoint.state import TrainState, describe, hash_of_files, read_state
from cloze.launch.checkpoint.transfer import Damaged, StoreThread, fetch, upload
from cloze.launch.engine.state import Engine
from cloze.launch.run.commits import Commit, TakenOver, is_first
from cloze.launch.run.patience import Patience, StoreAway
from cloze.launch.run.stored import StoredRun
from cloze.launch.system import distributed
from cloze.launch.system.environment import Environment
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import readable_errors, sha256_of
from cloze.pipeline.stores.places import StorePath

_LOOK_SECONDS = 1.0  # between two listings while other ranks upload
_WAIT_SECONDS = 0.1  # between two looks at the end of a run

@dataclass(frozen=True)
class _Published:
    """A checkpoint that lies on the scratch of the machines."""

    step: int
    files: Files
    """Of all ranks."""
    mine: Files
    state: dict


def _files_of(parts: list[str]) -> Files:
    """What all ranks vouch for."""
    return {name: tuple(each) for part in parts for name, each in json.loads(part).items()}


class StoredCheckpoints(CheckpointManager):
    """The checkpoints of a run in a store. On this machine's scratch they look like any other's, but that of other
    machines' files none is there."""

    def __init__(self, run: StoredRun, folder: Path, environment: Environment, device: torch.device, *,
                 keep_last: int = 2, warn: Callable[[str], None] = print, say: Callable[[str], None] = print) -> None:
        super().__init__(folder, environment, device, keep_last=keep_last, warn=warn)
        self._run, self._say = run, say
        self._place = run.checkpoints
        self._patience = Patience(run.patience_seconds, warn, run.ended)
        self._thread = StoreThread(run.ended)
        self._committed: dict[int, str] = {}  # step -> attempt, as rank 0 has sent it when the ranks met
        self._near: _Published | None = None  # newest on scratch, if it is not for the store
        self._waiting: _Published | None = None
        self._best_waiting: _Published | None = None  # older than that one, and that of the best evaluation
        self._best_committed = -1  # step of the best evaluation, as the newest committed checkpoint knows it; on rank 0
        self._sending: int | None = None  # the step that is on its way, or was the last
        self._sent = 0
        self._measured = self._warned_short = False  # on rank 0
        self._gives_up = False  # agreed by all: the store has been away for too long
        self._away: UserError | None = None  # what this rank has seen of that
        self._machines: list[list[int]] = [[]]  # the ranks on each
        self._machine: list[int] = []  # those on this one

    @property
    def leads(self) -> bool:
        """Whether this process looks after the folder on this machine's scratch."""
        return self.environment.rank == min(self._machine, default=self.environment.rank)

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending, damaged ones included: as of now on rank 0."""
        return sorted(self._run.log.commits if self._run.log else self._committed)

    def agree_on_latest(self) -> int | None:
        """The newest committed checkpoint of which every rank has fetched what it needs, undamaged; or a newer one that
        lies whole on the machines' scratch. Collective.

        Raises:
            UserError: the store or the disk can't be used.
        """
        self._meet()
        step = self._agree_on_scratch()
        if step is not None:
            return step
        for step in sorted(self._committed, reverse=True):
            index = self._agree_on_index(step)
            if index is None:
                self._damaged.add(step)
                continue
            problems = self._fetch(step, index)
            for rank, problem in enumerate(problems):
                if problem:
                    self.warn(f"{self._place}: step {step} is damaged (process {rank}: {problem}); passed over")
            if not any(problems):
                self._good.add(step)
                self._best_committed = index["state"]["best_step"]
                return step
            self._damaged.add(step)
        return None

    def _meet(self) -> None:
        """Learn the name of this start, what is committed, and who is on this machine."""
        log = self._run.log
        sent = json.dumps([self._run.attempt, {step: commit.attempt for step, commit in log.commits.items()}]
                          ) if log else ""
        attempt, committed = json.loads(distributed.gather_texts(sent, self.device)[0])
        self._committed = {int(step): by for step, by in committed.items()}
        if log is None:
            self._run.meet(attempt)
        status = self.folder.stat()
        machines = distributed.gather_texts(f"{platform.node()} {status.st_dev} {status.st_ino}", self.device)
        self._machines = [[rank for rank, machine in enumerate(machines) if machine == each]
                          for each in dict.fromkeys(machines)]
        self._machine = next(ranks for ranks in self._machines if self.environment.rank in ranks)
        with self._together("begin a run"):
            if is_first(attempt) and self.leads and super().steps():
                raise UserError(
                    f"checkpoint.scratch: found checkpoints in {self.folder.resolve()}, of a run of which nothing is "
                    f"left in {self._run.place}, expected none at a first start; remove {self.folder.resolve()}, or "
                    "choose another --output")
        if log:
            self._thread.submit(self._clean)

    def _agree_on_scratch(self) -> int | None:
        """The newest checkpoint that lies whole on the machines of the run, each process's files on its own, if the
        store has none so new; it is uploaded as soon as the run goes on. One of an earlier start than the store's
        newest does not count: the run has gone on without it."""
        newest = max(self._committed, default=-1)
        found: list[Found] = []
        newer = [self.path(step) for step in reversed(super().steps()) if step > newest]
        with self._together("look at scratch"), readable_errors(self.folder):
            if self.leads:
                found = found_on(newer, self.environment.world_size, self._committed.get(newest, ""))
        sent = distributed.gather_texts(json.dumps([asdict(each) for each in found]), self.device)
        by_machine = [[Found(**each) for each in json.loads(sent[min(ranks)])] for ranks in self._machines]
        whole = whole_on_all(by_machine, self._machines)
        if whole is None:
            return None
        step, files = whole[0].step, {name: each for part in whole for name, each in part.files.items()}
        if not take_shared(self.path(step), whole, self._machines, self.environment.rank, self.device):
            self.warn(f"{self.path(step)}: what one machine has of it did not arrive on another as it was written; "
                      "passed over")
            return None
        mine = {name: each for name, each in files.items() if (owner_of(name) or 0) == self.environment.rank}
        self._waiting = _Published(step, files, mine, read_state(self.path(step)))
        self._good.add(step)
        where = "this machine's scratch" if len(self._machines) == 1 else f"the scratch of {len(whole)} machines"
        self._say(f"step {step} lies on {where} and not in the store yet: going on from it")
        return step

    def _agree_on_index(self, step: int) -> dict | None:
        """What rank 0 has read; None, said by it, if the checkpoint is damaged as far as it can see."""
        sent = ""
        with self._together("read a checkpoint's index"):
            if self._run.log:
                try:
                    sent = json.dumps(read_index(self._place, step, self._run.log.commits[step]))
                except Damaged as error:
                    self.warn(f"{self._place}: step {step} is damaged ({error}); passed over")
        sent = distributed.gather_texts(sent, self.device)[0]
        return json.loads(sent) if sent else None

    def bring(self, step: int | None) -> int:
        """As of any checkpoints; of those that are committed."""
        if step is None:
            step = distributed.from_main(max(self.steps(), default=-1), self.device)
        index = self._agree_on_index(step)
        problems = ["its index, see above"] if index is None else self._fetch(step, index, whole=True)
        if any(problems):
            raise UserError(f"{self._place}: found step {step} damaged ({next(filter(None, problems))}), expected what "
                            "was uploaded; run the same command again, which goes on from an older one")
        return step

    def _fetch(self, step: int, index: dict, whole: bool = False) -> list[str]:
        """Fetch what the ranks of this machine need, each its share, into the folder of the step.

        Args:
            whole: whether they need all files.

        Returns:
            For each rank what is damaged of its share; empty: nothing.
        """
        state = index["state"]
        whole = whole or state["world_size"] != self.environment.world_size  # which each machine then converts
        files = {name: tuple(each) for name, each in sorted(index["files"].items())
                 if whole or owner_of(name) is None or owner_of(name) in self._machine}
        aside = self.path(step).with_name(self.path(step).name + ".fetched.tmp")
        with self._together("make room for a checkpoint"), readable_errors(aside):
            if self.leads:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
        folder = step_place(self._place, step) / index["folder"]
        problem = ""
        with self._together("fetch a checkpoint"), readable_errors(aside):
            try:
                for number, (name, (size, digest)) in enumerate(files.items()):
                    rank = owner_of(name)
                    rank = rank if rank in self._machine else self._machine[number % len(self._machine)]
                    if rank == self.environment.rank:
                        self._fetch_file(folder, size, digest, aside / name, self.path(step) / name)
            except Damaged as error:
                problem = str(error)
        problems = distributed.gather_texts(problem, self.device)
        with self._together("take up a checkpoint"), readable_errors(aside):
            if self.leads and not any(problems):
                describe(aside, files, state)
                shutil.rmtree(self.path(step), ignore_errors=True)
                os.replace(aside, self.path(step))
        return problems

    @staticmethod
    def _fetch_file(folder: StorePath, size: int, digest: str, target: Path, here: Path) -> None:
        """From this machine's scratch, if it has it still; else from the store."""
        if here.is_file() and here.stat().st_size == size and sha256_of(here) == digest:
            os.link(here, target)
        else:
            fetch(folder, size, digest, target)

    def _make_room(self, engine: Engine, aside: Path) -> None:
        super()._make_room(engine, aside)
        aside.mkdir()  # not every machine has a rank for which DeepSpeed makes it

    def votes(self) -> int:
        """As of any checkpoints; and of those that wait, when this rank has uploaded what is on its way."""
        if not self._gives_up and (self._thread.failure or self._run.lost() or self._run.away()):
            return self.environment.world_size
        if self._writing is not None:
            return super().votes()
        return int(not self._gives_up and self._next is not None and self._thread.idle)

    @property
    def _next(self) -> _Published | None:
        """What is to be sent next."""
        return self._best_waiting or self._waiting

    @property
    def must_end(self) -> bool:
        """As of any checkpoints: whether the store has been away for too long, as all ranks know since `publish`."""
        return self._gives_up

    def publish(self) -> None:
        """As of any checkpoints, on each machine's scratch; then begin to upload what waits, if nothing is on its way.

        Raises:
            UserError: also if another job holds the run.
        """
        self._look_at_store()
        super().publish()
        self._begin_upload()

    def _look_at_store(self) -> None:
        """Raise UserError if nothing of this job counts any more, or a disk fails; agree to give the store up if any
        rank has waited for it for too long. Collective."""
        failure, lost = self._thread.failure, self._run.lost()
        with self._together("upload a checkpoint"):
            if lost is not None:
                raise TakenOver(f"output: found {self._run.place} held by another job ({lost}), expected this one to "
                                "hold it to the end; this one ends, and nothing of it counts from there on")
            if failure is not None and not isinstance(failure, StoreAway):
                raise UserError(f"{failure}; {self._kept()}")
        self._away = self._away or failure or self._run.away()
        away = torch.tensor(float(self._away is not None), device=self.device)
        self._gives_up = distributed.reduce_sum(away).item() > 0

    def _kept(self) -> str:
        kept = [path.name for path in sorted(self.folder.glob("step-*")) if path.name[-1].isdigit()]
        return f"this machine's part of the newest checkpoint is {self.folder.resolve() / kept[-1] if kept else 'none'}"

    def _end_without_store(self) -> NoReturn:
        """Say what could not be done, and where the last checkpoint lies. Collective."""
        with self._together("reach the store"):
            if self._away is not None:
                raise UserError(f"{self._away}; {self._kept()}: the same command on the same machines goes on from it")
        raise AssertionError("unreachable: the rank for which all give up has raised")

    def save(self, engine: Engine, state: TrainState, facts: dict, rank_state: dict[str, torch.Tensor],
             files: Mapping[str, dict] = MappingProxyType({}), *, local: bool = False) -> None:
        """As of any checkpoints; they know the start that saved them."""
        super().save(engine, state, facts | {ATTEMPT: self._run.attempt}, rank_state, files, local=local)

    def _as_here(self, parts: list[str], facts: dict) -> tuple[list[str], dict]:
        here = [part if rank in self._machine else "{}" for rank, part in enumerate(parts)]
        return here, facts | {WHOLE: hash_of_files(_files_of(parts))}

    def _published(self, step: int, parts: list[str], state: dict, local: bool) -> None:
        published = _Published(step, _files_of(parts), json.loads(parts[self.environment.rank]), state)
        self._near = published if local else None
        if not local:
            self._send_next(published)

    def _send_next(self, published: _Published) -> None:
        """Have it wait, in the place of an older one."""
        before, best = self._waiting, published.state["best_step"]
        if before is not None and before.step == best:
            self._best_waiting = before  # a newer one does not take the place of the best
        elif self._best_waiting is not None and self._best_waiting.step != best:
            self._best_waiting = None
        self._waiting = published

    def _begin_upload(self) -> None:
        """Collective."""
        if self._next is None or self._gives_up:
            return
        busy = distributed.reduce_sum(torch.tensor(float(not self._thread.idle), device=self.device))
        if busy.item():
            return
        published = self._next
        if published is self._best_waiting:
            self._best_waiting = None
        else:
            self._waiting = None
        self._sending, self._sent = published.step, self._sent + 1
        name = f"{self._run.attempt}-{self._sent}"
        self._thread.submit(partial(self._upload, published, name))

    def _upload(self, published: _Published, name: str) -> None:
        """Send this rank's files; on rank 0 wait for those of the others, and commit. In the thread."""
        began = time.monotonic()
        folder = step_place(self._place, published.step) / name
        for file, (size, digest) in published.mine.items():
            upload(self.path(published.step) / file, size, digest, folder, self._patience)
        log = self._run.log
        if log is None:
            return
        while self._patience(lambda: missing_part(folder, published.files)):
            time.sleep(_LOOK_SECONDS)
        state = published.state | {"files_hash": hash_of_files(published.files)}
        index = json.dumps({"state": state, "files": published.files, "folder": name}, indent=1).encode()
        self._patience(lambda: (folder / INDEX).write(index))
        self._patience(self._run.ship)  # so that the curves know what the checkpoint does
        num_bytes = sum(size for size, _ in published.files.values())
        before = log.commits.get(published.step)
        commit = Commit(name, hashlib.sha256(index).hexdigest(), num_bytes)
        self._patience(lambda: log.commit(published.step, commit))
        self._damaged.discard(published.step)
        self._best_committed = published.state["best_step"]
        if before is not None:
            self._delete(published.step, before)
        self._report_time(published.step, num_bytes, time.monotonic() - began)

    def _report_time(self, step: int, num_bytes: int, seconds: float) -> None:
        """Once, what the first upload has taken; and once, that one took longer than a stop leaves."""
        if not self._measured:
            self._measured = True
            self._say(f"{self._run.place}: step {step} is there after {seconds:.1f} s ({num_bytes / 1e6:,.1f} MB); a "
                      "stop takes as long, so give the job more time than that between its signal and its end")
        short = [f"{name} = {given:g}" for name, given in self._run.graces.items() if given < seconds]
        if short and not self._warned_short:
            self._warned_short = True
            self.warn(f"{' and '.join(short)}: step {step} took {seconds:.1f} s to the store, expected less: a job "
                      "that is stopped ends before its checkpoint is there; have it signalled earlier")

    def finish(self, best: int | None, beat: Callable[[], None]) -> None:
        """As of any checkpoints; returns when the newest is committed.

        Raises:
            UserError: as `publish`, or the store has been away for too long.
        """
        self.publish()
        if self._near is not None:
            self._send_next(self._near)
            self._near = None
        self._drain(beat)
        if best is not None:
            self.retire(best)
            self._drain(beat)

    def _drain(self, beat: Callable[[], None]) -> None:
        while True:
            beat()
            self._look_at_store()
            if self._gives_up:
                self._end_without_store()
            self._begin_upload()
            left = float(self._next is not None or not self._thread.idle)
            if not distributed.reduce_sum(torch.tensor(left, device=self.device)).item():
                return
            time.sleep(_WAIT_SECONDS)

    def retire(self, best: int) -> None:
        """Remove all but the newest committed checkpoints and that of the best evaluation: from the list first, then
        their files. Scratch keeps what is on its way and the newest.
        """
        log = self._run.log
        if log:
            good = [step for step in sorted(log.commits) if step not in self._damaged]
            if old := set(good[:-self.keep_last]) - {best, *self._best, self._best_committed}:
                self._thread.submit(partial(self._retire, old))
        if self.leads and (local := super().steps()):
            kept = {each.step for each in (self._waiting, self._best_waiting) if each}
            kept.add(max(self._good, default=local[-1]))  # newer ones are of a start that was given up
            if self._sending is not None:
                kept.add(self._sending)
            for step in set(local) - kept:
                shutil.rmtree(self.path(step), ignore_errors=True)

    def _retire(self, steps: set[int]) -> None:
        log = self._run.log
        assert log is not None, "rank 0 has it"
        old = {step: log.commits[step] for step in steps if step in log.commits}
        self._patience(lambda: log.remove(set(old)))
        for step, commit in old.items():
            self._delete(step, commit)

    def _delete(self, step: int, commit: Commit) -> None:
        """Remove the files of a checkpoint that does not count any more; what stays goes with the next start."""
        folder = step_place(self._place, step) / commit.folder
        try:
            folder.writer.delete([each.key for each in folder.objects()])
        except UserError as error:
            self.warn(f"{folder}: an old checkpoint could not be removed ({error})")

    def _clean(self) -> None:
        """Remove the files of checkpoints that were never committed: of earlier starts, which can commit no more. A
        later one, which has taken over the run since, may have committed checkpoints that this one does not know."""
        log, attempt, start = self._run.log, self._run.attempt, len(self._place.key) + 1
        assert log is not None and attempt is not None, "rank 0 has them"
        counted = {f"{step_place(self._place, step).name}/{commit.folder}" for step, commit in log.commits.items()}
        try:
            found = [each.key for each in self._place.objects()]
            old = [key for key in found if key[start:].startswith("step-")
                   and "/".join(key[start:].split("/")[:2]) not in counted
                   and key[start:].partition("/")[2].partition("-")[0] < attempt.partition("-")[0]]
            self._place.writer.delete(old)
        except UserError as error:
            self.warn(f"{self._place}: what interrupted uploads have left could not be removed ({error})")
