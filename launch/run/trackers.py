"""Experiment trackers beside TensorBoard: Weights & Biases and MLflow, through their own libraries.

Each tracker has its own thread, which does everything that may wait for a server, so that a slow or failing server
never slows or stops the training. A resumed run continues the same curves: RUN/trackers.json has the tracker's id of
the run and the last step sent of each curve. Each checkpoint has a copy, for a start without that file. Steps that a
resume repeats are not sent twice (only their speeds could differ).
"""

import importlib.util
import json
import math
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from cloze.launch.run.runs import TRACKING
from cloze.pipeline.errors import UserError, reason_of
from cloze.pipeline.extras import how_to_install
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import publish_text
from cloze.pipeline.untrusted import fields_if_readable

# Size of a tracker's queue in lines, enough for hours; when it is full, new lines are left out.
_WAITING = 10_000
# Seconds that the end of a run waits for a server that does not answer.
_LEAVE_SECONDS = 60.0
_PARAMETERS = 100  # MLflow's limits: parameters per request, length of a value (mlflow.utils.validation)
_PARAMETER_LENGTH = 6000


class Tracker(Protocol):
    """The interface of a tracker. One thread calls its methods; any exception ends the tracking."""

    def begin(self, run_id: str | None, name: str, folder: Path, facts: Fields) -> str:
        """Begin the run, or continue it.

        Args:
            run_id: result of `begin` at an earlier start; None: the run is new.
            name: displayed name of the run.
            folder: folder of the run, for the library's files.
            facts: configuration, data and software of the run, by dotted names.

        Returns:
            The tracker's id of the run.
        """

    def known(self) -> dict[str, int]:
        """The last step of each curve on the server, as far as it reports them; set by `begin`."""

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Send finite values of a step; steps never decrease."""

    def end(self, complete: bool) -> None:
        """Send the remaining values and close the run.

        Args:
            complete: whether the run is complete, otherwise it failed or will be resumed.
        """


class Wandb:
    """Weights & Biases; server, key, mode and account are its own settings (WANDB_MODE=offline, `wandb login`)."""

    library, extra = "wandb", "wandb"

    def __init__(self, project: str) -> None:
        self._project = project

    def begin(self, run_id: str | None, name: str, folder: Path, facts: Fields) -> str:
        import wandb

        settings = wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True)
        mode = wandb.setup().settings.mode
        if mode == "online" and not wandb.api.api_key:  # otherwise the library would ask on the terminal
            raise RuntimeError("no login found; `wandb login`, or set WANDB_MODE=offline")
        run_id = run_id or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=self._project,
            id=run_id,
            name=name,
            dir=str(folder),
            config=facts,
            resume="allow",
            reinit="create_new",
            settings=settings,
        )
        return run_id

    def known(self) -> dict[str, int]:
        return {}  # the server ignores steps that it has already; offline there is no server to ask

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log(scalars, step=step)

    def end(self, complete: bool) -> None:
        if not complete:
            self._run.mark_preempting()  # shown as preempted rather than failed
        self._run.finish(0 if complete else 1)


class Mlflow:
    """MLflow; the server is MLflow's own setting (MLFLOW_TRACKING_URI; by default a local folder or database)."""

    library, extra = "mlflow", "mlflow"

    def __init__(self, project: str) -> None:
        self._project = project

    def begin(self, run_id: str | None, name: str, folder: Path, facts: Fields) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag

        self._client = MlflowClient()
        if run_id is None:
            existing = self._client.get_experiment_by_name(self._project)
            experiment = existing.experiment_id if existing else self._client.create_experiment(self._project)
            run_id = self._client.create_run(experiment, run_name=name).info.run_id
            known = [Param(name, str(value)[:_PARAMETER_LENGTH]) for name, value in facts.items()]
            for first in range(0, len(known), _PARAMETERS):
                self._client.log_batch(run_id, params=known[first : first + _PARAMETERS])
            self._client.log_batch(run_id, tags=[RunTag("cloze.folder", str(folder))])
        else:  # parameters cannot be changed: they stay those of the first start
            self._client.update_run(run_id, status="RUNNING")
        self._id = run_id
        return run_id

    def known(self) -> dict[str, int]:
        return {metric.key: metric.step for metric in self._client.get_run(self._id).data.to_proto().metrics}

    def write(self, step: int, scalars: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in scalars.items()])

    def end(self, complete: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if complete else "KILLED")


TRACKERS: dict[str, type[Wandb] | type[Mlflow]] = {"wandb": Wandb, "mlflow": Mlflow}


def check_installed(names: Sequence[str]) -> None:
    """Raise UserError for the first tracker whose library is missing."""
    for name in names:
        if name in TRACKERS and importlib.util.find_spec(TRACKERS[name].library) is None:
            raise UserError(
                f"monitor.trackers: found {name}, whose library is not installed, expected it; "
                f"{how_to_install(TRACKERS[name].extra)}"
            )


class Tracking:
    """One tracker of a run, in a thread.

    Args:
        name: a name of TRACKERS.
        tracker: the tracker that sends.
        folder: folder of the run.
        facts: configuration, data and software of the run, by dotted names.
        warn: called with a line about a failure, at most once.
        kept: state of this tracker in the checkpoint that the run resumes from (`tracked`).
        leave_seconds: how long the end of the run waits for unsent values.
    """

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        folder: Path,
        facts: Fields,
        warn: Callable[[str], None],
        kept: Mapping[str, Any] = MappingProxyType({}),
        leave_seconds: float = _LEAVE_SECONDS,
    ) -> None:
        self._name, self._tracker, self._folder, self._facts, self._kept = name, tracker, folder, facts, kept
        self._warn, self._leave_seconds = warn, leave_seconds
        self._waiting: queue.Queue[tuple[int, dict[str, float]] | bool] = queue.Queue(_WAITING)
        self._left_out = 0
        self._failed = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Queue values; never waits."""
        try:
            self._waiting.put_nowait((step, {name: value for name, value in scalars.items() if math.isfinite(value)}))
        except queue.Full:
            self._left_out += not self._failed

    def close(self, complete: bool) -> None:
        """Wait up to `leave_seconds` for the queued values to be sent."""
        deadline = time.monotonic() + self._leave_seconds
        try:
            if not self._failed:  # otherwise the queue has no consumer
                self._waiting.put(complete, timeout=self._leave_seconds)
                self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive() and not self._failed:
            self._warn(
                f"{self._name}: it has not answered for {self._leave_seconds:.0f} s, expected it to take the "
                "run's last values; metrics.jsonl has them all"
            )
        elif self._left_out and not self._failed:
            self._warn(
                f"{self._name}: {self._left_out} lines were left out, since it was too slow; metrics.jsonl has them all"
            )

    def _work(self) -> None:
        try:
            # the folder's state is never older than the checkpoint's
            state = tracked(self._folder).get(self._name) or self._kept
            sent: dict[str, int] = dict(state.get("sent", {}))
            state = {
                "id": self._tracker.begin(state.get("id"), self._folder.resolve().name, self._folder, self._facts),
                "sent": sent,
            }
            # The last values that a killed start sent may be recorded on the server only.
            sent |= {name: step for name, step in self._tracker.known().items() if step > sent.get(name, -1)}
            _note(self._folder, self._name, state)
            while not isinstance(item := self._waiting.get(), bool):
                step, scalars = item
                scalars = {name: value for name, value in scalars.items() if sent.get(name, -1) < step}
                if scalars:
                    sent |= dict.fromkeys(scalars, step)
                    # Recorded before they are sent: a kill in between loses a point but duplicates none.
                    _note(self._folder, self._name, state)
                    self._tracker.write(step, scalars)
            self._tracker.end(item)
        # Any exception of the library or its server, SystemExit included: the training continues.
        except BaseException as error:
            self._failed = True
            self._warn(f"{self._name}: the run continues without it ({type(error).__name__}: {reason_of(error)})")


_noting = threading.Lock()  # several trackers write one file


def tracked(folder: Path) -> dict[str, Fields]:
    """State of a run's trackers by name: the tracker's id of the run, and the last step sent of each curve."""
    content = fields_if_readable(folder / TRACKING)
    return {name: state for name, state in content.items() if isinstance(state, dict)}


def _note(folder: Path, name: str, state: Fields) -> None:
    with _noting:
        publish_text(folder / TRACKING, json.dumps(tracked(folder) | {name: state}) + "\n", durable=False)
