"""Heartbeat files of all processes, and the report of which process blocks the others when progress stops."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from cloze.launch.config import MonitorConfig
from cloze.launch.run.runs import HEARTBEATS, heartbeat_name
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.system.streams import print_aside
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import readable_errors
from cloze.pipeline.untrusted import is_number, read_json

# Phases of a step in their order.
_ORDER = ("start", "evaluate", "save", "data", "collective", "compute", "ended", "failed")
# Worlds up to this size report the position of every rank; larger ones that of the blocking ranks.
_LARGE_WORLD = 16
# Functions in which a process waits for other processes.
_COLLECTIVES = ("torch/distributed/", "deepspeed/comm/")


class Heartbeat:
    """Records step and phase of this process; a thread writes them to RUN/heartbeats/rank-00000.json.

    When progress stops, the same thread reports once the position of each process (from the files of all) and the stack
    traces of this process's threads. A process that is stopped or gone is recognized by its outdated file.

    Args:
        say: called with the lines of the report.
        fetch: where processes share no folder: downloads the files of all processes into this one's folder. Rank 0
            calls it; the other ranks report only themselves.
    """

    def __init__(
        self,
        run: Path,
        environment: Environment,
        config: MonitorConfig,
        say: Callable[[str], object] = print_aside,
        fetch: Callable[[], None] | None = None,
    ) -> None:
        self._folder = run / HEARTBEATS
        self._environment, self._config, self._say, self._fetch = environment, config, say, fetch
        self._now = (0, "start")
        self._moved = time.monotonic()  # which a correction of the clock does not move
        self._warned = False
        self._written = True  # time of the last progress
        self._stop = threading.Event()
        self._main = threading.current_thread()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        with readable_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._environment.is_main:  # files of an earlier part of the run with more processes
                now = {self._path(rank) for rank in range(self._environment.world_size)}
                for path in set(self._folder.glob("rank-*.json")) - now:
                    path.unlink(missing_ok=True)
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._now = (self._now[0], "failed" if kind else "ended")
        self._stop.set()
        self._thread.join()
        self._write()

    def beat(self, step: int, phase: str) -> None:
        """Record progress of this process. Cheap: nothing is written here.

        Args:
            phase: data, collective (agreeing on a step), compute, evaluate, save.
        """
        self._now = (step, phase)
        self._moved = time.monotonic()
        self._warned = False

    def _still(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._moved

    def _path(self, rank: int) -> Path:
        return self._folder / heartbeat_name(rank)

    def _write(self) -> None:
        (step, phase), now = self._now, time.time()
        aside = self._path(self._environment.rank).with_suffix(f".{os.getpid()}.tmp")
        # Not synced: a heartbeat matters only while the process lives. A full disk ends the run elsewhere, where data
        # would be lost.
        try:
            aside.write_text(
                json.dumps(
                    {
                        "step": step,
                        "phase": phase,
                        "since": now - self._still(),
                        "time": now,
                        "waiting": self._is_waiting(),
                        "host": socket.gethostname(),
                        "process": os.getpid(),
                    }
                ),
                encoding="utf-8",
            )
            os.replace(aside, self._path(self._environment.rank))
        except OSError as error:
            if self._written:  # one warning until a write succeeds again
                self._say(f"warning: {aside}: the heartbeat could not be written ({error.strerror})")
            self._written = False
        else:
            self._written = True

    def _is_waiting(self) -> bool:
        """Whether the main thread is in a collective; a GPU's collective that is only queued is not seen."""
        frame = sys._current_frames().get(self._main.ident or 0)
        while frame is not None:
            if any(part in frame.f_code.co_filename for part in _COLLECTIVES):
                return True
            frame = frame.f_back
        return False

    def _watch(self) -> None:
        while not self._stop.wait(self._config.heartbeat_seconds):
            self._write()
            if not self._warned and self._still() > self._config.hang_seconds:
                self._warned = True
                self._say(self.report())

    def place(self, rank: int) -> str:
        """Rank, host and process id, from the rank's file."""
        beat = self._read(rank)
        return f"rank {rank}" + (f" ({beat['host']}, process {beat['process']})" if beat else "")

    def report(self) -> str:
        """The report: position of each process and since when, which ranks are waited for, and this process's
        stacks.
        """
        rank, world_size = self._environment.rank, self._environment.world_size
        step, phase = self._now
        lines = [f"rank {rank}: no progress for {self._still():.0f} s, at step {step} in {phase}."]
        # With a large world size only the first and the last rank report on all ranks, since that reads all files.
        if world_size <= _LARGE_WORLD or rank in (0, world_size - 1):
            lines[0] += f" {'All ranks' if world_size <= _LARGE_WORLD else 'The ranks'}, from {self._folder}:"
            lines += self._places()
        else:
            lines[0] += f" What ranks 0 and {world_size - 1} print says who is waited for."
        frames = sys._current_frames()
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and thread.ident in frames:
                lines.append(f"rank {self._environment.rank}, thread {thread.name}:")
                lines.append("".join(traceback.format_stack(frames[thread.ident])).rstrip())
        return "\n".join(lines)

    def _places(self) -> list[str]:
        """One line per rank, with a large world size only for the ranks that are waited for; then the list of these."""
        now = time.time()
        notes: list[str] = []
        beats = {rank: self._read(rank) for rank in self._seen(notes)}
        # Clocks of hosts differ, and a shared file system shows changes late.
        late = max(2 * self._config.heartbeat_seconds, self._config.hang_seconds / 2)
        lines, culprits = {}, []
        for rank, beat in beats.items():
            if beat is None:
                lines[rank] = f"  rank {rank}: no heartbeat file"
                culprits.append(rank)
                continue
            silent = now - beat["time"]
            waits = ", waiting for others" if beat["waiting"] else ""
            stopped = f"; its heartbeat stopped {silent:.0f} s ago" if silent > late else ""
            lines[rank] = (
                f"  rank {rank}: step {beat['step']}, {beat['phase']} for {now - beat['since']:.0f} s"
                f"{waits} ({beat['host']}, process {beat['process']}){stopped}"
            )
            if silent > late:
                culprits.append(rank)
        if not culprits:
            # Every process is alive: of the ranks that are furthest behind, those that do not wait block the others.
            there = {rank: beat for rank, beat in beats.items() if beat is not None}
            places = {rank: (beat["step"], _ORDER.index(beat["phase"])) for rank, beat in there.items()}
            behind = [rank for rank, place in places.items() if place == min(places.values())]
            culprits = [rank for rank in behind if not there[rank]["waiting"]] or behind
        shown = list(beats)
        if len(beats) > _LARGE_WORLD:
            shown = culprits[:_LARGE_WORLD]
        report = [lines[rank] for rank in shown]
        if len(culprits) < len(beats):
            more = f" and {len(culprits) - _LARGE_WORLD} more" if len(culprits) > _LARGE_WORLD else ""
            report.append(f"waited for: rank {', '.join(map(str, culprits[:_LARGE_WORLD]))}{more}")
        return [*notes, *report]

    def _seen(self, lines: list[str]) -> Iterable[int]:
        """Ranks that have a heartbeat file."""
        if self._fetch is None:
            return range(self._environment.world_size)
        if self._environment.is_main:
            try:
                self._fetch()
                return range(self._environment.world_size)
            except (UserError, OSError) as error:
                lines.append(f"  those of the others can't be read ({error})")
        return [self._environment.rank]

    def _read(self, rank: int) -> Fields | None:
        if rank == self._environment.rank:
            self._write()
        try:
            found = read_json(self._path(rank))
            numbers = is_number(found["time"]), is_number(found["since"]), type(found["step"]) is int
            known = found["phase"] in _ORDER and found.keys() >= {"waiting", "host", "process"}
            return found if known and all(numbers) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
