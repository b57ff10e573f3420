"""Writing tensors to disk: copied to host memory, shared ones once; hashed and written in a background thread."""

import copy
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

import torch

from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import readable_errors


def replace_tensors(
    value: object,
    replace: Callable[[torch.Tensor], torch.Tensor],
    other: Callable[[object], object] = lambda value: value,
) -> Any:
    """Nested dicts, lists and tuples anew, with `replace` of each tensor and `other` of everything else."""
    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps the class of the dict and its attributes
        copied.update((name, replace_tensors(part, replace, other)) for name, part in value.items())
        return copied
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(replace_tensors(part, replace, other) for part in value)
    return other(value)


class ContentOnHost:
    """A deep copy of nested dicts, lists and tuples with every tensor in host memory; nothing is shared with `value`.

    Tensors that share a storage also share its copy, so that the files keep their size. Copies from a GPU go into
    pinned memory behind the work that is queued there, and the host does not wait for them: `take` does. torch keeps
    pinned memory for the next copy.
    """

    def __init__(self, value: object) -> None:
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._copied: torch.cuda.Event | None = None
        self._value = replace_tensors(value, self._copy, copy.deepcopy)
        if self._copied is not None:
            self._copied.record()

    def take(self) -> Any:
        """The copy, when it is complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._value

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._copies:
            self._copies[storage._cdata] = self._copy_storage(storage, tensor.device)
        host = torch.empty(0, dtype=tensor.dtype)
        host.set_(self._copies[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
        return torch.nn.Parameter(host, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else host

    def _copy_storage(self, storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
        if device.type == "cpu":
            return storage.clone()
        self._copied = self._copied or torch.cuda.Event()
        source = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        return host.copy_(source, non_blocking=True).untyped_storage()


class _HashingFile:
    """File object for torch.save that hashes everything that it writes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = 0
        self.digest = hashlib.sha256()
        self.error: OSError | None = None  # torch would raise a RuntimeError without the cause

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.size += len(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def write_hashed(copied: ContentOnHost, path: Path) -> tuple[int, str]:
    """Write with torch.save and sync; returns size in bytes and SHA-256, by which every reader verifies the file.

    Raises:
        UserError: the file has another size than was written.
        OSError: the disk is full or can't be written.
    """
    content = copied.take()
    with open(path, "wb") as file:
        hashing = _HashingFile(file)
        try:
            torch.save(content, cast(IO[bytes], hashing))  # torch.save uses its write and flush only
        except RuntimeError:
            if hashing.error is None:
                raise
            raise hashing.error from None
        file.flush()
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    if size != hashing.size:
        raise UserError(
            f"{path}: found {size} bytes on the disk, expected the {hashing.size} that were written; check the disk, "
            "then run the same command again"
        )
    return hashing.size, hashing.digest.hexdigest()


class BackgroundWriter:
    """Writes the files of one checkpoint, one after the other, in a thread; `result` returns their sizes and hashes."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: list[tuple[str, Future[tuple[int, str]]]] = []

    def submit(self, content: object, path: Path) -> None:
        """Copy `content`, which may change as soon as this returns, and write the copy."""
        self._pending.append((path.name, self._pool.submit(write_hashed, ContentOnHost(content), path)))

    def done(self) -> bool:
        """Whether writing is over, by success or failure."""
        return all(future.done() for _, future in self._pending)

    def result(self, folder: Path) -> dict[str, tuple[int, str]]:
        """Wait for the thread; returns size and SHA-256 by file name.

        Raises:
            UserError: the disk is full or can't be written.
        """
        self._pool.shutdown()
        with readable_errors(folder):
            return {name: future.result() for name, future in self._pending}
