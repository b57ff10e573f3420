"""What a user can fix ends in one line on stderr and exit status 2, before any process group is joined."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from cloze.launch.checkpoint.deepspeed_files import MODEL_FILE
from cloze.launch.checkpoint.folder import CheckpointFolder
from cloze.launch.cli import main
from cloze.launch.run.preemption import StopRequest
from cloze.launch.system import exit_status
from cloze.launch.system.environment.launchers import child_variables
from cloze.launch.training import loop
from cloze.pipeline.errors import UserError
from tests.forked import ForkedRun
from tests.launch.checkpoint.small_checkpoints import rewrite, sign
from tests.launch.errors import error_of
from tests.launching import ROOT, TINY, curve, finish, pretrain_arguments, train, weights
from tests.pipeline.corpus import as_format_1
from tests.synthetic import make_shards


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("errors"))


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A complete run of four steps, with checkpoints of steps 2 and 4."""
    run = tmp_path_factory.mktemp("errors") / "run"
    train(data, run, "--train.max_steps", "4", "--checkpoint.every_steps", "2")
    return run


def test_a_typo_in_a_yaml_file(data, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("train:\n  learning_rat: 1\n")
    line = error_of(capsys, "pretrain", "--config", tmp_path / "c.yaml", "--data", data, "--output", tmp_path / "run")
    assert "learning_rat" in line and "did you mean --train.learning_rate?" in line


def test_no_shards_a_damaged_shard_a_foreign_tokenizer(data, tmp_path, capsys):
    arguments = ("pretrain", *TINY, "--output", tmp_path / "run", "--data")
    assert "cloze prepare" in error_of(capsys, *arguments, tmp_path / "none")

    broken = shutil.copytree(data, tmp_path / "broken")
    shard = broken / "train" / "shard-00001.arrow"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert "shard-00001.arrow" in error_of(capsys, *arguments, broken)

    other = make_shards(tmp_path / "other", vocab_size=80)
    foreign = shutil.copytree(data, tmp_path / "foreign")
    shutil.rmtree(foreign / "tokenizer")
    shutil.copytree(other / "tokenizer", foreign / "tokenizer")
    assert "fingerprint" in error_of(capsys, *arguments, foreign)


@pytest.mark.parametrize("edited", ["special_tokens", "max_length", "objective", "removed shard", "doubled shard"])
def test_a_manifest_that_was_changed_is_not_trained_on(data, tmp_path, capsys, edited):
    changed = shutil.copytree(data, tmp_path / "changed")
    manifest = json.loads((changed / "manifest.json").read_text())
    columns = manifest["splits"]["train"]["shards"].values()
    {
        "special_tokens": lambda: manifest["special_tokens"].update(mask=3),
        "max_length": lambda: manifest.update(max_length=31),
        "objective": lambda: manifest.update(objective="single_sentences"),
        "removed shard": lambda: [column.pop() for column in columns],
        "doubled shard": lambda: [column.append(column[0]) for column in columns],
    }[edited]()
    (changed / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    line = error_of(capsys, "pretrain", *TINY, "--data", changed, "--output", tmp_path / "run")
    assert "manifest.json: found SHA-256" in line and "changed after it was written" in line
    assert not (tmp_path / "run").exists()


def test_a_manifest_of_before_is_trained_on_with_a_warning(data, tmp_path, capsys):
    """It has no hash; the special tokens stand in the tokenizer too."""
    old = shutil.copytree(data, tmp_path / "old")
    manifest = {name: value for name, value in as_format_1(old).items() if name != "sha256"}
    (old / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    said = train(old, tmp_path / "run", "--train.max_steps", "1")
    assert "warning: " in said and "an earlier version wrote it without hashes" in said
    manifest["special_tokens"]["mask"] = 3
    (old / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    line = error_of(capsys, "pretrain", *TINY, "--data", old, "--output", tmp_path / "other")
    assert "found special tokens" in line and "mask=4" in line and "mask=3" in line


def test_what_may_not_be_read_is_one_line(data, folder_of_nobody, as_nobody, capsys):
    top = folder_of_nobody
    secret = top / "secret"
    shutil.copytree(data, secret / "data")
    for command in (
        f"pretrain --data {secret}/data --output {top}/run",
        f"inspect {secret}/data",
        f"prepare --input {secret}/a.txt --tokenizer {secret}/data/tokenizer --output {top}/out",
        f"prepare --input {top}/a.txt --tokenizer {secret}/data/tokenizer --output {top}/out",
        f"predict embed {secret}/model text",
        f"export {secret}/model --output {top}/exported",
    ):
        error_of(capsys, *command.replace("/secret/", "/nowhere/").split())  # imports what nobody may not read
        secret.chmod(0)
        with as_nobody():
            assert "permission denied" in error_of(capsys, *command.split()), command
        secret.chmod(0o700)


def test_a_shard_damaged_inside_stops_the_run(data, tmp_path):
    """One flipped bit, same size: found when the block is read, in one line."""
    broken = shutil.copytree(data, tmp_path / "broken")
    shard = broken / "train" / "shard-00001.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(bytes(content))
    output = train(broken, tmp_path / "run", "--train.max_steps", "30", status=2)
    assert "Traceback" not in output and "shard-00001.arrow" in output.splitlines()[-1]


def test_a_run_of_before_a_field_was_known_goes_on(data, finished, tmp_path, capsys):
    """What config.yaml lacks has its default: a shape's field too, of which no other value is ever accepted."""
    run = shutil.copytree(finished, tmp_path / "run")
    told = yaml.safe_load((run / "config.yaml").read_text())
    for section, name in (("model", "gate_bias"), ("monitor", "hang_seconds"), (None, "init_word_vectors")):
        del (told[section] if section else told)[name]
    (run / "config.yaml").write_text(yaml.safe_dump(told))
    facts = json.loads((run / "data.json").read_text())
    assert facts.pop("max_length") == 32
    (run / "data.json").write_text(json.dumps(facts))
    fixed = ("--train.max_steps", "4", "--checkpoint.every_steps", "2")
    assert "complete at step 4" in train(data, run, *fixed)
    changed = ("--model.first_attention_norm", "false", "--model.norm_position", "pre")
    line = error_of(capsys, *pretrain_arguments(data, run, *fixed, *changed))
    assert "model.first_attention_norm is True, expected False" in line


def test_a_run_whose_samples_came_in_another_order_is_refused_or_accepted(data, finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    told = yaml.safe_load((run / "config.yaml").read_text())
    assert told["data_streams"] == 16
    del told["data_streams"]  # as runs of earlier versions have none
    (run / "config.yaml").write_text(yaml.safe_dump(told))
    arguments = ("pretrain", *TINY, "--data", data, "--output", run, "--checkpoint.every_steps", "2")
    line = error_of(capsys, *arguments, "--train.max_steps", "4")
    assert "earlier version" in line and "another order" in line and "--checkpoint.accept_changes true" in line
    output = train(data, run, "--train.max_steps", "6", "--checkpoint.accept_changes", "true")
    assert "resumed from step 4" in output and "complete at step 6" in output
    assert yaml.safe_load((run / "config.yaml").read_text())["data_streams"] == 16
    line = error_of(capsys, *arguments, "--train.max_steps", "6", "--data_streams", "8")
    assert "data_streams is 16, expected 8" in line
    line = error_of(capsys, *arguments, "--data_streams", "5")
    assert "data_streams: found 5, expected a divisor of train.global_batch_size = 16" in line


def test_a_missing_shard_is_found_by_one_process_and_reported_by_all(data, tmp_path):
    broken = shutil.copytree(data, tmp_path / "broken")
    (broken / "train" / "shard-00001.arrow").unlink()
    output = train(broken, tmp_path / "run", processes=2, status=2)
    assert output.count("shard-00001.arrow: found no such shard") == 1, output
    assert "found a process that could not find the shards" in output and "Traceback" not in output
    assert "building" not in output, "the data is opened before anything is built"


def test_a_folder_that_holds_another_run(data, finished, tmp_path, capsys):
    arguments = ("pretrain", *TINY, "--data", data, "--train.max_steps", "4", "--output")
    # What shapes the weights cannot change, whatever is accepted; and an attempt leaves the run as it was.
    before = (finished / "config.yaml").read_text()
    line = error_of(capsys, *arguments, finished, "--model.hidden_size", "64", "--checkpoint.accept_changes", "true")
    assert "model.hidden_size is 32, expected 64" in line and (finished / "config.yaml").read_text() == before
    line = error_of(capsys, *arguments, finished, "--optimizer.name", "muon", "--checkpoint.accept_changes", "true")
    assert "optimizer.name is 'adamw', expected 'muon'; choose another --output" in line
    assert line.endswith(f"or repeat the run's configuration with --config {finished}/config.yaml")
    line = error_of(capsys, *arguments, finished, "--train.learning_rate", "1e-4")
    assert "train.learning_rate is 0.003, expected 0.0001" in line and "--checkpoint.accept_changes" in line
    other = make_shards(tmp_path / "other", seed=1)
    line = error_of(capsys, "pretrain", *TINY, "--data", other, "--train.max_steps", "4", "--output", finished)
    assert "manifest_hash" in line and "--config" not in line, "which does not bring other data back"
    (tmp_path / "file").write_text("")
    assert "files that are not a run's" in error_of(capsys, *arguments, tmp_path / "file")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    line = error_of(capsys, *arguments, tmp_path / "mine")
    assert f"files that are not a run's ({tmp_path}/mine/thesis.txt)" in line


def test_resume_policies(data, finished, tmp_path):
    fixed = ("--train.max_steps", "4", "--checkpoint.every_steps", "2")
    for run, policy, expected in (
        (tmp_path / "new", "required", "found no good checkpoint"),
        (finished, "never", "expected none since it is `never`"),
    ):
        output = train(data, run, *fixed, "--checkpoint.resume", policy, status=2)
        assert expected in output.splitlines()[-1]
    assert "complete at step 4" in train(data, finished, *fixed, "--checkpoint.resume", "required")


def test_all_checkpoints_damaged_is_no_silent_restart(data, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    for path in (run / "checkpoints").glob("step-*"):
        (path / "checksums.json").unlink()
    output = train(data, run, "--train.max_steps", "4", "--checkpoint.every_steps", "2", status=2)
    assert "found every checkpoint damaged" in output.splitlines()[-1]


def test_a_finished_run_is_repeated_by_its_own_configuration(data, finished, tmp_path):
    finish(
        ForkedRun(
            [
                "pretrain",
                "--config",
                str(finished / "config.yaml"),
                "--output",
                str(tmp_path / "again"),
                "--checkpoint.resume",
                "auto",
            ]
        )
    )
    assert curve(tmp_path / "again") == curve(finished)


def patient_main(command: list[str]) -> int:
    """The command, whose other ranks wait for rank 0, which is at most so much slower."""
    exit_status.SAID_SECONDS = 120
    return main(command)


def test_what_all_processes_find_is_said_once(data, tmp_path):
    """Once rank 0 has said it and ended, its launcher ends the others, as ours does (test_ranks.py)."""
    command = pretrain_arguments(data, tmp_path / "run", "--train.global_batch_size", "15")
    output = finish(ForkedRun(command, 2, patient_main), status=2)
    said = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "found 15, expected a multiple of the 2 processes; set it to 14 or 16" in said[0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ('{"zero_optimization": {"foo": 1}}', "deepspeed: found foo = 1, expected a setting that DeepSpeed knows"),
        (
            '{"sequence_parallel_size": 3}',
            "deepspeed: found settings that DeepSpeed refuses (Check batch related parameters.",
        ),
        (
            '{"wall_clock_breakdow": true}',
            "deepspeed.wall_clock_breakdow: found a setting that DeepSpeed does not read",
        ),
        (
            '{"activation_checkpointing": {"profile": false, "cpu_chekpointing": true}}',
            "deepspeed.activation_checkpointing.cpu_chekpointing: found a setting that DeepSpeed does not read",
        ),
    ],
)
def test_a_setting_that_deepspeed_refuses(data, tmp_path, capsys, settings, expected):
    assert expected in error_of(capsys, *pretrain_arguments(data, tmp_path / "run", "--deepspeed", settings))


def test_settings_that_deepspeed_reads_are_let_through(data, tmp_path):
    settings = {
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "prescale_gradients": False,
        "dump_state": False,
        "disable_allgather": False,
        "zero_optimization": {"reduce_bucket_size": 1000, "overlap_comm": False},
        "activation_checkpointing": {"partition_activations": False, "profile": False},
        "flops_profiler": {"enabled": False, "top_modules": 2},
        "comms_logger": {"enabled": False, "verbose": False},
        "csv_monitor": {"enabled": False, "job_name": "x"},
        "aio": {"block_size": 1048576},
    }
    assert "complete at step 1" in train(
        data, tmp_path / "run", "--train.max_steps", "1", "--zero.stage", "2", "--deepspeed", json.dumps(settings)
    )


def rank_1_ends(command: list[str]) -> int:
    """The command, which one process leaves in the middle of training with a message of its own. The other is deaf
    to the signal by which the launcher ends it then, so that it comes to its line."""
    make_step, exit_status.SAID_SECONDS = loop.Loop.step, 2.0
    StopRequest.__exit__ = lambda self, *exception: setattr(self, "_ignored_until", time.monotonic() + 60)

    def leaves(self, *arguments):
        if self.environment.rank == 1 and self.progress.state.step == 2:
            raise UserError("what is wrong with rank 1")
        make_step(self, *arguments)

    loop.Loop.step = leaves
    return main(command)


def test_processes_that_another_has_left_end_with_a_line(data, tmp_path):
    output = finish(
        ForkedRun(pretrain_arguments(data, tmp_path / "run", "--train.max_steps", "50"), 2, rank_1_ends), status=None
    )
    own, peers = [line for line in output.splitlines() if line.startswith("error: ")]
    assert own == "error: what is wrong with rank 1" and "Traceback" not in output
    assert peers.startswith("error: rank 0: found other processes gone, expected them in a collective (")


@pytest.mark.slow
def test_a_lost_model_does_not_push_out_the_good_checkpoints(data, tmp_path):
    """Weights grow beyond use between two steps, a checkpoint is due before any loss has seen them, one is kept."""
    output = train(
        data,
        tmp_path / "run",
        "--train.learning_rate",
        "1e30",
        "--schedule.warmup_steps",
        "3",
        "--train.log_every_steps",
        "50",
        "--checkpoint.every_steps",
        "1",
        "--checkpoint.keep_last",
        "1",
        status=2,
    )
    assert "20 steps in a row whose loss or gradient are infinite or NaN" in output.splitlines()[-1]
    steps = CheckpointFolder(tmp_path / "run" / "checkpoints", print).steps()
    assert steps == [1, 2]
    good, lost = (weights(tmp_path / "run", step).values() for step in steps)
    assert all(value.abs().max() < 10 for value in good) and any(value.abs().max() > 1e20 for value in lost)


def test_fp16_needs_a_gpu(data, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    words = pretrain_arguments(data, tmp_path / "run", "--train.precision", "fp16", "--zero.stage", "1")
    assert "only GPUs train in fp16" in error_of(capsys, *words)


def no_room(command: list[str]) -> int:
    """The command on a disk of which 100 kB are free."""
    shutil.disk_usage = lambda path: SimpleNamespace(free=10**5)
    return main(command)


def test_free_space_is_looked_at_before_anything_is_written(data, tmp_path):
    run = tmp_path / "run"
    command = pretrain_arguments(data, run, "--train.max_steps", "2")
    output = finish(ForkedRun(command, 2, no_room), status=2)
    assert re.search(r"error: \S*step-00000002: found 100,000 bytes free, expected at least [\d,]+ for a", output)
    assert not list((run / "checkpoints").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_full_disk_leaves_the_last_checkpoint_intact(data, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1400k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine refuses to mount a tmpfs: " + mounted.stderr.decode().strip())
    try:
        output = train(
            data,
            disk / "run",
            "--train.max_steps",
            "8",
            "--checkpoint.every_steps",
            "1",
            "--checkpoint.keep_last",
            "100",
            status=2,
        )
        line = output.splitlines()[-1]
        assert line.startswith("error: ") and ("free" in line or "full" in line)
        good = sorted((disk / "run" / "checkpoints").glob("step-*[0-9]"))
        assert good, "a checkpoint was published before the disk was full"
        # On a larger disk the same command continues from it.
        moved = shutil.copytree(disk / "run", tmp_path / "run")
        output = train(data, moved, "--train.max_steps", "8", "--checkpoint.every_steps", "1")
        assert f"resumed from step {int(good[-1].name[5:])} " in output
    finally:
        subprocess.run(["umount", str(disk)], check=True)


class Malice:
    """A pickle that would write a file when loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "rank-00000.pt", "zero"])
def test_a_malicious_pickle_in_any_file_is_refused(data, finished, tmp_path, capsys, name):
    """With matching checksums, as an attacker would leave it: resume and export refuse it and run nothing."""
    run, trap = tmp_path / "run", tmp_path / "trap"
    fixed = ("--train.max_steps", "4", "--checkpoint.every_steps", "2", "--zero.stage", "2" if name == "zero" else "0")
    if name == "zero":
        train(data, run, *fixed)
    else:
        shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    folder = run / "checkpoints" / "step-00000004"
    path = next(folder.glob("*optim_states.pt")) if name == "zero" else folder / name
    torch.save({"module": Malice(trap)}, path)
    sign(path)
    output = train(data, run, *fixed, status=2)
    assert "other than tensors" in output.splitlines()[-1]
    if not name.startswith("rank"):
        assert "other than tensors" in error_of(capsys, "export", run)
    if name == "zero":  # which DeepSpeed's own tool reads
        variables = child_variables(DS_ACCELERATOR="cpu")
        variables.pop("TORCH_FORCE_WEIGHTS_ONLY_LOAD", None)  # as in a program that never was one of our commands
        program = "import sys; from cloze.launch.predict.predictor import Predictor; Predictor.from_folder(sys.argv[1])"
        tried = subprocess.run(
            [sys.executable, "-c", program, str(run)], cwd=ROOT, env=variables, text=True, capture_output=True
        )
        assert "other than tensors" in tried.stderr
    assert not trap.exists()


@pytest.mark.parametrize(
    ("name", "place"), [("rank-00000.pt", "rng_cpu"), ("rank-00000.pt", "window"), (MODEL_FILE, "module")]
)
def test_content_that_no_run_writes_is_a_line(data, finished, tmp_path, capsys, name, place):
    """Tensors alone, and the hashes are right."""
    run = shutil.copytree(finished, tmp_path / "run")
    rewrite(run / "checkpoints" / "step-00000004" / name, lambda content: content.update({place: 3}))
    said = train(data, run, "--train.max_steps", "4", "--checkpoint.every_steps", "2", status=2)
    expected = "step-00000004: found other content than this run's ("
    assert expected in said.splitlines()[-1] and "Traceback" not in said
    if name == MODEL_FILE:
        assert expected in error_of(capsys, "export", run)


@pytest.mark.parametrize("name", ["rank-00000.pt", MODEL_FILE])
def test_a_file_of_an_older_checkpoint_is_a_line(data, finished, tmp_path, capsys, name):
    """In the newest one's folder, with all hashes written anew: each file says which checkpoint it belongs to."""
    run = shutil.copytree(finished, tmp_path / "run")
    newest, older = (run / "checkpoints" / f"step-{step:08d}" for step in (4, 2))
    shutil.copyfile(older / name, newest / name)
    sign(newest / name)
    said = train(data, run, "--train.max_steps", "4", "--checkpoint.every_steps", "2", status=2)
    expected = f"step-00000004: found other content than this run's ({name}: it is that of step 2, expected 4)"
    assert expected in said.splitlines()[-1] and "Traceback" not in said
    if name == MODEL_FILE:
        assert expected in error_of(capsys, "export", run)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizers_file_without_end_is_neither_read_nor_copied(data, tmp_path, capsys, name):
    """A link to a device, or gigabytes of nothing, which took the memory and filled the disk of the run."""
    broken = shutil.copytree(data, tmp_path / "broken")
    path = broken / "tokenizer" / name
    with open(path, "r+b") as file:
        file.truncate(2 << 30)
    arguments = ("pretrain", *TINY, "--output", tmp_path / "run", "--data", broken)
    assert f"{path}: found 2,147,483,648 bytes, expected at most" in error_of(capsys, *arguments)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert f"{path}: found no regular file, expected one" in error_of(capsys, *arguments)
    assert not (tmp_path / "run").exists()
