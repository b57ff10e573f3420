"""A rank ends with the process that has started it."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.launching import ROOT, wait_until

# Each starts the next one, to the last one, a rank, which says what it is and then what stops it.
CHAIN = """
import os, signal, subprocess, sys, time
from cloze.launch.system.environment import parents
links, folder = int(sys.argv[2]), sys.argv[3]
open(f"{folder}/{links}", "w").write(str(os.getpid()))
if links:
    sys.exit(subprocess.call([sys.executable, "-c", sys.argv[1], sys.argv[1], str(links - 1), folder]))
def stop(number, frame):
    open(f"{folder}/stopped", "w").close()
    os._exit(75)
signal.signal(signal.SIGTERM, stop)
parents._LOOK_SECONDS = 0.05
parents.end_with_parent()
open(f"{folder}/ready", "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("variable", "killed", "stops"),
    [
        ("TORCHELASTIC_RUN_ID", 1, True),
        ("CROSS_RANK", 1, True),  # deepspeed's launcher
        ("CROSS_RANK", 2, True),  # the `deepspeed` that has started it
        ("BY_HAND", 1, False),  # a shell that may end before what it has started
    ],
)
def test_a_rank_stops_when_its_launcher_is_killed(tmp_path, variable, killed, stops):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", variable: "1"}
    command = [sys.executable, "-c", CHAIN, CHAIN, str(killed), str(tmp_path)]
    first = subprocess.Popen(command, env={**os.environ, **variables}, cwd=ROOT)
    try:
        wait_until((tmp_path / "ready").exists)
        first.kill()
        first.wait()
        if stops:
            wait_until((tmp_path / "stopped").exists)
        else:
            time.sleep(0.3)
            assert not (tmp_path / "stopped").exists()
    finally:
        for path in tmp_path.glob("[0-9]"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
