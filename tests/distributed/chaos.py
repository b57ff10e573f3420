"""Faults injected into a run: signals at random moments, damaged checkpoint files, a full disk; and that it ends with
the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cloze.launch.checkpoint.state import CHECKSUMS, damage
from cloze.launch.system.exit_status import EXIT_REQUEUE
from tests.forked import ForkedRun
from tests.launching import (
    PATIENCE_SECONDS,
    Process,
    assert_same_weights,
    children,
    curve,
    finish,
    kill_all,
    pretrain_arguments,
    pretrain_command,
    saved,
    start,
    step_of,
    weights,
)
from tests.synthetic import make_shards

# Nobody waits longer for a process that has been killed, or whose peer has: it hangs.
HANG_SECONDS = PATIENCE_SECONDS
DISK_BYTES = 64 << 20
PROCESSES = 2
EVERY = 4  # steps between checkpoints
STRIDE = 3 * EVERY  # the most steps that a round may train before it is struck
# Of the starts: torchrun and its ranks import for seconds, in which a kill teaches nothing.
TORCHRUN_SHARE = 0.15


def begin(data: Path, run: Path, options: tuple[str, ...], rng: random.Random) -> Process:
    """Start or continue the run, saving asynchronously or in line, under torchrun or as srun starts processes."""
    options = (*options, "--checkpoint.asynchronous", rng.choice(("true", "true", "false")))
    if rng.random() < TORCHRUN_SHARE:
        return start(pretrain_command(data, run, *options, processes=PROCESSES))
    return ForkedRun(pretrain_arguments(data, run, *options), PROCESSES)


@dataclass(frozen=True)
class Strike:
    """One signal to one or all processes of a run, at a moment."""

    moment: str
    """start: while the processes start; training: some steps later; save: while a checkpoint is being written."""
    target: str
    """rank: one of them; ranks: all, one after another; run: the launcher too, at once; launcher: it alone."""
    number: signal.Signals
    seconds: float
    """Waited after the moment has come."""
    steps: int
    """Steps after the resume at which a moment in training comes; a moment in a save comes at the first save then."""

    @classmethod
    def draw(cls, rng: random.Random, most_steps: int, struck: Counter) -> Strike:
        """One more. Less than a third of all hit the start, in which there is little to lose."""
        early = 3 * (struck["while starting"] + 1) < struck.total() + 1
        moment = rng.choices(("start", "training", "save"), (int(early), 5, 4))[0]
        number = rng.choices((signal.SIGKILL, signal.SIGTERM), (7, 3))[0]
        # A launcher that is killed alone leaves its ranks behind, at work; no scheduler does that.
        target = rng.choice(("rank", "ranks", "run") if number == signal.SIGKILL else ("rank", "ranks", "launcher"))
        # A start takes a second or some, a step and a save tens of milliseconds.
        seconds = rng.uniform(0, {"start": 2.0, "training": 0.05, "save": 0.012}[moment])
        return cls(moment, target, number, seconds, rng.randint(1, most_steps))

    def __str__(self) -> str:
        return f"{self.number.name} to {self.target}, moment: {self.moment} + {self.seconds:.3f} s, +{self.steps} steps"

    def wait(self, process: Process, run: Path) -> None:
        """Return when the moment has come, or the process has ended."""
        if self.moment == "start":
            before, until = step_of(run), time.monotonic() + self.seconds
            while time.monotonic() < until and step_of(run) == before:  # a quick start is over before
                time.sleep(0.001)
            return
        wait_for_steps(process, run, self.steps)
        while self.moment == "save" and process.poll() is None and not saving(run):
            time.sleep(0.0005)
        time.sleep(self.seconds)

    def hit(self, process: Process, rng: random.Random) -> None:
        """Send the signal."""
        ranks = children(process.pid)
        if self.target == "run" or not ranks:  # of a launcher that is about to start them none must be left behind
            kill_all(process, self.number)
            return
        if self.target == "launcher":
            process.send_signal(self.number)
            return
        for pid in ranks if self.target == "ranks" else [rng.choice(ranks)]:
            with contextlib.suppress(ProcessLookupError):  # it died of the other's death
                os.kill(pid, self.number)


def wait_for_steps(process: Process, run: Path, steps: int) -> None:
    """Return when the run has logged so many steps beyond where it stood, or has ended."""
    before, began = step_of(run), None
    deadline = time.monotonic() + HANG_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        now = step_of(run)
        # On a resume the lines of the lost steps are cut off, then new ones come.
        if began is None and now != before:
            began = now
        if began is not None and now >= began + steps:
            return
        time.sleep(0.001)
    assert process.poll() is not None, f"no {steps} steps in {HANG_SECONDS} seconds"


def saving(run: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((run / "checkpoints").glob("step-*.tmp"))


def collect(process: Process) -> str:
    """What a struck run printed. It must end soon, with its ranks: they all hold the pipe that is read."""
    pids = [process.pid, *children(process.pid)]
    try:
        return process.communicate(timeout=HANG_SECONDS)[0]
    except subprocess.TimeoutExpired:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"still there {HANG_SECONDS} s later:\n{process.communicate()[0][-6000:]}") from None


def good_checkpoints(run: Path) -> list[Path]:
    """Published folders that verify, oldest first."""
    return [path for path in saved(run) if damage(path) is None]


def damaged_checkpoints(run: Path) -> set[Path]:
    """Published folders that do not verify."""
    return {path for path in saved(run) if damage(path) is not None}


def damage_newest(run: Path, rng: random.Random) -> str | None:
    """Truncate, flip, empty or remove a random file of the newest checkpoint, unless it is the only good one."""
    good = good_checkpoints(run)
    if len(good) < 2:
        return None
    path = rng.choice(sorted(path for path in good[-1].iterdir() if path.is_file()))
    content = bytearray(path.read_bytes())
    kind = rng.choice(("truncated", "flipped", "emptied", "removed"))
    if kind == "truncated":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif kind == "flipped":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif kind == "emptied":
        path.write_bytes(b"")
    else:
        path.unlink()
    # The file of the checksums itself may still say the same, as when a space was flipped into another character.
    return f"{kind} {good[-1].name}/{path.name}" if damage(good[-1]) or path.name != CHECKSUMS else None


def damage_notes(run: Path, rng: random.Random) -> str | None:
    """Harm one of the files by which a run tells how it is, and which it does not need to go on."""
    notes = sorted(
        path for path in (run / "status.json", run / "software.json", *run.glob("heartbeats/*")) if path.exists()
    )
    if not notes:
        return None
    path, kind = rng.choice(notes), rng.choice(("truncated", "garbage", "emptied", "removed"))
    content = path.read_bytes()
    path.unlink()  # a fault of a disk, and not a write of the file that others have open
    if kind != "removed":
        path.write_bytes(
            {"truncated": content[: len(content) // 2], "garbage": rng.randbytes(len(content)), "emptied": b""}[kind]
        )
    return f"{kind} {path.relative_to(run)}"


class Disk:
    """Where the run lives, and two ways to fill it."""

    def __init__(self, folder: Path, mounted: bool) -> None:
        self.folder, self.mounted = folder, mounted
        self._balloon = folder / "balloon"

    def fill(self, process: Process, rng: random.Random) -> str:
        """Leave next to nothing: of the disk, or of what the run's processes may write into one file."""
        if self.mounted and rng.random() < 0.7:
            left = rng.choice((0, 16 << 10, 256 << 10, 1 << 20))
            self._grow(left)
            return f"the disk is full but for {left} bytes"
        limit = rng.choice((8 << 10, 64 << 10))
        for pid in children(process.pid):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, limit))
        return f"no file may be larger than {limit} bytes"

    def keep_full(self, process: Process) -> None:
        """Until the run has ended, take what it gives back, or it would go on in the space of its old checkpoints."""
        deadline = time.monotonic() + HANG_SECONDS
        while self._balloon.exists() and process.poll() is None and time.monotonic() < deadline:
            self._grow(0)
            time.sleep(0.05)

    def _grow(self, left: int) -> None:
        with open(self._balloon, "ab", buffering=0) as file:
            with contextlib.suppress(OSError):  # written until it is full, since the run writes at the same time
                while file.write(bytes(1 << 20)):
                    pass
            file.truncate(max(0, file.tell() - left))

    def free(self) -> None:
        self._balloon.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    """A file system of its own where the machine lets us mount one; else the folder, whose files can be limited."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield Disk(folder, mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def endure(folder: Path, seed: int, kills: int, seconds: float, say: Callable[[str], None]) -> Counter:
    """One long-lived run that is killed, stopped, damaged and starved of disk again and again, and ends with the same
    bits as an undisturbed one.

    Args:
        folder: an empty one, for both runs.
        kills: signals; what else befalls the run comes besides.
        seconds: in which there must have been as many; on a slow machine more are needed.
        say: called with a line for each round.
    Returns: the kills by their moment.
    Raises:
        AssertionError: the run hangs, has lost a checkpoint or said nothing, or ends with other bits.
    """
    rng = random.Random(seed)
    stage = str(rng.randrange(4))
    steps = kills * 12  # a round trains some 5 that last: it is never complete before the last kill
    say(f"seed {seed}, ZeRO stage {stage}, {steps} steps")
    data = make_shards(folder / "data")
    options = (
        "--train.max_steps",
        str(steps),
        "--zero.stage",
        stage,
        "--checkpoint.every_steps",
        str(EVERY),
        "--checkpoint.keep_last",
        "3",
        "--evaluation.every_steps",
        "10",
        "--evaluation.keep_best",
        "true",
    )
    undisturbed = folder / "undisturbed"
    finish(ForkedRun(pretrain_arguments(data, undisturbed, *options), PROCESSES))
    with small_disk(folder / "disk") as disk:
        if not disk.mounted:
            say("without the right to mount a small disk: only the size of files is limited")
        run = disk.folder / "run"
        start_run = partial(begin, data, run, options, rng)
        struck, began = Counter(), time.monotonic()
        while struck.total() < kills and time.monotonic() - began < seconds:
            if rng.random() < 0.2 and (what := damage_newest(run, rng)):
                say(f"    {what}")
            if rng.random() < 0.2 and (what := damage_notes(run, rng)):
                say(f"    {what}")
            full = rng.random() < 0.1
            (starve if full else strike)(start_run, run, disk, rng, struck, say)
        for number in range(2):  # the second time there is nothing to do
            output = finish(start_run())
            assert f"complete at step {steps}" in output, number
        say(f"{struck.total()} kills in {time.monotonic() - began:.0f} s: {dict(struck)}")
        assert struck.total() >= kills, f"only {struck.total()} kills in {seconds} s; a slow machine needs more"
        assert curve(run) == curve(undisturbed)
        for step in (None, "best"):
            assert_same_weights(weights(run, step), weights(undisturbed, step))
    return struck


def strike(begin, run, disk, rng, kills, say) -> None:
    """One round: start, hit, see that nothing hangs, that what is published is whole, and what a stop leaves."""
    blow = Strike.draw(rng, STRIDE, kills)
    damaged_before = damaged_checkpoints(run)
    process = begin()
    blow.wait(process, run)
    assert process.poll() is None, f"ended by itself before {blow}:\n{process.communicate()[0][-6000:]}"
    when = "while starting" if blow.moment == "start" else "while saving" if saving(run) else "while training"
    blow.hit(process, rng)
    output = collect(process)
    step = step_of(run)
    say(f"{kills.total() + 1:3} {blow} -> {when}, step {step}, status {process.returncode}")
    assert process.returncode != 0, output[-4000:]
    kills[when] += 1
    # Nothing that a kill cut short carries a checkpoint's name: what is new is whole, what was whole still is.
    assert not damaged_checkpoints(run) - damaged_before, output[-4000:]
    if blow.number == signal.SIGTERM and when != "while starting":
        status = json.loads((run / "status.json").read_text())
        assert status["state"] == "requeue", output[-4000:]
        # torchrun makes 1 of every status.
        assert process.returncode == (EXIT_REQUEUE if isinstance(process, ForkedRun) else 1), output[-4000:]
        assert f"stopped with a checkpoint of step {status['step']}" in output
        assert good_checkpoints(run)[-1].name == f"step-{status['step']:08d}"


def starve(begin, run, disk, rng, kills, say) -> None:
    """One round in which the disk fills up: the run ends with one clear line, and its last good checkpoint is whole."""
    damaged_before = damaged_checkpoints(run)
    process = begin()
    wait_for_steps(process, run, rng.randint(1, STRIDE))
    assert process.poll() is None, f"ended by itself:\n{process.communicate()[0][-6000:]}"
    good = good_checkpoints(run)
    try:
        what = disk.fill(process, rng)
        disk.keep_full(process)
        output = collect(process)
    finally:
        disk.free()
    # Not at the start of a line: the processes share a pipe, and another may be in the middle of a warning's.
    line = re.search(r"error: .*(disk is full|bytes free|File too large).*$", output, re.MULTILINE)
    say(f"    {what}: {line and line[0]}")
    assert line and process.returncode != 0, output[-6000:]
    assert not damaged_checkpoints(run) - damaged_before, output[-6000:]
    if good:
        assert good[-1] <= good_checkpoints(run)[-1], "the last good checkpoint was lost"
