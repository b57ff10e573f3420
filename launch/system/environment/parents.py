"""A rank ends with the process that has started it."""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from cloze.pipeline.bounds import whole_number

# The variable with the id of the process that started this one as a rank and at whose end this one ends.
_PARENT = "CLOZE_PARENT"
# Variables of ranks whose parent process watches over them: torchrun's agent, deepspeed's launcher of a machine. (srun
# and mpirun end the ranks of a lost launcher themselves.)
_TORCHRUN, _DEEPSPEED = "TORCHELASTIC_RUN_ID", "CROSS_RANK"
_PR_SET_PDEATHSIG = 1  # prctl(2)
# What becomes of this process's launcher: the process that watches over it, and whether that was left alone itself.
_WATCHING: dict[str, int] = {}
_LEFT_ALONE = threading.Event()
# The threads of a killed launcher end one after another. At the end of the one that has started a rank the kernel sends
# the signal, while another one is still the rank's parent.
_DYING_SECONDS = 0.5
_LOOK_SECONDS = 1.0  # between two looks at the `deepspeed` that has started the launcher


def end_with(process: int) -> dict[str, str]:
    """Environment variables for a child process that must stop when `process` ends, for whatever reason."""
    return {_PARENT: str(process)}


def end_with_parent() -> None:
    """Stop this process, as by SIGTERM, when the process that started it as a rank ends, even if that was killed; on
    Linux only. Otherwise ranks would train on without anybody who waits for them, and hold their run.
    """
    parent = whole_number(os.environ.pop(_PARENT, ""))  # not inherited by processes that this one starts
    launchers = {_TORCHRUN, _DEEPSPEED} & os.environ.keys() if "LOCAL_RANK" in os.environ else set()
    if not (parent or launchers) or not sys.platform.startswith("linux"):
        return
    _WATCHING["parent"] = parent or os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have ended already. Without torchrun's agent or deepspeed's launcher the ranks can't meet then.
    if parent and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
    if _DEEPSPEED in launchers and not parent:
        launcher = os.getppid()
        threading.Thread(target=_stop_when_orphaned, args=(launcher, _parent_of(launcher)), daemon=True).start()


def _stop_when_orphaned(launcher: int, parent: int | None) -> None:
    """Stop this process when its launcher has lost its own parent: deepspeed's does not end with the `deepspeed` (or
    the ssh session) that has started it.
    """
    while (now := _parent_of(launcher)) == parent and now is not None:
        time.sleep(_LOOK_SECONDS)
    if now is not None:  # otherwise the launcher has ended, and the kernel has sent SIGTERM
        _LEFT_ALONE.set()
        os.kill(os.getpid(), signal.SIGTERM)


def has_lost_launcher() -> bool:
    """Whether the process that has started this one as a rank is gone, and has caused a SIGTERM by that. Waits a while
    if there is a launcher, which may be about to end.
    """
    end = time.monotonic() + _DYING_SECONDS
    while not _LEFT_ALONE.is_set() and os.getppid() == _WATCHING.get("parent"):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return _LEFT_ALONE.is_set() or "parent" in _WATCHING


def _parent_of(process: int) -> int | None:
    """The parent of a process; None if it has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
