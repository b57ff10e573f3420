"""What all tests share."""

import contextlib
import gc
import os
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ["tests.parallel"]

gc.disable()  # while tests are collected: looking for garbage takes a quarter of that time

# Read by DeepSpeed at import; the launch floor sets it in every process that it starts.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# Pages of help and progress are as wide as the terminal; tests see the narrowest that is common.
os.environ["COLUMNS"] = "80"
# For tiny models a second thread costs more than it does.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How fast an example is depends on who else computes on the machine.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_collection_finish():
    """What was imported stays: no collection of garbage has to look at its 760,000 objects. The rest is small, and
    looked at less often than by Python's own threshold of 700 objects, which takes 3% of the time.
    """
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


_NOBODY = 65534
# What a command that runs in the process of the tests leaves there for DeepSpeed, and any launcher sets.
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_rank():
    """No test begins as a rank of an earlier one's run, which transformers' Trainer would join; none leaves a process
    group, in which the next run of this process would fail.
    """
    for name in _LAUNCHERS:
        os.environ.pop(name, None)
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("found a process group after the test, expected that the test ends it")


@pytest.fixture
def as_nobody():
    """A context in which this process is a user's to whom modes apply: root reads everything."""

    @contextlib.contextmanager
    def change():
        if os.geteuid() != 0:
            yield
            return
        os.seteuid(_NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)

    return change


@pytest.fixture
def folder_of_nobody(as_nobody):
    """A folder of such a user: those of pytest are root's alone."""
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() == 0:
            os.chown(folder, _NOBODY, _NOBODY)
        yield Path(folder).resolve()
