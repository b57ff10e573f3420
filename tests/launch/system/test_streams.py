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


def test_a_terminal_that_is_closed_ends_no_command():
    """One that goes on without it: told so (`disown`), it gets no signal, and writing is an error."""
    script = (
        "import os, sys\nfrom cloze.launch.system.console import Console, doing\n"
        "from cloze.launch.system.streams import print_aside\n"
        "lost = []\nconsole = Console()\nconsole.on_lost_reader(lambda: lost.append(1))\n"
        "sys.stdin.readline()\nassert print_aside('aside')\n"
        "for _ in range(2):\n    console.say('line')\n    console.warn('careful')\n"
        "console.facts('title', [('name', 'value')])\nsys.exit(len(lost))\n"
    )
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    os.close(ours)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 0
