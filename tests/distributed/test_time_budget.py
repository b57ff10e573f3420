"""A run by the clock: it ends when the time is used up, with the rate at zero; a resume goes on with the time used."""

import json
import os
import time

import pytest

from cloze.launch.cli import main
from cloze.launch.training import loop
from tests.forked import ForkedRun
from tests.launching import curve, finish, kill_when, pretrain_arguments, train
from tests.synthetic import make_shards

SECONDS = 4  # in steps of some milliseconds
RUN = (
    "--train.max_steps",
    "1000000",
    "--train.time_budget_hours",
    str(SECONDS / 3600),
    "--schedule.warmup_share",
    "0.5",
    "--checkpoint.every_steps",
    "25",
    "--schedule.initial_share",
    "0.25",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("clock"))


SKEW = 100.0  # seconds by which the clock of rank 1 runs ahead once it trains


def other_clock(command: list[str]) -> int:
    """The command in a process whose clock jumps ahead, if it is not rank 0; each notes the rates that it sets."""
    clock, begun = time.monotonic, []
    rate = loop.Loop._rate
    rank = int(os.environ["RANK"])

    def noting(self):
        begun.append(True)
        rates.append(rate(self))
        return rates[-1]

    rates: list[float] = []
    loop.Loop._rate = noting
    if rank:
        time.monotonic = lambda: clock() + (SKEW if begun else 0.0)
    status = main(command)
    print(f"RATES {rank} {json.dumps(rates)}\n", end="", flush=True)
    return status


@pytest.mark.slow
def test_the_clock_of_rank_0_counts_on_all(data, tmp_path):
    output = finish(ForkedRun(pretrain_arguments(data, tmp_path / "run", *RUN), 2, other_clock))
    told = dict(line.split(" ", 2)[1:] for line in output.splitlines() if line.startswith("RATES "))
    ours, theirs = json.loads(told["0"]), json.loads(told["1"])
    assert ours == theirs and len(ours) > 20 and ours[-1] == 0


def state_of(run) -> dict:
    """state.json of the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*[0-9]"), default=None)
    try:
        return json.loads((newest / "state.json").read_text()) if newest else {"seconds": 0}
    except FileNotFoundError:  # another has taken its place meanwhile
        return state_of(run)


@pytest.mark.slow
def test_two_processes_end_together_with_the_rate_at_zero_and_a_checkpoint(data, tmp_path):
    run = tmp_path / "run"
    output = train(data, run, *RUN, processes=2)
    assert "the time budget of 0.00111111 hours is used up" in output
    assert "linear over 0.00111111 hours, 50.0% of the time of warmup" in output
    rates = [line["train/learning_rate"] for line in curve(run) if "train/learning_rate" in line]
    peak = rates.index(max(rates))
    assert rates[0] == pytest.approx(0.25 * 3e-3) and max(rates) <= 3e-3
    assert rates[: peak + 1] == sorted(rates[: peak + 1]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == 0, "the last step has seen the budget used up"
    state = state_of(run)
    assert state["step"] == len(rates) and state["seconds"] >= SECONDS
    assert json.loads((run / "status.json").read_text()) == {"state": "complete", "step": state["step"]}
    assert train(data, run, *RUN, processes=2).count("complete at step") == 1, "nothing is left to do"


@pytest.mark.slow
def test_a_resume_goes_on_with_the_time_that_was_used(data, tmp_path):
    run, seconds = tmp_path / "run", 5 * SECONDS  # of which a machine that stands still takes some
    command = pretrain_arguments(
        data, run, *RUN, "--checkpoint.every_steps", "1", "--train.time_budget_hours", str(seconds / 3600)
    )
    kill_when(ForkedRun(command), lambda: state_of(run)["seconds"] > 0.5)
    time.sleep(seconds + 1)  # longer than the budget, and not counted: the clock stands while the run does not train
    step, used = (state_of(run)[name] for name in ("step", "seconds"))
    assert 0 < used < seconds
    assert f"resumed from step {step} " in finish(ForkedRun(command))
    rates = {line["step"]: line["train/learning_rate"] for line in curve(run) if "train/learning_rate" in line}
    share = used / seconds
    expected = 0.25 + 0.75 * share / 0.5 if share < 0.5 else 2 - 2 * share
    assert rates[step + 1] == pytest.approx(3e-3 * expected), "the rate of the time that the checkpoint holds"
    assert rates[max(rates)] == 0 and state_of(run)["seconds"] >= seconds
