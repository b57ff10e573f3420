"""Batches across requests: all requests that wait when the model becomes free run together.

No request waits for later ones: the first one runs at once, and those that arrive meanwhile form the next batch. A
single client has no delay, and batches grow with the load. The event loop only dispatches: tokenization and JSON
encoding run in threads, too.

Small requests are served under any load. They have a queue and threads of their own, and their batches alternate with
the parts of a large one. The order in a queue is fair queueing (Demers, Keshav and Shenker 1989, each request a flow of
its own): a small request overtakes larger ones that came before it, and each waits for a bounded number of tokens. When
the queues are full, the largest waiting request is rejected in favour of a smaller one. Results are computed no faster
than they are converted to JSON; until then later requests stay in the queue.
"""

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cloze.launch.predict.operation import Operation, Row
from cloze.launch.predict.output import as_json, encoded
from cloze.launch.predict.predictor import Predictor
from cloze.launch.serve.config import ServeConfig
from cloze.launch.texts.encoding import Encoding
from cloze.pipeline.errors import UserError

# Threads for texts and results of small requests, and of large ones: Python runs one at a time, each waits for the
# others wherever it has let them run, and each holds its data in memory.
_THREADS, _LARGE_THREADS = 2, 1
# A request is large if it has more: on a small model, each takes some 10 ms.
_LARGE_CHARACTERS = 4096
_LARGE_TOKENS = 1024
_LARGE_NUMBERS = 1 << 14

Prepared = list[tuple[Row, list[Encoding]]]


class QueueFull(Exception):
    """The queue has reached its limit of tokens or numbers."""


@dataclass(eq=False)
class _Job:
    """A request in the queue.

    Args:
        share: its share of the limits of all waiting requests.
        queue: where it waits.
        due: its virtual finish time of fair queueing, in tokens.
    """

    operation: Operation
    prepared: Prepared
    characters: int
    tokens: int
    numbers: int
    share: float
    queue: "_Queue"
    due: float
    answer: asyncio.Future[Any]
    counted: bool = True
    taken: bool = False


class _Threads:
    """Threads that are given what waits for them in the order of fair queueing."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="texts")
        self._free, self._time = count, 0.0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []  # a heap
        self._number = itertools.count()  # of what is due at the same time, the first that came

    async def run(self, cost: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function, run in one of the threads.

        Args:
            cost: characters that it reads, or numbers that it writes, which take about as long.
        """
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        heapq.heappush(self._waiting, (self._time + cost, next(self._number), turn))
        self._pass_on()
        try:
            await turn
            self._time += cost / (len(self._waiting) + 1)
            return await loop.run_in_executor(self._pool, function, *arguments)
        finally:
            if not turn.cancelled():  # while it waited
                self._free += 1
                self._pass_on()

    def _pass_on(self) -> None:
        while self._free and self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.cancelled():
                self._free -= 1
                turn.set_result(None)


class _Queue:
    """Requests that wait for the model, and threads for their texts and results.

    time: the virtual time of fair queueing: tokens that each of the waiting requests would have run by now if they had
    run at the same time.
    numbers_made: numbers in results that are computed or converted to JSON.
    """

    def __init__(self, limits: ServeConfig, threads: int) -> None:
        self.threads = _Threads(threads)
        self.jobs: list[_Job] = []
        self.arrived = asyncio.Event()
        self.time, self.numbers_made = 0.0, 0
        self._limits = limits

    def waiting(self) -> list[_Job]:
        return [job for job in self.jobs if not job.answer.done()]

    def next_batch(self) -> list[_Job]:
        """The job that is due first and, up to the limit, others of the same operation and options; empty while there
        is no room for results. Jobs whose clients have disconnected are dropped.
        """
        batch: list[_Job] = []
        rest: list[_Job] = []
        tokens, kept = 0, False
        waiting = self.waiting()
        for job in sorted(waiting, key=lambda job: job.due):
            fits = tokens + job.tokens <= self._limits.max_batch_tokens
            has_room = not self.numbers_made or self.numbers_made + job.numbers <= self._limits.max_numbers
            if has_room and not kept and (not batch or (fits and job.operation == batch[0].operation)):
                batch.append(job)
                job.taken = True
                self.numbers_made += job.numbers
                tokens += job.tokens
            else:
                rest.append(job)
                # stop here, so that no later request overtakes it and it gets the next room
                kept |= not has_room and job.due <= self.time
        self.jobs = rest
        if batch:
            self.time += tokens / len(waiting)
        return batch


class Batcher:
    """The request queues of a model, for one event loop. The model runs in two threads, a batch of small requests in
    one and of large ones in the other; they take turns by the forward.

    waiting_tokens, waiting_numbers: tokens of the sequences, and numbers in the results, of requests that wait, run or
    are converted to JSON.

    Args:
        on_batch: called with the number of texts of each batch.
    """

    def __init__(
        self, predictor: Predictor, limits: ServeConfig, on_batch: Callable[[float], None] | None = None
    ) -> None:
        self.predictor, self.waiting_tokens, self.waiting_numbers = predictor, 0, 0
        self._limits, self._on_batch = limits, on_batch
        self._small, self._large = _Queue(limits, _THREADS), _Queue(limits, _LARGE_THREADS)
        self._turn = threading.Lock()

    @property
    def full(self) -> bool:
        return (
            self.waiting_tokens >= self._limits.max_queue_tokens
            or self.waiting_numbers >= self._limits.max_queue_numbers
        )

    async def submit(self, operation: Operation, rows: list[Row]) -> bytes:
        """Queue texts and return their results as JSON: a list of the objects that `cloze predict` prints.

        Raises:
            QueueFull, UserError.
        """
        self.predictor.require(operation)
        characters = sum(len(row.text) + len(row.pair or "") + sum(map(len, row.choices)) for row in rows)
        if self.full and all(job.characters <= characters for job in self._waiting()):  # before any work is done
            raise QueueFull
        threads = (self._large if characters > _LARGE_CHARACTERS else self._small).threads
        prepared, tokens, numbers = await threads.run(characters, self._prepare, operation, rows)
        share = max(tokens / self._limits.max_queue_tokens, numbers / self._limits.max_queue_numbers)
        self._make_room(share)
        queue = self._large if tokens > _LARGE_TOKENS or numbers > _LARGE_NUMBERS else self._small
        due = queue.time + tokens
        answer = asyncio.get_running_loop().create_future()
        job = _Job(operation, prepared, characters, tokens, numbers, share, queue, due, answer)
        self.waiting_tokens += tokens
        self.waiting_numbers += numbers
        queue.jobs.append(job)
        queue.arrived.set()
        try:
            return await queue.threads.run(numbers, _write, operation, rows, await job.answer)
        finally:
            self._release(job)

    def _waiting(self) -> list[_Job]:
        return [*self._small.waiting(), *self._large.waiting()]

    def _make_room(self, share: float) -> None:
        """While the queue is full, reject with QueueFull the largest waiting request that is larger than this share; of
        equal ones the latest.

        Raises:
            QueueFull: no waiting request is larger.
        """
        while self.full:
            largest = max(reversed(self._waiting()), key=lambda job: job.share, default=None)
            if largest is None or largest.share <= share:
                raise QueueFull
            largest.answer.set_exception(QueueFull())
            self._release(largest)

    def _release(self, job: _Job) -> None:
        """Remove a job from the counts of waiting ones, once."""
        if job.counted:
            job.counted = False
            self.waiting_tokens -= job.tokens
            self.waiting_numbers -= job.numbers
            job.queue.numbers_made -= job.numbers if job.taken else 0
            job.queue.arrived.set()  # there may be room now for further results

    def _prepare(self, operation: Operation, rows: list[Row]) -> tuple[Prepared, int, int]:
        """Encode texts.

        Returns:
            The sequences, their number of tokens, and the number of numbers in the result.

        Raises:
            UserError: as soon as a limit is exceeded.
        """
        prepared, tokens, numbers = [], 0, 0
        for row in rows:
            encodings = []
            for encoding in self.predictor.prepare(operation, row):
                tokens += len(encoding)
                _check("max_tokens", tokens, "tokens to run through the model", self._limits)
                encodings.append(encoding)
            numbers += operation.numbers(self.predictor.loaded, encodings)
            _check("max_numbers", numbers, "numbers to answer", self._limits)
            prepared.append((row, encodings))
        return prepared, tokens, numbers

    async def run(self) -> None:
        """Run batches until cancelled."""
        await asyncio.gather(self._serve(self._small), self._serve(self._large))

    async def _serve(self, queue: _Queue) -> None:
        while True:
            await queue.arrived.wait()
            queue.arrived.clear()
            while batch := queue.next_batch():
                await self._answer(batch)

    async def _answer(self, batch: list[_Job]) -> None:
        together = [each for job in batch for each in job.prepared]
        if self._on_batch:
            self._on_batch(len(together))
        try:
            results = await asyncio.to_thread(self.predictor.run, batch[0].operation, together, self._turn)
        except Exception as error:
            if len(batch) > 1:  # run them one by one, so that only the failing one is answered with an error
                for job in batch:
                    await self._answer([job])
            elif not batch[0].answer.done():  # responds with 500, and the traceback goes to the log
                batch[0].answer.set_exception(error)
            return
        start = 0
        for job in batch:
            end = start + len(job.prepared)
            if not job.answer.done():
                job.answer.set_result(results[start:end])
            start = end


def _check(limit: str, found: int, what: str, limits: ServeConfig) -> None:
    if found > (most := getattr(limits, limit)):
        raise UserError(
            f"inputs: found more than {most:,} {what}, expected at most as many in a request ({limit}); "
            "send fewer or shorter texts"
        )


def _write(operation: Operation, rows: list[Row], results: Sequence[object]) -> bytes:
    return f"[{', '.join(_json(as_json(operation, *pair)) for pair in zip(rows, results, strict=True))}]".encode()


def _json(value: object) -> str:
    """Encode JSON piece by piece: the json library blocks all other threads, including the event loop, while it encodes
    a value.
    """
    if isinstance(value, dict):
        return f"{{{', '.join(f'{encoded(name)}: {_json(each)}' for name, each in value.items())}}}"
    if isinstance(value, list) and value and isinstance(value[0], list):
        return f"[{', '.join(map(_json, value))}]"
    return encoded(value)
