"""Pretraining into a store: killed in an upload, gone on from empty disks, with faults between it and the store."""

from __future__ import annotations

import json
import threading

import pytest

from cloze.launch.checkpoint import fetch_run
from cloze.pipeline.stores.places import to_place
from tests.launching import assert_same_weights, kill_all, train, weights
from tests.stores.conftest import ENVIRONMENT
from tests.stores.server import BUSY, first
from tests.stores.stored_runs import Machine, committed, finish_all, start_on, train_on, wait_until
from tests.synthetic import make_shards

STEPS = 16
RUN = ("--train.max_steps", str(STEPS), "--checkpoint.every_steps", "4", "--zero.stage", "1")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("stored"), mask_sets=0)


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """A run of two processes into a folder."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(data, folder, *RUN, processes=2)
    return folder


@pytest.fixture
def machines(tmp_path):
    """As many empty machines as are asked for."""
    made = []

    def more(count: int) -> list[Machine]:
        made.extend([Machine(tmp_path / f"machine-{len(made) + number}") for number in range(count)])
        return made[-count:]

    return more


def keys(output: str) -> list[str]:
    """All objects of a run, by their names below it."""
    place = to_place(output)
    return [each.key[len(place.key) + 1 :] for each in place.objects()]


def assert_nothing_but_what_counts(output: str) -> None:
    """That the store has no file of a checkpoint that does not count."""
    commits = json.loads((to_place(output) / "checkpoints/commits.json").read_bytes())["commits"]
    counted = {f"step-{int(step):08d}/{commit['folder']}" for step, commit in commits.items()}
    found = {"/".join(key.split("/")[1:3]) for key in keys(output) if key.startswith("checkpoints/step-")}
    assert found == counted


def assert_no_secrets(output: str, printed: str) -> None:
    """That neither what was printed nor what was stored has a part of the credentials."""
    place = to_place(output)
    texts = [printed.encode(), *(place.at(each.key).read_bytes() for each in place.objects())]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert not any(ENVIRONMENT[name].encode() in text for text in texts)


def test_killed_in_an_upload_and_gone_on_with_from_empty_disks(data, undisturbed, machines, bucket, proxy, request):
    """Two machines that share nothing; those that go on have empty disks."""
    output, ended = f"{bucket}/runs/own", threading.Event()
    request.addfinalizer(ended.set)

    def stuck(request):  # the second checkpoint's upload begins, and does not end
        if request.method == "PUT" and "/step-00000008/" in request.path and "rank-00001" in request.path:
            ended.wait()

    proxy.fault = stuck
    processes = start_on(machines(2), data, output, *RUN)
    uploaded = f"{output}/checkpoints/step-00000008"
    wait_until(lambda: to_place(uploaded).is_dir() and committed(output) == [4], processes[0])
    for process in processes:
        kill_all(process)
    proxy.fault = lambda request: None
    assert any("mp_rank_00_model_states" in key for key in keys(uploaded))
    printed = finish_all(start_on(machines(2), data, output, *RUN))
    assert "resumed from step 4 of 16" in printed
    assert committed(output) == [12, 16]
    assert_nothing_but_what_counts(output)
    assert_no_secrets(output, printed)
    local = fetch_run(to_place(output))
    assert_same_weights(weights(local), weights(undisturbed))


@pytest.mark.slow
def test_503s_and_cut_connections_are_no_harm(data, undisturbed, machines, bucket, proxy):
    """The first request for each object is answered with 503, the second one cut off after it was done."""
    output = f"{bucket}/own"
    cut = first(1, lambda _: None, lambda request: request.method == "PUT")
    busy = first(1, lambda _: BUSY, lambda request: request.method != "PUT")
    proxy.fault = lambda request: busy(request) or cut(request)
    (machine,) = machines(1)
    printed = train_on(machine, data, output, *RUN, processes=2)
    assert "warning" not in printed.replace("warning: s3", "")
    proxy.fault = lambda request: None
    assert committed(output) == [12, 16]
    assert_nothing_but_what_counts(output)
    assert_same_weights(weights(fetch_run(to_place(output))), weights(undisturbed))
