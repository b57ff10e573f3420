"""Who may write a run: one job at a time, since a requeued job must not run beside the one that it replaces.

- `locked`: a lock of the file system, which ends with its process, on a run's folder, or on its scratch if the run is
  in an object store. It excludes other jobs on the same disk.
- `held`: a lease on the place in an object store, which its holder renews (pipeline/stores/leases.py). It excludes jobs
  on any machine while the holder lives.
- `CommitLog.claim` (commits.py): only the job that has claimed the list of checkpoints last can commit one. It excludes
  a job that was paused for longer than its lease and goes on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloze.launch.run.preemption import Starting
from cloze.launch.run.runs import LOCK
from cloze.launch.system.console import Console
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import holding, readable_errors
from cloze.pipeline.stores.leases import Lease, leased
from cloze.pipeline.stores.places import StorePath

LEASE = "lease"


@contextmanager
def locked(folder: Path, name: str = "", field: str = "output") -> Iterator[None]:
    """Hold the lock of a folder, which is made if it is missing.

    Args:
        name: of what is locked in the folder; empty: all of it.
        field: by which a user chooses the folder.

    Raises:
        UserError: another job holds the lock, or the file system has no locks.
    """
    with readable_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with holding(folder / f"{name}{LOCK}") as is_held:
        if not is_held:
            raise _in_use(folder, field)
        yield


def in_use(folder: Path) -> bool:
    """Whether a job holds the run's lock.

    Raises:
        UserError: as `locked` does.
    """
    if not (folder / LOCK).exists():
        return False
    with holding(folder / LOCK) as is_held:
        return not is_held


@contextmanager
def held(place: StorePath, console: Console, patience_seconds: float, own: Path) -> Iterator[Lease]:
    """Hold the lease of a run in a store.

    Args:
        patience_seconds, own: as of `leased`.

    Raises:
        UserError: another job holds the run, or the store can't be used.
    """
    with leased(place / LEASE, console.warn, patience_seconds, own) as lease:
        if lease is None:
            raise _in_use(place, "output")
        Starting.before_end(lease.release)
        yield lease


def _in_use(where: Path | StorePath, field: str) -> UserError:
    return UserError(
        f"{field}: found {where} in use by another job, expected it free; wait for that job or choose another --{field}"
    )
