"""`cloze runs` and `cloze status`: state, step, speed and time left of runs, from their folders or an object store.

Nothing is locked and nothing written: a job that starts at the same time is not affected.
"""

import os
import shutil
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from cloze.launch.config.commands import RunsConfig, StatusConfig
from cloze.launch.run import runs
from cloze.launch.run.metrics_file import lines_of
from cloze.launch.run.progress_line import ProgressLine, has_progress
from cloze.launch.run.status_file import SILENT_SECONDS, read_status
from cloze.launch.run.stored_run import fetch_objects
from cloze.launch.run.uploaded_logs import LogReader, fetch_heartbeats
from cloze.launch.system.console import Console, clock
from cloze.launch.system.exit_status import EXIT_COMPLETE, EXIT_REQUEUE, EXIT_USER_ERROR
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import publish_json, readable_errors
from cloze.pipeline.stores.places import StorePath, is_url, to_local, to_place
from cloze.pipeline.stores.temporary_folders import temporary_folder
from cloze.pipeline.untrusted import check_regular, is_number, naming, read_json

_NEWEST_PIECES = 64  # of metrics.jsonl in a store: half an hour of them
_TAIL_BYTES = 1 << 16  # of metrics.jsonl: hundreds of its lines
_MOST_NEW_BYTES = 1 << 26  # of metrics.jsonl at once, as after a long pause: hours of its lines
_LINES_BEFORE = 10  # number of existing lines shown first, as in `tail`
_LONG_PHASE_SECONDS = 30.0
# Phases of heartbeats (launch/run/heartbeat.py) in words.
_PHASES = {
    "start": "starting",
    "evaluate": "evaluating",
    "save": "saving",
    "data": "waiting for data",
    "collective": "agreeing with others",
    "compute": "computing",
}
_ENDED = {"complete": EXIT_COMPLETE, "requeue": EXIT_REQUEUE, "failed": EXIT_USER_ERROR}  # state -> exit status


@dataclass(frozen=True)
class RunState:
    """State of a run; None for what its files do not contain."""

    run: str
    state: str
    """running, silent (it says that it runs, and a process has not shown itself for two minutes), requeue, complete,
    failed, new (it has not said yet)."""
    step: int
    max_steps: int | None
    loss: float | None
    validation_loss: float | None
    tokens_per_second: float | None
    mfu: float | None
    seconds_left: float | None
    heartbeat_seconds: float | None
    """Seconds since the last heartbeat of the process that has been silent for longest."""
    restarts: int | None
    checkpoints_left_out: int | None
    """Checkpoints since the last start that were due by steps and left out, since another was being written."""
    phase: str | None
    """What the processes of a running or silent run do, as their heartbeats say: evaluating, saving, ...; if they do
    different things, each with the number of processes."""


def read_run(folder: Path, now: float | None = None, shown: str | None = None) -> RunState:
    """Read the state of a pretraining or fine-tuning run.

    Args:
        now: seconds since the epoch; None: the clock's.
        shown: displayed name; None: its folder.

    Raises:
        UserError: the folder holds no run.
    """
    fields = runs.fields_of(folder)
    status = read_status(folder)
    state, step = status.get("state", "new"), status.get("step", 0)
    now, beats = time.time() if now is None else now, _heartbeats(folder)
    silence = max(0.0, now - min(beat["time"] for beat in beats)) if beats else None
    if state == "running" and (silence is None or silence > SILENT_SECONDS):
        state = "silent"
    last: Fields = {}
    for line in _Tail(folder / runs.METRICS, most=None).lines():
        last |= line
        step = max(step, line.get("step", 0))
    budgeted = fields.get("train.time_budget_hours") is not None
    planned = None if budgeted else fields.get("train.max_steps")
    max_steps = planned if type(planned) is int else None
    seconds = last.get("speed/step_seconds")
    running = state == "running" and max_steps is not None and seconds is not None and seconds > 0
    starts = runs.num_starts(folder)
    return RunState(
        shown or str(folder),
        state,
        step,
        max_steps,
        last.get("train/loss"),
        last.get("validation/loss"),
        last.get("speed/tokens_per_second"),
        last.get("speed/mfu"),
        max(0, max_steps - step) * seconds if running else None,
        silence,
        starts - 1 if starts else None,
        None if (left_out := last.get("speed/checkpoints_left_out")) is None else int(left_out),
        _phase(beats, now) if state in ("running", "silent") else None,
    )


class _Stored:
    """A local copy of a run's state in a store, updated by `look`.

    Args:
        curves: an additional folder for the run's TensorBoard events.
    """

    def __init__(self, place: StorePath, curves: Path | None = None) -> None:
        self.place, self.folder, self._curves = place, temporary_folder(place), curves
        self._reader = LogReader(place, None if curves else _NEWEST_PIECES)

    def look(self) -> RunState:
        """Copy the run's state and curves."""
        fetch_objects(self.place, (runs.CONFIG, runs.SOFTWARE), self.folder)
        if not (self.folder / runs.CONFIG).exists():
            raise UserError(f"{self.place}: found no run there, expected one of `cloze pretrain`; look at the name")
        self._reader.write(self.folder, (runs.METRICS, runs.STATUS))
        fetch_heartbeats(self.place, self.folder)
        if self._curves:
            with readable_errors(self._curves):
                self._curves.mkdir(parents=True, exist_ok=True)
                self._reader.write_events(self._curves)
                if (self.folder / runs.METRICS).exists():
                    shutil.copyfile(self.folder / runs.METRICS, self._curves / runs.METRICS)
        return read_run(self.folder, shown=str(self.place))


def _find_stored(place: StorePath) -> list[StorePath]:
    """The runs below a place, itself included; not those inside a run."""
    if {runs.CONFIG, runs.DATA} <= {path.name for path in place.iterdir()}:
        return [place]
    return [found for name in place.client.folders(place.key) for found in _find_stored(place / name)]


def _read_all(folder: str) -> list[RunState]:
    """The runs in a folder or below a URL.

    Raises:
        UserError: there is none.
    """
    if not is_url(folder):
        return [read_run(each) for each in find_runs(Path(folder))]
    place = to_place(folder)
    assert isinstance(place, StorePath), folder
    found = _find_stored(place)
    if not found:
        raise UserError(f"folder: found no run below {folder}, expected runs of `cloze pretrain`")
    return [_Stored(each).look() for each in found]


def find_runs(folder: Path) -> list[Path]:
    """The runs in a folder, at any depth, itself included; not those inside a run. Sorted by path.

    Raises:
        UserError: there is no such folder, or no run in it.
    """
    found = []
    for place, folders, files in os.walk(folder, followlinks=False):
        if runs.CONFIG in files and runs.DATA in files:
            found.append(Path(place))
            folders.clear()
    if not found:
        what = "no run in the folder" if folder.is_dir() else "no folder"
        raise UserError(f"folder: found {what} {folder}, expected runs of `cloze pretrain` or `cloze finetune`")
    return sorted(found)


def list_runs(config: RunsConfig) -> int:
    """`cloze runs`: print a line for each run in a folder.

    Returns:
        The exit status.
    """
    output = to_local(config.json, "json") if config.json else None
    states = _read_all(config.folder)
    columns = "run", "state", "step", "loss", "validation", "tokens/s", "MFU", "left", "heartbeat", "restarts"
    Console().table(config.folder, columns, [_row(each, config.folder) for each in states])
    if output:
        publish_json(output, [asdict(each) for each in states])
    return 0


def show_status(config: StatusConfig) -> int:
    """`cloze status`: print the state of one run; with `follow` the last lines of its metrics and every new one until
    it ends.

    Returns:
        The exit status: 0, and with `follow` that of the run's end: 0 complete, 75 requeue, 2 failed.
    """
    console, place = Console(), to_place(config.run)
    curves = Path(config.curves) if config.curves else None
    stored = _Stored(place, curves) if isinstance(place, StorePath) else None
    folder = stored.folder if stored else Path(config.run)

    def look() -> RunState:
        return stored.look() if stored else read_run(folder)

    state = look()
    console.facts(
        config.run,
        [
            (name, value)
            for name, value in zip(
                ("state", "step", "loss", "validation loss", "tokens/s", "MFU", "time left", "heartbeat", "restarts"),
                _row(state, str(folder))[1:],
                strict=True,
            )
            if value
        ]
        + [("checkpoints left out", str(count)) for count in [state.checkpoints_left_out] if count],
    )
    if not config.follow:
        return 0
    tail, progress = _Tail(folder / runs.METRICS, made_anew=stored is not None), ProgressLine(console, estimates=False)
    while True:
        state = look()
        for line in filter(has_progress, tail.lines()):
            progress.show(line["step"], state.max_steps, line, state.seconds_left)
        if state.state in _ENDED:
            console.say(f"{state.state} at step {state.step}")
            return _ENDED[state.state]
        time.sleep(config.interval_seconds)


class _Tail:
    """Follows a growing metrics.jsonl; of a file that is new or was replaced by a resume it returns the last lines.

    Args:
        made_anew: whether the file is rewritten each time with the same beginning.
        most: how many lines of a file that is new; None: those of its last bytes.
    """

    def __init__(self, path: Path, made_anew: bool = False, most: int | None = _LINES_BEFORE) -> None:
        self._path, self._made_anew, self._most = path, made_anew, most
        self._file, self._seen = -1, 0

    def lines(self) -> list[Fields]:
        """New lines; none where there is no file yet. An incomplete last line is left for later."""
        check_regular(self._path)
        try:
            with naming(self._path), open(self._path, "rb") as file:
                state = os.fstat(file.fileno())
                replaced = state.st_ino != self._file and not (self._made_anew and self._seen)
                new = replaced or not 0 <= state.st_size - self._seen <= _MOST_NEW_BYTES
                start = max(0, state.st_size - _TAIL_BYTES) if new else self._seen
                file.seek(start)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._file, self._seen = state.st_ino, start + len(whole)
        # Without the first one, if it was met in its middle.
        lines = lines_of(whole)
        return lines[-self._most :] if new and self._most else lines


def _row(state: RunState, folder: str) -> tuple[str, ...]:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    name = state.run.removeprefix(folder.rstrip("/") + "/") if is_url(folder) else os.path.relpath(state.run, folder)
    return (
        state.run if name == "." else name,
        f"{state.state}: {state.phase}" if state.phase else state.state,
        f"{state.step:,}" + ("" if state.max_steps is None else f" of {state.max_steps:,}"),
        shown(state.loss, "{:.4f}"),
        shown(state.validation_loss, "{:.4f}"),
        shown(state.tokens_per_second, "{:,.0f}"),
        shown(state.mfu, "{:.1%}"),
        "" if state.seconds_left is None else clock(state.seconds_left),
        "" if state.heartbeat_seconds is None else f"{clock(state.heartbeat_seconds)} ago",
        shown(state.restarts, "{}"),
    )


def _heartbeats(folder: Path) -> list[Fields]:
    """The newest heartbeats of a run's processes."""
    found = []
    for path in (folder / runs.HEARTBEATS).glob("rank-*.json"):
        try:
            beat = read_json(path)
            times = {name: beat[name] for name in ("time", "since")}
            if all(map(is_number, times.values())):
                found.append({**times, "phase": str(beat["phase"])})
        except (OSError, ValueError, KeyError, TypeError):  # it is being replaced, or was cut short
            continue
    return found


def _phase(beats: list[Fields], now: float) -> str | None:
    """Phases of the processes, the most frequent first, with the time of long ones."""
    counts = sorted(
        Counter(str(_PHASES.get(beat["phase"], beat["phase"])) for beat in beats).items(),
        key=lambda each: (-each[1], each[0]),
    )
    shown = ", ".join(f"{phase} ({count})" if len(counts) > 1 else phase for phase, count in counts)
    since = now - min((beat["since"] for beat in beats), default=now)
    return (shown + (f" for {clock(since)}" if since > _LONG_PHASE_SECONDS else "")) or None
