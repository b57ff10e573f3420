"""The averages of the weights against a loop written here, at all stages; kills, other processes, exports."""

from __future__ import annotations

import shutil

import pytest
import torch

from cloze.launch.checkpoint.weights import read_weights
from cloze.launch.cli import main
from cloze.launch.run.metrics_file import read_metrics
from cloze.model.tasks import saved_class
from tests.forked import ForkedRun
from tests.launching import (
    NO_DROPOUT,
    assert_same_run,
    assert_same_weights,
    finish,
    kill_at,
    pretrain_arguments,
    resume,
    saved,
    train,
    weights,
)
from tests.synthetic import make_shards

# The first step has the rate 0: its checkpoint holds the weights that the average began with.
EVERY = ("--schedule.warmup_steps", "1", "--checkpoint.every_steps", "1", "--checkpoint.keep_last", "9")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("data"))


def averaged(run, step=None) -> dict[str, torch.Tensor]:
    return read_weights(run, step, print, ema=True)[1]


def expected_average(run, steps: int, decay: float | None) -> dict[str, torch.Tensor]:
    """By its formula, of the weights in the checkpoints; without a decay the mean of the last half."""
    average = weights(run, 1)
    for step in range(1, steps + 1):
        kept = 1 - 1 / max(1, step - steps // 2) if decay is None else min(decay, (1 + step) / (10 + step))
        share = torch.tensor(1 - kept, dtype=torch.float64).float()
        average = {
            name: average[name] + (tensor - average[name]) * share for name, tensor in weights(run, step).items()
        }
    return average


# Stage 1 has the optimizer of stage 2; in 16 bits the next test is of it.
@pytest.mark.parametrize("stage", [0, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_average_is_that_of_its_formula_and_is_measured_at_every_stage(data, tmp_path, stage):
    run, processes = tmp_path / "run", 2 if stage else 1
    tail = stage == 2
    kind = ("--ema.tail_share", "0.5") if tail else ("--ema.decay", "0.4")
    train(data, run, *EVERY, "--zero.stage", str(stage), "--train.max_steps", "6", *kind, processes=processes)
    found, last_three = averaged(run), [weights(run, step) for step in (4, 5, 6)]
    assert_same_weights(found, expected_average(run, 6, None if tail else 0.4))
    if tail:
        for name, average in found.items():
            mean = sum(each[name].double() for each in last_three) / 3
            assert torch.allclose(average.double(), mean, rtol=1e-5, atol=1e-7), name
    assert not torch.equal(found["bert.embeddings.word.weight"], last_three[-1]["bert.embeddings.word.weight"])
    # What validation says of it is what a run says that starts from its export.
    assert main(["export", str(run), "--output", str(tmp_path / "exported"), "--ema", "true"]) == 0
    assert "the average of the weights at step 6" in (tmp_path / "exported/README.md").read_text()
    exported = saved_class(tmp_path / "exported").from_folder(tmp_path / "exported").state_dict()
    assert torch.equal(exported["bert.pooler.dense.weight"], found["bert.pooler.dense.weight"])
    # The mean of the last checkpoints, whichever files the stage has written.
    assert main(["export", str(run), "--output", str(tmp_path / "mean"), "--average", "3"]) == 0
    mean = saved_class(tmp_path / "mean").from_folder(tmp_path / "mean").state_dict()
    for name in ("bert.pooler.dense.weight", "bert.encoder.layers.1.attention.qkv.weight"):
        parts = [each[name].double() for each in last_three]
        assert torch.equal(mean[name], (sum(parts) / 3).float()), name
    train(data, tmp_path / "next", "--init_from", str(tmp_path / "exported"), "--train.max_steps", "1")
    (last,) = (line for line in read_metrics(run) if line["step"] == 6 and "validation/loss" in line)
    (first,) = (line for line in read_metrics(tmp_path / "next") if line["step"] == 0 and "validation/loss" in line)
    for name in ("loss", "mlm_loss", "mlm_accuracy", "next_sentence_loss"):
        assert last[f"validation/ema_{name}"] == pytest.approx(first[f"validation/{name}"], rel=1e-6)
    assert last["validation/ema_loss"] != last["validation/loss"]
    # It changes nothing about the run, whose weights came back as they were.
    train(
        data,
        tmp_path / "without",
        *EVERY,
        "--zero.stage",
        str(stage),
        "--train.max_steps",
        "6",
        "--evaluation.samples",
        "1",
        processes=processes,
    )
    assert_same_weights(weights(tmp_path / "without"), last_three[-1])


def test_a_decay_without_warmup_16_bits_and_a_run_that_begins_to_average(data, tmp_path):
    run = tmp_path / "run"
    bf16 = (*EVERY, "--train.precision", "bf16", "--zero.stage", "1", "--train.micro_batch_size", "16")
    train(data, run, *bf16, "--train.max_steps", "2")
    said = train(
        data,
        run,
        *bf16,
        "--train.max_steps",
        "5",
        "--ema.decay",
        "0.9",
        "--ema.warmup",
        "false",
        "--checkpoint.accept_changes",
        "true",
    )
    assert "step 2 holds no average of the weights: one begins with them here" in said
    assert "bf16_optimizer" not in said, "DeepSpeed's report of the memory"
    average = weights(run, 2)
    for step in (3, 4, 5):
        share = torch.tensor(1 - 0.9, dtype=torch.float64).float()
        average = {
            name: average[name] + (tensor - average[name]) * share for name, tensor in weights(run, step).items()
        }
    assert_same_weights(averaged(run), average)


def test_what_is_wrong_is_one_line(data, tmp_path, capsys):
    assert "ema.decay: found 1.0, expected at least 0, below 1" in train(
        data, tmp_path / "r", "--ema.decay", "1", status=2
    )
    both = ("--ema.decay", "0.9", "--ema.tail_share", "0.5")
    assert "ema.tail_share: found beside ema.decay" in train(data, tmp_path / "r", *both, status=2)
    timed = ("--ema.tail_share", "0.5", "--train.time_budget_hours", "1")
    assert "ema.tail_share: found 0.5 with train.time_budget_hours" in train(data, tmp_path / "r", *timed, status=2)
    train(data, tmp_path / "run", "--train.max_steps", "1")
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out"), "--ema", "true"]) == 2
    assert "ema: found no average in" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_average_survives_a_kill_and_another_number_of_processes(data, tmp_path, stage):
    arguments = (
        *NO_DROPOUT,
        "--train.max_steps",
        "16",
        "--checkpoint.every_steps",
        "4",
        "--checkpoint.keep_last",
        "9",
        "--zero.stage",
        str(stage),
        *(("--ema.decay", "0.8") if stage else ("--ema.tail_share", "0.75")),
    )
    whole, cut = (pretrain_arguments(data, tmp_path / name, *arguments) for name in ("whole", "cut"))
    finish(ForkedRun(whole, 2))
    kill_at(9, cut, 2, checkpoints=2)
    resume(cut, 2)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    assert_same_weights(averaged(tmp_path / "whole"), averaged(tmp_path / "cut"))
    for path in saved(tmp_path / "cut")[1:]:
        shutil.rmtree(path)
    before = averaged(tmp_path / "cut", 4)
    assert_same_weights(before, averaged(tmp_path / "whole", 4))
    for processes in (1, 4):  # from what two processes have saved
        other = tmp_path / f"on-{processes}"
        shutil.copytree(tmp_path / "cut", other)
        finish(ForkedRun(pretrain_arguments(data, other, *arguments), processes))
        assert_same_weights(averaged(tmp_path / "whole"), averaged(other), 2e-4)
