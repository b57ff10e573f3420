"""What `cloze export` says about the folder that it has written."""

import importlib.metadata
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from cloze.launch.cli import main
from cloze.launch.predict.output import encoded
from cloze.launch.predict.predictor import Predictor
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.run.runs import model_config
from cloze.launch.tools import export as export_module
from cloze.pipeline.errors import UserError
from tests.launch.errors import error_of
from tests.launch.finetune.running import finetune
from tests.launch.tiny_models import POSITIONS, save_model
from tests.launching import train
from tests.synthetic import make_shards


def test_the_folder_in_which_one_stands(tmp_path, capsys, monkeypatch):
    save_model(tmp_path / "run" / "model")
    monkeypatch.chdir(tmp_path / "run")
    assert main(["export", "."]) == 0
    assert (tmp_path / "run-hf" / "model.safetensors").is_file()
    assert f"exported model to {tmp_path / 'run-hf'}" in capsys.readouterr().out


@pytest.mark.parametrize("model_type", ["bert", "cloze"])
def test_a_shape_that_transformers_lacks_is_named(tmp_path, capsys, model_type):
    save_model(tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type}))
    assert main(["export", str(tmp_path / "model")]) == 0
    said = capsys.readouterr().err
    assert ("transformers lacks this shape or head" in said and "trust_remote_code=True" in said) == (
        model_type == "cloze"
    )


@pytest.mark.parametrize(
    ("command", "field"),
    [
        ("export MODEL --output gs://b/e", "output"),
        ("runs . --json s3://b/r.json", "json"),
        ("plan --device h100 --train.sequence_length 128 --json s3://b/p.json", "json"),
        ("quickstart --output s3://b/q", "output"),
    ],
)
def test_a_result_for_a_disk_alone_is_not_written_into_a_folder_of_a_url_s_name(
    tmp_path, capsys, monkeypatch, command, field
):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "MODEL")
    before = sorted(tmp_path.rglob("*"))
    assert f"error: {field}: found {command.split()[-1]}, expected a path on a disk; " in error_of(
        capsys, *command.split()
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_an_export_of_anothers_folder_says_what_it_leaves_out(tmp_path, capsys):
    folder = save_model(tmp_path / "model")
    (folder / "training_args.bin").write_bytes(b"a pickle")
    assert main(["export", str(folder)]) == 0
    assert f"left out of {folder}: training_args.bin (" in capsys.readouterr().out
    assert not (tmp_path / "model-hf/training_args.bin").exists()
    assert "copied with Cloze" in (tmp_path / "model-hf/README.md").read_text()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        assert (tmp_path / "model-hf" / name).read_bytes() == (folder / name).read_bytes(), name


def test_the_length_that_was_trained_is_exported_and_longer_texts_are_cut_or_remarked_on(tmp_path, capsys):
    """A first phase: 16 tokens, of a model with 64 positions, of which the others are as they were drawn."""
    data = make_shards(tmp_path / "data", max_length=16)
    run, exported = tmp_path / "run", tmp_path / "exported"
    train(data, run, "--train.max_steps", "1", "--model.max_position_embeddings", "64")
    assert main(["export", str(run), "--output", str(exported)]) == 0
    assert json.loads((exported / "config.json").read_text())["cloze_truncation"]["max_length"] == 16
    assert json.loads((exported / "tokenizer_config.json").read_text())["model_max_length"] == 64
    short, long = "w1 w2", " ".join(["w3"] * 30)
    said = "texts of more than the 16 tokens that the model was trained on"
    for folder in (run, exported):
        capsys.readouterr()
        assert main(["predict", "embed", str(folder), short, long]) == 0
        output = capsys.readouterr()
        assert [json.loads(line)["cut_tokens"] for line in output.out.splitlines()] == [0, 16]
        assert "16 tokens of texts beyond the 16 that the model reads were truncated" in output.err
        assert main(["predict", "fill-mask", str(folder), f"{short} [MASK]", f"{long} [MASK]"]) == 0
        assert f"found 1 {said}" in capsys.readouterr().err
        with pytest.warns(UserWarning, match="more than the 16 tokens that the model was trained on"):
            Predictor.from_folder(folder).features(long)
    table = tmp_path / "train.tsv"
    table.write_text(f"text\tlabel\n{short}\ta\n{long}\tb\n" * 4)
    for length, model in (("32", run), ("16", exported)):
        _, output = finetune(
            "classification", model, table, table, tmp_path / f"tuned-{length}", "--max_length", length, "--epochs", "1"
        )
        assert ("max_length: found 32, more than the 16 tokens" in output) == (length == "32")
    check_as_written(tmp_path / "tuned-32", table, tmp_path, capsys)


def check_as_written(run: Path, table: Path, folder: Path, capsys) -> None:
    """Of a fine-tuning's model each file must be as the run has written it; under its own name it may be another."""
    files = ["--train", str(table), "--validation", str(table), "--output", str(folder / "new")]
    tuned = ["finetune", "classification", "--model", str(run), *files]
    commands = ["predict", "classify", str(run), "w1"], ["export", str(run)], tuned
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        path = run / "model" / name
        content = path.read_bytes()
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        for command in commands:
            capsys.readouterr()
            assert main(command) == 2
            assert f"{path}: found another file, expected it as the run has written it; " in capsys.readouterr().err
        path.unlink()
        assert main(commands[0]) == 2 and f"{path}: found no such file" in capsys.readouterr().err
        path.write_bytes(content)
    assert main(commands[0]) == 0
    config = json.loads((run / "model/config.json").read_text())
    (run / "model/config.json").write_text(json.dumps(config | {"note": 1}))
    assert main(commands[0]) == 2 and main([*commands[0][:2], str(run / "model"), "w1"]) == 0


def test_json_of_results_has_no_nan():
    with pytest.raises(UserError, match="a number that is not finite"):
        encoded({"score": [0.5, float("nan")]})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    base = tmp_path_factory.mktemp("trained")
    train(make_shards(base / "data"), base / "run", "--train.max_steps", "2", "--evaluation.every_steps", "2")
    return base / "run"


def test_a_card_says_what_the_model_is_from(trained, tmp_path):
    assert main(["export", str(trained), "--output", str(tmp_path / "model")]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head == {
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "tags": ["cloze", "sentence-transformers"],
    }
    for value in json.loads((trained / "data.json").read_text()).values():
        assert f"`{value}`" in card
    validation = [line for line in read_metrics(trained) if "validation/loss" in line][-1]["validation/loss"]
    assert f"| step 2 | loss | {validation:.4f} |" in card
    recipe = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert recipe["train"]["max_steps"] == 2 and recipe["model"] == asdict(model_config(trained))
    assert str(tmp_path) not in card and str(trained.parent) not in card
    software = json.loads((trained / "software.json").read_text())
    assert software["torch"] == importlib.metadata.version("torch")
    assert software["commit"] is None or f"`{software['commit']}`" in card


def test_a_card_of_a_copy_keeps_whose_it_is_and_what_it_may_be_used_for(tmp_path):
    folder = save_model(tmp_path / "model")
    (folder / "README.md").write_text("---\nlicense: cc-by-nc-4.0\nlanguage: [de, en]\nmetrics: [x]\n---\n# Theirs\n")
    assert main(["export", str(folder)]) == 0
    head = yaml.safe_load((tmp_path / "model-hf" / "README.md").read_text().split("---")[1])
    assert (head["license"], head["language"], "metrics" in head) == ("cc-by-nc-4.0", ["de", "en"], False)


def test_a_damaged_checkpoint_is_not_named_among_results(trained, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "run")
    shutil.copytree(run / "checkpoints/step-00000002", run / "checkpoints/step-00000003")
    assert main(["predict", "fill-mask", str(run), "w1 [MASK]"]) == 0
    said = capsys.readouterr()
    assert [json.loads(line)["text"] for line in said.out.splitlines()] == ["w1 [MASK]"]
    assert "step-00000003: damaged (state.json is that of step 2); skipped" in " ".join(said.err.split())


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_another_number_format(tmp_path, name):
    folder = save_model(tmp_path / "model")
    assert main(["export", str(folder), "--dtype", name, "--output", str(tmp_path / name)]) == 0
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / name / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor.to(kind), after[key]) for key, tensor in before.items())
    theirs, said = AutoModel.from_pretrained(tmp_path / name, output_loading_info=True)
    assert theirs.dtype == kind and not said["missing_keys"]
    text = "the cat sat on the mat"
    ours = (Predictor.from_folder(path).embed([text])[0] for path in (folder, tmp_path / name))
    np.testing.assert_allclose(*ours, atol=0.1)
    weights = load_file(folder / "model.safetensors")
    weights["bert.embeddings.word_embeddings.weight"][0, 0] = 1e6  # more than fp16 holds
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["export", str(folder), "--dtype", "fp16", "--output", str(tmp_path / "large")]) == 2
    assert not (tmp_path / "large").exists()


def test_sentence_transformers_makes_the_same_vectors(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    folder = save_model(tmp_path / "model")
    assert main(["export", str(folder)]) == 0
    texts = ["the cat sat on the mat", "the sky is blue", "a film"]
    theirs = library.SentenceTransformer(str(tmp_path / "model-hf"), device="cpu")
    assert theirs.max_seq_length == POSITIONS
    np.testing.assert_allclose(theirs.encode(texts), Predictor.from_folder(folder).embed(texts), atol=1e-5)


def test_a_classifier_is_no_encoder_of_sentences(tmp_path):
    folder = save_model(tmp_path / "model", "BertForSequenceClassification")
    assert main(["export", str(folder)]) == 0
    assert not (tmp_path / "model-hf" / "modules.json").exists()
    assert "AutoModelForSequenceClassification" in (tmp_path / "model-hf" / "README.md").read_text()


@pytest.mark.parametrize("into", [".", "link", "dangling"])
def test_an_empty_folder_is_filled(tmp_path, monkeypatch, into):
    """And not replaced, as a mount can't be; what is not whole has no config.json. What a killed export has left there
    goes, and a new file system's folder stays.
    """
    source, output = save_model(tmp_path / "model"), tmp_path / "out"
    (tmp_path / "dangling").symlink_to("new")
    for name in (".tmp-export", "lost+found"):
        (output / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("out")
    number = output.stat().st_ino
    monkeypatch.chdir(output if into == "." else tmp_path)
    replace, names = os.replace, []

    def follow(path, to):
        names.append(Path(path).name)
        replace(path, to)

    monkeypatch.setattr(os, "replace", follow)
    assert main(["export", str(source), "--output", into]) == 0
    if into == "dangling":
        output = tmp_path / "new"
    else:
        assert output.stat().st_ino == number and names[-1] == "config.json"
    assert {path.name for path in output.iterdir()} > {"config.json", "model.safetensors", "README.md"}
    assert f"\n# {output.name}\n" in (output / "README.md").read_text()
    assert not [path for folder in (tmp_path, output) for path in folder.iterdir() if path.name.startswith(".tmp")]


def test_an_export_into_a_folder_below_goes_on_beside_one_into_it(tmp_path, monkeypatch):
    source, output = save_model(tmp_path / "model"), tmp_path / "out"
    output.mkdir()
    write, inner = export_module.write_remote_code, [output / "inner"]

    def another(folder):
        write(folder)
        if inner:  # the first one has its temporary folder in the output of the second
            assert main(["export", str(source), "--output", str(inner.pop().parent)]) == 0

    monkeypatch.setattr(export_module, "write_remote_code", another)
    assert main(["export", str(source), "--output", str(inner[0])]) == 0
    assert (output / "config.json").is_file() and (output / "inner/config.json").is_file()


def test_one_export_at_once_uses_a_folder(tmp_path, capsys, monkeypatch):
    source, output = save_model(tmp_path / "model"), tmp_path / "out"
    output.mkdir()
    write, said = export_module.write_remote_code, []

    def another(folder):
        if not said:
            said.append(error_of(capsys, "export", str(source), "--output", str(output)))
        write(folder)

    monkeypatch.setattr(export_module, "write_remote_code", another)
    assert main(["export", str(source), "--output", str(output)]) == 0
    assert "in use by another export" in said[0] and (output / "config.json").is_file()
    assert "found" in error_of(capsys, "export", str(source), "--output", str(output))


def test_the_later_of_two_exports_at_once_is_told_of_the_first(tmp_path, capsys, monkeypatch):
    source, output = save_model(tmp_path / "model"), tmp_path / "out"
    write = export_module.write_remote_code

    def meanwhile(folder):
        write(folder)
        output.mkdir()
        (output / "config.json").write_text("of another")

    monkeypatch.setattr(export_module, "write_remote_code", meanwhile)
    assert "found out there already" in error_of(capsys, "export", str(source), "--output", str(output)).replace(
        f"{tmp_path}/", ""
    )
    assert [path.name for path in output.iterdir()] == ["config.json"] and len([*tmp_path.iterdir()]) == 2


def test_an_export_removes_no_folder_of_anothers(tmp_path):
    source, neighbour = save_model(tmp_path / "model.tmp", "BertForMaskedLM"), tmp_path / "out.tmp"
    neighbour.mkdir()
    (neighbour / "notes.txt").write_text("mine")
    for output in ("model", "out"):
        assert main(["export", str(source), "--output", str(tmp_path / output)]) == 0
    assert (source / "config.json").exists() and (neighbour / "notes.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"model.tmp", "out.tmp", "model", "out"}
