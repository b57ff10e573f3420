"""A disk that is full from some moment of a command on, a folder that may not be written any more, or a kill; and that
the same command ends with the undisturbed result afterwards.

The moments are those at which a command opens a file to write it, makes a folder, renames or removes: Python's audit
events. What libraries of other languages write comes between two of them.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cloze.launch import cli
from tests.forked import ForkedRun
from tests.hostile_files import PATIENCE_SECONDS, Outcome, Target, alike, judge, targets

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
READ_ONLY, KILLED = -1, -2  # instead of the most bytes of a file
# Nothing more can be written; the first bytes, so that a file is cut off; as much as small files have.
MOST_BYTES = (0, 100, KILLED, 4096, READ_ONLY)
COUNT = "moments: "


def suffer(arguments: list[str], folder: str, number: int, most_bytes: int) -> int:
    """Run a command whose disk is full from moment `number` on; prints the number of moments.

    A limit on the size of files stands for the full disk: the system refuses a write to any of them, in its middle.
    """
    passed = 0

    def hear(event: str, values: tuple) -> None:
        nonlocal passed
        if event == "open":
            path, writes = values[0], bool(values[2] & WRITING)
        else:
            path, writes = values[0] if values else None, event in ("os.mkdir", "os.rename", "os.remove")
        if not writes or not isinstance(path, (str, os.PathLike)) or not os.fspath(path).startswith(folder):
            return
        if passed >= number and most_bytes == READ_ONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))
        if passed == number and most_bytes == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if passed == number and most_bytes >= 0:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
        passed += 1

    sys.addaudithook(hear)
    try:
        return cli.main(arguments)
    finally:
        print(f"{COUNT}{passed}", flush=True)


def run(target: Target, copy: Path, number: int, most_bytes: int) -> tuple[int, str]:
    """Status and output of a target's command on a copy of it, whose disk is full from a moment on."""
    main = partial(suffer, folder=str(copy), number=number, most_bytes=most_bytes)
    process = ForkedRun(target.command(copy), main=main)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, output


def starve(target: Target, copy: Path, number: int, most_bytes: int, expected: object) -> Outcome:
    """Run a target's command with a full disk, then again with space."""
    shutil.copytree(target.pristine, copy, symlinks=True)

    def same() -> bool:
        return target.result is None or alike(target.result(copy), expected)

    status, output = run(target, copy, number, most_bytes)
    lost = None if most_bytes == KILLED and status == 128 + signal.SIGKILL else judge(status, output, same)
    if lost is None and status:
        again, said = run(target, copy, sys.maxsize, 0)
        if again or not same():
            lost, output = f"then, undisturbed: status {again}, or another result", output + said
    what = f"moment {number}, " + {READ_ONLY: "read-only", KILLED: "killed"}.get(
        most_bytes, f"{most_bytes} bytes a file"
    )
    return Outcome(target.name, what, status, lost, output)


def moments(target: Target, copy: Path) -> tuple[int, object]:
    """The moments of an undisturbed command, and its result."""
    shutil.copytree(target.pristine, copy, symlinks=True)
    status, output = run(target, copy, sys.maxsize, 0)
    assert status == 0, output
    return int(output.rpartition(COUNT)[2]), target.result and target.result(copy)


def starvations(folder: Path, count: int, seed: int) -> Iterator[Outcome]:
    """So many commands that are disturbed at moments that are spread over all of them; yields what came of each."""
    rng = random.Random(seed)
    cases = []
    for target in targets(folder):
        if "full disk" in target.harms:
            most, expected = moments(target, folder / f"{target.name}-whole")
            cases += [(target, number, how, expected) for number in range(most) for how in MOST_BYTES]
    first = rng.randrange(len(cases))
    for number in range(count):
        target, moment, how, expected = cases[(first + number * len(cases) // count) % len(cases)]
        copy = folder / f"disturbed-{number}"
        yield starve(target, copy, moment, how, expected)
        shutil.rmtree(copy)
