"""Texts of several requests in one batch."""

import asyncio
import json
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from cloze.launch.predict.blanks import Score
from cloze.launch.predict.operation import Row
from cloze.launch.predict.output import as_json
from cloze.launch.predict.vectors import Embed
from cloze.launch.serve.batching import Batcher, QueueFull, _Threads
from cloze.launch.serve.config import ServeConfig


@dataclass(frozen=True)
class Delicate(Embed):
    def finish(self, predictor, row, encodings, values):
        if row.text == "sea":
            raise ZeroDivisionError
        return super().finish(predictor, row, encodings, values)


def test_one_bad_request_of_a_batch_fails_alone(offline):
    sizes, texts = [], ["cat", "sea", "sky"]

    async def ask() -> list:
        batcher = Batcher(offline, ServeConfig("model"), sizes.append)
        asked = [asyncio.create_task(batcher.submit(Delicate(), [Row(text)])) for text in texts]
        while batcher.waiting_tokens < 9:  # all wait before the model is free
            await asyncio.sleep(0.01)
        worker = asyncio.create_task(batcher.run())
        results = await asyncio.gather(*asked, return_exceptions=True)
        worker.cancel()
        return results

    first, guilty, last = asyncio.run(ask())
    assert isinstance(guilty, ZeroDivisionError) and sizes == [3, 1, 1, 1]
    found = [result["vector"] for answer in (first, last) for result in json.loads(answer)]
    np.testing.assert_allclose(found, offline.embed(["cat", "sky"]), atol=1e-5)


def test_who_asks_for_little_is_answered_when_the_queue_is_full_of_large_requests(offline):
    """Two large ones fill it: further ones are refused. A small one takes the place of the second and runs first."""
    ran, large = [], [Row("the cat sat on the mat and the sky is blue")] * 40  # 520 tokens

    async def ask() -> list:
        batcher = Batcher(offline, ServeConfig("model", max_queue_tokens=1000, max_batch_tokens=1), ran.append)
        asked = []
        for rows in (large, large, [*large, Row("cat")], large, [Row("cat")], large, large):
            asked.append(asyncio.create_task(batcher.submit(Embed(), rows)))
            before = len(batcher._small.jobs)
            while len(batcher._small.jobs) == before and not asked[-1].done():
                await asyncio.sleep(0.01)
        worker = asyncio.create_task(batcher.run())
        results = await asyncio.gather(*asked, return_exceptions=True)
        worker.cancel()
        assert batcher.waiting_tokens == batcher.waiting_numbers == batcher._small.numbers_made == 0
        return results

    refused = [isinstance(each, QueueFull) for each in asyncio.run(ask())]
    assert refused == [False, True, True, True, False, False, True]
    assert ran == [1, 40, 40]


def test_results_wait_in_the_queue_while_others_become_json(offline, monkeypatch):
    """So that they can make room: of what has left the queue nothing can be dropped."""
    may_write, sizes = threading.Event(), []

    def writing(*parts):
        may_write.wait()
        return as_json(*parts)

    async def ask() -> list:
        batcher = Batcher(offline, ServeConfig("model", max_numbers=2 * 32, max_batch_tokens=1), sizes.append)
        worker = asyncio.create_task(batcher.run())
        asked = [asyncio.create_task(batcher.submit(Embed(), [Row("cat")])) for _ in range(4)]
        while batcher._small.numbers_made < 2 * 32:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert sizes == [1, 1] and len(batcher._small.jobs) == 2
        may_write.set()
        results = await asyncio.gather(*asked)
        worker.cancel()
        return results

    monkeypatch.setattr("cloze.launch.serve.batching.as_json", writing)
    assert len(asyncio.run(ask())) == 4 and sizes == [1, 1, 1, 1]


def test_small_requests_do_not_overtake_one_for_ever(offline):
    """It has room for its results when no others become JSON: those that come after its turn wait for that."""

    async def ask() -> list[int]:
        batcher, taken = Batcher(offline, ServeConfig("model", max_numbers=2 * 32)), []

        async def come(texts: int) -> None:
            before = len(batcher._small.jobs)
            asked.append(asyncio.create_task(batcher.submit(Embed(), [Row("cat")] * texts)))
            while len(batcher._small.jobs) == before:
                await asyncio.sleep(0.01)

        def take() -> int:
            taken.append(batcher._small.next_batch())
            return sum(len(job.prepared) for job in taken[-1])

        asked: list[asyncio.Task] = []
        await come(1)
        found = [take()]
        await come(2)  # 64 numbers: there is room for 32; its turn is when both have run 6 tokens
        for _ in range(4):
            await come(1)
            found.append(take())
            batcher._release(taken[-2][0])
        await come(1)
        found.append(take())  # that is now: the other could run, but waits
        batcher._release(taken[-2][0])
        found.append(take())
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return found

    assert asyncio.run(ask()) == [1, 1, 1, 1, 1, 0, 2]


def test_a_small_request_overtakes_all_larger_ones_that_wait(offline):
    """However long: were their turns counted by what has run in all, they would all be due after the second of them."""
    larger = [Row("the cat sat on the mat and the sky is blue")] * 10

    async def ask() -> list[int]:
        batcher = Batcher(offline, ServeConfig("model", max_batch_tokens=1))
        asked = [asyncio.create_task(batcher.submit(Embed(), larger)) for _ in range(6)]
        while len(batcher._small.jobs) < 6:
            await asyncio.sleep(0.01)
        for job in [batcher._small.next_batch()[0] for _ in range(3)]:
            batcher._release(job)
        asked.append(asyncio.create_task(batcher.submit(Embed(), [Row("cat")])))
        while len(batcher._small.jobs) < 4:
            await asyncio.sleep(0.01)
        found = [len(batcher._small.next_batch()[0].prepared) for _ in range(2)]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return found

    assert asyncio.run(ask()) == [1, 10]


@dataclass(frozen=True)
class Slow(Embed):
    """What waits, for a text, where results are finished or written."""

    may_end = threading.Event()

    def finish(self, loaded, row, encodings, values):
        if row.text == "sea":
            self.may_end.wait()
        return super().finish(loaded, row, encodings, values)


@pytest.mark.parametrize("while_written", [False, True])
def test_small_requests_are_answered_while_large_ones_are(offline, monkeypatch, while_written):
    large = [Row("sea")] + [Row("sky")] * 511  # 16,384 numbers and 1,536 tokens
    operation = Embed() if while_written else Slow()
    Slow.may_end.clear()

    def writing(asked, row, result):
        if row.text == "sea":
            Slow.may_end.wait()
        return as_json(asked, row, result)

    async def ask() -> None:
        batcher = Batcher(offline, ServeConfig("model"))
        worker = asyncio.create_task(batcher.run())
        asked = [asyncio.create_task(batcher.submit(operation, large)) for _ in range(5)]
        while not batcher._large.numbers_made:
            await asyncio.sleep(0.01)
        for _ in range(2):
            await asyncio.wait_for(batcher.submit(operation, [Row("cat")]), 60)
        assert not any(task.done() for task in asked)
        Slow.may_end.set()
        await asyncio.gather(*asked)
        worker.cancel()

    monkeypatch.setattr("cloze.launch.serve.batching.as_json", writing)
    asyncio.run(ask())


def test_threads_are_given_what_takes_least_first():
    """Also when who waits for one has left."""
    may_end, order = threading.Event(), []

    async def ask() -> None:
        threads = _Threads(1)
        asked = [asyncio.create_task(threads.run(1, may_end.wait))]
        asked += [asyncio.create_task(threads.run(cost, order.append, cost)) for cost in (5, 4, 3, 2)]
        await asyncio.sleep(0)
        asked[2].cancel()
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(*asked, return_exceptions=True)
        assert await threads.run(1, len, order) == 3 and threads._free == 1

    asyncio.run(ask())
    assert order == [2, 3, 5]


def test_texts_become_tokens_and_results_json_in_other_threads_than_the_event_loop_s(offline, monkeypatch):
    seen = []

    def noting(function):
        def noted(*parts):
            seen.append((function.__name__, threading.current_thread()))
            return function(*parts)

        return noted

    async def ask() -> bytes:
        batcher = Batcher(offline, ServeConfig("model"))
        worker = asyncio.create_task(batcher.run())
        answer = await batcher.submit(Embed(), [Row("cat")])
        worker.cancel()
        assert batcher.waiting_tokens == 0
        return answer

    monkeypatch.setattr("cloze.launch.serve.batching.as_json", noting(as_json))
    monkeypatch.setattr(offline, "prepare", noting(offline.prepare))
    monkeypatch.setattr(offline, "run", noting(offline.run))
    assert json.loads(asyncio.run(ask()))[0]["text"] == "cat"
    assert [name for name, _ in seen] == ["prepare", "run", "as_json"]
    assert threading.main_thread() not in {thread for _, thread in seen}


def test_a_text_to_score_is_not_copied_for_each_of_its_tokens(offline):
    sequences = list(offline.prepare(Score(), Row("the cat sat on the mat")))
    assert [each.blanks for each in sequences] == [(place,) for place in range(1, 7)]
    assert all(each.ids is sequences[0].ids for each in sequences)
