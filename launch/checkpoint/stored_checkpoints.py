"""Checkpoints of a run whose output is in an object store: written to local scratch, uploaded in the background.

Each process uploads its own files. Rank 0 lists the store until all files are there with their sizes, writes the index
and commits (launch/run/commits.py). One checkpoint is uploaded at a time; of those published during an upload the
newest waits, and older ones are skipped. The ranks agree on this in collectives that they make anyway (`votes`,
`publish`), so no step waits for the store.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from cloze.launch.checkpoint.fetching import (
    INDEX,
    Files,
    missing_parts,
    owner_of,
    read_index,
    sizes_of_parts,
    step_place,
)
from cloze.launch.checkpoint.local_checkpoints import ATTEMPT, WHOLE, Found, found_on, take_shared, whole_on_all
from cloze.launch.checkpoint.manager import CheckpointManager
from cloze.launch.checkpoint.state import hash_of_files, read_state, saved_alike, steps_in, write_state
from cloze.launch.checkpoint.transfer import Damaged, StoreThread, fetch, upload
from cloze.launch.engine.engine import Engine
from cloze.launch.run.commits import Commit, TakenOver, is_first
from cloze.launch.run.runs import step_name
from cloze.launch.run.store_retries import Patience, StoreAway
from cloze.launch.run.stored_run import StoredRun, refuse_checkpoints
from cloze.launch.system import distributed
from cloze.launch.system.environment.launchers import Environment
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import clear, readable_errors, sha256_of
from cloze.pipeline.stores.places import StorePath

# Of 128 MiB at most, at the speed of a telephone line; a rank whose store does not answer gives up before that.
_MOST_SECONDS_OF_A_PART = 3600
_LOOK_SECONDS = 1.0  # seconds between two listings while other ranks upload
_WAIT_SECONDS = 0.1  # seconds between two checks at the end of a run


@dataclass(frozen=True)
class _Published:
    """A checkpoint on the scratch of the machines."""

    step: int
    files: Files
    """The files of all ranks."""
    mine: Files
    state: Fields


def _files_of(parts: list[str]) -> Files:
    """The files of all ranks."""
    return {name: tuple(each) for part in parts for name, each in json.loads(part).items()}


class StoredCheckpoints(CheckpointManager):
    """The checkpoints of a run in a store. This machine's scratch holds them in the usual layout, without the files of
    other machines.

    Args:
        stage: of ZeRO in this run; None: that of whatever is read.
    """

    def __init__(
        self,
        run: StoredRun,
        folder: Path,
        environment: Environment,
        device: torch.device,
        *,
        keep_last: int = 2,
        warn: Callable[[str], None],
        say: Callable[[str], None],
        stage: int | None = None,
    ) -> None:
        super().__init__(folder, environment, device, keep_last=keep_last, warn=warn)
        self._run, self._say, self._stage = run, say, stage
        self._place = run.checkpoints
        self._patience = Patience(run.patience_seconds, warn, run.ended)
        self._thread = StoreThread(run.ended)
        self._committed: dict[int, str] = {}  # step -> attempt, sent by rank 0 at the start
        # the newest one on scratch, if it is not uploaded (checkpoint.local)
        self._newest_local: _Published | None = None
        self._queue: list[_Published] = []  # those that wait for their upload: the newest, and the best if it is older
        self._best_committed = -1  # step of the best evaluation by the newest committed checkpoint; on rank 0
        self._uploading: int | None = None  # step of the current or last upload
        self._sent = 0
        self._measured = self._warned_short = False  # on rank 0
        self._store_given_up = False  # agreed by all ranks: the store has not answered for too long
        self._store_failure: UserError | None = None  # this rank's error of the store
        self._ranks_by_machine: list[list[int]] = [[]]
        self._local_ranks: list[int] = []

    @property
    def leads(self) -> bool:
        """Whether this process looks after the folder on this machine's scratch: the lowest local rank."""
        return self.environment.rank == min(self._local_ranks, default=self.environment.rank)

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending, damaged ones included; on rank 0 up to date, on others as of
        the start.
        """
        return sorted(self._run.log.commits if self._run.log else self._committed)

    def agree_on_latest(self) -> int | None:
        """Fetch the newest undamaged committed checkpoint, unless a newer one is complete on the machines' scratch;
        returns its step. Collective.

        Raises:
            UserError: the store or the disk can't be used.
        """
        self._exchange_facts()
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
                    self.warn(f"{self._place}: step {step} is damaged (process {rank}: {problem}); skipped")
            if not any(problems):
                self._good.add(step)
                self._best_committed = index["state"].get("best_step", -1)  # as an earlier version's, without one
                return step
            self._damaged.add(step)
        return None

    def _exchange_facts(self) -> None:
        """Exchange the name of this start, the committed checkpoints and the ranks of each machine. Collective."""
        log = self._run.log
        sent = (
            json.dumps([self._run.attempt, {step: commit.attempt for step, commit in log.commits.items()}])
            if log
            else ""
        )
        attempt, committed = json.loads(distributed.gather_texts(sent, self.device)[0])
        self._committed = {int(step): by for step, by in committed.items()}
        if log is None:
            self._run.meet(attempt)
        status = self.folder.stat()
        machines = distributed.gather_texts(f"{platform.node()} {status.st_dev} {status.st_ino}", self.device)
        self._ranks_by_machine = [
            [rank for rank, machine in enumerate(machines) if machine == each] for each in dict.fromkeys(machines)
        ]
        self._local_ranks = next(ranks for ranks in self._ranks_by_machine if self.environment.rank in ranks)
        with self._together("begin a run"):
            if is_first(attempt) and self.leads:
                refuse_checkpoints(self.folder, self._run.place)
        if log:
            self._thread.submit(self._remove_uncommitted)

    def _agree_on_scratch(self) -> int | None:
        """The newest checkpoint that is complete on the run's machines, with each process's files on its machine, if it
        is newer than the store's; it is uploaded when the run continues. One of an earlier start than the store's
        newest is ignored, since the run has continued without it.
        """
        newest = max(self._committed, default=-1)
        found: list[Found] = []
        newer = [self.path(step) for step in reversed(super().steps()) if step > newest]
        with self._together("look at scratch"), readable_errors(self.folder):
            if self.leads:
                found = found_on(newer, self.environment.world_size, self._stage, self._committed.get(newest, ""))
        sent = distributed.gather_texts(json.dumps([asdict(each) for each in found]), self.device)
        by_machine = [[Found(**each) for each in json.loads(sent[min(ranks)])] for ranks in self._ranks_by_machine]
        whole = whole_on_all(by_machine, self._ranks_by_machine)
        if whole is None:
            return None
        step, files = whole[0].step, {name: each for part in whole for name, each in part.files.items()}
        if not take_shared(self.path(step), whole, self._ranks_by_machine, self.environment.rank, self.device):
            self.warn(
                f"{self.path(step)}: the files copied from another machine differ from what was written; passed over"
            )
            return None
        mine = {name: each for name, each in files.items() if (owner_of(name) or 0) == self.environment.rank}
        self._queue = [_Published(step, files, mine, read_state(self.path(step)))]
        self._good.add(step)
        where = "this machine's scratch" if len(whole) == 1 else f"the scratch of {len(whole)} machines"
        self._say(f"step {step} is on {where} and not in the store yet: resuming from it")
        return step

    def _agree_on_index(self, step: int) -> Fields | None:
        """Rank 0's copy of the index, on every rank; None, after a warning, if rank 0 finds the checkpoint damaged."""
        sent = ""
        with self._together("read a checkpoint's index"):
            if self._run.log:
                try:
                    sent = json.dumps(read_index(self._place, step, self._run.log.commits[step]))
                except Damaged as error:
                    self.warn(f"{self._place}: step {step} is damaged ({error}); skipped")
        sent = distributed.gather_texts(sent, self.device)[0]
        return json.loads(sent) if sent else None

    def bring(self, step: int | None) -> int:
        """As in CheckpointManager, for committed checkpoints."""
        if step is None:
            step = distributed.from_main(max(self.steps(), default=-1), self.device)
        index = self._agree_on_index(step)
        problems = ["its index, see above"] if index is None else self._fetch(step, index, whole=True)
        if any(problems):
            raise UserError(
                f"{self._place}: found step {step} damaged ({next(filter(None, problems))}), expected what "
                "was uploaded; run the same command again, which resumes from an older one"
            )
        return step

    def _fetch(self, step: int, index: Fields, whole: bool = False) -> list[str]:
        """Fetch the files that the ranks of this machine need into the folder of the step; each rank fetches its share.

        Args:
            whole: whether all files are needed.

        Returns:
            For each rank the damage of its share; empty if there is none.
        """
        state = index["state"]
        # Of another world size or stage, ranks need files that others wrote.
        whole = whole or not saved_alike(state, self.environment.world_size, self._stage)
        files = {
            name: tuple(each)
            for name, each in sorted(index["files"].items())
            if whole or owner_of(name) is None or owner_of(name) in self._local_ranks
        }
        aside = self.path(step).with_name(self.path(step).name + ".fetched.tmp")
        with self._together("make room for a checkpoint"), readable_errors(aside):
            if self.leads:
                clear(aside, ignore_errors=True)
                aside.mkdir(parents=True)
        folder = step_place(self._place, step) / index["folder"]
        problem = ""
        with self._together("fetch a checkpoint"), readable_errors(aside):
            try:
                for number, (name, (size, digest)) in enumerate(files.items()):
                    rank = owner_of(name)
                    rank = rank if rank in self._local_ranks else self._local_ranks[number % len(self._local_ranks)]
                    if rank == self.environment.rank:
                        self._fetch_file(folder, size, digest, aside / name, self.path(step) / name)
            except Damaged as error:
                problem = str(error)
        problems = distributed.gather_texts(problem, self.device)
        with self._together("take up a checkpoint"), readable_errors(aside):
            if self.leads and not any(problems):
                write_state(aside, files, state)
                clear(self.path(step), ignore_errors=True)
                os.replace(aside, self.path(step))
        return problems

    @staticmethod
    def _fetch_file(folder: StorePath, size: int, digest: str, target: Path, here: Path) -> None:
        """Take the file from this machine's scratch if it is still there, else from the store."""
        if here.is_file() and here.stat().st_size == size and sha256_of(here) == digest:
            os.link(here, target)
        else:
            fetch(folder, size, digest, target)

    def _make_room(self, engine: Engine, aside: Path) -> None:
        super()._make_room(engine, aside)
        aside.mkdir()  # DeepSpeed does not create it on every machine

    def publish_votes(self) -> int:
        """As in CheckpointManager; also 1 if a checkpoint waits and this rank has finished its upload. The world size,
        which makes all ranks publish at once, if an upload failed, another job has the run or the store is silent.
        """
        if not self._store_given_up and (self._thread.failure or self._run.lost() or self._run.away()):
            return self.environment.world_size
        if self._writing is not None:
            return super().publish_votes()
        return int(not self._store_given_up and bool(self._queue) and self._thread.idle)

    @property
    def must_end(self) -> bool:
        """As in CheckpointManager: whether the store has not answered for too long, as agreed in `publish`."""
        return self._store_given_up

    def publish(self) -> None:
        """As in CheckpointManager, on each machine's scratch; then begin the next upload if none is running.

        Raises:
            UserError: also if another job holds the run.
        """
        self._check_store()
        super().publish()
        self._begin_upload()

    def _check_store(self) -> None:
        """Raise UserError if another job has the run, or a disk fails; agree to give up the store if it has not
        answered any one rank for too long. Collective.
        """
        failure, lost = self._thread.failure, self._run.lost()
        with self._together("upload a checkpoint"):
            if lost is not None:
                raise TakenOver(
                    f"output: found {self._run.place} held by another job ({lost}), expected this one to "
                    "hold it to the end; this one ends, and none of its later steps is kept"
                )
            if failure is not None and not isinstance(failure, StoreAway):
                raise UserError(f"{failure}; {self._kept()}")
        self._store_failure = self._store_failure or failure or self._run.away()
        self._store_given_up = distributed.on_any_rank(self._store_failure is not None, self.device)

    def _kept(self) -> str:
        kept = steps_in(self.folder)
        newest = self.folder.resolve() / step_name(kept[-1]) if kept else "none"
        return f"this machine's part of the newest checkpoint is {newest}"

    def _end_without_store(self) -> NoReturn:
        """Raise UserError with the failure and the folder of the last checkpoint. Collective."""
        with self._together("reach the store"):
            if self._store_failure is not None:
                raise UserError(
                    f"{self._store_failure}; {self._kept()}: the same command on the same machines resumes from it"
                )
        raise AssertionError("unreachable: the rank for which all give up has raised")

    def _in_this_folder(self, parts: list[str], facts: Fields) -> tuple[list[str], Fields]:
        here = [part if rank in self._local_ranks else "{}" for rank, part in enumerate(parts)]
        return here, facts | {ATTEMPT: self._run.attempt, WHOLE: hash_of_files(_files_of(parts))}

    def _published(self, step: int, parts: list[str], state: Fields, local: bool) -> None:
        published = _Published(step, _files_of(parts), json.loads(parts[self.environment.rank]), state)
        self._newest_local = published if local else None
        if not local:
            self._enqueue(published)

    def _enqueue(self, published: _Published) -> None:
        """Let the checkpoint wait for its upload, in the place of all that wait but the one of the best evaluation."""
        best = published.state["best_step"]
        kept = [each for each in self._queue if each.step == best and each.step != published.step]
        self._queue = [*kept, published]

    def _begin_upload(self) -> None:
        """Collective."""
        if not self._queue or self._store_given_up:
            return
        if distributed.on_any_rank(not self._thread.idle, self.device):
            return
        published = self._queue.pop(0)
        self._uploading, self._sent = published.step, self._sent + 1
        name = f"{self._run.attempt}-{self._sent}"
        self._thread.submit(partial(self._upload, published, name))

    def _upload(self, published: _Published, name: str) -> None:
        """Upload this rank's files; on rank 0 wait for those of the others, and commit. Runs in the thread."""
        began, failures = time.monotonic(), self._patience.failures
        folder = step_place(self._place, published.step) / name
        for file, (size, digest) in published.mine.items():
            upload(self.path(published.step) / file, size, digest, folder, self._patience)
        log = self._run.log
        if log is None:
            return
        self._wait_for_parts(folder, published)
        state = published.state | {"files_hash": hash_of_files(published.files)}
        index = json.dumps({"state": state, "files": published.files, "folder": name}, indent=1).encode()
        self._patience(lambda: (folder / INDEX).write(index))
        self._patience(self._run.ship)  # so that the store has the curves up to the checkpoint
        num_bytes = sum(size for size, _ in published.files.values())
        before = log.commits.get(published.step)
        commit = Commit(name, hashlib.sha256(index).hexdigest(), num_bytes)
        self._patience(lambda: log.commit(published.step, commit))
        self._damaged.discard(published.step)
        self._best_committed = published.state["best_step"]
        if before is not None:
            self._delete(published.step, before)
        if self._patience.failures == failures:  # otherwise it is the time of an outage
            self._report_time(published.step, num_bytes, time.monotonic() - began)

    def _wait_for_parts(self, folder: StorePath, published: _Published) -> None:
        """Wait until all parts of all ranks are in the store.

        Raises:
            UserError: some that were there are gone, or none has come for long.
        """
        awaited, came = sizes_of_parts(published.files).keys() - sizes_of_parts(published.mine).keys(), time.monotonic()
        while missing := self._patience(lambda: missing_parts(folder, published.files)):
            if gone := sorted(missing.keys() - awaited):
                raise UserError(
                    f"{folder}: found that {missing[gone[0]]}, expected it as it was uploaded: something removes the "
                    "run's objects while it runs"
                )
            now = time.monotonic()
            if len(missing) < len(awaited):
                awaited, came = set(missing), now
            elif now - came > _MOST_SECONDS_OF_A_PART:
                raise UserError(
                    f"{folder}: found that {next(iter(missing.values()))}, expected another part within "
                    f"{_MOST_SECONDS_OF_A_PART} s of the one before"
                )
            time.sleep(_LOOK_SECONDS)

    def _report_time(self, step: int, num_bytes: int, seconds: float) -> None:
        """Report the time of the first upload; warn once if an upload takes longer than a stopped job has left."""
        if not self._measured:
            self._measured = True
            self._say(
                f"{self._run.place}: step {step} was uploaded after {seconds:.1f} s ({num_bytes / 1e6:,.1f} MB); "
                "a stop takes as long, so give the job more time than that between its signal and its end"
            )
        short = [f"{name} = {given:g}" for name, given in self._run.graces.items() if given < seconds]
        if short and not self._warned_short:
            self._warned_short = True
            self.warn(
                f"{' and '.join(short)}: step {step} took {seconds:.1f} s to the store, expected less: a job "
                "that is stopped ends before its checkpoint is there; have it signalled earlier"
            )

    def finish(self, best: int | None, beat: Callable[[], None]) -> None:
        """As in CheckpointManager; returns when the newest one is committed.

        Raises:
            UserError: as `publish`, or the store has not answered for too long.
        """
        self.publish()
        if self._newest_local is not None:
            self._enqueue(self._newest_local)
            self._newest_local = None
        self._upload_all(beat)
        if best is not None:
            self.retire(best)
            self._upload_all(beat)

    def check_last(self) -> None:
        """Raise UserError if the newest committed checkpoint, or that of the best evaluation, is not whole in the store
        any more, if that answers. For rank 0.
        """
        commits = self._run.log.commits if self._run.log else {}
        for step in sorted(commits.keys() & {max(commits, default=None), self._best_committed}):
            try:
                with suppress(UserError):
                    read_index(self._place, step, commits[step])
            except Damaged as error:
                raise UserError(
                    f"{step_place(self._place, step)}: found that {error}, expected the checkpoint as it was uploaded: "
                    f"something was removed while the run used the place; {self._kept()}"
                ) from error

    def _upload_all(self, beat: Callable[[], None]) -> None:
        while True:
            beat()
            self._check_store()
            if self._store_given_up:
                self._end_without_store()
            self._begin_upload()
            left = bool(self._queue) or not self._thread.idle
            if not distributed.on_any_rank(left, self.device):
                return
            time.sleep(_WAIT_SECONDS)

    def retire(self, best: int) -> None:
        """Remove all but the newest committed checkpoints and that of the best evaluation: first from the list, then
        their files. Scratch keeps the newest and those that are being uploaded or wait for it.
        """
        log = self._run.log
        if log:
            good = [step for step in sorted(log.commits) if step not in self._damaged]
            if old := self.outlived(good, best, self._best_committed):
                self._thread.submit(partial(self._retire, old))
        if self.leads and (local := super().steps()):
            kept = {each.step for each in self._queue}
            kept.add(max(self._good, default=local[-1]))  # newer ones belong to an abandoned start
            if self._uploading is not None:
                kept.add(self._uploading)
            for step in set(local) - kept:
                clear(self.path(step), ignore_errors=True)

    def _retire(self, steps: set[int]) -> None:
        log = self._run.log
        assert log is not None, "rank 0 has it"
        old = {step: log.commits[step] for step in steps if step in log.commits}
        self._patience(lambda: log.remove(set(old)))
        for step, commit in old.items():
            self._delete(step, commit)

    def _delete(self, step: int, commit: Commit) -> None:
        """Remove the files of a checkpoint that is no longer in the list; the next start removes what could not be
        removed.
        """
        folder = step_place(self._place, step) / commit.folder
        try:
            folder.writer.delete([each.key for each in folder.objects()])
        except UserError as error:
            self.warn(f"{folder}: an old checkpoint could not be removed ({error})")

    def _remove_uncommitted(self) -> None:
        """Remove the files of uncommitted checkpoints of earlier starts, which can no longer commit. Those of later
        starts stay: one may have taken over the run and committed checkpoints that this start does not know.
        """
        log, attempt, start = self._run.log, self._run.attempt, len(self._place.key) + 1
        assert log is not None and attempt is not None, "rank 0 has them"
        counted = {f"{step_place(self._place, step).name}/{commit.folder}" for step, commit in log.commits.items()}
        try:
            keys = [each.key for each in self._place.objects()]
            old = [
                key
                for key in keys
                if key[start:].startswith("step-")
                and "/".join(key[start:].split("/")[:2]) not in counted
                and key[start:].partition("/")[2].partition("-")[0] < attempt.partition("-")[0]
            ]
            self._place.writer.delete(old)
        except UserError as error:
            self.warn(f"{self._place}: what interrupted uploads have left could not be removed ({error})")
