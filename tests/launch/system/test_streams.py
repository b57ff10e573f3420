"""Standard output and error whose reader is gone."""

import os
import subprocess
import sys

from tests.launching import ROOT


def test_lines_on_standard_error_that_nobody_reads_change_no_status():
    """As behind `2>&1 | tee log`, when tee has ended: of what is done now, warnings, the error itself."""
    script = (
        "import sys\nfrom cloze.launch.system.console import Console, doing\n"
        "from cloze.pipeline.errors import UserError\nfrom cloze.launch.system.exit_status import Ending\n"
        "lost = []\nconsole = Console()\nconsole.on_lost_reader(lambda: lost.append(1))\n"
        "with doing() as tell:\n    tell(lambda: 'at work')\nwith Ending() as ending:\n    console.warn('careful')\n"
        "    raise UserError('wrong')\nprint(len(lost))\nsys.exit(ending.status)\n"
    )
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=writing)
    os.close(writing)
    assert (done.returncode, done.stdout) == (2, "0\n")
