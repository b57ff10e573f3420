"""`--processes N`: ranks that the command starts by itself, and ends with itself."""

import json
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from cloze.launch.cli import main
from cloze.launch.run.run_locks import in_use
from cloze.launch.system import local_launcher
from cloze.launch.system.environment.process import fewer_imports
from tests.forked import ForkedRun
from tests.launching import (
    PATIENCE_SECONDS,
    assert_same_weights,
    children,
    curve,
    finish,
    kill_all,
    pretrain_arguments,
    pretrain_command,
    saved,
    start,
    train,
    weights,
)
from tests.synthetic import make_shards

with fewer_imports():
    from cloze.launch.checkpoint.state import damage


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("ranks"))


def status_of(run) -> dict:
    path = run / "status.json"
    return json.loads(path.read_text()) if path.exists() else {"state": None, "step": 0}


def wait_for(process, reached) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        if process.poll() is not None or time.monotonic() > deadline:
            kill_all(process)
            raise AssertionError(process.communicate()[0])
        time.sleep(0.05)


def rank_one(process) -> int:
    """The process id of the rank 1 that `--processes` has started."""
    return next(pid for pid in children(process.pid) if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())


def test_one_command_starts_stops_and_loses_no_process(data, tmp_path):
    run = tmp_path / "run"
    told = ("--train.max_steps", "100000", "--monitor.heartbeat_seconds", "0.2")  # no longer than is needed
    command = pretrain_command(data, run, "--processes", "2", *told)
    first = start(command)
    wait_for(first, lambda: status_of(run)["step"] >= 3)
    assert status_of(run)["state"] == "running", "with the step, while it runs"
    own = children(first.pid)
    assert len(own) == 2
    first.kill()  # as nobody can catch it: the ranks stop by themselves, with a checkpoint
    first.communicate(timeout=PATIENCE_SECONDS)
    assert status_of(run)["state"] == "requeue"
    stopped = status_of(run)["step"]

    second = start(command)
    wait_for(second, lambda: status_of(run)["step"] > stopped + 2)
    os.kill(rank_one(second), signal.SIGTERM)  # which alone is asked
    output = finish(second, status=75)
    assert "SIGTERM: stopping after this step, with a checkpoint, as rank 1 was asked\n" in output
    assert output.startswith("cloze pretrain: starting 2 processes on this machine; Ctrl-C stops with a checkpoint\n")
    assert "2 x CPU" in output and f"resumed from step {stopped} " in output
    assert "stopped with a checkpoint of step" in output and status_of(run)["state"] == "requeue"
    assert not any(noise in output for noise in ("Traceback", "Setting OMP_NUM_THREADS", "torch.distributed"))


DEEPSPEED = "import sys; from deepspeed.launcher.runner import main; main(sys.argv[1:])"


def launch(launcher, data, run, *options):
    """A run of two processes that a launcher starts."""
    if launcher == "processes":
        return start(pretrain_command(data, run, "--processes", "2", *options))
    command = pretrain_command(data, run, *options, processes=2)
    if launcher == "deepspeed":
        words = ["--num_accelerators", "2", "--master_port", str(free_port()), "--module", "cloze"]
        command = [sys.executable, "-c", DEEPSPEED, *words, *command[command.index("pretrain") :]]
    return start(command, PATH=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))


def ranks_of(pid: int) -> list[int]:
    """The processes below a launcher, and its own helpers, that are a rank."""
    below = [each for child in children(pid) for each in (child, *ranks_of(child))]
    return [each for each in below if b"RANK=" in Path(f"/proc/{each}/environ").read_bytes() and is_cloze(each)]


def is_cloze(pid: int) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"pretrain" in words and words[1:4] != [b"-m", b"torch.distributed.run", b"--standalone"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_ranks_whose_launcher_is_killed_save_and_leave_the_run(data, tmp_path, launcher):
    run = tmp_path / "run"
    killed = launch(launcher, data, run, "--train.max_steps", "100000")
    wait_for(killed, lambda: status_of(run)["step"] >= 3)
    killed.kill()  # its ranks close what is read here when they end
    said, _ = killed.communicate(timeout=PATIENCE_SECONDS)
    cause = "the launcher has ended (torchrun, deepspeed, or the `cloze` with --processes)"
    assert f"{cause}: stopping after this step, with a checkpoint" in said and "Traceback" not in said, said
    assert status_of(run)["state"] == "requeue" and not in_use(run)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize(
    ("environment", "processes", "expected"),
    [
        ({}, "0", "processes: found 0, expected 1 to 1024"),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
            "2",
            "processes: found 2 in a run of which torchrun has started 4, expected the same; leave it to the launcher",
        ),
    ],
)
def test_other_launchers_start_what_they_start(data, monkeypatch, capsys, environment, processes, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(pretrain_arguments(data, "o", "--processes", processes)) == 2
    assert expected in capsys.readouterr().err


def test_ctrl_c_at_the_very_start_ends_with_a_line(data, tmp_path):
    """While the ranks import what could answer it, and while this process reads its configuration."""
    command = pretrain_command(data, tmp_path / "run", "--processes", "2")
    process = start(command)
    wait_for(process, lambda: len(children(process.pid)) == 2)
    os.kill(process.pid, signal.SIGINT)
    said = finish(process, status=75)
    assert "SIGINT: stopped before the first step of this start, with nothing to save" in said
    assert "Traceback" not in said


HEARD = "signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())\n"  # as the command line does at its start


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        (("", ""), 0),
        (("sys.exit(75)", ""), 75),
        (("sys.exit(75)", "sys.exit(2)"), 2),
        (("time.sleep(600)", "sys.exit(3)"), 3),
        (("os.kill(os.getpid(), 9)", "time.sleep(600)"), 137),
    ],
)
def test_the_status_is_that_of_the_first_that_failed(monkeypatch, tmp_path, ends, status):
    """And the others are ended with it."""
    script = tmp_path / "cloze.py"
    script.write_text(
        f"import os, signal, sys, time\n{HEARD}"
        + "".join(f"if os.environ['RANK'] == '{rank}':\n    {end or 'pass'}\n" for rank, end in enumerate(ends))
    )
    monkeypatch.chdir(tmp_path)  # where `-m cloze` finds it first
    assert local_launcher.run_ranks("pretrain", [], 2) == status


STOPPABLE = """
import os, pathlib, signal, sys, time

def stop(number, frame):
    pathlib.Path("stopped").touch()
    sys.exit(75)

for number in (stops := (signal.SIGTERM, signal.SIGHUP)):
    signal.signal(number, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
if os.environ.get("CLOZE_PARENT"):  # as the command line does at its start
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
pathlib.Path("command").write_text(str(os.getpid()))
time.sleep(600)
"""


def in_folder(folder: Path, command: list[str]) -> int:
    """The command, where `-m cloze` finds the other one first; the tests may have been started by nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(folder)
    return main(command)


def test_nohup_holds_for_what_is_started():
    """A terminal that is closed sends SIGHUP to all that run in it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with local_launcher.Children() as children_of_this:
            signal.raise_signal(signal.SIGHUP)
        assert children_of_this.heard is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGKILL, 137)])
def test_what_stops_quickstart_stops_its_command(tmp_path, number, status):
    (tmp_path / "cloze.py").write_text(STOPPABLE)
    quickstart = ForkedRun(["quickstart", "--output", "out"], main=partial(in_folder, tmp_path))
    wait_for(quickstart, (tmp_path / "command").exists)
    os.kill(children(quickstart.pid)[0], number)
    finish(quickstart, status)
    deadline = time.monotonic() + 30
    while not (tmp_path / "stopped").exists():
        assert time.monotonic() < deadline, "the command goes on without quickstart"
        time.sleep(0.05)


SIXTY_STEPS = ("--train.max_steps", "60", "--checkpoint.every_steps", "10")


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    train(data, run, *SIXTY_STEPS, processes=2)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["processes", "torchrun", "deepspeed"])
def test_a_rank_that_is_killed_ends_the_job_and_the_next_start_has_the_same_bits(data, undisturbed, tmp_path, launcher):
    """By the kernel for its memory, say: nothing hangs, no rank is left, and no checkpoint is lost."""
    run = tmp_path / "run"
    killed = launch(launcher, data, run, *SIXTY_STEPS)
    wait_for(killed, lambda: status_of(run)["step"] >= 25)
    os.kill(ranks_of(killed.pid)[-1], signal.SIGKILL)
    said, _ = killed.communicate(timeout=PATIENCE_SECONDS)  # until the last process that holds its output has ended
    statuses = {"processes": 128 + signal.SIGKILL, "torchrun": 1, "deepspeed": 256 - signal.SIGKILL}
    assert killed.returncode == statuses[launcher], said
    assert "cloze/launch/" not in said, "a traceback of torchrun's own is none"
    assert not in_use(run) and status_of(run)["state"] != "complete"
    kept = saved(run)
    assert kept and all(damage(path) is None for path in kept)
    assert f"resumed from step {int(kept[-1].name[5:])} " in train(data, run, *SIXTY_STEPS, processes=2)
    assert curve(run) == curve(undisturbed)
    assert_same_weights(weights(run), weights(undisturbed))
