"""What a fine-tuning run starts from."""

import json
import os
import shutil
from pathlib import Path

import pytest

from cloze.launch.commands import parse
from cloze.launch.finetune import job
from cloze.launch.finetune.job import read_job
from cloze.launch.finetune.sweep import plan
from cloze.launch.pretrained.source import find_source
from cloze.launch.sweeps.run import claim
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import sha256_of
from tests.forked import ForkedRun
from tests.launch.finetune.running import arguments
from tests.launch.finetune.small import make_tokenizer
from tests.launching import finish, train
from tests.synthetic import make_shards


def test_all_runs_start_from_one_checkpoint_of_a_pretraining_that_goes_on(files, tmp_path):
    """The newest at their start, also where a newer one is saved before a run begins or goes on."""
    train(make_shards(tmp_path / "data"), tmp_path / "old", "--train.max_steps", "4", "--checkpoint.every_steps", "2")
    newest, hidden = (tmp_path / "old" / "checkpoints" / name for name in ("step-00000004", "hidden"))
    single, words = (
        arguments("sst2", tmp_path / "old", *files, tmp_path / name, "--epochs", 0.1, "--seeds", seeds)
        for name, seeds in (("single", 1), ("sweep", 2))
    )
    newest.rename(hidden)
    finish(ForkedRun(single))
    planned = plan(parse("finetune", words[1:]))
    hidden.rename(newest)
    said = finish(ForkedRun(single))
    assert f"{tmp_path / 'old'}, step 2; initialized" in " ".join(said.replace("│", " ").split())
    assert json.loads((tmp_path / "single" / "results.json").read_text())["model_step"] == 2

    def steps(planned):
        for run in planned:
            claim(run).close()
        return [
            find_source(parse("finetune", run.command[run.command.index("finetune") + 1 :])).step for run in planned
        ]

    assert steps(planned) == [2, 2]
    assert steps(plan(parse("finetune", words[1:]))) == [2, 2], "of the same one started again"
    grid = [*words[1:], "--grid", "model_step=2,null"]
    asked = steps(plan(parse("finetune", grid)))
    assert asked == [2, 2, 4, 4], "a step that is asked for is that setting's own"
    (tmp_path / "old").rename(tmp_path / "first")
    train(tmp_path / "data", tmp_path / "old", "--seed", "7", "--train.max_steps", "2", "--checkpoint.every_steps", "2")
    assert "with another run, whose model_hash is" in finish(ForkedRun(single), 2), "at the same path"
    shutil.rmtree(tmp_path / "old")
    (tmp_path / "first").rename(tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "other")
    other = [word.replace(str(tmp_path / "old"), str(tmp_path / "other")) for word in words[1:]]
    assert steps(plan(parse("finetune", other))) == [4, 4], "nor does another model begin where that one did"


@pytest.mark.parametrize(("pooler", "expected"), [(True, "pooler"), (False, "mean")])
def test_a_model_without_a_pooler_is_read_by_the_mean_of_its_tokens(files, tmp_path, pooler, expected):
    """At [CLS] it has learned nothing about the text."""
    ours = make_tokenizer()
    ours.save(tmp_path / "tokenizer")
    shape = {"vocab_size": ours.vocab_size, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "shape.yaml").write_text(json.dumps(shape | {"intermediate_size": 64, "pooler": pooler}))
    words = arguments("sst2", tmp_path / "shape.yaml", *files, tmp_path / "run")
    job = read_job(parse("finetune", [*words[1:], "--tokenizer", str(tmp_path / "tokenizer")]))
    assert job.config.pooling == job.head.pooling == expected
    told = read_job(parse("finetune", [*words[1:], "--tokenizer", str(tmp_path / "tokenizer"), "--pooling", "cls"]))
    assert told.head.pooling == "cls"


@pytest.mark.parametrize("name", ["train.tsv", "train.jsonl", "train.parquet", "train.csv.gz"])
def test_a_pipe_is_no_file_of_examples(files, model, tmp_path, name):
    """Each file is read several times."""
    os.mkfifo(tmp_path / name)
    config = parse("finetune", arguments("sst2", model, tmp_path / name, files[1], tmp_path / "run")[1:])
    with pytest.raises(UserError, match="found no regular file, expected one"):
        read_job(config)


@pytest.mark.parametrize("content", ["", "[1]", "{x", "abc"])
def test_a_damaged_configuration_of_a_sweeps_run_is_a_line(files, model, tmp_path, content):
    words = arguments("sst2", model, *files, tmp_path / "sweep", "--seeds", 2)[1:]
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/seed-42.yaml").write_text(content)
    with pytest.raises(UserError, match="seed-42.yaml: found "):
        plan(parse("finetune", words))


@pytest.mark.parametrize("number", [0, 1])
def test_a_file_that_is_replaced_while_it_is_read_is_refused(files, model, tmp_path, monkeypatch, number):
    """Its hash would be of other rows than were read, and a resume go on with these."""
    mine = [shutil.copy(path, tmp_path) for path in files]
    read = job.read_examples

    def replacing(*arguments):
        found = read(*arguments)
        Path(mine[number]).write_bytes(Path(files[1 - number]).read_bytes())
        return found

    config = parse("finetune", arguments("sst2", model, *mine, tmp_path / "run")[1:])
    assert read_job(config).facts["train_hash"] == sha256_of(mine[0])
    monkeypatch.setattr(job, "read_examples", replacing)
    with pytest.raises(UserError, match=f"{mine[number]}: changed while it was read, expected a file at rest"):
        read_job(config)


def test_all_missing_columns_are_said_before_anything_is_loaded(tmp_path):
    (tmp_path / "train.csv").write_text("a,b\n1,2\n")
    (tmp_path / "dev.csv").write_text("text,b\n1,2\n")
    words = ["--model", "nowhere", "--train", f"{tmp_path}/train.csv", "--validation", f"{tmp_path}/dev.csv"]
    with pytest.raises(UserError) as caught:
        read_job(parse("finetune", ["classification", *words, "--output", "o"]))
    said = str(caught.value)
    assert "train.csv: found the columns 'a', 'b', expected 'text' and 'label'" in said and "\n" not in said
    assert "dev.csv: found the columns 'text', 'b', expected one named 'label'" in said
    assert "--text_columns and --label_columns" in said
    (tmp_path / "dev.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"train.csv, \S+dev.csv: found the columns 'a', 'b', expected") as caught:
        read_job(parse("finetune", ["classification", *words, "--output", "o"]))
    assert str(caught.value).count("found") == 1, "what is the same of several files is said once"
