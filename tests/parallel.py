"""How `make test` shares the tests among its processes (pytest-xdist); the top conftest.py loads this plugin."""

from __future__ import annotations

import os
from multiprocessing import forkserver, resource_tracker

import pytest

# What a server of forked processes imports (forked.py). One list for all tests: the last one that is set counts.
PRELOADED = ["tests.preloaded"]

# Of these folders one process runs all tests: Slurm's hosts and the others have the same names, and the shim of the GPU
# is compiled once for a session.
TOGETHER = ("tests/clusters/", "tests/gpu/")
# Of this file each test is its own: they share nothing dear, and one process alone would start one run after another.
APART = "tests/model/test_cuda.py"
# What takes longest comes first, so that no process has a long file left when the others are done; then the rest.
FIRST = (
    "tests/clusters/",
    "tests/gpu/",
    "tests/distributed/",
    "tests/stores/",
    "tests/end_to_end/",
    "tests/launch/",
    "tests/model/",
)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config, log):
    """A file's tests stay in one process, for what they share, but for those of APART."""
    from xdist.scheduler import LoadScopeScheduling  # of the tests' extra: pytest alone does without

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(APART):
                return nodeid
            return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])

    config.option.loadscopereorder = False  # by numbers of tests, which say nothing of their time
    return Files(config, log)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_configure_node(node):
    """All processes have theirs forked from one server, whose imports take 5 s of processor time; it makes them while
    the tests are collected.
    """
    forkserver.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    node.workerinput["forkserver"] = forkserver._forkserver._forkserver_address


def pytest_configure(config):
    """Take the server that the first process has started, and ends, for this process's own."""
    if hasattr(config, "workerinput"):
        server = forkserver._forkserver
        server._forkserver_address = config.workerinput["forkserver"]
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # a server's own ends it when it is closed
        server.ensure_running = resource_tracker.ensure_running


def pytest_collection_modifyitems(config, items):
    """Sort by FIRST, where there are several processes."""
    if hasattr(config, "workerinput"):
        items.sort(
            key=lambda item: next(
                (place for place, folder in enumerate(FIRST) if item.nodeid.startswith(folder)), len(FIRST)
            )
        )
