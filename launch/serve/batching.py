"""Batches across requests: all requests that wait when the model becomes free run together.

No request waits for later ones: the first one runs at once, and those that arrive meanwhile form the next batch. A
single client has no delay, and batches grow with the load. The event loop only dispatches: tokenization and JSON
encoding run in threads, too.

Small requests are served under any load. The order is fair queueing (Demers, Keshav and Shenker 1989, each request a
flow of its own): a small request overtakes large ones that came shortly before it, and each waits for a bounded number
of tokens. When the queue is full, the largest waiting request is rejected in favour of a smaller one. Results are
computed no faster than they are converted to JSON; until then later requests stay in the queue.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cloze.launch.predict.operation import Operation, Row
from cloze.launch.predict.output import as_json, encoded
from cloze.launch.predict.predictor import Predictor
from cloze.launch.serve.config import ServeConfig
from cloze.launch.texts.encoding import Encoding
from cloze.pipeline.errors import UserError

# Threads for tokenization and for JSON: Python runs one at a time, and each holds its data in memory.
_THREADS = 4

Prepared = list[tuple[Row, list[Encoding]]]


class QueueFull(Exception):
    """The queue has reached its limit of tokens or numbers."""


@dataclass(eq=False)
class _Job:
    """A request in the queue.

    Args:
        share: its share of the queue's limit.
        due: its virtual finish time of fair queueing, in tokens.
    """

    operation: Operation
    prepared: Prepared
    characters: int
    tokens: int
    numbers: int
    share: float
    due: int
    answer: asyncio.Future[Any]
    counted: bool = True
    taken: bool = False


class Batcher:
    """The request queue of a model, for one event loop; the model runs in a thread, one batch at a time.

    waiting_tokens, waiting_numbers: tokens of the sequences, and numbers in the results, of requests that wait, run or
    are converted to JSON.

    Args:
        on_batch: called with the number of texts of each batch.
    """

    def __init__(
        self, predictor: Predictor, limits: ServeConfig, on_batch: Callable[[float], None] | None = None
    ) -> None:
        self.predictor, self.waiting_tokens, self.waiting_numbers = predictor, 0, 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="texts")
        self._limits, self._on_batch = limits, on_batch
        self._jobs: list[_Job] = []
        self._arrived = asyncio.Event()
        # Tokens of all batches so far; numbers in results that are computed or converted to JSON.
        self._tokens_run = self._numbers_made = 0

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
        loop = asyncio.get_running_loop()
        prepared, tokens, numbers = await loop.run_in_executor(self._threads, self._prepare, operation, rows)
        share = max(tokens / self._limits.max_queue_tokens, numbers / self._limits.max_queue_numbers)
        self._make_room(share)
        job = _Job(
            operation, prepared, characters, tokens, numbers, share, self._tokens_run + tokens, loop.create_future()
        )
        self.waiting_tokens += tokens
        self.waiting_numbers += numbers
        self._jobs.append(job)
        self._arrived.set()
        try:
            return await loop.run_in_executor(self._threads, _write, operation, rows, await job.answer)
        finally:
            self._release(job)

    def _waiting(self) -> Iterator[_Job]:
        return (job for job in self._jobs if not job.answer.done())

    def _make_room(self, share: float) -> None:
        """While the queue is full, reject with QueueFull the largest waiting request that is larger than this share; of
        equal ones the latest.

        Raises:
            QueueFull: no waiting request is larger.
        """
        while self.full:
            largest = max(reversed(list(self._waiting())), key=lambda job: job.share, default=None)
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
            self._numbers_made -= job.numbers if job.taken else 0
            self._arrived.set()  # there may be room now for further results

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
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while batch := self._next_batch():
                await self._answer(batch)

    def _next_batch(self) -> list[_Job]:
        """The job that is due first and, up to the limit, others of the same operation and options; empty while there
        is no room for results. Jobs whose clients have disconnected are dropped.
        """
        batch: list[_Job] = []
        rest: list[_Job] = []
        tokens, kept = 0, False
        for job in sorted(self._waiting(), key=lambda job: job.due):
            fits = tokens + job.tokens <= self._limits.max_batch_tokens
            has_room = not self._numbers_made or self._numbers_made + job.numbers <= self._limits.max_numbers
            if has_room and not kept and (not batch or (fits and job.operation == batch[0].operation)):
                batch.append(job)
                job.taken = True
                self._numbers_made += job.numbers
                tokens += job.tokens
            else:
                rest.append(job)
                # stop here, so that no later request overtakes it and it gets the next room
                kept |= not has_room and job.due <= self._tokens_run
        self._jobs = rest
        self._tokens_run += tokens
        return batch

    async def _answer(self, batch: list[_Job]) -> None:
        together = [each for job in batch for each in job.prepared]
        if self._on_batch:
            self._on_batch(len(together))
        try:
            results = await asyncio.to_thread(self.predictor.run, batch[0].operation, together)
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
