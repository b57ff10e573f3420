"""The cluster that the tests of this folder share."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.clusters.hosts import Unavailable, two_hosts
from tests.clusters.slurm import slurm
from tests.synthetic import make_shards


def _started(kind, folder: Path):
    """The cluster, or a skip that says what this machine lacks."""
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(kind(folder))
        except Unavailable as reason:
            pytest.skip(f"no {kind.__name__} here: {reason}")
        yield cluster


@pytest.fixture(scope="session")
def folder():
    """Of a short name: a socket's path has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="cloze-") as path:
        yield Path(path)


# A module's, not the session's: both are made of hosts of the same names, so one must be gone when the other begins.
@pytest.fixture(scope="module")
def slurm_cluster(folder):
    (folder / "slurm").mkdir(exist_ok=True)
    yield from _started(slurm, folder / "slurm")


@pytest.fixture(scope="module")
def hosts(folder):
    """The folder that `on` wants; the hosts are those of HOSTS."""
    (folder / "hosts").mkdir(exist_ok=True)
    for _ in _started(two_hosts, folder / "hosts"):
        yield folder / "hosts"


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("clusters"))
