"""A step whose loss or gradient is infinite or NaN changes nothing, on any rank, at any ZeRO stage."""

import json
import re
from functools import partial

import pytest
import torch

from cloze.launch.checkpoint.folder import CheckpointFolder
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig
from cloze.model.initialization import init_weights
from cloze.pipeline.loading.batches import BatchStream
from cloze.pipeline.shards.reader import ShardReader
from tests.forked import ForkedRun
from tests.launching import (
    NO_DROPOUT,
    assert_killed_equals_whole,
    assert_same_run,
    assert_same_weights,
    curve,
    finish,
    pretrain_arguments,
    train,
    weights,
)
from tests.poisoned import infinite_main, poisoned_main
from tests.synthetic import make_shards

RUN = (
    *NO_DROPOUT,
    "--schedule.warmup_steps",
    "0",
    "--schedule.name",
    "constant",
    "--checkpoint.every_steps",
    "4",
    "--monitor.inspect_every_steps",
    "1",
)
# Six steps of 3e-3, moved by sums in another order: a few 1e-7 each.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("skipping"))


def poisoned_run(data, run, rank: int, steps: range, *overrides: str, main=poisoned_main) -> ForkedRun:
    """Two processes, of which one has a NaN loss at these steps."""
    return ForkedRun(pretrain_arguments(data, run, *RUN, *overrides), 2, partial(main, rank, steps))


def plain_loop(data, num_steps: int, skipped: set[int]) -> dict[str, torch.Tensor]:
    """AdamW on whole global batches, without DeepSpeed; the skipped ones are only read."""
    model = BertForPreTraining(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
        )
    )
    init_weights(model, 42)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, eps=1e-6)
    stream = BatchStream(
        ShardReader(data, "train"), global_batch_size=16, streams=16, micro_batch_size=16, rank=0, world_size=1, seed=42
    )
    for step in range(num_steps):
        batch = next(stream).micro_batches[0]
        if step in skipped:
            continue
        output = model(**batch)
        optimizer.zero_grad()
        (output.mlm_losses.mean() + output.next_sentence_losses.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    stream.close()
    return model.state_dict()


@pytest.mark.parametrize(
    ("stage", "main"),
    [
        ("0", infinite_main),
        ("2", poisoned_main),
        *(
            pytest.param(stage, main, marks=pytest.mark.slow)
            for stage, main in [
                ("0", poisoned_main),
                ("3", poisoned_main),
                ("3", infinite_main),
            ]
        ),
    ],
)
def test_the_others_steps_are_those_of_a_plain_loop(data, tmp_path, stage, main):
    run = tmp_path / "run"
    output = finish(
        poisoned_run(
            data,
            run,
            1,
            range(2, 4),
            "--zero.stage",
            stage,
            "--train.max_steps",
            "6",
            "--train.log_every_steps",
            "2",
            main=main,
        )
    )
    assert_same_weights(plain_loop(data, 6, {2, 3}), weights(run), TOLERANCE)
    assert "loss or gradient of step 3, on samples 32 to 47 of the stream (epoch 0) are infinite or NaN" in output
    lines = [line for line in curve(run) if "train/skipped_steps" in line]
    assert [line["train/skipped_steps"] for line in lines] == [0, 2, 2]
    assert ["train/loss" in line for line in lines] == [True, False, True], "no good step, no loss"
    assert not {"NaN", "Infinity"} & set(re.findall(r"\w+", (run / "metrics.jsonl").read_text()))
    state = json.loads((run / "checkpoints" / "step-00000006" / "state.json").read_text())
    assert state["skipped_steps"] == 2


@pytest.mark.slow
def test_killed_between_skipped_steps_and_resumed(data, tmp_path):
    """Checkpoints fall due at skipped steps: what is saved is the last good step, and the skipped are met again."""
    overrides = ("--train.max_steps", "40", "--train.log_every_steps", "3", "--zero.stage", "2")
    whole = tmp_path / "whole"
    finish(poisoned_run(data, whole, 0, range(14, 18), *overrides))
    cut = pretrain_arguments(data, tmp_path / "cut", *RUN, *overrides)
    assert_killed_equals_whole(whole, 18, cut, 2, partial(poisoned_main, 0, range(14, 18)))


@pytest.mark.slow
def test_too_many_in_a_row_end_the_run_with_the_last_good_state(data, tmp_path):
    run = tmp_path / "run"
    overrides = ("--train.max_steps", "30", "--train.max_skipped_steps", "5", "--checkpoint.keep_last", "1")
    output = finish(poisoned_run(data, run, 1, range(10, 30), *overrides), status=None)
    (line,) = {line for line in output.splitlines() if line.startswith("error:")}
    assert "found 5 steps in a row whose loss or gradient are infinite or NaN" in line
    assert "the last being step 15, on samples 224 to" in line
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    steps = CheckpointFolder(run / "checkpoints", print).steps()
    assert steps == [4, 8, 10], "the last good state, and none went since no later one had proven itself"
    # Without the poison the same run goes on from there, and loses nothing by what happened.
    train(data, run, *RUN, *overrides, processes=2)
    healthy = tmp_path / "healthy"
    train(data, healthy, *RUN, *overrides, processes=2)
    assert_same_run(run, healthy)


@pytest.mark.slow
def test_a_good_step_that_ran_before_the_skipped_one_was_looked_at_is_saved(data, tmp_path):
    """The outcome of a step is looked at when the next has run: its update is in the weights."""
    run = tmp_path / "run"
    overrides = (
        "--train.max_steps",
        "13",
        "--train.max_skipped_steps",
        "1",
        "--monitor.inspect_every_steps",
        "0",
        "--train.log_every_steps",
        "20",
    )
    output = finish(poisoned_run(data, run, 1, range(9, 10), *overrides), status=None)
    assert "found 1 steps in a row" in output and "the last being step 10," in output
    steps = CheckpointFolder(run / "checkpoints", print).steps()
    assert steps == [4, 8, 11]
    assert "resumed from step 11" in train(data, run, *RUN, *overrides, processes=2)
    assert_same_weights(plain_loop(data, 13, {9}), weights(run), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lamb", "muon", "stable_adamw"])
def test_optimizers_that_cannot_skip_on_the_device_skip_too(data, tmp_path, name):
    """Two good steps, and then two whose gradient is NaN: the weights are those of two steps."""
    overrides = ("--optimizer.name", name)
    train(data, tmp_path / "two", *RUN, *overrides, "--train.max_steps", "2", processes=2)
    finish(poisoned_run(data, tmp_path / "four", 1, range(2, 4), *overrides, "--train.max_steps", "4"))
    assert_same_weights(weights(tmp_path / "two"), weights(tmp_path / "four"))
