"""A run goes on with another number of processes: 2 -> 1 -> 2 equals 2 all along, at every ZeRO stage.

Weight decay is 1, a hundred times the usual, and the weights are tied: a group that took another's decay, or an Adam
step that was counted twice, moves the weights by far more than the tolerance.
"""

import resource
import shutil

import pytest

from cloze.launch import cli
from cloze.launch.checkpoint.weights import read_weights
from tests.engine_reports import compile_deepspeed_adam, resumes_main, told
from tests.forked import ForkedRun
from tests.launching import NO_DROPOUT, curve, finish, pretrain_arguments, train, weights
from tests.synthetic import make_shards

RUN = (
    "--train.max_steps",
    "9",
    "--checkpoint.every_steps",
    "3",
    "--checkpoint.keep_last",
    "9",
    "--optimizer.weight_decay",
    "1",
    *NO_DROPOUT,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("elastic"))


def distance(left, right) -> float:
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


def forget_after(run, step: int) -> None:
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)


def go_on(data, run, from_step: int, to_step: int, *overrides: str, processes: int) -> None:
    """Forget all checkpoints after `from_step` and continue; those after `to_step` are removed as if it died there.

    What the optimizer holds when it goes on is what it holds in a resume by the number of processes that saved it.
    """
    forget_after(run, from_step)
    same = shutil.copytree(run, run.with_name(f"same-{from_step}"))
    output = continued(data, run, *overrides, processes=processes)
    stage = overrides[overrides.index("--zero.stage") + 1]
    converting = f"step {from_step} was saved by another number of processes: converting it"
    assert (converting in output) == (stage != "0"), "at stage 0 each process has the whole"
    assert f"resumed from step {from_step} " in output
    assert not list((run / "checkpoints").glob("*universal*")), "nothing is left of the conversion"
    forget_after(run, to_step)
    (expected, *_), held = told(continued(data, same, *overrides, processes=3 - processes)), told(output)
    assert len(held) == processes
    for each in held:
        assert each["groups"] == expected["groups"] and len({group["weight_decay"] for group in each["groups"]}) > 1
        assert each["steps"] == expected["steps"] == [from_step]
        assert each["moments"] == pytest.approx(expected["moments"], rel=1e-6) and min(each["moments"]) > 0


def continued(data, run, *overrides: str, processes: int) -> str:
    return finish(ForkedRun(pretrain_arguments(data, run, *RUN, *overrides), processes, resumes_main))


def there_and_back(data, tmp_path, *overrides: str):
    """Weights and curve of 2 processes all along, and of 2 -> 1 -> 2."""
    train(data, tmp_path / "two", *RUN, *overrides, processes=2)
    changed = shutil.copytree(tmp_path / "two", tmp_path / "lr[1e-3] a+b")  # DeepSpeed takes paths for patterns
    go_on(data, changed, 3, 6, *overrides, processes=1)
    go_on(data, changed, 6, 9, *overrides, processes=2)
    return tmp_path / "two", changed


def assert_same_curve(left, right, tolerance: float) -> None:
    for one, other in zip(curve(left), curve(right), strict=True):
        assert one.keys() == other.keys()
        for name in one:
            if name != "data/padding_share":  # depends on how the batch is divided
                assert one[name] == pytest.approx(other[name], abs=tolerance), (one["step"], name)


# Stage 1 has the optimizer of stage 2, and sums the same way before it.
STAGES = [pytest.param(stage, marks=() if stage == "2" else pytest.mark.slow) for stage in "023"]


@pytest.mark.parametrize("stage", STAGES)
def test_fp32(data, tmp_path, stage):
    two, changed = there_and_back(data, tmp_path, "--zero.stage", stage)
    assert distance(weights(two), weights(changed)) <= 1e-5
    assert_same_curve(two, changed, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "optimizer"),
    [
        ("2", ("--optimizer.bias_correction", "false", "--optimizer.layer_decay", "0.7")),  # eight groups
        ("3", ("--optimizer.implementation", "deepspeed")),
    ],
    ids=["uncorrected", "deepspeed"],
)
def test_other_optimizers(data, tmp_path, stage, optimizer):
    if "deepspeed" in optimizer:
        compile_deepspeed_adam()
    two, changed = there_and_back(data, tmp_path, "--zero.stage", stage, *optimizer)
    assert distance(weights(two), weights(changed)) <= 1e-5


@pytest.mark.slow
def test_bf16(data, tmp_path):
    """Within twice of what a fresh run differs between 1 and 2 processes."""
    overrides = ("--zero.stage", "3", "--train.precision", "bf16")
    two, changed = there_and_back(data, tmp_path, *overrides)
    train(data, tmp_path / "one", *RUN, *overrides, processes=1)
    fresh = distance(weights(two), weights(tmp_path / "one"))
    assert 0 < fresh < 0.1
    assert distance(weights(two), weights(changed)) <= 2 * fresh
    assert 0 < losses_apart(two, tmp_path / "one") < 0.01
    assert losses_apart(two, changed) <= 2 * losses_apart(two, tmp_path / "one")


@pytest.mark.slow
def test_whole_tensors_at_another_stage(data, tmp_path):
    """2 ranks at stage 2, 1 at stage 0, 2 at stage 1, with a moving average: the weights of 2 ranks at stage 0."""
    # What divides them is the same for all (launch/engine/division.py); its states are of two kinds here.
    fixed = ("--optimizer.name", "muon", "--ema.decay", "0.9")
    train(data, tmp_path / "two", *RUN, *fixed, processes=2)
    changed = tmp_path / "changed"
    for stage, steps, processes in (("2", 3, 2), ("0", 6, 1), ("1", 9, 2)):
        output = train(data, changed, *RUN, *fixed, "--zero.stage", stage, processes=processes)
        assert steps == 3 or f"resumed from step {steps - 3} " in output
        assert "converting" not in output
        forget_after(changed, steps)
    assert_same_curve(tmp_path / "two", changed, 1e-4)
    for ema in (False, True):
        left, right = (read_weights(run, None, print, ema=ema)[1] for run in (tmp_path / "two", changed))
        assert distance(left, right) <= 1e-3


def losses_apart(left, right) -> float:
    """The largest difference of the training losses of a step."""
    ours, theirs = ([line["train/loss"] for line in curve(run) if "train/loss" in line] for run in (left, right))
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


def limited_main(command: list[str]) -> int:
    """The command in a process whose disk is full in the middle of a tensor."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
    return cli.main(command)


def test_a_disk_that_a_conversion_fills_is_named_and_not_the_checkpoint(data, tmp_path):
    run, overrides = tmp_path / "run", ("--train.max_steps", "2", "--zero.stage", "2")
    train(data, run, *overrides, processes=2)
    output = finish(ForkedRun(pretrain_arguments(data, run, *overrides), main=limited_main), status=2)
    line = output.splitlines()[-1]
    assert line.startswith(f"error: {run}/checkpoints/step-00000002.universal.tmp: ") and "good" in line, output
    assert not list((run / "checkpoints").glob("*.universal.tmp"))
    assert "complete at step 2" in train(data, run, *overrides)
