"""Upload and download of checkpoint files, in parts of bounded size, with hashes checked both ways.

Each part is an object by itself, instead of a part of a multipart upload: an interrupted multipart upload leaves data
that no listing shows and that is paid for.
"""

import hashlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from cloze.launch.run.store_retries import Patience
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import sha256_of, write_at
from cloze.pipeline.stores.places import StorePath

PART_BYTES = 128 << 20
_AT_ONCE = 4  # concurrent parts of a process, which are in its memory


class Damaged(Exception):
    """The store does not hold what was uploaded."""


def parts_of(size: int) -> list[tuple[int, int]]:
    """Byte ranges [start, stop) of a file's parts: one part, or parts of equal size above half of PART_BYTES."""
    count = max(1, -(-size // PART_BYTES))
    edges = [size * number // count for number in range(count + 1)]
    return list(zip(edges, edges[1:], strict=False))


def part_name(name: str, number: int) -> str:
    """Name of the object of a file's part."""
    return f"{name}.{number:05d}"


def upload(path: Path, size: int, digest: str, folder: StorePath, patience: Patience) -> None:
    """Upload a file as the objects `NAME.00000` and so on of `folder`.

    Raises:
        UserError: the disk returns other bytes than were written, or the store can't be used.
    """
    hashed = hashlib.sha256()
    with open(path, "rb") as file, ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="upload") as senders:
        sent: deque[Future[None]] = deque()
        for number, (start, stop) in enumerate(parts_of(size)):
            data = file.read(stop - start)
            hashed.update(data)
            if len(sent) == _AT_ONCE:
                sent.popleft().result()
            target = folder / part_name(path.name, number)
            sent.append(senders.submit(patience, lambda target=target, data=data: target.write(data)))
        for upload in sent:
            upload.result()
    if hashed.hexdigest() != digest:
        raise UserError(
            f"{path}: found other bytes on the disk than were written, expected the same; check the disk, "
            "then run the same command again"
        )


def fetch(folder: StorePath, size: int, digest: str, target: Path) -> None:
    """Download a file from its parts.

    Raises:
        Damaged: a part is missing, or the content differs from what was uploaded.
        UserError: the store can't be used.
        OSError: the disk is full or can't be written.
    """

    def copy(number: int, start: int, stop: int) -> None:
        data = (folder / part_name(target.name, number)).read_bytes()
        if len(data) != stop - start:
            raise Damaged(f"{part_name(target.name, number)} has {len(data)} bytes, expected {stop - start}")
        write_at(file.fileno(), data, start)

    with open(target, "wb") as file, ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch") as readers:
        try:
            list(readers.map(lambda each: copy(each[0], *each[1]), enumerate(parts_of(size))))
        except FileNotFoundError as error:
            raise Damaged(f"{error.filename} is missing") from error
    if sha256_of(target) != digest:
        raise Damaged(f"{target.name} has another SHA-256 than when it was written")


class StoreThread:
    """A thread that runs tasks for the store one after another; the first failure is kept and ends it.

    Args:
        ended: set when the process is about to end; failures after that are not reported.
    """

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended
        self._tasks: queue.Queue[Callable[[], None]] = queue.Queue()
        self._failure: UserError | None = None
        self._left = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)

    def submit(self, task: Callable[[], None]) -> None:
        """Queue a task."""
        with self._lock:
            self._left += 1
        self._tasks.put(task)
        if not self._thread.is_alive() and self._failure is None:
            self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether all tasks are done."""
        return self._left == 0

    @property
    def failure(self) -> UserError | None:
        """The first failure, or None."""
        return self._failure

    def _work(self) -> None:
        while self._failure is None:
            task = self._tasks.get()
            try:
                task()
            except UserError as error:
                self._failure = error
            except OSError as error:  # an error of the scratch disk
                self._failure = UserError(
                    f"checkpoint.scratch: a checkpoint there can't be read ({error.strerror or error}); check the disk"
                )
            except Exception as error:  # a bug must end the run, not leave it without checkpoints
                if self._ended.is_set():  # the interpreter starts no more threads
                    return
                self._failure = UserError(
                    f"the thread that uploads checkpoints has failed ({type(error).__name__}: "
                    f"{error}), expected it to keep running"
                )
                raise
            finally:
                with self._lock:
                    self._left -= 1
