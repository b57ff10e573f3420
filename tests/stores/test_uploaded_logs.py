"""What a run tells, uploaded in pieces."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from cloze.launch.run import uploaded_logs
from cloze.launch.run.metrics_file import iterate_metrics, lines_of
from cloze.launch.run.uploaded_logs import LogReader, Shipper, add_unsent, fetch_heartbeats, send_rest
from cloze.pipeline.errors import UserError
from cloze.pipeline.stores.places import StorePath, to_place
from tests.stores.server import BUSY


def lines(*steps):
    return "".join(f'{{"step": {step}, "train/loss": {step}.0}}\n' for step in steps)


def parsed(*steps: int) -> list[dict]:
    return lines_of(lines(*steps).encode())


def arrived_of(*steps: int) -> list[tuple[int, bool]]:
    return [(step, False) for step in steps]


def test_what_a_run_tells_arrives_in_pieces(bucket, tmp_path):
    """Of two attempts the later one wins by step; a line that is being written waits; nothing is sent twice."""
    place = to_place(bucket) / "run"
    for number, (start, own) in enumerate([(0, (1, 2, 3, 4)), (2, (3, 4, 5))]):
        folder = tmp_path / str(number)
        (folder / "heartbeats").mkdir(parents=True)
        if number:
            LogReader(place).write(folder)
            assert (folder / "metrics.jsonl").read_text() == lines(1, 2, 3, 4)
            (folder / "metrics.jsonl").write_text(lines(1, 2))  # as the writer of metrics does
        shipper = Shipper(folder, place / "log" / f"000{number}-a", 0, 1000, print)
        shipper.begin(start, start, arrived_of(1, 2, 3, 4) if number else [])
        board = SummaryWriter(str(folder), purge_step=start + 1 if start else 0)
        for step in own:
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(lines(step))
                file.flush()
                board.add_scalar("x", step, step)
                board.flush()
                (folder / "status.json").write_text(f'{{"state": "running", "step": {step}}}')
                (folder / "heartbeats/rank-00000.json").write_text(f'{{"step": {step}}}')
                shipper.ship()
                file.write('{"step": 99')  # its rest has not come yet
                file.flush()
                shipper.ship()
                file.truncate(file.tell() - len('{"step": 99'))
        shipper.close(60)
        board.close()
    pieces = [each for each in (place / "log").objects() if "metrics.jsonl" in each.key]
    assert len(pieces) == 7 and sum(each.size for each in pieces) == len(lines(1, 2, 3, 4, 3, 4, 5))
    back = tmp_path / "back"
    back.mkdir()
    reader = LogReader(place, newest_pieces=3)
    reader.write(back)
    assert (back / "metrics.jsonl").read_text() == lines(3, 4, 5)
    LogReader(place).write(back)
    fetch_heartbeats(place, back)
    assert (back / "metrics.jsonl").read_text() == lines(1, 2, 3, 4, 5)
    assert (back / "status.json").read_text() == '{"state": "running", "step": 5}'
    assert (back / "heartbeats/rank-00000.json").read_text() == '{"step": 5}'
    assert (
        len(
            [each for each in (place / "log/0001-a/status.json.000002").parent.objects() if "/status.json." in each.key]
        )
        == 2
    )  # older ones are removed
    reader.write_events(back)
    reader.write_events(back)  # nothing is added twice
    board = EventAccumulator(str(back)).Reload()
    assert [event.step for event in board.Scalars("x")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("content", [b"", b'{"step": 2', b"[]", b'{"step": 2}', b"[" * 100_000, b"\xff"])
def test_a_damaged_start_is_one_line(bucket, tmp_path, content):
    log = to_place(bucket) / "run/log/0001-a"
    (log / "start.json.000000").write(content)
    (log / "metrics.jsonl.000000").write(lines(1, 2).encode())
    with pytest.raises(
        UserError, match=r"^s3://.*/log/0001-a/start.json.000000: found no step from which the run went"
    ):
        LogReader(log.parent.parent).write(tmp_path)


def test_a_log_of_any_length_is_joined_in_pieces(bucket, tmp_path, monkeypatch):
    """Of 30 MB in segments of 1 MB a few are in memory; each is read once, and replaced lines are gone."""
    place, width, wide = to_place(bucket) / "run", 200, "x" * 5000
    for number in range(30):
        segment = "".join(
            json.dumps({"step": number * width + each, wide: None}) + "\n" for each in range(1, width + 1)
        )
        (place / f"log/0001-a/metrics.jsonl.{number:06d}").write(segment.encode())
    (place / "log/0002-b/start.json.000000").write(b'{"step": 5000, "evaluated_step": -1}')
    (place / "log/0002-b/metrics.jsonl.000000").write(lines(5001, 5002).encode())
    monkeypatch.setattr(uploaded_logs, "_READERS", 2)
    reader, read = LogReader(place), []
    monkeypatch.setattr(
        StorePath, "read_bytes", lambda path, whole=StorePath.read_bytes: (read.append(path), whole(path))[1]
    )
    tracemalloc.start()
    reader.write(tmp_path, ["metrics.jsonl"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 15 << 20, f"{peak >> 20} MiB"
    assert [line["step"] for line in iterate_metrics(tmp_path)] == list(range(1, 5003))
    before = len(read)
    reader.write(tmp_path, ["metrics.jsonl"])
    assert [path.name for path in read[before:]] == ["start.json.000000"] and len(set(read[:before])) == 32


def test_events_that_a_killed_start_has_not_sent(bucket, tmp_path):
    """They are sent by the next one on its machine, from where they were cut: no gap and no step twice."""
    log = to_place(bucket) / "run/log"
    for name, start, steps in (("0001-a", 0, range(1, 7)), ("0002-b", 5, range(6, 9))):
        folder = tmp_path / name
        folder.mkdir()
        shipper = Shipper(folder, log / name, 0, 1000, print)
        board = SummaryWriter(str(folder), purge_step=start + 1 if start else 0)
        for step in steps:
            board.add_scalar("x", step, step)
            board.flush()
            if step in (2, 3, 7):
                shipper.ship()
        board.close()
        with open(next(folder.glob("*tfevents*")), "ab") as file:
            file.write(b"\x18\0\0")  # one that was being written
        if start == 0:
            send_rest(folder, log, name)
            send_rest(folder, log, name)  # there is nothing left
    (tmp_path / "back").mkdir()
    LogReader(log.parent).write_events(tmp_path / "back")
    board = EventAccumulator(str(tmp_path / "back")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("x")] == [(step, step) for step in range(1, 8)]


def test_what_a_killed_start_has_not_sent_is_sent_by_the_next_on_its_machine(bucket, tmp_path):
    """It goes on from scratch, from a later step than any in the store."""
    place, path = to_place(bucket) / "run", tmp_path / "metrics.jsonl"
    (place / "log/0001-a/metrics.jsonl.000000").write(lines(1, 2, 3).encode())
    before = parsed(1, 2, 3, 4, 5) + [{"step": 5, "validation/loss": 1.0}]
    LogReader(place).write(tmp_path)
    arrived = add_unsent(path, before)
    assert arrived == arrived_of(1, 2, 3) and lines_of(path.read_bytes()) == before
    path.write_text(lines(1, 2, 3, 4))  # as the writer of metrics does, of a run that goes on from step 4
    shipper = Shipper(tmp_path, place / "log/0002-b", 0, 1000, print)
    shipper.begin(4, -1, arrived)
    shipper.close(60)
    assert (place / "log/0002-b/metrics.jsonl.000000").read_text() == lines(4)
    LogReader(place).write(tmp_path)
    assert path.read_text() == lines(1, 2, 3, 4)


def test_a_store_that_is_away_is_no_harm_to_what_tells(bucket, proxy, impatient, tmp_path):
    place, said = to_place(bucket) / "run/log/0001-a", []
    shipper = Shipper(tmp_path, place, 0, 0.02, said.append)
    shipper.begin(0, -1, [])
    proxy.fault = lambda request: lambda _: BUSY
    (tmp_path / "metrics.jsonl").write_text(lines(1, 2))
    while not said:
        assert shipper._thread.is_alive()
    proxy.fault = lambda request: None
    shipper.close(60)
    assert len(said) == 1 and "could not be uploaded" in said[0]
    assert place.at("run/log/0001-a/metrics.jsonl.000000").read_text() == lines(1, 2)
