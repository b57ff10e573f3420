"""The interrupted run equals the uninterrupted one, bit for bit; interruptions are SIGKILLs, also during a save."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cloze.launch.checkpoint import manager
from cloze.launch.checkpoint.state import CHECKSUMS
from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.pretrain.data import check_manifest
from cloze.launch.run import description, runs
from cloze.launch.run.resume_check import config_hash
from cloze.launch.run.status_file import read_status
from cloze.launch.training import loop
from cloze.launch.training import process as training_process
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.storage import ASIDE
from tests.forked import ForkedRun, torchrun_main
from tests.launching import (
    assert_killed_equals_whole,
    assert_same_run,
    assert_same_weights,
    children,
    curve,
    finish,
    kill_when,
    pretrain_arguments,
    resume,
    saved,
    step_of,
    train,
    weights,
)
from tests.slowed import SECONDS, slow_from
from tests.synthetic import make_shards

STEPS = 30
# Dropout is on. Three steps a line and five a checkpoint: most checkpoints fall inside a line's window.
RUN = (
    "--train.max_steps",
    str(STEPS),
    "--train.log_every_steps",
    "3",
    "--evaluation.every_steps",
    "12",
    "--checkpoint.every_steps",
    "5",
    "--checkpoint.keep_last",
    "3",
)
# By one process, of one micro-batch a step: what is checked does not depend on how much is computed.
SHORT = (*RUN, "--train.max_steps", "6", "--train.micro_batch_size", "16")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("resume"), mask_sets=0)  # drawn at load time: the harder to repeat


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """Runs without interruption, made once for each ZeRO stage."""
    found = {}

    def get(stage: str):
        if stage not in found:
            found[stage] = tmp_path_factory.mktemp("undisturbed") / stage
            train(data, found[stage], *RUN, "--zero.stage", stage, processes=2)
        return found[stage]

    return get


def checkpoints(output):
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def assert_complete_and_shown(run: Path) -> None:
    """By status.json; TensorBoard shows one value a step, the resumed one, and the same scalars as metrics.jsonl."""
    assert json.loads((run / "status.json").read_text()) == {"state": "complete", "step": STEPS}
    board = EventAccumulator(str(run))
    board.Reload()
    events = board.Scalars("train/loss")
    assert [event.step for event in events] == list(range(3, STEPS + 1, 3))
    written = [line["train/loss"] for line in curve(run) if "train/loss" in line]
    assert [event.value for event in events] == pytest.approx(written, rel=1e-6)


@pytest.mark.slow
def test_killed_between_checkpoints(data, undisturbed, tmp_path):
    """Stage 3; `test_stopped_and_killed_at_stage_2` shows it at stage 2, test_optimizers.py (adamw-1-mup) at stage 1,
    `test_killed_in_the_middle_of_a_save` at stage 0.
    """
    run = tmp_path / "lr[1e-3] a+b(c|d)"  # DeepSpeed takes paths for patterns
    command = pretrain_arguments(data, run, *RUN, "--zero.stage", "3")
    assert_killed_equals_whole(undisturbed("3"), 18, command, 2)
    assert_complete_and_shown(run)


def test_killed_before_the_first_checkpoint(data, tmp_path):
    """It starts again from step 0, and no curve overlaps."""
    run = tmp_path / "run"
    command = pretrain_arguments(data, run, *SHORT, "--train.max_steps", "12", "--checkpoint.every_steps", "0")
    # TensorBoard sorts its files by the second: from step 6 on, the first start takes longer than one.
    kill_when(ForkedRun(command, 1, slow_from(6)), lambda: step_of(run) >= 9)
    assert "resumed" not in finish(ForkedRun(command))
    board = EventAccumulator(str(run))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == list(range(3, 13, 3))


def dies_describing(command: list[str]) -> int:
    """The command, whose process is killed in the middle of writing config.yaml."""
    publish = description.publish_text

    def publish_text(path, text, **options):
        if path.name == runs.CONFIG:
            path.with_name(f"{ASIDE}0123-{path.name}").write_text(text[:100])
            os.kill(os.getpid(), signal.SIGKILL)
        publish(path, text, **options)

    description.publish_text = publish_text
    return main(command)


def loses(folder: Path, command: list[str]) -> int:
    """The command, whose folder or file is removed before its last step, when a checkpoint is written and has not its
    name yet.
    """
    make_step = loop.Loop.step

    def step(self, *arguments):
        if self.progress.state.step == 5:
            while not self.checkpoints.publish_votes():  # its writer is slower than the step on a busy machine
                time.sleep(0.01)
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
        make_step(self, *arguments)

    loop.Loop.step = step
    return main(command)


def loses_at_the_end(name: str, folder: Path, command: list[str]) -> int:
    """The command, of which what has this name is removed when only its last looks are left."""
    look, calls = training_process.describe_again, itertools.count()

    def describe_again(*arguments) -> None:
        if next(calls):  # the first is before the run's last work
            for path in folder.glob(name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        look(*arguments)

    training_process.describe_again = describe_again
    return main(command)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("checkpoints", "step-00000006: found that"),
        ("checkpoints/step-00000006/rank-00000.pt", "step-00000006: found that"),
    ],
)
def test_nothing_is_complete_whose_checkpoint_is_removed_at_the_end(data, tmp_path, name, found):
    run = tmp_path / "run"
    command = pretrain_arguments(data, run, *SHORT, "--checkpoint.every_steps", "3")
    output = finish(ForkedRun(command, 1, partial(loses_at_the_end, name, run)), status=2)
    assert found in output and "complete at" not in output and read_status(run)["state"] == "failed"
    output = finish(ForkedRun(command))
    assert "complete at step 6" in output
    lost = "found no checkpoint, though the run had reached step 6: it begins anew"
    assert (lost in output) == (name == "checkpoints")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (".", "expected the files of all processes; something was removed while the run used the folder"),
        ("tokenizer", "found no tokenizer, expected it as the run has written it"),
        (runs.METRICS, "metrics.jsonl: found no file, expected the one that this run has written"),
    ],
)
def test_nothing_is_complete_that_has_vanished(data, tmp_path, name, found):
    """Not even with good weights in memory; the same command then makes the rest again."""
    run = tmp_path / "run"
    command = pretrain_arguments(data, run, *SHORT)
    output = finish(ForkedRun(command, 1, partial(loses, run / name)), status=2)
    assert found in output and "complete at" not in output
    assert read_status(run).get("state") != "complete"
    assert "complete at step 6" in finish(ForkedRun(command))


def test_killed_before_it_is_a_run(data, tmp_path):
    """What such a start leaves is no one's: the same command starts anew."""
    run = tmp_path / "run"
    command = pretrain_arguments(data, run, *RUN, "--train.max_steps", "6")
    finish(ForkedRun(command, 2, dies_describing), status=None)
    assert {path.name for path in run.iterdir()} >= {runs.DATA, f"{ASIDE}0123-{runs.CONFIG}"}
    assert not (run / runs.CONFIG).exists()
    output = finish(ForkedRun(command, 2))
    assert "resumed" not in output and "complete at step 6" in output
    assert [line["step"] for line in curve(run) if "train/loss" in line] == [3, 6]


def in_a_save(output) -> bool:
    """Whether a checkpoint is being written; what is being removed ends in .tmp too, but is older."""
    newest = max((path.name for path in saved(output)), default="")
    with contextlib.suppress(FileNotFoundError):  # published meanwhile
        return any(path.parent.name > newest for path in (output / "checkpoints").glob("step-*.tmp/*.pt"))
    return False


def publishes_slowly(command: list[str]) -> int:
    """The command, whose checkpoints are whole a while before they have their names."""
    publish = manager.CheckpointManager._publish

    def publish_late(*arguments):
        time.sleep(SECONDS)
        publish(*arguments)

    manager.CheckpointManager._publish = publish_late
    return main(command)


@pytest.fixture(scope="module")
def killed(data, tmp_path_factory):
    """A run of two processes that was killed in the middle of a save; its newest checkpoint, of step 20, is inside of a
    line's window.
    """
    run, three = tmp_path_factory.mktemp("killed") / "run", [f"step-{step:08d}" for step in (10, 15, 20)]
    process = ForkedRun(pretrain_arguments(data, run, *RUN), 2, publishes_slowly)
    kill_when(process, lambda: [path.name for path in saved(run)] == three and in_a_save(run))
    return run


def test_killed_in_the_middle_of_a_save(data, undisturbed, killed, tmp_path):
    run = shutil.copytree(killed, tmp_path / "run")
    half_written = list((run / "checkpoints").glob("*.tmp"))
    published = [path for path in (run / "checkpoints").iterdir() if path not in half_written]
    assert half_written and len(published) == 3 and all((path / CHECKSUMS).exists() for path in published)
    assert "resumed from step 20 " in resume(pretrain_arguments(data, run, *RUN), 2)
    assert_same_run(run, undisturbed("0"))
    assert checkpoints(run) == ["step-00000020", "step-00000025", "step-00000030"], "retention, no leftovers"
    assert_complete_and_shown(run)


def test_stopped_and_killed_at_stage_2(data, undisturbed, tmp_path):
    """SIGTERM reaches torchrun, or USR1 a single worker: all ranks stop together, with a checkpoint. Then all are
    killed between two."""
    run = tmp_path / "lr[1e-3] a+b(c|d)"
    options = (*RUN, "--zero.stage", "2")
    command = pretrain_arguments(data, run, *options)
    for moment, number in ((6, signal.SIGTERM), (12, signal.SIGUSR1)):
        torchrun = number == signal.SIGTERM
        slowed = slow_from(moment)
        process = (
            ForkedRun(command, 1, partial(torchrun_main, 2, slowed)) if torchrun else ForkedRun(command, 2, slowed)
        )
        while step_of(run) < moment:
            assert process.poll() is None
            time.sleep(0.002)
        os.kill(process.pid if torchrun else children(process.pid)[-1], number)
        output = finish(process, status=1 if torchrun else 75)  # torchrun makes 1 of every status
        status = json.loads((run / "status.json").read_text())
        assert status["state"] == "requeue" and moment <= status["step"] < STEPS, output
        assert f"step-{status['step']:08d}" in checkpoints(run)
    assert_killed_equals_whole(undisturbed("2"), 21, command, 2)


@pytest.mark.parametrize("lost", [(), (runs.CONFIG, runs.DATA), (runs.TOKENIZER,)])
def test_one_process_alone_ends_with_75_when_stopped(data, tmp_path, lost):
    """It says that the same command continues once it has seen that it can; what is easily written again is."""
    run = tmp_path / "run"
    process = ForkedRun(pretrain_arguments(data, run, *SHORT, "--train.max_steps", "5000"))
    while step_of(run) < 3:
        assert process.poll() is None
        time.sleep(0.002)
    before = (run / runs.CONFIG).read_bytes()
    for name in lost:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    process.send_signal(signal.SIGTERM)
    output = finish(process, status=75)
    assert (runs.TOKENIZER in lost) == ("the same command continues" not in output)
    for name in lost:
        told = "found no {}, expected" if name == runs.TOKENIZER else "{} was removed or emptied while the run"
        assert f"warning: {run}: {told.format(name)}" in output
    assert read_status(run)["state"] == "requeue" and (run / runs.CONFIG).read_bytes() == before
    again = pretrain_arguments(data, run, *SHORT, "--train.max_steps", "5000", "--train.stop_before_seconds", "5")
    output = finish(ForkedRun(again, SLURM_JOB_END_TIME="1"), status=75)
    assert "resumed from step" in output and "the same command continues" in output


@pytest.mark.slow
def test_an_evaluation_that_ends_a_resumed_run_is_in_its_checkpoint(data, tmp_path):
    """Stopped at a step that is to be evaluated: the resume evaluates it first, and reaches the target."""
    run = tmp_path / "run"
    command = pretrain_arguments(
        data,
        run,
        *RUN,
        "--evaluation.every_steps",
        "1",
        "--evaluation.keep_best",
        "true",
        "--schedule.warmup_steps",
        "0",
        "--train.learning_rate",
        "3e-4",  # a step that helps
        "--evaluation.target",
        "100",
    )
    at = command.index("--evaluation.target")
    stopping = [*command[:at], "--train.stop_before_seconds", "5"]
    assert "checkpoint of step 1" in finish(ForkedRun(stopping, SLURM_JOB_END_TIME="1"), status=75)
    assert "complete at step 1" in finish(ForkedRun(command))
    state = json.loads((run / "checkpoints" / "step-00000001" / "state.json").read_text())
    assert (state["evaluated_step"], state["best_step"]) == (1, 1)
    assert checkpoints(run) == ["step-00000001"] and weights(run, "best")


def test_a_checkpoint_knows_by_hashes_what_it_is_of(data, undisturbed):
    """The same in every part of a run; fields that say where and how do not count."""
    run = undisturbed("0")
    states = [json.loads((folder / "state.json").read_text()) for folder in saved(run)]
    known = {(state["manifest_hash"], state["tokenizer_fingerprint"], state["config_hash"]) for state in states}
    manifest = Manifest.load(data)
    config = parse("pretrain", pretrain_arguments(data, run, *RUN, "--train.log_every_steps", "7")[1:])
    model = check_manifest(manifest, config.model, None)
    assert {state["data_streams"] for state in states} == {16}  # as many as samples in a batch
    hashes = [config_hash(replace(config, model=model, data_streams=16, seed=seed)) for seed in (42, 43)]
    assert known == {(manifest.hash, manifest.tokenizer_fingerprint, hashes[0])} and len(set(hashes)) == 2


def test_a_checkpoint_of_another_run_is_neither_gone_on_with_nor_exported(data, tmp_path, capsys):
    """Of the same shape, with another seed, in the run's own folder: refused; what changes how a run goes is not."""
    run, other = tmp_path / "run", tmp_path / "other"
    short = (*RUN, "--train.max_steps", "4", "--checkpoint.every_steps", "0", "--evaluation.every_steps", "0")
    train(data, run, *short)
    train(data, other, *short, "--seed", "43")
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(other / "checkpoints", run / "checkpoints")
    output = train(data, run, *short, status=2)
    assert "step-00000004: found a checkpoint of another run, whose seed is 43, expected 42; remove it" in output
    assert json.loads((run / "status.json").read_text())["state"] == "failed", "not the `complete` of before"
    for step in ("best", "4"):
        assert main(["export", str(run), "--output", str(tmp_path / "model"), "--step", step]) == 2
        assert "step-00000004: found a checkpoint of another run (run is " in capsys.readouterr().err
    longer = ("--train.max_steps", "5", "--train.micro_batch_size", "2", "--checkpoint.accept_changes", "true")
    assert "resumed from step 4 of 5" in train(data, other, *short, "--seed", "43", *longer)
    for step in ("4", "5"):  # it is the same run after the change
        assert main(["export", str(other), "--output", str(tmp_path / f"model-{step}"), "--step", step]) == 0
    path = other / "config.yaml"
    path.write_text(path.read_text().replace("layer_norm_eps: 1.0e-12", "layer_norm_eps: 1.0e-05"))
    assert main(["predict", "fill-mask", str(other), "w1 [MASK]"]) == 2
    said = capsys.readouterr().err
    assert (
        "step-00000005: found a checkpoint of another run, whose model.layer_norm_eps is 1e-12, expected 1e-05" in said
    )


def test_damaged_checkpoints_are_skipped_with_a_warning(data, undisturbed, killed, tmp_path):
    """The newest is truncated, the one before has one flipped bit: the third is taken, and the end is the same."""
    run = shutil.copytree(killed, tmp_path / "run")
    *_, third, second, newest = saved(run)
    with open(newest / "mp_rank_00_model_states.pt", "r+b") as file:
        file.truncate(1000)
    path = second / "mp_rank_00_model_states.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    (run / runs.METRICS).write_bytes(b"")
    output = resume(pretrain_arguments(data, run, *RUN), 2)
    assert re.search(r"metrics.jsonl: found 0 lines up to step \d+, expected the \d+ that were there", output)
    assert f"{newest}: damaged (mp_rank_00_model_states.pt has 1000 bytes" in output
    assert f"{second}: damaged (mp_rank_00_model_states.pt has another SHA-256" in output
    assert f"resumed from step {int(third.name[5:])} " in output
    assert_same_weights(weights(run), weights(undisturbed("0")))


def test_a_run_that_goes_on_elsewhere_says_what_differs_and_keeps_where_it_began(tmp_path):
    data, run = make_shards(tmp_path / "data"), tmp_path / "run"
    said = train(data, run, "--train.max_steps", "2")
    began = json.loads((run / "device.json").read_text())
    assert began["attention kernel"] == "eager" and began["compile"] is False and "began otherwise" not in said
    elsewhere = began | {"attention kernel": "varlen", "compile": True}
    (run / "device.json").write_text(json.dumps(elsewhere))
    said = " ".join(train(data, run, "--train.max_steps", "2").split())
    assert "attention kernel varlen then, eager now, compile True then, False now" in said
    assert json.loads((run / "device.json").read_text()) == elsewhere
