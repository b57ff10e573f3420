"""One long-lived run that is killed, stopped, damaged and starved of disk again and again ends with the same bits.

A failure is repeated by its seed:  CHAOS_SEED=... python -m pytest -m slow tests/distributed/test_chaos.py
(as far as the clock allows: what is drawn is the same, the moment within a step is not). The seed is a new one each
time, since each is another test.
"""

import json
import os
import random
import re
import signal
import time
from collections import Counter
from functools import partial

import pytest

from cloze.launch.training.running import EXIT_REQUEUE
from tests.distributed import chaos
from tests.forked import ForkedRun
from tests.launching import assert_same_weights, curve, finish, pretrain_arguments, weights
from tests.synthetic import make_shards

KILLS = int(os.environ.get("CHAOS_KILLS", "30"))
# For the kills: some two minutes on two quiet cores, many times that where others are at work.
SECONDS = int(os.environ.get("CHAOS_SECONDS", "1500"))
EVERY = 4  # steps between checkpoints
STRIDE = 3 * EVERY  # the most steps that a round may train before it is struck
STEPS = KILLS * 12  # a round trains some 5 that last: it is never complete before the last kill


@pytest.mark.slow
def test_a_run_through_chaos_ends_with_the_same_bits(tmp_path, capsys):
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(10**6)))
    rng = random.Random(seed)
    stage = str(rng.randrange(4))

    def say(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    say(f"\nCHAOS_SEED={seed}, ZeRO stage {stage}, {STEPS} steps")
    data = make_shards(tmp_path / "data")
    options = ("--train.max_steps", str(STEPS), "--zero.stage", stage, "--checkpoint.every_steps", str(EVERY),
               "--checkpoint.keep_last", "3", "--evaluation.every_steps", "10", "--evaluation.keep_best", "true")
    undisturbed = tmp_path / "undisturbed"
    finish(ForkedRun(pretrain_arguments(data, undisturbed, *options), chaos.PROCESSES))
    with chaos.small_disk(tmp_path / "disk") as disk:
        if not disk.mounted:
            say("without the right to mount a small disk: only the size of files is limited")
        run = disk.folder / "run"
        begin = partial(chaos.begin, data, run, options, rng)
        kills, began = Counter(), time.monotonic()
        while kills.total() < KILLS and time.monotonic() - began < SECONDS:
            if rng.random() < 0.2 and (what := chaos.damage_newest(run, rng)):
                say(f"    {what}")
            full = rng.random() < 0.1
            (starve if full else strike)(begin, run, disk, rng, kills, say)
        for number in range(2):  # the second time there is nothing to do
            output = finish(begin())
            assert f"complete at step {STEPS}" in output, number
        say(f"{kills.total()} kills in {time.monotonic() - began:.0f} s: {dict(kills)}")
        assert kills.total() >= KILLS, f"only {kills.total()} kills in {SECONDS} s; on a slow machine set CHAOS_SECONDS"
        assert kills["while starting"] < kills.total() / 3, "most kills must hit training or saving"
        assert curve(run) == curve(undisturbed)
        for step in (None, "best"):
            assert_same_weights(weights(run, step), weights(undisturbed, step))


def strike(begin, run, disk, rng, kills, say) -> None:
    """One round: start, hit, see that nothing hangs, that what is published is whole, and what a stop leaves."""
    blow = chaos.Strike.draw(rng, STRIDE)
    damaged_before = chaos.damaged_checkpoints(run)
    process = begin()
    blow.wait(process, run)
    assert process.poll() is None, f"ended by itself before {blow}:\n{process.communicate()[0][-6000:]}"
    when = "while starting" if blow.moment == "start" else "while saving" if chaos.saving(run) else "while training"
    blow.hit(process, rng)
    output = chaos.collect(process)
    step = chaos.step_of(run)
    say(f"{kills.total() + 1:3} {blow} -> {when}, step {step}, status {process.returncode}")
    assert process.returncode != 0, output[-4000:]
    kills[when] += 1
    # Nothing that a kill cut short carries a checkpoint's name: what is new is whole, what was whole still is.
    assert not chaos.damaged_checkpoints(run) - damaged_before, output[-4000:]
    if blow.number == signal.SIGTERM and when != "while starting":
        status = json.loads((run / "status.json").read_text())
        assert status["state"] == "requeue", output[-4000:]
        # torchrun makes 1 of every status.
        assert process.returncode == (EXIT_REQUEUE if isinstance(process, ForkedRun) else 1), output[-4000:]
        assert f"stopped with a checkpoint of step {status['step']}" in output
        assert chaos.good_checkpoints(run)[-1].name == f"step-{status['step']:08d}"


def starve(begin, run, disk, rng, kills, say) -> None:
    """One round in which the disk fills up: the run ends with one clear line, and its last good checkpoint is whole."""
    damaged_before = chaos.damaged_checkpoints(run)
    process = begin()
    chaos.wait_for_steps(process, run, rng.randint(1, STRIDE))
    assert process.poll() is None, f"ended by itself:\n{process.communicate()[0][-6000:]}"
    good = chaos.good_checkpoints(run)
    try:
        what = disk.fill(process, rng)
        disk.keep_full(process)
        output = chaos.collect(process)
    finally:
        disk.free()
    # Not at the start of a line: the processes share a pipe, and another may be in the middle of a warning's.
    line = re.search(r"error: .*(disk is full|bytes free|File too large).*$", output, re.MULTILINE)
    say(f"    {what}: {line and line[0]}")
    assert line and process.returncode != 0, output[-6000:]
    assert not chaos.damaged_checkpoints(run) - damaged_before, output[-6000:]
    if good:
        assert good[-1] <= chaos.good_checkpoints(run)[-1], "the last good checkpoint was lost"
