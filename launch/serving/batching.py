"""One model, many requests: whatever waits when the model is free goes through it together.

No request waits for others to come: the first one runs at once, and those that come meanwhile make the next batch. So a
lone client has no delay, and under load batches grow by themselves.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from launch.predict import Predictor
from launch.predicting.operation import Operation, Row
from pipeline.encoding import Encoding


class QueueFull(Exception):
    """More texts wait than may."""


@dataclass(frozen=True)
class _Job:
    operation: Operation
    prepared: list[tuple[Row, list[Encoding]]]
    answer: asyncio.Future


class Batcher:
    """The queue before a model. Of one event loop; the model runs in a thread, one batch at a time.

    waiting_texts: texts that wait or run. on_batch: called with the number of texts of each batch.
    """

    def __init__(self, predictor: Predictor, max_batch_texts: int, max_queue_texts: int, on_batch=None) -> None:
        self.predictor, self.waiting_texts = predictor, 0
        self._max_batch, self._max_queue, self._on_batch = max_batch_texts, max_queue_texts, on_batch
        self._jobs: deque[_Job] = deque()
        self._arrived = asyncio.Event()

    async def submit(self, operation: Operation, rows: list[Row]) -> list[Any]:
        """Results of some texts, as `Predictor.map` gives them.

        Raises:
            QueueFull, UserError.
        """
        self.predictor.require(operation)
        if self.waiting_texts + len(rows) > self._max_queue:
            raise QueueFull
        prepared = [(row, self.predictor.prepare(operation, row)) for row in rows]
        job = _Job(operation, prepared, asyncio.get_running_loop().create_future())
        self.waiting_texts += len(rows)
        self._jobs.append(job)
        self._arrived.set()
        try:
            return await job.answer
        finally:
            self.waiting_texts -= len(rows)

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            await self._arrived.wait()
            batch = self._next_batch()
            if batch:
                await self._answer(batch)
            if not self._jobs:
                self._arrived.clear()

    def _next_batch(self) -> list[_Job]:
        """The oldest job and, up to the limit, others of the same operation and options; the rest keep their order.

        A job whose client has gone is dropped.
        """
        batch, rest, texts = [], deque(), 0
        for job in self._jobs:
            if job.answer.done():
                continue
            fits = not batch or (job.operation == batch[0].operation and texts + len(job.prepared) <= self._max_batch)
            if fits:
                batch.append(job)
                texts += len(job.prepared)
            else:
                rest.append(job)
        self._jobs = rest
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
