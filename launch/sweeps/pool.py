"""The processes of a sweep: its incomplete runs, one at a time on each device."""

import subprocess
import time
from collections.abc import Sequence
from contextlib import closing

from cloze.launch.run.metrics_file import newest_metrics
from cloze.launch.run.preemption import StopRequest
from cloze.launch.sweeps.run import Run, claim, is_claimed, last_line, shown
from cloze.launch.system.console import Console, doing, figure
from cloze.launch.system.environment.launchers import child_variables
from cloze.launch.system.exit_status import EXIT_REQUEUE

_POLL_SECONDS = 0.2


def run_all(planned: Sequence[Run], devices: list[str], stop: StopRequest, console: Console) -> bool:
    """Run the incomplete runs, one process at a time on each device.

    Args:
        devices: values of CUDA_VISIBLE_DEVICES; an empty one selects no device.
        stop: entered by the caller, which has the end of its work to do without being ended either.

    Returns:
        Whether it was stopped: by a signal, or since a run was.

    Raises:
        UserError: a folder holds what was made by other settings than are planned.

    Stop signals are forwarded, so that each run leaves a checkpoint. When a run can't be started, those at work are
    stopped. A run still active from a sweep that was killed is waited for, and so is one that another command has
    begun.
    """
    for run in planned:
        if lost := run.lost_model():
            advice = lost.advice if run.measured else "the run is started again, which writes it anew"
            console.warn(f"{lost.what}; {advice}")
    for run in planned:
        run.check()  # again: the sweep's folder may not have been held when they were planned
    pool = _Pool(planned, devices, stop, console)
    with doing() as tell, closing(pool):
        while pool.has_work:
            pool.start_waiting()
            time.sleep(_POLL_SECONDS)
            if pool.is_running and console.is_main:
                tell(pool.progress)
            pool.forward_stop()
            pool.collect_ended()
    return pool.is_stopped and not all(run.measured for run in planned)


class _Pool:
    """The runs that wait for a device, and those at work."""

    def __init__(self, planned: Sequence[Run], devices: list[str], stop: StopRequest, console: Console) -> None:
        self._planned, self._devices, self._stop, self._console = planned, devices, stop, console
        self._running: dict[str, tuple[Run, subprocess.Popen[bytes]]] = {}  # by device
        self._ended: dict[str, bool] = {}  # names of those that were run here, and whether they had results then
        self._reported: list[str] = []  # names of the runs that were said to be waited for
        self._passed_on = self._run_stopped = False
        self._waiting = self._without_results(planned)
        if done := len(planned) - len(self._waiting):
            console.say(f"{done} of {len(planned)} runs are complete already")

    @property
    def is_running(self) -> bool:
        """Whether a run is at work."""
        return bool(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a run is at work or to be started."""
        return self.is_running or bool(self._waiting and not self.is_stopped)

    @property
    def is_stopped(self) -> bool:
        """Whether no further run is to begin: by a signal, or since a run was stopped by one, or by its time."""
        return self._stop.wanted or self._run_stopped

    def start_waiting(self) -> None:
        """Start a run on each device that is free, unless runs of an earlier start are still at work."""
        left_behind = [run.name for run in self._waiting if is_claimed(run)]
        if left_behind not in ([], self._reported):
            self._console.say(f"waiting for {', '.join(left_behind)}, still at work since an earlier start")
            self._reported = left_behind
        if left_behind:
            return
        self._waiting = self._without_results(self._waiting)  # again: who has let go of a run may have completed it
        for device in self._devices:
            if device not in self._running and self._waiting and not self.is_stopped:
                run = self._waiting[0]
                if (process := _start(run, device)) is None:
                    return
                self._running[device] = self._waiting.pop(0), process
                self._console.say(f"{_which(run, self._planned)} begins; its output: {run.log}")

    def progress(self) -> str:
        """The runs at work, in a line."""
        return "; ".join(_at(run, self._planned) for run, _ in self._running.values())

    def forward_stop(self) -> None:
        """Pass a signal on to the runs."""
        if self._stop.wanted:
            self._stop_running()

    def _stop_running(self) -> None:
        """Once only: a second signal would end the runs without a checkpoint."""
        if not self._passed_on:
            self._passed_on = True
            for _, process in self._running.values():
                process.terminate()

    def collect_ended(self) -> None:
        """Report the runs that have ended, and leave out those that have results by now."""
        for device, (run, process) in list(self._running.items()):
            if process.poll() is not None:
                del self._running[device]
                self._ended[run.name] = run.measured
                if process.returncode == EXIT_REQUEUE and not self._stop.wanted:
                    self._run_stopped = True
                    self._console.warn(f"{run.name}: stopped, to be continued: no other run begins")
                else:
                    _say_end(run, process.returncode, self._passed_on, self._console)
        self._waiting = self._without_results(self._waiting)
        if not self.has_work and not self.is_stopped:  # another command may have begun a complete one again
            self._waiting = self._without_results(self._planned)

    def close(self) -> None:
        """Stop the runs that are still at work, which they are only after an error."""
        self._stop_running()
        for _, process in self._running.values():
            process.wait()

    def _without_results(self, some: Sequence[Run]) -> list[Run]:
        """Those to be run, or to be waited for."""
        return [run for run in some if not run.measured and (self._may_begin(run) or is_claimed(run))]

    def _may_begin(self, run: Run) -> bool:
        """Not what has failed here, but what another command has begun again behind its end, and has not ended."""
        return run.name not in self._ended or (self._ended[run.name] and run.results() is None)


def _start(run: Run, device: str) -> subprocess.Popen[bytes] | None:
    """None: another process has taken the run."""
    variables = child_variables(**({"CUDA_VISIBLE_DEVICES": device} if device else {}))
    if (log := claim(run)) is None:
        return None
    with log:
        return subprocess.Popen(run.command, stdout=log, stderr=subprocess.STDOUT, env=variables)


def _which(run: Run, planned: Sequence[Run]) -> str:
    return f"run {planned.index(run) + 1} of {len(planned)}, {run.name}"


def _at(run: Run, planned: Sequence[Run]) -> str:
    """A run that is at work, with its step and loss as far as it has logged any."""
    metrics = newest_metrics(run.folder)
    if metrics is None:
        return f"{_which(run, planned)}: no step logged yet"
    return f"{_which(run, planned)}: step {metrics['step']}, loss {figure(metrics['train/loss'])}"


def _say_end(run: Run, status: int, stopped: bool, console: Console) -> None:
    results = run.results()
    if results is not None:
        console.say(f"{run.name}: {results.metric} {shown(results.value)}")
    elif stopped:
        console.say(f"{run.name}: stopped")
    else:
        console.warn(f"{run.name}: failed with status {status}: {last_line(run.log)}")
