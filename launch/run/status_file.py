"""The status of a run: `status.json`, by which job templates decide whether to queue it again."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cloze.launch.run.runs import STATUS
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import publish_text
from cloze.pipeline.untrusted import fields_if_readable

# After so long without a heartbeat the overview of runs calls a running one silent. A process writes its heartbeat
# every monitor.heartbeat_seconds (10 by default); clocks of hosts differ by seconds, and shared folders show changes
# late.
SILENT_SECONDS = 120.0


class RefusedStartError(UserError):
    """A run is not started as it was asked for. Nothing of it is wrong, and nothing of it was changed."""


def set_status(folder: Path, state: str, step: int | None) -> None:
    """Write status.json. The job templates read it.

    Args:
        state: running, requeue (stopped early with a checkpoint: submit again), complete, failed.
    """
    publish_text(folder / STATUS, json.dumps({"state": state, "step": step}) + "\n", durable=state != "running")


@contextmanager
def recording_failure(folder: Path) -> Iterator[None]:
    """Set the status `running` at once, so that a start that fails or is killed does not leave an earlier status; and
    `failed` if an error ends the start before it has set another status. A complete run stays so if the start is
    refused (RefusedStartError).
    """
    earlier = read_status(folder)
    set_status(folder, "running", earlier.get("step", 0))
    try:
        yield
    except BaseException as error:
        with suppress(UserError):  # the disk may be full, which is then the error being raised
            if (status := read_status(folder)).get("state") == "running":
                kept = isinstance(error, RefusedStartError) and earlier.get("state") == "complete"
                set_status(folder, "complete" if kept else "failed", status.get("step", 0))
        raise


def read_status(folder: Path) -> Fields:
    """Content of status.json: state and step; empty where it is missing or damaged."""
    status = fields_if_readable(folder / STATUS)
    if not isinstance(status.get("state"), str):
        return {}
    return status | {"step": status["step"] if type(status.get("step")) is int else 0}
