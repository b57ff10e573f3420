"""Executors of tasks: this process, spawned processes, or a Dask cluster; one concurrent.futures interface."""

import importlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pyarrow as pa

from cloze.pipeline.allocator import keep_freed_pages
from cloze.pipeline.config import PrepareConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.extras import how_to_install

# Tasks that are submitted to an executor at once: enough for four on each of a thousand cores, and few enough that
# their descriptions (some 15 kB for a task that reads 512 parts) take little memory, here or in Dask's scheduler.
_IN_FLIGHT = 4096
_CONNECT_SECONDS = 20  # a running scheduler answers within one, a cluster that has just started may take longer
_DIED = (
    "a worker process died (killed, or out of memory); run the same command again, it continues where it was, "
    "with fewer --workers if memory was short"
)

_NO_MEMORY = (
    "a task found too little memory; a worker needs up to 1.5 GB: run the same command again, it continues where it "
    "was, with fewer --workers or a lower --shards.target_tokens"
)


class LocalExecutor(Executor):
    """Runs tasks in `workers` processes: this one, which works while it waits (see `help`), and spawned ones.

    A task is given to a process only when that is free; this process begins while the others start.
    """

    def __init__(self, workers: int):
        self._waiting: deque[tuple[Future[object], Callable[..., object]]] = deque()
        self._free = workers - 1  # spawned processes without a task
        self._lock = threading.Lock()
        self._pool = None
        keep_freed_pages()
        if workers > 1:
            context = multiprocessing.get_context("spawn")  # a forked `tokenizers` deadlocks (datasets#620, #5094)
            self._pool = ProcessPoolExecutor(workers - 1, mp_context=context, initializer=start_worker)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until `start_worker` has an answer
            try:
                for _ in range(workers - 1):  # each starts a process, while none is idle
                    self._pool.submit(int)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def submit(self, function: Callable[..., object], /, *args: object, **kwargs: object) -> Future[Any]:
        future: Future[object] = Future()
        self._waiting.append((future, partial(function, *args, **kwargs)))
        self._feed()
        return future

    def help(self) -> bool:
        """Run a waiting task in this process.

        Returns:
            Whether there was one.
        """
        with self._lock:
            task = self._next()
        if task is not None:
            future, call = task
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
        return task is not None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)

    def _next(self) -> tuple[Future[object], Callable[..., object]] | None:
        while self._waiting:
            task = self._waiting.popleft()
            if task[0].set_running_or_notify_cancel():
                return task
        return None

    def _feed(self) -> None:
        """Give waiting tasks to free processes; also called by the pool's thread when a task has ended."""
        while True:
            with self._lock:
                task = self._next() if self._free else None
                if task is None:
                    return
                self._free -= 1
            future, call = task
            try:
                assert self._pool is not None, "it has free processes"
                self._pool.submit(call).add_done_callback(partial(self._ended, future))
            except RuntimeError as error:  # a worker has died
                future.set_exception(error)

    def _ended(self, future: Future[object], done: Future[object]) -> None:
        with self._lock:
            self._free += 1
        if (error := done.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())
        self._feed()


def start_worker() -> None:
    """Make a worker process use one core: workers are counted in cores. Ctrl-C, which a terminal sends to all
    processes, ends it without a word: the parent process has one.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_freed_pages()
    with suppress(OSError):  # if memory runs out, Linux should kill a worker and not the parent, which can report it
        Path("/proc/self/oom_score_adj").write_text("500")
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    # What tasks need is imported now, while the parent process still plans, and not with the first task.
    importlib.import_module("cloze.pipeline.jobs.tokenize_stage")
    importlib.import_module("cloze.pipeline.jobs.exchange_stage")
    importlib.import_module("cloze.pipeline.jobs.build_stage")


def _end_with_parent() -> None:
    """End this process when its parent is gone: a killed parent can't close the queue of tasks, and workers would wait
    forever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "only processes of a pool run this"
    parent.join()
    os._exit(1)


@contextmanager
def open_executor(config: PrepareConfig) -> Iterator[Executor]:
    """The executor of the configuration.

    Raises:
        UserError: a cluster can't be reached, or is lost.
    """
    if config.executor == "dask":
        assert config.scheduler is not None, "PrepareConfig asks for it"
        yield from _dask(config.scheduler)
    else:
        executor = LocalExecutor(config.workers)
        try:
            yield executor
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _dask(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
        from distributed.comm import CommClosedError
    except ImportError as error:
        raise UserError(f"executor dask: the library is missing; {how_to_install('dask')}") from error
    try:
        client = Client(address, timeout=_CONNECT_SECONDS)
    except (OSError, ValueError, TimeoutError) as error:
        raise UserError(f"scheduler: no Dask scheduler answers at {address}; check the address") from error
    try:
        with client:
            if not client.scheduler_info()["workers"]:
                raise UserError(f"scheduler: {address} has no workers; start some with `dask worker {address}`")
            yield client.get_executor(pure=False)
    except (CancelledError, CommClosedError) as error:  # a client that has lost its scheduler cancels all tasks
        raise UserError(
            f"scheduler: lost the one at {address}, expected it to stay; start one and run the same command again, it "
            "continues where it was"
        ) from error


def run_tasks(
    executor: Executor,
    function: Callable[..., object],
    task: Callable[[int], object],
    weights: Sequence[int],
    on_result: Callable[[int, Any], None],
) -> None:
    """Run `function` on task(0), task(1), …, one for each weight, the heaviest first, so that no long one remains at
    the end.

    Tasks are made when they are needed. `on_result(place, result)` is called in this process when they end, in any
    order. The first failure cancels tasks that have not begun and is raised.
    """
    waiting = iter(np.argsort(-np.asarray(weights, np.int64), kind="stable").tolist())
    places: dict[Future[object], int] = {}
    ended: SimpleQueue[Future[object]] = SimpleQueue()

    def submit(count: int) -> None:
        for place in itertools.islice(waiting, count):
            future = executor.submit(function, task(place))
            places[future] = place
            future.add_done_callback(ended.put)

    try:
        submit(_IN_FLIGHT)
        while places:
            if ended.empty() and isinstance(executor, LocalExecutor) and executor.help():
                continue
            future = ended.get()
            on_result(places.pop(future), future.result())
            submit(1)
    except BrokenProcessPool as error:
        raise UserError(_DIED) from error
    except MemoryError as error:
        raise UserError(_NO_MEMORY) from error
    except Exception as error:
        if type(error).__name__ == "KilledWorker":  # Dask: a task whose worker died four times
            raise UserError(_DIED) from error
        raise
    finally:
        for future in places:
            future.cancel()
