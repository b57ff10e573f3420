"""A run that mpirun starts, of whichever MPI the machine has."""

import json
import shutil
import socket
import subprocess

import pytest

from tests.launching import finish, pretrain_command, saved, start
from tests.synthetic import make_shards


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="this machine has no mpirun")
def test_mpirun_starts_one_run_of_two_processes(tmp_path):
    data, run = make_shards(tmp_path / "data"), tmp_path / "run"
    command = ["mpirun", "-n", "2", *pretrain_command(data, run, "--train.max_steps", "2")]
    if "Open MPI" in subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout:
        command.insert(1, "--oversubscribe")
        variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    output = finish(start(command, DS_ACCELERATOR="cpu", **variables))
    assert output.count("complete at step 2") == 1
    assert [json.loads((folder / "state.json").read_text())["world_size"] for folder in saved(run)] == [2]
