"""A run whose output is in an object store: the layout there, and the run's folder on local scratch.

    config.yaml, data.json, tokenizer/ ...   the description, as in the folder of a run
    checkpoints/commits.json                 the valid checkpoints (commits.py)
    checkpoints/step-N/ATTEMPT-n/            files of a checkpoint, in parts, and its index
    log/ATTEMPT/                             curves, events and status of each start (uploaded_logs.py)
    lease                                    the job that holds the run

Each process has its own folder on local scratch, with the layout of a run's folder; all processes of a machine share
the folder of checkpoints in it.
"""

import hashlib
import io
import platform
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from cloze.launch.config import RunConfig
from cloze.launch.run import runs
from cloze.launch.run.commits import CommitLog
from cloze.launch.run.metrics_file import good_lines
from cloze.launch.run.run_locks import LEASE, held, locked
from cloze.launch.run.store_retries import Patience, StoreAway, reading
from cloze.launch.run.uploaded_logs import (
    LOG,
    Arrived,
    LogReader,
    Shipper,
    add_unsent,
    fetch_heartbeats,
    newest_attempt,
    send_rest,
)
from cloze.launch.system.console import Console
from cloze.launch.system.environment.folders import cache_folder
from cloze.launch.system.environment.launchers import Environment
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import clear, inside, readable_errors
from cloze.pipeline.stores.leases import Lease
from cloze.pipeline.stores.places import StorePath, is_url, to_output
from cloze.pipeline.stores.temporary_folders import show_as

# Seconds that the end of a run waits for the store to take the remaining data. An error is reported after that, and
# before other processes report theirs (SAID_SECONDS in launch/system/exit_status.py).
_LEAVE_SECONDS, _FAILED_SECONDS = 60.0, 4.0
_PIECE_BYTES = 64 << 20  # of an object, in memory at once
COMMITS = "commits.json"
_ATTEMPT = "attempt"  # on scratch: the name of the start (attempt) that the folder belongs to
_FOLDERS = (runs.ORIGIN, runs.TOKENIZER)
_WEIGHTS = ".safetensors"  # how their files' names end
_OWN = {*runs.DESCRIPTION, *_FOLDERS, runs.CHECKPOINTS, LOG, LEASE}


def scratch_of(place: StorePath, scratch: str | None) -> Path:
    """The folder of a run on this machine's scratch; each machine has another one, even if they share the disk, and so
    has a bucket of the same name at another endpoint or of another account.
    """
    root = Path(scratch) if scratch else cache_folder() / "runs"
    service = "".join(f"\n{each}" for each in (place.writer.service, platform.node()) if each)
    name = hashlib.sha256(f"{place}{service}".encode()).hexdigest()[:12]
    return root.resolve() / f"{place.name}-{name}"


def refuse_checkpoints(folder: Path, place: StorePath) -> None:
    """Refuse checkpoints on scratch at the first start of a run.

    Raises:
        UserError: there are some, of a run of this name that is not in the store any more.
    """
    if left := sorted(folder.glob("step-*")):
        where = folder.resolve()
        raise UserError(
            f"checkpoint.scratch: found checkpoints in {where} ({left[-1].name}), of a run that is not in {place} any "
            f"more, as when the bucket was made anew, expected none at a first start; remove {where}, or choose "
            "another --output"
        )


class StoredRun:
    """One process's access to a run in a store."""

    def __init__(self, place: StorePath, config: RunConfig, environment: Environment, console: Console) -> None:
        self.place = place
        self.patience_seconds = config.checkpoint.store_patience_seconds
        self.scratch = scratch_of(place, config.checkpoint.scratch)
        self._own = self.scratch / f"rank-{environment.rank:05d}"
        self.folder = self._own / place.name
        """This process's copy of the run's folder; its name is the run's, which TensorBoard and trackers show."""
        show_as(self.folder, place)
        self.attempt: str | None = None
        """The name of this start, which rank 0 gives it and the others hear of (`meet`)."""
        self.log: CommitLog | None = None
        """On rank 0."""
        graces = {f"train.{name}": getattr(config.train, name) for name in ("stop_before_seconds", "grace_seconds")}
        self.graces: dict[str, float] = {name: each for name, each in graces.items() if each is not None}
        """What is known of the time that a stop leaves, by the fields that say so."""
        self.ended = threading.Event()
        """Set when this process is done with the run."""
        self._seconds = config.monitor.store_seconds
        self._console, self._rank = console, environment.rank
        self._shipper: Shipper | None = None
        self._sent_all = True  # False after a warning that something could not be sent
        self._arrived: list[Arrived] = []  # lines of metrics.jsonl that are in the store, on rank 0
        self._earlier: dict[str, int] = {}  # the pieces that they are in, as of LogReader
        self._lease: Lease | None = None

    @property
    def checkpoints(self) -> StorePath:
        """The place of the checkpoints."""
        return self.place / runs.CHECKPOINTS

    @contextmanager
    def held(self, main: bool) -> Iterator[None]:
        """Take the run's lease (on rank 0) and make this process's folder anew.

        Raises:
            UserError: another job holds the run, the place holds something else, or the store can't be used.
        """
        with ExitStack() as owned:
            owned.enter_context(locked(self.scratch, self._own.name, "checkpoint.scratch"))
            if main:
                self._check_place()
                own = self.scratch / f"{self._own.name}.{LEASE}"
                self._lease = owned.enter_context(held(self.place, self._console, self.patience_seconds, own))
                self._take_over()
            else:
                self._make_folder()
            yield

    def _take_over(self) -> None:
        """Send what an earlier start on this machine has not sent, make the folder anew, and claim the commits."""
        self.log = CommitLog(self.checkpoints / COMMITS)
        before = 0
        if self.log.is_new():
            self._forget_another()
            before = newest_attempt(self.place / LOG)  # of a run that has lost its list
        metrics = self.folder / runs.METRICS
        # Unsent data must survive a start that is killed before the new folder is complete.
        aside = self.scratch / f"{self._own.name}.{runs.METRICS}"
        if metrics.exists() and not aside.exists():
            metrics.replace(aside)
        named = self.scratch / f"{self._own.name}.{_ATTEMPT}"
        if named.is_file():
            send_rest(self.folder, self.place / LOG, named.read_text())
        self._make_folder()
        fetch_objects(self.place, keys_below(self.place, runs.ORIGIN), self.folder)  # as it was written at the start
        log = LogReader(self.place)
        log.write(self.folder)
        self._earlier = log.pieces
        with open(aside, "rb") if aside.exists() else io.BytesIO() as unsent:
            self._arrived = add_unsent(metrics, good_lines(unsent))
        aside.unlink(missing_ok=True)
        self.meet(self.log.claim(before))
        named.write_text(self.attempt or "")

    def _check_place(self) -> None:
        names = {path.name for path in self.place.iterdir()}
        if names and runs.CONFIG not in names and (strange := sorted(names - _OWN)):
            raise UserError(
                f"output: found {self.place} with objects that are not a run's ({strange[0]}), expected a "
                "new name or an earlier part of this run; choose another --output"
            )

    def _forget_another(self) -> None:
        """At a run's first start: remove the unsent files that another run of this name has left on this machine."""
        refuse_checkpoints(self.scratch / runs.CHECKPOINTS, self.place)
        for name in (runs.METRICS, _ATTEMPT):
            (self.scratch / f"{self._own.name}.{name}").unlink(missing_ok=True)
        clear(self.folder, ignore_errors=True)

    def _make_folder(self) -> None:
        with readable_errors(self.folder):
            clear(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            (self.scratch / runs.CHECKPOINTS).mkdir(exist_ok=True)
            (self.folder / runs.CHECKPOINTS).symlink_to(self.scratch / runs.CHECKPOINTS)
            # deepspeed.json is only written
            fetch_objects(self.place, [name for name in runs.DESCRIPTION if name != runs.DEEPSPEED], self.folder)

    def meet(self, attempt: str) -> None:
        """Set the name of this start, and begin to send this process's data."""
        self.attempt = attempt
        self._shipper = Shipper(self.folder, self.place / LOG / attempt, self._rank, self._seconds, self._console.warn)

    def begin(self, step: int, evaluated_step: int) -> None:
        """Send the description, and begin to send the curves. For rank 0.

        Raises:
            UserError: the store can't be used.
        """
        paths = [path for name in _FOLDERS for path in sorted((self.folder / name).rglob("*")) if path.is_file()]
        for path in paths + [path for name in runs.DESCRIPTION if (path := self.folder / name).exists()]:
            self.send(path)
        assert self._shipper is not None, "`meet` comes first"
        self._shipper.begin(step, evaluated_step, self._arrived)

    def send(self, path: Path) -> None:
        """Write a file of the folder to the store.

        Raises:
            ScratchLost: the file can't be read.
            UserError: the store can't be used.
        """
        with reading(path, self.folder):
            content = path.read_bytes()
        (self.place / str(path.relative_to(self.folder))).write(content)

    def check_there(self, complete: bool) -> None:
        """Send again what the run has sent of its description and results and is not in the store any more, and warn of
        it and of a curve that is not there. Where the store does not answer nothing is known, which `ship_last` says.
        For rank 0.

        Args:
            complete: whether the run is, so that all of its results have been sent.

        Raises:
            UserError: it is removed again.
        """
        results = (runs.RESULTS, runs.MODEL, runs.PREDICTIONS) if complete else ()
        names = [self.folder / name for name in (*_FOLDERS, *runs.DESCRIPTION, *results)]
        sent = [path for name in names for path in (name, *sorted(name.rglob("*"))) if path.is_file()]
        assert self._shipper is not None, "`meet` comes first"
        try:
            lost = [path for path in sent if not self._is_there(path)]
            for path in lost:
                self.send(path)
            again = [path for path in lost if not self._is_there(path)]
            pieces = self._shipper.num_lost(self._earlier)
        except UserError:
            return
        if again:
            raise UserError(
                f"{self.place}: found {again[0].name} gone as often as it is sent, expected a place that nothing "
                f"cleans while a run uses it; {self._own} on this machine has it"
            )
        for path in lost:
            self._console.warn(f"{self.place}: {path.name} was removed while the run used the place; it is sent again")
        if pieces:
            self._console.warn(
                f"{self.place / LOG}: {pieces:,} pieces of the curve were removed or changed while the run used the "
                f"place; {runs.METRICS} in {self._own} on this machine has them until the next start"
            )

    def _is_there(self, path: Path) -> bool:
        found = (self.place / str(path.relative_to(self.folder))).info()
        return found is not None and found.size == path.stat().st_size

    def ship(self) -> None:
        """Upload new curves, events, status and heartbeats now.

        Raises:
            UserError: the store can't be used.
        """
        assert self._shipper is not None, "`meet` comes first"
        self._shipper.ship()

    def ship_last(self, beat: Callable[[], None]) -> None:
        """Send the final status and curves, after the checkpoints. If the store does not answer, it is retried for the
        usual time, and then a warning names what is missing. For rank 0.

        Args:
            beat: called while it waits.
        """

        def send() -> None:
            beat()
            self.ship()

        try:
            Patience(self.patience_seconds, lambda line: None, self.ended)(send)
        except StoreAway as error:
            self._sent_all = False
            self._console.warn(
                f"{self.place}: the checkpoints are there, but not how the run has ended, nor its last "
                f"curves ({error}); the same command on this machine sends them when the store answers"
            )

    def close(self, seconds: float) -> None:
        """Upload the remaining data, for at most `seconds`."""
        self.ended.set()
        if self._shipper is not None:
            self._shipper.close(seconds if self._sent_all else 0.0)

    def fetch_heartbeats(self) -> None:
        """Download the heartbeats of all processes into this process's folder.

        Raises:
            UserError: the store can't be used.
        """
        fetch_heartbeats(self.place, self.folder)

    def lost(self) -> str | None:
        """Why the run is lost to another job; None if it is not known to be."""
        return self._lease.taken if self._lease is not None else None

    def away(self) -> UserError | None:
        """The error that the lease could not be renewed in time, so that another job may take over the run; None if it
        could.
        """
        silence = self._lease.silence if self._lease is not None else None
        return (
            None
            if silence is None
            else UserError(
                f"output: found {self.place} without an answer, expected one within checkpoint.store_patience_seconds "
                f"= {self.patience_seconds:g}: the run's lease can't be renewed ({silence})"
            )
        )

    def clear(self) -> None:
        """Remove the checkpoints from scratch, when the run is complete in the store."""
        clear(self.scratch / runs.CHECKPOINTS, ignore_errors=True)


def fetch_objects(place: StorePath, names: Iterable[str], folder: Path) -> None:
    """Copy those of the objects that exist into a folder."""
    for name in names:
        info = (place / name).info()
        if info is None:
            continue
        path = inside(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if info.size <= _PIECE_BYTES:  # in one request: what is replaced meanwhile is of one state
            path.write_bytes((place / name).read_bytes())
            continue
        with open(path, "wb") as file:
            for start in range(0, info.size, _PIECE_BYTES):
                file.write((place / name).read_range(start, min(start + _PIECE_BYTES, info.size)))


def fetch_description(place: StorePath, folder: Path) -> None:
    """Copy a run's configurations, its tokenizer, what it keeps of the model that it began with and, of a complete
    fine-tuning run, its model but for the weights into a folder.

    Raises:
        UserError: the store can't be used.
    """
    below = [key for name in (*_FOLDERS, runs.MODEL) for key in keys_below(place, name)]
    fetch_objects(place, [*runs.DESCRIPTION, *(key for key in below if not key.endswith(_WEIGHTS))], folder)


def keys_below(place: StorePath, folder: str) -> list[str]:
    """The keys of the objects in a run's folder, as `fetch_objects` takes them."""
    start = len(place.key) + bool(place.key)  # the bucket itself has none, and no slash behind it
    return [each.key[start:] for each in (place / folder).objects()]


Kind = TypeVar("Kind", bound=RunConfig)  # any kind of run


@contextmanager
def open_stored_run(
    config: Kind, environment: Environment, console: Console
) -> Iterator[tuple[Kind, StoredRun | None]]:
    """For an output in a store: the configuration with a local folder as its output, and the StoredRun. For a folder:
    the configuration unchanged, and None.

    Raises:
        UserError: as StoredRun.held, or the URL is not that of a store that can be written.
    """
    if not is_url(config.output):
        if config.checkpoint.local is not None:
            raise UserError(
                f"checkpoint.local: found {config.checkpoint.local} with the folder {config.output} as "
                "output, expected null: it is for a run in an object store; a folder has every checkpoint, "
                "see checkpoint.every_steps"
            )
        yield config, None
        return
    place = to_output(config.output)
    assert isinstance(place, StorePath), config.output
    if not place.key:
        raise UserError(
            f"output: found {config.output}, a whole bucket, expected a place in it such as "
            f"{config.output.rstrip('/')}/runs/name"
        )
    run = StoredRun(place, config, environment, console)
    with run.held(environment.is_main):
        seconds = _FAILED_SECONDS
        try:
            yield replace(config, output=str(run.folder)), run
            seconds = _LEAVE_SECONDS
        finally:
            run.close(seconds)
