"""Start `cloze serve` as a user does and talk to it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloze.launch.system.environment import child_variables
from tests.launching import ROOT


@contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server on a free port: its address and its process, which is stopped at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cloze", "serve", str(folder), "--port", "0", *options], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=child_variables(OMP_NUM_THREADS="1"),
    )
    line = process.stdout.readline()
    found = re.search(r"http://[\d.]+:\d+", line)
    if not found:
        process.kill()
        raise AssertionError(line + process.communicate()[1])
    try:
        yield found[0], process
    finally:
        process.terminate()
        process.communicate(timeout=60)
