"""A run that starts from another: other length, other rate, weights with or without moments; in real processes."""

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import asdict

import pytest
import torch
import transformers
import yaml

from cloze.launch.checkpoint.manager import CheckpointManager
from cloze.launch.cli import main
from cloze.launch.config import PretrainConfig
from cloze.launch.pretrain import first_model, init_from
from cloze.launch.pretrain.first_model import check_word_vectors
from cloze.launch.pretrain.init_from import InitialWeights, for_student, take_weights
from cloze.launch.pretrain.shapes import check_shape
from cloze.launch.run.integrity import hashes_of_model
from cloze.launch.system.console import Console
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig
from cloze.model.config_files import FINGERPRINT, config_from_huggingface
from cloze.model.huggingface import load_pretrained, save_pretrained
from cloze.model.weight_files import hash_of
from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.forked import ForkedRun
from tests.launching import (
    NO_DROPOUT,
    assert_same_run,
    assert_same_weights,
    curve,
    finish,
    kill_at,
    pretrain_arguments,
    resume,
    saved,
    train,
    weights,
)
from tests.model.model_batches import add_strange_fields, scramble
from tests.model.tiny_families import tiny
from tests.synthetic import make_shards

# One step whose rate is 0: the weights after it are those before it.
STILL = ("--train.max_steps", "1", "--schedule.warmup_steps", "1")


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("short"), max_length=16)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("long"), max_length=32)


@pytest.fixture(scope="module")
def first(short, tmp_path_factory):
    """Phase 1: 12 steps at length 16, two processes, ZeRO 2."""
    run = tmp_path_factory.mktemp("phases") / "first"
    train(short, run, "--train.max_steps", "12", "--zero.stage", "2", processes=2)
    return run


def refusal_of(capsys, data, run, *options: str) -> str:
    """The one line of a run that is refused before anything is built."""
    capsys.readouterr()
    assert main(pretrain_arguments(data, run, *STILL, *options)) == 2
    said = capsys.readouterr()
    line = said.err.splitlines()[-1]
    assert line.startswith("error: ") and "building" not in said.out + said.err and "Traceback" not in said.err
    return line


def table(output: str) -> dict[str, str]:
    """The table of what was taken: its rows by their name."""
    lines = output.split("init_from: initial state of this run")[1].splitlines()[1:]
    rows, name = {}, ""
    for line in lines:
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if line.startswith("└"):
            break
        if len(cells) == 2:
            name = cells[0] or name
            rows[name] = f"{rows.get(name, '')} {cells[1]}".strip()
    return rows


def test_weights_are_taken_and_everything_else_begins_at_0(long, first, tmp_path):
    run = tmp_path / "second"
    output = train(long, run, *STILL, "--init_from", str(first), "--train.learning_rate", "0.5", processes=2)
    rows = table(output)
    assert "step 12 of" in rows["weights"] and rows["initialized"] == "nothing"
    assert rows["moments"] == "none: they start at 0"
    assert_same_weights(weights(first), weights(run))
    assert [line["data/samples"] for line in curve(run) if "data/samples" in line] == [16]


@pytest.mark.slow
def test_a_killed_second_phase_resumes_and_does_not_look_back(long, first, tmp_path):
    """With the moments; the first phase is gone when the second resumes, and its end is that of an undisturbed one."""
    source = shutil.copytree(first, tmp_path / "first")
    arguments = (
        "--train.max_steps",
        "24",
        "--checkpoint.every_steps",
        "8",
        "--zero.stage",
        "2",
        "--init_from",
        str(source),
        "--init_optimizer",
        "true",
        "--train.learning_rate",
        "1e-3",
    )
    whole, cut = (pretrain_arguments(long, tmp_path / name, *arguments) for name in ("whole", "cut"))
    assert table(finish(ForkedRun(whole, 2)))["moments"] == "taken, of 12 steps"
    kill_at(12, cut, 2)
    shutil.rmtree(source)
    assert "init_from:" not in resume(cut, 2)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def rank_0_looks_earlier(command: list[str]) -> int:
    steps = CheckpointManager.steps
    if os.environ["RANK"] == "0":
        CheckpointManager.steps = lambda self: [n for n in steps(self) if n < 4 or "source" not in str(self.folder)]
    return main(command)


def test_all_ranks_take_the_same_step_of_a_source_that_is_still_training(short, long, tmp_path):
    """Its checkpoint of step 4 appears after rank 0 has looked and before rank 1 does."""
    source, run = tmp_path / "source", tmp_path / "run"
    fixed = ("--zero.stage", "2")
    train(short, source, *fixed, "--train.max_steps", "4", "--checkpoint.every_steps", "2", processes=2)
    command = pretrain_arguments(long, run, *STILL, *fixed, "--init_from", str(source), "--init_optimizer", "true")
    output = finish(ForkedRun(command, 2, rank_0_looks_earlier))
    assert "step 2 of" in table(output)["weights"] and table(output)["moments"] == "taken, of 2 steps"
    assert_same_weights(weights(source, 2), weights(run))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["0", "3"])
def test_moments_go_on_as_if_there_were_one_run(tmp_path, stage):
    """One batch is all the data, so that two runs of 4 steps see what one of 8 sees; the second has another size."""
    data = make_shards(tmp_path / "data", train=16, validation=4, mask_sets=1)
    fixed = (*NO_DROPOUT, "--schedule.name", "constant", "--schedule.warmup_steps", "0", "--zero.stage", stage)
    train(data, tmp_path / "one", *fixed, "--train.max_steps", "8")
    train(data, tmp_path / "first", *fixed, "--train.max_steps", "4", processes=2)
    apart = []
    for moments in ("true", "false"):
        run = tmp_path / moments
        output = train(
            data,
            run,
            *fixed,
            "--train.max_steps",
            "4",
            "--init_from",
            str(tmp_path / "first"),
            "--init_optimizer",
            moments,
        )
        taken = "taken, of 4 steps" if moments == "true" else "none: they start at 0"
        assert table(output)["moments"] == taken
        left, right = weights(tmp_path / "one"), weights(run)
        apart.append(max((left[name] - right[name]).abs().max().item() for name in left))
    assert apart[0] <= 2e-5 and apart[1] > 1e-3


@pytest.mark.slow
def test_longer_positions_are_refused_or_extended_by_name(short, long, tmp_path):
    train(short, tmp_path / "first", *STILL, "--model.max_position_embeddings", "16")
    arguments = (*STILL, "--init_from", str(tmp_path / "first"), "--model.max_position_embeddings", "32")
    output = train(long, tmp_path / "second", *arguments, status=2)
    assert "found 32, expected 16: that of init_from" in output.splitlines()[-1]
    assert table(train(long, tmp_path / "second", *arguments, "--init_positions", "extend"))["positions"] == (
        "0 to 15 taken, 16 to 31 drawn"
    )
    before, after = (weights(tmp_path / name)["bert.embeddings.position.weight"] for name in ("first", "second"))
    assert torch.equal(before, after[:16]) and after[16:].std() == pytest.approx(0.02, rel=0.1)


def test_a_hugging_face_bert_is_trained_on(long, tmp_path, capsys):
    """Written by transformers, with a masked-LM head and no other; its evaluation is that of transformers."""
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    torch.manual_seed(1)
    theirs = transformers.BertForMaskedLM(config)
    folder = tmp_path / "bert"
    theirs.save_pretrained(folder)
    for path in (long / "tokenizer").iterdir():
        shutil.copy(path, folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "of_another_tool": 1}')
    described = add_strange_fields(folder, Tokenizer.from_folder(folder).fingerprint)
    output = train(long, tmp_path / "run", *STILL, "--init_from", str(folder))
    rows = table(output)
    assert set(rows["initialized"].split(", ")) == {
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
        "next_sentence.classifier.weight",
        "next_sentence.classifier.bias",
    }
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "back")]) == 0
    back = transformers.BertForMaskedLM.from_pretrained(tmp_path / "back").state_dict()
    for name, value in theirs.state_dict().items():
        assert torch.equal(back[name], value), name
    values = json.loads((tmp_path / "back/config.json").read_text())
    assert values.pop("cloze_truncation") and values.pop("architectures") == ["BertForPreTraining"]
    assert values | {"architectures": ["BertForMaskedLM"]} == described
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes(), name

    # Which run it is depends on the weights. What it keeps of them is written again while they are there.
    path = tmp_path / "run"
    state = json.loads((saved(path)[-1] / "state.json").read_text())
    known = f"{state['config_hash']} {hash_of(load_pretrained(folder)[1])}"
    assert state["run"] == hashlib.sha256(known.encode()).hexdigest()
    shutil.rmtree(path / "origin")
    train(long, path, *STILL, "--init_from", str(folder))
    assert main(["export", str(path), "--output", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again/config.json").read_bytes() == (tmp_path / "back/config.json").read_bytes()
    shutil.rmtree(path / "origin")
    folder.rename(tmp_path / "elsewhere")
    assert "origin/sha256.json: found no such file" in train(long, path, *STILL, "--init_from", str(folder), status=2)
    (tmp_path / "elsewhere").rename(folder)

    # And what does not fit says so, in one line.
    for overrides, expected in (
        (("--init_optimizer", "true"), "no run of `cloze pretrain`, expected one"),
        (("--model.hidden_act", "relu"), "model.hidden_act: found 'relu', expected 'gelu': that of init_from"),
    ):
        assert expected in refusal_of(capsys, long, tmp_path / "other", "--init_from", str(folder), *overrides)


SHAPE = BertConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
)


def test_a_fine_tuned_model_is_trained_on_with_its_own_tokenizer(long, tmp_path, capsys):
    """Named by its run; with two words exchanged since, each of them would begin with the other's vector."""
    model, run = scramble(BertForPreTraining(SHAPE)), tmp_path / "tuned"
    note = {FINGERPRINT: Tokenizer.from_folder(long / "tokenizer").fingerprint}
    save_pretrained(run / "model", SHAPE, model.state_dict(), long / "tokenizer", notes=note)
    (run / "config.yaml").write_text("train_file: train.tsv\n")
    (run / "results.json").write_text(json.dumps({"model_hashes": hashes_of_model(run)}))
    train(long, tmp_path / "next", *STILL, "--init_from", str(run))
    assert_same_weights(weights(tmp_path / "next"), model.state_dict())
    assert json.loads((tmp_path / "next/origin/config.json").read_text())[FINGERPRINT] == note[FINGERPRINT]

    path = run / "model/tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["w1"], words["w2"] = words["w2"], words["w1"]
    path.write_text(json.dumps(content))
    for source, expected in (
        (run, f"{path}: found another file, expected it as the run has written it"),
        (run / "model", f"{run / 'model'}: found a tokenizer with fingerprint"),
    ):
        transplant = ("--init_vocabulary", "transplant", "--init_from", str(source))
        assert refusal_of(capsys, long, tmp_path / "other", *transplant).startswith(f"error: {expected}")


def test_a_checkpoint_with_a_nan_is_not_trained_on(tmp_path, monkeypatch):
    content = BertForPreTraining(SHAPE).state_dict()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": asdict(SHAPE)}))
    monkeypatch.setattr(init_from, "read_weights", lambda *_: (7, content))
    read = init_from._read(tmp_path, 7, print)
    assert read["step"] == 7 and read["weights"].keys() == content.keys() and BertConfig(**read["shape"]) == SHAPE
    content["masked_lm.dense.bias"][0] = float("nan")
    with pytest.raises(UserError, match=f"step 7 of {tmp_path}: found masked_lm.dense.bias with numbers that are not"):
        init_from._read(tmp_path, 7, print)


BY_MUP = ("--model.parametrization", "mup", "--model.base_hidden_size", "16", "--model.base_num_layers", "1")


def test_what_does_not_fit_the_first_phase_is_refused(long, first, tmp_path, capsys):
    foreign = make_shards(tmp_path / "foreign", vocab_size=48)  # more tokens would extend the source's
    for data, source, overrides, expected in (
        (foreign, first, (), "prepare them with --tokenizer"),
        (long, tmp_path, (), "found neither config.yaml nor config.json"),
        (long, first, ("--init_optimizer", "true"), "zero.stage: found 0, expected 2, that of init_from"),
        (
            long,
            first,
            (
                "--init_optimizer",
                "true",
                "--zero.stage",
                "2",
                "--optimizer.bias_correction",
                "false",
                "--optimizer.layer_decay",
                "0.5",
            ),
            "optimizer.layer_decay: found 0.5, expected 1.0",
        ),
        (
            long,
            first,
            (*BY_MUP, "--init_optimizer", "true", "--zero.stage", "2", "--optimizer.bias_correction", "false"),
            "model.parametrization: found 'mup', expected 'standard', that of init_from",
        ),
    ):
        assert expected in refusal_of(capsys, data, tmp_path / "run", "--init_from", str(source), *overrides)


def test_word_embeddings_start_from_a_file_of_vectors(short, tmp_path):
    vectors = tmp_path / "vectors.txt"
    rows = {"w0": torch.full((32,), 0.5), "w7": torch.arange(32.0), "unknown": torch.ones(32), "[PAD]": torch.ones(32)}
    vectors.write_text("4 32\n" + "".join(f"{word} {' '.join(map(str, row.tolist()))}\n" for word, row in rows.items()))
    for name, options in (("drawn", ()), ("given", ("--init_word_vectors", str(vectors)))):
        output = train(short, tmp_path / name, *STILL, *options, processes=2)
    assert "2 of 63 tokens start from" in output
    drawn, given = weights(tmp_path / "drawn"), weights(tmp_path / "given")
    expected = drawn["bert.embeddings.word.weight"].clone()
    expected[5], expected[12] = rows["w0"], rows["w7"]
    for name in ("bert.embeddings.word.weight", "masked_lm.decoder.weight"):  # tied
        assert torch.equal(given.pop(name), expected) and drawn.pop(name) is not None
    assert_same_weights(drawn, given)


def test_a_file_of_vectors_that_is_written_meanwhile_is_refused(short, tmp_path, monkeypatch):
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("w0 1 2\n")

    def take(*arguments):
        vectors.write_text("w0 1 2\nw7 1 2\n")
        return 1

    monkeypatch.setattr(first_model, "init_word_embeddings", take)
    model = BertForPreTraining(BertConfig(vocab_size=63, hidden_size=2, num_attention_heads=1, num_hidden_layers=1))
    with pytest.raises(UserError, match="vectors.txt: changed while it was read, expected a file at rest"):
        first_model.take_word_vectors(vectors, Tokenizer.from_folder(short / "tokenizer"), model, Console())


def test_vectors_that_cannot_be_taken_are_refused_in_one_line(short, first, tmp_path, capsys):
    vectors, run = tmp_path / "vectors.txt", tmp_path / "run"
    vectors.write_text("w0 1 2 3\n")
    said = refusal_of(capsys, short, run, "--init_word_vectors", str(vectors))
    assert "vectors.txt:1: found 3 numbers, expected 32, the width of the embeddings" in said
    said = refusal_of(capsys, short, run, "--init_word_vectors", str(tmp_path / "none"))
    assert f"init_word_vectors: found no file {tmp_path / 'none'}" in said
    said = refusal_of(capsys, short, run, "--init_word_vectors", str(vectors), "--init_from", str(first))
    assert "expected one of the two" in said


def test_a_distilbert_takes_the_layers_of_a_bert(tmp_path):
    """All of them, so that both compute the same for a text, of which each token is in the first segment."""
    teacher, student = (scramble(BertForPreTraining(tiny(kind))).eval() for kind in ("bert", "distilbert"))
    source = for_student(
        InitialWeights(tmp_path, teacher.config, teacher.state_dict(), None, "teacher"), student.config
    )
    rows = dict(take_weights(student, source))
    assert rows["initialized"] == "bert.pooler.dense.weight, bert.pooler.dense.bias" and "left out" not in rows
    ids = torch.randint(5, 64, (3, 20))
    found, expected = (model.bert(ids).last_hidden_state for model in (student, teacher))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for model, init_layers, fits in ((student, [0, 1], True), (student, None, False)):
        config = PretrainConfig("data", "run", model=model.config, init_from="teacher", init_layers=init_layers)
        with (
            contextlib.nullcontext()
            if fits
            else pytest.raises(UserError, match="model.family: found 'distilbert', exp")
        ):
            check_shape(config, teacher.config)


def test_the_preset_of_a_student_is_distilberts_own_shape():
    theirs = json.loads(transformers.DistilBertConfig().to_json_string())
    assert config_from_huggingface(theirs) == BertConfig.preset("distil-base", vocab_size=30522)


def test_word_vectors_of_an_endless_line_are_refused(tmp_path):
    with open(tmp_path / "vectors.txt", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="vectors.txt: found a line of 1,048,576 characters, expected a word and its"):
        check_word_vectors(tmp_path / "vectors.txt", 64)
