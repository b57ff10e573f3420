"""Collectives and process groups: the only file that calls torch.distributed."""

import contextlib
import datetime
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from cloze.launch.system.devices import work_on
from cloze.launch.system.environment.gpus import device_index, device_type
from cloze.launch.system.environment.launchers import Environment
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

Number = TypeVar("Number", int, float)

# How long collectives wait for a rank: long enough for rank 0 to verify or convert a large checkpoint.
COLLECTIVE_SECONDS = 1800
TIMEOUT = datetime.timedelta(seconds=COLLECTIVE_SECONDS)
# torch 2.13 renamed it, and warns of the old name.
_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_PIECE_BYTES = 64 << 20  # bytes of a file that are copied from rank to rank at a time
_LEAVE_SECONDS = 30  # seconds that rank 0, when it has failed, waits until the others know
# The store at which the processes met before they joined a group, reused to make the group; and the texts sent so far.
_meeting: dist.Store | None = None
_numbers = itertools.count()


def initialize(environment: Environment, timeout: datetime.timedelta = TIMEOUT) -> torch.device:
    """Join the process group (nccl on CUDA, gloo elsewhere) and return this rank's device.

    A single process uses a store in memory, so that no port can collide.

    Args:
        timeout: how long to wait for the other processes, here and in each collective.
    """
    if device_type() == "cuda":
        device = torch.device("cuda", device_index(environment, torch.cuda.device_count()))
    else:
        device = torch.device("cpu")
    work_on(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    options: Fields = {
        "backend": backend,
        "rank": environment.rank,
        "world_size": environment.world_size,
        "timeout": timeout,
    }
    if device.type == "cuda":
        options["device_id"] = device  # otherwise NCCL connects in the first collective, and guesses a barrier's device
    if environment.world_size == 1:
        dist.init_process_group(**options | {"store": dist.HashStore()})
    else:
        # env:// and not an address: torchrun's agent already listens on that port, and only env:// knows it.
        if _meeting is None:
            options["init_method"] = "env://"
        else:
            options["store"] = dist.PrefixStore("group", _meeting)
        dist.init_process_group(**options)
    return device


def text_from_main(make: Callable[[], str], environment: Environment) -> str:
    """Send a short text that rank 0 makes to every rank, also before the process group exists. Collective.

    Raises:
        UserError: rank 0 could not make it.
    """
    global _meeting
    if environment.world_size == 1:
        return make()
    if _meeting is None:
        _meeting, *_ = next(rendezvous("env://", environment.rank, environment.world_size, timeout=TIMEOUT))
        _meeting.set_timeout(TIMEOUT)
    store = dist.PrefixStore(f"text-{next(_numbers)}", _meeting)
    if environment.is_main:
        try:
            store.set("text", "+" + make())
        except UserError:
            store.set("text", "-")
            # the store ends with this process: let the others read the failure first
            deadline = time.monotonic() + _LEAVE_SECONDS
            while store.add("heard", 0) < environment.world_size - 1 and time.monotonic() < deadline:
                time.sleep(0.05)
            raise
    text = store.get("text").decode()
    store.add("heard", 1)
    if text == "-":
        raise UserError(
            f"rank {environment.rank}: rank 0 could not read what all processes need, expected it to; its "
            "own message says why"
        )
    return text[1:]


def new_group(ranks: Iterable[int]) -> dist.ProcessGroup:
    """A group of some ranks with the timeout of the default group; torch's default with NCCL would be shorter."""
    return dist.new_group(ranks, timeout=TIMEOUT)


def is_joined(group: dist.ProcessGroup) -> bool:
    """Whether a group belongs to the process group that this process is in now, not to one that it has left."""
    try:
        return have_met() and bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return False


def have_met() -> bool:
    """Whether the default process group exists."""
    return dist.is_initialized()


def lost_others(error: RuntimeError) -> bool:
    """Whether an error of a collective means that other processes are gone: torch's errors of NCCL and of its store, or
    gloo's, a plain RuntimeError that names a file of gloo's transport.
    """
    return (
        have_met()
        and dist.get_world_size() > 1
        and (isinstance(error, dist.DistError) or "gloo/transport" in str(error))
    )


def shutdown() -> None:
    """Leave the process group; does nothing if there is none."""
    global _meeting
    _meeting = None
    if have_met():
        dist.destroy_process_group()


def reduce_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum of `values` over all ranks, in place; every rank gets it."""
    dist.all_reduce(values)
    return values


def begin_sum(values: torch.Tensor) -> Callable[[], object]:
    """Start the sum of `values` over all ranks, in place, and return immediately.

    Returns:
        A function that waits for the sum; on a GPU the current stream waits, not the host.
    """
    return dist.all_reduce(values, async_op=True).wait


def place() -> tuple[int, int]:
    """This process's rank, and the number of processes."""
    return dist.get_rank(), dist.get_world_size()


def from_main(value: Number, device: torch.device) -> Number:
    """Rank 0's number on every rank, exactly; on the other ranks only the type of the argument is used."""
    box = torch.tensor([value], dtype=torch.float64 if isinstance(value, float) else torch.int64, device=device)
    dist.broadcast(box, src=0)
    return type(value)(box.item())


def broadcast_from_main(values: torch.Tensor) -> None:
    """Overwrite `values` with those of rank 0; they have the same shape on every rank. Collective."""
    dist.broadcast(values, src=0)


def barrier() -> None:
    """Wait for every rank."""
    dist.barrier()


def gather(values: torch.Tensor) -> torch.Tensor:
    """`values` (N, ...) of every rank, (world size, N, ...), on every rank; no gradient goes through it."""
    rows = values.new_empty((dist.get_world_size(), *values.shape))
    # into one tensor: a list of a thousand small ones would be allocated, and stacked afterwards, at every log line
    _gather_single(rows.view(-1), values.flatten())
    return rows


def gather_texts(text: str, device: torch.device) -> list[str]:
    """`text` of every rank, on every rank."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    sizes = gather(torch.tensor([len(own)], device=device)).flatten().tolist()
    rows = gather(torch.nn.functional.pad(own, (0, max(sizes) - len(own)))).cpu()
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def copy_file(path: Path, size: int, source: int, target: Path | None, device: torch.device) -> None:
    """Copy a file of one rank's machine, `size` bytes, to the ranks that have a `target`. Collective.

    Raises:
        OSError: this rank can't read or write it; the other ranks finished the copy.
    """
    reads = dist.get_rank() == source
    given = path if reads else target
    file: IO[bytes] | None = None
    failure: OSError | None = None  # reported after all pieces were sent, so that the others are not left waiting
    with contextlib.ExitStack() as opened:
        for begin in range(0, size, _PIECE_BYTES):
            piece = torch.zeros(min(_PIECE_BYTES, size - begin), dtype=torch.uint8)
            try:
                if given and not (begin or failure):
                    file = opened.enter_context(open(given, "rb" if reads else "wb"))
                if file and reads and not failure:
                    # a file that became shorter is detected by the receivers, by its hash
                    if data := file.read(len(piece)):
                        piece[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            except OSError as error:
                failure = error
            piece = piece.to(device)
            dist.broadcast(piece, src=source)
            try:
                if file and not (reads or failure):
                    file.write(piece.cpu().numpy().tobytes())
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure


def on_any_rank(flag: bool, device: torch.device) -> bool:
    """Whether it is true on any rank. Collective."""
    return reduce_sum(torch.tensor([float(flag)], device=device)).item() > 0


@contextlib.contextmanager
def together(what: str, where: object, device: torch.device) -> Iterator[None]:
    """Make a failure of one rank a failure of all, so that none waits in a collective for it. Collective.

    Raises:
        UserError: another rank could not do `what` with `where`.
    """
    error = None
    try:
        yield
    except UserError as caught:
        error = caught
    failed = on_any_rank(error is not None, device)
    if error is not None:
        raise error
    if failed:
        raise UserError(f"{where}: found a process that could not {what}, expected all to; its own message says why")


class NumbersOnHost:
    """An asynchronous copy of numbers from the device to the host; `take` them after further work.

    Args:
        values: float64 (N,) on the device.
    """

    def __init__(self, values: torch.Tensor) -> None:
        on_gpu = values.device.type == "cuda"
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_gpu)
        self._host.copy_(values, non_blocking=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        if self._copied is not None:
            self._copied.record()

    def take(self) -> list[float]:
        """The numbers; waits for the copy if it is not finished."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()
