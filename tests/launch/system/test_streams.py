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


# In a terminal that is closed before the second line.
CLOSED = """
import sys
from cloze.launch.system.console import Console, doing
from cloze.launch.system.environment.process import open_standard_streams
from cloze.launch.system.exit_status import Ending
from cloze.launch.system.streams import print_aside
sys.stdin.readline()
lost, console = [], Console()
console.on_lost_reader(lambda: lost.append(1))
with Ending() as ending:
    {first}
    assert print_aside("aside")
    for _ in range(2):
        console.say("line")
        console.warn("careful")
    console.facts("title", [("name", "value")])
sys.exit(len(lost) or ending.status)
"""


@pytest.mark.parametrize(
    ("first", "status"),
    [
        ("pass", 0),
        ("open_standard_streams(); print('by anything', flush=True)", 0),
        ("print('result', flush=True)", 141),
    ],
)
def test_a_terminal_that_is_closed_ends_no_command_but_one_whose_results_it_shows(first, status):
    """One that goes on without it: told so (`disown`), it gets no signal, and writing is an error. What begins then
    has no terminal.
    """
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", CLOSED.format(first=first)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.close(ours)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == status


def test_a_device_that_is_no_terminal_keeps_its_errors():
    """What can't be written there is lost."""
    command = [sys.executable, "-c", CLOSED.format(first="open_standard_streams(); print('result', flush=True)")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, input=b"\n", stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2 and b"the disk is full" in done.stderr
