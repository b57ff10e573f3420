"""Standard output and error whose reader is gone: of a pipe, or at a terminal that is closed."""

import os
import subprocess
import sys

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


# In a terminal that is closed before the third line.
CLOSED = """
import sys
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


def script(before: str, after: str = "", first: str = "print('result', flush=True)") -> str:
    return CLOSED.format(before=before, after=after, first=first)


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(("before", "after"), [(OPEN, ""), ("", OPEN)], ids=["later", "before it begins"])
def test_a_terminal_that_is_closed_ends_no_command(options, before, after):
    """One that goes on without it: told so (`disown`), it gets no signal, and writing is an error."""
    ours, theirs = os.openpty()
    command = [sys.executable, *options, "-c", script(before, after)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.close(ours)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 0


def test_a_device_that_is_no_terminal_keeps_its_errors():
    """What can't be written there is lost."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script(OPEN)],
            cwd=ROOT,
            input=b"\n",
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: standard output: the disk is full; free space or choose another file for it")


@pytest.mark.parametrize(
    "first", ["print('result', flush=True)", "console.say('result')", "console.facts('a', [('b', 'c')])"]
)
def test_a_file_on_a_disk_that_fails_is_no_closed_terminal(first):
    """The same error of the system's, with a result that nobody would miss. The first address of a process's memory is
    never mapped, and to write there is that error too.
    """
    failing = os.open("/proc/self/mem", os.O_RDWR)
    done = subprocess.run(
        [sys.executable, "-c", script(OPEN, first=first)],
        cwd=ROOT,
        input=b"\n",
        stdout=failing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(failing)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: standard output: Input/output error; fix this")
