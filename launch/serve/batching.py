"""Batches across requests: all that wait when the model is free are run together.

No request waits for others to come: the first one runs at once, and those that arrive while it runs make the next
batch. So a lone client has no delay, and under load batches grow by themselves. The event loop only passes things on:
texts become tokens and results become JSON in threads, too.

Small requests are answered under any load. Requests are served in the order of fair queueing (Demers, Keshav and
Shenker 1989, each request a flow of its own): a small one goes before large ones that came shortly before it, and each
waits for a bounded number of tokens. When the queue is full, the largest that waits makes room for a smaller one.
Results are computed no faster than they are converted to JSON: later requests stay in the queue until then.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cloze.launch.predict.operation import Operation, Row
from cloze.launch.predict.output import as_json, encoded
from cloze.launch.predict.predictor import Predictor
from cloze.launch.serve.config import ServeConfig
from cloze.launch.texts.encoding import Encoding
from cloze.pipeline.errors import UserError

# Threads that make tokens of texts and JSON of results: Python runs one at a time, and each holds what it works on.
_THREADS = 4

Prepared = list[tuple[Row, list[Encoding]]]


class QueueFull(Exception):
    """As many tokens or numbers wait as may."""


@dataclass(eq=False)
class _Job:
    """A request in the queue; share: of the queue, by tokens or numbers; due: its turn, in tokens that were run."""

    operation: Operation
    prepared: Prepared
    characters: int
    tokens: int
    numbers: int
    share: float
    due: int
    answer: asyncio.Future
    counted: bool = True
    taken: bool = False


class Batcher:
    """The queue before a model. Of one event loop; the model runs in a thread, one batch at a time.

    waiting_tokens, waiting_numbers: of all sequences, and in the answers, that wait, run or become JSON. on_batch:
    called with the number of texts of each batch.
    """

    def __init__(self, predictor: Predictor, limits: ServeConfig, on_batch: Callable[[float], None] | None = None
                 ) -> None:
        self.predictor, self.waiting_tokens, self.waiting_numbers = predictor, 0, 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="texts")
        self._limits, self._on_batch = limits, on_batch
        self._jobs: list[_Job] = []
        self._arrived = asyncio.Event()
        # Tokens of all batches until now, and numbers of the results that are made or become JSON.
        self._tokens_run = self._numbers_made = 0

    @property
    def full(self) -> bool:
        return (self.waiting_tokens >= self._limits.max_queue_tokens
                or self.waiting_numbers >= self._limits.max_queue_numbers)

    async def submit(self, operation: Operation, rows: list[Row]) -> bytes:
        """Results of some texts: a list of the objects that `cloze predict` prints, as JSON.

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
        job = _Job(operation, prepared, characters, tokens, numbers, share, self._tokens_run + tokens,
                   loop.create_future())
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
        """While the queue is full, answer the largest one that waits, and is larger than this share, with QueueFull; of
        equal ones that which came last.

        Raises:
            QueueFull: there is none.
        """
        while self.full:
            largest = max(reversed(list(self._waiting())), key=lambda job: job.share, default=None)
            if largest is None or largest.share <= share:
                raise QueueFull
            largest.answer.set_exception(QueueFull())
            self._release(largest)

    def _release(self, job: _Job) -> None:
        """Count a job as waiting no longer, once."""
        if job.counted:
            job.counted = False
            self.waiting_tokens -= job.tokens
            self.waiting_numbers -= job.numbers
            self._numbers_made -= job.numbers if job.taken else 0
            self._arrived.set()  # there may be room for results that had none

    def _prepare(self, operation: Operation, rows: list[Row]) -> tuple[Prepared, int, int]:
        """Sequences of some texts, the number of their tokens and that of the numbers in the answer.

        Raises:
            UserError: as soon as they are too many.
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
        """Serve until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while batch := self._next_batch():
                await self._answer(batch)

    def _next_batch(self) -> list[_Job]:
        """The job that is due first and, up to the limit, others of the same operation and options; none while the
        results of all that wait have no room. A job whose client has gone is dropped.
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
                # no other request passes it any more: room will come
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
            if len(batch) > 1:  # only the guilty one is to fail
                for job in batch:
                    await self._answer([job])
            elif not batch[0].answer.done():  # answers 500, with its traceback in the log
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
        raise UserError(f"inputs: found more than {most:,} {what}, expected at most as many in a request ({limit}); "
                        "send fewer or shorter texts")


def _write(operation: Operation, rows: list[Row], results: list[Any]) -> bytes:
    return f"[{', '.join(_json(as_json(operation, *pair)) for pair in zip(rows, results, strict=True))}]".encode()


def _json(value: Any) -> str:
    """JSON row by row: the library lets no other thread run, the event loop's neither, while it writes a value."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{encoded(name)}: {_json(each)}' for name, each in value.items())}}}"
    if isinstance(value, list) and value and isinstance(value[0], list):
        return f"[{', '.join(map(_json, value))}]"
    return encoded(value)
