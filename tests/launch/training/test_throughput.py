"""A rank that is slower than the others for long is named once."""

import json
import re
import socket
import time

from cloze.launch.cli import main
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.run.runs import HEARTBEATS
from cloze.launch.training import loop
from tests.forked import ForkedRun
from tests.launching import finish, pretrain_arguments
from tests.synthetic import make_shards

SLEEP_SECONDS = 0.6  # a pass of the other process takes milliseconds, on a busy machine up to some 0.3 s


def slow_main(command: list[str]) -> int:
    """The command in two processes of which one takes long over each micro-batch."""
    loss = loop.Loop._loss

    def slowly(self, *arguments):
        if self.environment.rank == 1:
            time.sleep(SLEEP_SECONDS)
        return loss(self, *arguments)

    loop.Loop._loss = slowly
    return main(command)


def test_a_process_that_is_slow_for_long_is_named_once(tmp_path):
    data, run = make_shards(tmp_path / "data"), tmp_path / "run"
    process = ForkedRun(
        pretrain_arguments(
            data,
            run,
            "--train.max_steps",
            "14",
            "--train.log_every_steps",
            "2",
            "--monitor.heartbeat_seconds",
            "0.2",
            "--monitor.hang_seconds",
            "3",
        ),
        2,
        slow_main,
    )
    output = finish(process)
    named = re.findall(r"rank 1 \((\S+), process (\d+)\) is slow: for \d+ s it has taken (\S+) s a step", output)
    assert len(named) == 1 and "rank 0 (" not in output, output
    process_of_rank_1 = json.loads((run / HEARTBEATS / "rank-00001.json").read_text())["process"]
    assert named[0][:2] == (socket.gethostname(), str(process_of_rank_1)) and float(named[0][2]) > SLEEP_SECONDS
    lines = [line for line in read_metrics(run) if "speed/pass_seconds" in line]
    assert all(line["speed/pass_seconds/max"] > SLEEP_SECONDS > line["speed/pass_seconds/min"] for line in lines)
