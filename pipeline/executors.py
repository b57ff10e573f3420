"""Where tasks run: in this process, in spawned processes, or on a Dask cluster; one concurrent.futures interface."""

import ctypes
import importlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress

import pyarrow as pa

from pipeline.config import PrepareConfig
from pipeline.errors import UserError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_CONNECT_SECONDS = 20
_KEPT_BYTES = 1 << 30
_DIED = (
    "a worker process died (killed, or out of memory); run the same command again, it continues where it was, "
    "with fewer --workers if memory was short"
)

_NO_MEMORY = (
    "a task found too little memory; a worker needs up to 1.5 GB: run the same command again, it continues where it "
    "was, with fewer --workers or a lower --shards.target_tokens"
)


class InlineExecutor(Executor):
    """Runs a task when it is submitted."""

    def submit(self, function: Callable, /, *args, **kwargs) -> Future:
        future: Future = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def keep_memory() -> None:
    """Let freed arrays stay with the process: glibc maps every large one anew, and the kernel zeroes it each time,
    which is a seventh of all time here. Elsewhere than on glibc nothing happens."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def start_worker() -> None:
    """Make a worker process use one core: workers are counted in cores."""
    keep_memory()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    # What tasks need is imported now, while the parent process still plans, and not with the first task.
    importlib.import_module("pipeline.tokenizing")
    importlib.import_module("pipeline.building")


@contextmanager
def open_executor(config: PrepareConfig) -> Iterator[Executor]:
    """The executor that the configuration asks for. Raises UserError if a cluster can't be reached."""
    if config.executor == "dask":
        yield from _dask(config.scheduler)
    elif config.workers == 1:
        keep_memory()
        yield InlineExecutor()
    else:
        context = multiprocessing.get_context("spawn")  # a forked `tokenizers` deadlocks (datasets#620, #5094)
        pool = ProcessPoolExecutor(config.workers, mp_context=context, initializer=start_worker)
        pool.submit(int)  # the first task, even an empty one, starts all processes
        try:
            yield pool
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _dask(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError as error:
        raise UserError("executor dask: the library is missing; pip install 'cloze[dask]'") from error
    try:
        client = Client(address, timeout=_CONNECT_SECONDS)
    except (OSError, ValueError, TimeoutError) as error:
        raise UserError(f"scheduler: no Dask scheduler answers at {address}; check the address") from error
    with client:
        if not client.scheduler_info()["workers"]:
            raise UserError(f"scheduler: {address} has no workers; start some with `dask worker {address}`")
        yield client.get_executor(pure=False)


def run_tasks(executor: Executor, function: Callable, tasks: list, on_result: Callable[[int, object], None]) -> None:
    """Run all tasks; `on_result(place, result)` is called in this process as they end, in any order.

    The first failure cancels what hasn't begun and is raised: a worker's failure is the job's failure.
    """
    waiting: dict[Future, int] = {}
    try:
        for place, task in enumerate(tasks):
            future = executor.submit(function, task)
            if isinstance(executor, InlineExecutor):  # at its end already
                on_result(place, future.result())
            else:
                waiting[future] = place
        while waiting:
            # A short wait, so that ended tasks are told of while others run.
            done, _ = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
            for future in done:
                on_result(waiting.pop(future), future.result())
    except BrokenProcessPool as error:
        raise UserError(_DIED) from error
    except MemoryError as error:
        raise UserError(_NO_MEMORY) from error
    except Exception as error:
        if type(error).__name__ == "KilledWorker":  # Dask: a task whose worker died four times
            raise UserError(_DIED) from error
        raise
    finally:
        for future in waiting:
            future.cancel()
