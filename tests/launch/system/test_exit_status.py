"""How a command ends."""

import errno
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from cloze.launch import cli
from cloze.launch.cli import main
from cloze.launch.system import distributed
from cloze.launch.system.exit_status import Ending
from cloze.pipeline.errors import UserError
from tests.launching import ROOT, finish, start


@pytest.mark.parametrize(
    ("rank", "met", "before"), [(0, False, []), (1, False, [""]), (0, True, ["error"]), (1, True, ["error"])]
)
def test_a_rank_that_ends_does_not_cut_off_what_another_says(monkeypatch, capsys, rank, met, before):
    """A launcher ends all ranks with the first one: each waits, before its message or after it."""
    heard = []
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(distributed, "have_met", lambda: met)
    monkeypatch.setattr(time, "sleep", lambda seconds: heard.append(capsys.readouterr().err.partition(":")[0]))
    assert main(["pretrain", "--train.max_steps", "-1"]) == 2
    assert heard == before


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_while_the_others_say_their_errors_leaves_the_status(rank, monkeypatch, capsys):
    """It was a traceback and 130."""

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(distributed, "have_met", lambda: True)
    monkeypatch.setattr(time, "sleep", interrupted)
    assert main(["pretrain", "--train.max_steps", "-1"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_ctrl_c_while_a_class_is_made_ends_with_a_line(monkeypatch, capsys):
    """As at imports: Python before 3.12 makes it the cause of a RuntimeError."""

    class Interrupted:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(cli, "called", lambda *_: lambda: type("Made", (), {"field": Interrupted()}) and None)
    assert main(["x"]) == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C\n"


def test_ctrl_c_ends_a_command_with_a_line():
    """A real signal in the middle of a command that does not train: no traceback."""
    program = (
        "import signal, sys, time; from cloze.launch import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "cli.called = lambda *_: print('running', flush=True) or time.sleep(60)\nsys.exit(cli.main(['x']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=30)[1]
    assert (said, process.returncode) == ("stopped by Ctrl-C\n", 130)


@pytest.mark.parametrize("lines", [1_000_000, 14_000], ids=["at work", "in the last flush"])
def test_ctrl_c_ends_a_command_whose_reader_stands_still(lines):
    """As `less` does. What it has not read keeps the process until the next Ctrl-C, which is no traceback."""
    program = (
        "import signal, sys; from cloze import __main__; from cloze.launch import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        f"cli.called = lambda *_: lambda: [print('line') for _ in range({lines})] and None\nsys.exit(__main__.main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "x"],
        cwd=ROOT,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    deadline = time.monotonic() + 60
    while unread(process.stdout) < 60_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # the pipe is full now, or what is left of its room is smaller than Python's buffer
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "stopped by Ctrl-C\n"
    while catches(process.pid, signal.SIGINT) and time.monotonic() < deadline:
        time.sleep(0.01)  # until it ends, which Python's own handler does not see any more
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) in (-signal.SIGINT, 130) and process.stderr.read() == ""


def catches(process: int, number: int) -> bool:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


def unread(pipe) -> int:
    """Bytes in a pipe."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0"))[0]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (
            errno.ENOSPC,
            "error: a file that was written below --output or TMPDIR: the disk is full; free space or choose another",
        ),
        (errno.EFBIG, "error: a file that was written below --output or TMPDIR: File too large; fix this"),
        (errno.EIO, "error: a file that was read: Input/output error; fix this"),
    ],
)
def test_a_read_or_write_that_fails_is_a_line(capsys, number, said):
    """The system's error of either, unlike that of an open, names no file."""
    with Ending() as ending:
        raise OSError(number, os.strerror(number))
    assert ending.status == 2 and capsys.readouterr().err.startswith(said)


def test_a_file_that_was_removed_meanwhile_is_a_line(tmp_path, capsys):
    with Ending() as ending:
        (tmp_path / "config.yaml").read_text()
    assert ending.status == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'config.yaml'}: not found (any more); restore it")


@pytest.mark.parametrize(
    "error, said",
    [
        (MemoryError(), "memory: found too little (MemoryError), expected"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 128 bytes"),
            "memory: found too",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), "memory: found too little (CUDA"),
        (
            RuntimeError("can't start new thread"),
            "threads: found no room for another (can't start new thread), expected",
        ),
        (
            pa.ArrowException("Unknown error: Failed to launch worker thread: Resource temporarily unavailable"),
            "threads: found no room for another (Unknown error: Failed",
        ),
    ],
)
def test_too_little_memory_and_too_few_threads_are_a_line(capsys, error, said):
    with Ending() as ending:
        raise error
    (line,) = capsys.readouterr().err.splitlines()
    assert ending.status == 2 and line.startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("arguments", "module", "said", "status"),
    [
        (["--help"], "cli", "stopped by Ctrl-C", 130),
        (["inspect", "nowhere"], "cli", "stopped by Ctrl-C", 130),
        (["pretrain"], "cli", "SIGINT: stopped before the first step of this start", 75),
        (
            ["sweep", "--data", "nowhere", "--output", "out", "--grid", "seed=1,2"],
            "pretrain.sweep",
            "SIGINT: stopped before the first step of this start",
            75,
        ),
        (
            ["sweep", "--data", "nowhere", "--output", "out", "--grid", "seed=1,2"],
            "config",  # while the words are read
            "SIGINT: stopped before the first step of this start",
            75,
        ),
    ],
)
def test_ctrl_c_during_the_imports_ends_a_command_with_its_line(tmp_path, arguments, module, said, status):
    """The signal comes while the module of the command line, or that of the command, is looked for."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name == 'cloze.launch.{module}':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    process = start([sys.executable, "-m", "cloze", *arguments], PYTHONPATH=f"{tmp_path}:{ROOT}")
    output = finish(process, status)
    assert output.startswith(said) and output.count("\n") == 1, output


def test_a_message_is_one_line_whatever_the_names_in_it(capsys):
    """A hostile file's names hold line ends and commands of the terminal, or are very long."""
    with Ending() as ending:
        raise UserError(f"a\nb\x1b[2J {'x' * 10_000} end")
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        ending.status == 2 and line.startswith(r"error: a\nb\x1b[2J x") and line.endswith("x end") and len(line) < 5000
    )
