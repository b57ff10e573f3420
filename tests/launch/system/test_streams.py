"""Standard output and error whose reader is gone: of a pipe, or at a terminal that is closed."""

import os
import subprocess
import sys
import time

import pytest

from tests.launching import ROOT


@pytest.mark.parametrize(("first", "heard"), [("tell(lambda: 'at work')", 0), ("console.warn('careful')", 1)])
def test_lines_on_standard_error_that_nobody_reads_change_no_status(first, heard):
    """As behind `2>&1 | tee log`, when tee has ended: of what is done now, warnings, the error itself. A run hears of
    it by its own lines.
    """
    script = (
        "import sys\nfrom cloze.launch.system.console import Console, doing\n"
        "from cloze.pipeline.errors import UserError\nfrom cloze.launch.system.exit_status import Ending\n"
        "lost = []\nconsole = Console()\nconsole.on_lost_reader(lambda: lost.append(1))\n"
        f"with doing() as tell:\n    {first}\nwith Ending() as ending:\n    console.warn('careful')\n"
        "    raise UserError('wrong')\nprint(len(lost))\nsys.exit(ending.status)\n"
    )
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=writing)
    os.close(writing)
    assert (done.returncode, done.stdout) == (2, f"{heard}\n")


# Prints in all ways, after a line of standard input.
PRINTING = """
import os, sys
from cloze.launch.system.console import Console, doing
from cloze.launch.system.environment.process import open_standard_streams
from cloze.launch.system.exit_status import Ending
from cloze.launch.system.streams import print_aside
{before}
sys.stdin.readline()
{after}
lost, console = [], Console()
console.on_lost_reader(lambda: lost.append(1))
with Ending() as ending:
    {first}
    print("result" * 10_000)
    assert print_aside("aside")
    for _ in range(2):
        console.say("line")
        console.warn("careful")
    console.facts("title", [("name", "value")])
    print("at the end")
sys.exit(len(lost) or ending.status)
"""
OPEN = "open_standard_streams()"
PRINT = "print('result', flush=True)"


@pytest.fixture(params=[[], ["-u"]], ids=["buffered", "unbuffered"])
def start(request):
    """Starts PRINTING, with Python's buffer for standard output and without it, as containers have it."""

    def start(first: str = PRINT, before: str = OPEN, after: str = "", **streams) -> subprocess.Popen:
        script = PRINTING.format(before=before, after=after, first=first)
        return subprocess.Popen(
            [sys.executable, *request.param, "-c", script],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            stdin=subprocess.PIPE,
            **streams,
        )

    return start


@pytest.mark.parametrize(("before", "after"), [(OPEN, ""), ("", OPEN)], ids=["later", "before it begins"])
def test_a_terminal_that_is_closed_ends_no_command(start, before, after):
    """One that goes on without it: told so (`disown`), it gets no signal, and writing is an error."""
    ours, theirs = os.openpty()
    process = start(before=before, after=after, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.close(ours)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 0


def test_a_warning_for_a_terminal_that_is_closed_ends_no_program_of_a_users(start):
    """A server, say, that has imported `cloze` and outlives its terminal."""
    ours, theirs = os.openpty()
    process = start("console.warn('careful'); os._exit(len(lost))", before="", stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.close(ours)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 0


# The first address of a process's memory is never mapped: to write there is the error of a disk that fails, and of a
# terminal that is closed.
@pytest.mark.parametrize(
    ("path", "mode", "line"),
    [
        ("/dev/full", os.O_WRONLY, b"the disk is full; free space or choose another file for it"),
        ("/proc/self/mem", os.O_RDWR, b"Input/output error; fix this"),
        ("/dev/null", os.O_RDONLY, b"Bad file descriptor; fix this"),
    ],
    ids=["full", "failing", "for reading"],
)
@pytest.mark.parametrize(
    "first", [PRINT, "console.say('result')", "console.facts('a', [('b', 'c')])", "sys.exit(print(1))"]
)
def test_what_cannot_be_printed_is_an_error(start, path, mode, line, first):
    file = os.open(path, mode)
    process = start(first, stdout=file, stderr=subprocess.PIPE)
    os.close(file)
    _, said = process.communicate(b"\n", timeout=60)
    assert process.returncode == 2, said
    assert said.startswith(b"error: standard output: " + line) and said.count(b"\n") == 1


def test_an_error_that_cannot_be_printed_keeps_the_status(start):
    """Standard error on a full disk."""
    with open("/dev/full", "w") as full:
        process = start("raise OSError(28, 'no space')", stdout=subprocess.PIPE, stderr=full)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 2


def test_a_disk_that_fills_within_the_last_write_is_an_error(start, tmp_path):
    """The system writes what there is room for, and says how much."""
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += f"resource.setrlimit(resource.RLIMIT_FSIZE, (65_000, 65_000)); {OPEN}"
    with open(tmp_path / "out", "w") as file:
        process = start(
            "print('r' * 70_000, flush=True); os._exit(0)", before=limit, stdout=file, stderr=subprocess.PIPE
        )
    _, said = process.communicate(b"\n", timeout=60)
    assert process.returncode == 2 and said.startswith(b"error: standard output: "), said


def test_a_pipe_that_another_has_made_non_blocking_gets_all(start):
    """`ssh` and editors do, of a pipe or terminal that they share."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    process = start(f"print('r' * 1_000_000); {PRINT}", stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    process.stdin.write(b"\n")
    process.stdin.flush()
    with open(reading, "rb", buffering=0) as pipe:
        time.sleep(0.5)
        printed = pipe.readall()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert printed.count(b"r") > 1_000_000 and printed.endswith(b"at the end\n")
