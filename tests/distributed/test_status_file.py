"""How a run has ended is in status.json, by which job templates decide, whatever happens to its processes after."""

import json

import pytest

from cloze.launch.cli import main
from cloze.launch.run.status_file import read_status
from cloze.launch.system import distributed
from cloze.launch.training import process
from tests.forked import ForkedRun
from tests.launching import ROOT, finish, pretrain_arguments, pretrain_command, start
from tests.synthetic import make_shards


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("status"))


def fails_leaving(command: list[str]) -> int:
    """The command, which meets an error once it has written how it ended, as when another rank dies there."""
    told, barrier, ended = process.set_status, distributed.barrier, []

    def set_status(folder, state, step):
        told(folder, state, step)
        ended.extend([state] if state != "running" else [])

    def meet():
        if ended:
            raise RuntimeError("connection closed by peer")
        barrier()

    process.set_status, distributed.barrier = set_status, meet
    return main(command)


def test_what_has_ended_well_is_not_called_failed(data, tmp_path):
    """Job files go by the status: all was saved, whatever befalls the processes as they leave."""
    command = pretrain_arguments(data, tmp_path / "run", "--train.max_steps", "3", "--monitor.hang_seconds", "7200")
    output = finish(ForkedRun(command, 2, fails_leaving), status=None)
    assert "connection closed by peer" in output and "complete at step 3" in output
    assert json.loads((tmp_path / "run" / "status.json").read_text()) == {"state": "complete", "step": 3}
    assert "warning: monitor.hang_seconds: found 7200; what hangs is not reported" in output


SLOW_STATUS = """
import sys, time
from cloze.launch.cli import main
from cloze.launch.run import status_file
told = status_file.set_status
def slowly(folder, state, step):
    if state != "running":
        time.sleep(4)
    told(folder, state, step)
status_file.set_status = slowly  # before any other file takes it
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_no_rank_leaves_before_the_status_is_written(data, tmp_path):
    """torchrun ends the others when one has left with 75; job scripts go by what rank 0 writes, be the disk slow."""
    script = tmp_path / "slowly.py"
    script.write_text(SLOW_STATUS)
    command = pretrain_command(
        data, tmp_path / "run", "--train.stop_before_seconds", "5", processes=2, program=(str(script),)
    )
    finish(start(command, PYTHONPATH=str(ROOT), SLURM_JOB_END_TIME="1"), status=None)
    assert read_status(tmp_path / "run")["state"] == "requeue"
