"""fp16 through DeepSpeed's own optimizers: what the loss is multiplied by is what the gradient is divided by."""

import pytest

from cloze.launch.checkpoint.deepspeed_files import load_pickled
from tests.forked import ForkedRun
from tests.fp16_on_cpu import fp16_main
from tests.launching import assert_same_weights, curve, finish, pretrain_arguments, weights
from tests.poisoned import poison
from tests.synthetic import make_shards

# Between gradients that differ by a power of two in fp16, what is lost below its smallest number.
TOLERANCE = 1e-4


def fp16(data, run, stage: str, *overrides: str) -> ForkedRun:
    """Ten steps, of which the scale grows at every third, if at all."""
    command = pretrain_arguments(
        data,
        run,
        "--train.precision",
        "fp16",
        "--zero.stage",
        stage,
        "--train.max_steps",
        "10",
        "--checkpoint.every_steps",
        "4",
        "--checkpoint.keep_last",
        "3",
        *overrides,
    )
    return ForkedRun(command, main=fp16_main)


def scales(run) -> list[float]:
    return [line["train/loss_scale"] for line in curve(run) if "train/loss_scale" in line]


def norms(run) -> list[float]:
    return [line["train/gradient_norm"] for line in curve(run) if "train/gradient_norm" in line]


@pytest.mark.parametrize("stage", ["1", *(pytest.param(stage, marks=pytest.mark.slow) for stage in "23")])
def test_a_step_at_which_the_scale_grows_is_like_any_other(tmp_path, stage):
    data = make_shards(tmp_path / "data")
    grows, constant = tmp_path / "grows", tmp_path / "constant"
    for process in (
        fp16(data, grows, stage, "--loss_scale.initial_power", "10", "--loss_scale.window", "3"),
        fp16(data, constant, stage, "--loss_scale.initial_power", "10"),
    ):
        finish(process)
    assert scales(constant) == [2**10] * 10
    assert scales(grows) == [2**10] * 3 + [2**11] * 3 + [2**12] * 3 + [2**13]
    assert norms(grows) == pytest.approx(norms(constant), rel=1e-3)
    assert_same_weights(weights(grows), weights(constant), TOLERANCE)
    (saved,) = (grows / "checkpoints" / "step-00000004").glob("*optim_states.pt")
    assert load_pickled(saved)["optimizer_state_dict"]["loss_scaler"].cur_scale == 2**11


def nan_in_fp16(command: list[str]) -> int:
    poison(1, range(6, 100))
    return fp16_main(command)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["2", "3"])  # stage 1 has the optimizer of stage 2
def test_too_many_skips_in_a_row_name_the_batch_and_leave_the_last_good_state(tmp_path, stage):
    """In fp16 a skipped step changes something, the loss scale, and still proves nothing."""
    data, run = make_shards(tmp_path / "data"), tmp_path / "run"
    options = (
        "--train.precision",
        "fp16",
        "--zero.stage",
        stage,
        "--train.max_skipped_steps",
        "4",
        "--loss_scale.initial_power",
        "10",
        "--loss_scale.hysteresis",
        "1",
        "--schedule.name",
        "constant",
        "--schedule.warmup_steps",
        "0",
    )
    command = pretrain_arguments(data, run, *options, "--train.max_steps", "30")
    output = finish(ForkedRun(command, 2, nan_in_fp16), status=None)
    (line,) = {line for line in output.splitlines() if "error:" in line and "steps in a row" in line}
    assert "found 4 steps in a row whose loss or gradient are infinite or NaN" in line
    assert "the last being step 10, on samples 144 to" in line
    for step, first in ((7, 96), (8, 112), (9, 128), (10, 144)):
        assert f"step {step}, on samples {first} to {first + 15} of the stream" in output
    whole = tmp_path / "whole"
    finish(ForkedRun(pretrain_arguments(data, whole, *options, "--train.max_steps", "6"), 2, fp16_main))
    assert_same_weights(weights(run), weights(whole))


def test_a_step_that_overflows_halves_the_scale_at_once(tmp_path):
    data, run = make_shards(tmp_path / "data"), tmp_path / "run"
    finish(fp16(data, run, "1", "--loss_scale.initial_power", "32", "--loss_scale.hysteresis", "1"))
    found = scales(run)
    skipped = [line["train/skipped_steps"] for line in curve(run) if "train/skipped_steps" in line]
    assert skipped[0] == 1 and found == [2**32 / 2**number for number in skipped]
