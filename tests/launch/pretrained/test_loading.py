"""Models that give no numbers are refused wherever they are loaded."""

import dataclasses
import json
import shutil

import pytest
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from cloze.launch.cli import main
from cloze.launch.pretrained.loading import cut_alike, load_model
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.launch.tiny_models import POSITIONS, save_model, tokenizer


@pytest.mark.parametrize("number", [float("nan"), 1e30])
def test_a_model_that_gives_no_numbers_is_neither_served_nor_asked_nor_exported(tmp_path, capsys, number):
    """One weight is not finite; or all are, and what is computed of them is not."""
    folder = save_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["bert.encoder.layer.0.attention.self.query.weight"][:] = number
    weights["bert.encoder.layer.0.attention.self.key.weight"][:] = number
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    for command in (["serve", str(folder), "--port", "0"], ["predict", "embed", str(folder), "a man"]):
        assert main(command) == 2
        line = capsys.readouterr().err
        assert "not finite" in line and len(line.splitlines()) == 1, line
    assert main(["export", str(folder)]) == (2 if number != number else 0)


def test_a_checkpoint_with_a_nan_is_neither_asked_nor_exported(tmp_path, capsys, monkeypatch):
    ours = tokenizer()
    config = BertConfig(
        vocab_size=ours.vocab_size, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    weights = BertForPreTraining(config).state_dict()
    weights["masked_lm.dense.bias"][0] = float("nan")
    run = tmp_path / "run"
    ours.save(run / "tokenizer")
    (run / "config.yaml").write_text(yaml.safe_dump({"model": dataclasses.asdict(config)}))
    monkeypatch.setattr("cloze.launch.tools.export.read_run_average", lambda *_, **__: ([7], weights))
    monkeypatch.setattr("cloze.launch.pretrained.loading.read_run_weights", lambda *_: (7, weights))
    for command in (["export", str(run)], ["predict", "fill-mask", str(run), "the [MASK]"]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"step 7 of {run}: found masked_lm.dense.bias with numbers that are not finite" in said


def test_a_run_is_neither_asked_nor_exported_with_another_tokenizer(tmp_path, capsys, monkeypatch):
    """Two words have exchanged their ids in the run's folder since it began."""
    ours = tokenizer()
    config = BertConfig(
        vocab_size=ours.vocab_size, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    weights, run = BertForPreTraining(config).state_dict(), tmp_path / "run"
    ours.save(run / "tokenizer")
    (run / "config.yaml").write_text(yaml.safe_dump({"model": dataclasses.asdict(config)}))
    (run / "data.json").write_text(json.dumps({"tokenizer_fingerprint": ours.fingerprint}))
    monkeypatch.setattr("cloze.launch.tools.export.read_run_average", lambda *_, **__: ([7], weights))
    monkeypatch.setattr("cloze.launch.pretrained.loading.read_run_weights", lambda *_: (7, weights))
    asked = ["predict", "fill-mask", str(run), "the [MASK]"]
    assert main(asked) == 0
    content = json.loads((run / "tokenizer/tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["cat"], words["mat"] = words["mat"], words["cat"]
    (run / "tokenizer/tokenizer.json").write_text(json.dumps(content))
    for command in (asked, ["export", str(run)]):
        capsys.readouterr()
        assert main(command) == 2
        assert f"error: {run}/tokenizer: found a tokenizer with fingerprint" in capsys.readouterr().err
    # vocab.txt alone would be read as another tokenizer, and transformers could not load the export
    (run / "tokenizer/tokenizer.json").unlink()
    for command in (asked, ["export", str(run)]):
        assert main(command) == 2
        assert f"error: {run}/tokenizer: found no tokenizer.json, expected it as the run" in capsys.readouterr().err


def test_a_model_that_was_trained_here_is_neither_asked_nor_exported_with_another_tokenizer(tmp_path, capsys):
    """As the model/ of a fine-tuning, whose config.json names its tokenizer; of others nothing is known."""
    folder, output = save_model(tmp_path / "model"), ["--output", str(tmp_path / "exported")]
    content = json.loads((folder / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["cat"], words["mat"] = words["mat"], words["cat"]
    asked, exported = ["predict", "embed", str(folder), "the cat"], ["export", str(folder), *output]
    config = json.loads((folder / "config.json").read_text())
    for noted, changed, status in ((False, True, 0), (True, False, 0), (True, True, 2), (True, None, 2)):
        save_model(folder)
        if noted:
            note = {"tokenizer_fingerprint": Tokenizer.from_folder(folder).fingerprint}
            (folder / "config.json").write_text(json.dumps(config | note))
        if changed:
            (folder / "tokenizer.json").write_text(json.dumps(content))
        if changed is None:
            (folder / "tokenizer.json").write_text("")
        for command in (asked, exported):
            capsys.readouterr()
            assert main(command) == status
            said = capsys.readouterr().err
            assert status == 0 or "found a tokenizer with fingerprint" in said or "can't be read as a tok" in said
        assert (tmp_path / "exported").exists() == (status == 0)
        shutil.rmtree(tmp_path / "exported", ignore_errors=True)


def test_a_checkpoint_of_other_sizes_is_neither_asked_nor_exported(tmp_path, capsys, monkeypatch):
    ours = tokenizer()
    config = BertConfig(
        vocab_size=ours.vocab_size, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    weights, run = BertForPreTraining(dataclasses.replace(config, hidden_size=16)).state_dict(), tmp_path / "run"
    ours.save(run / "tokenizer")
    (run / "config.yaml").write_text(yaml.safe_dump({"model": dataclasses.asdict(config)}))
    (run / "data.json").write_text("{}")
    monkeypatch.setattr("cloze.launch.tools.export.read_run_average", lambda *_, **__: ([7], weights))
    monkeypatch.setattr("cloze.launch.pretrained.loading.read_run_weights", lambda *_: (7, weights))
    for command in (["predict", "fill-mask", str(run), "the [MASK]"], ["export", str(run)]):
        assert main(command) == 2
        assert f"step 7 of {run}: found bert.embeddings.word.weight of shape" in capsys.readouterr().err


def test_texts_are_cut_on_the_side_that_the_models_tokenizer_says(tmp_path):
    """As transformers' own tokenizer cuts them."""
    folder = save_model(tmp_path, "BertModel")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation_side": "left"}))
    loaded = load_model(folder)
    text = "the cat sat on the mat " * 30
    ours = loaded.encoder.encode(text, cut=True).ids
    theirs = AutoTokenizer.from_pretrained(folder)(text, truncation=True, max_length=POSITIONS)["input_ids"]
    assert list(ours) == theirs and len(theirs) == POSITIONS


@pytest.mark.parametrize(
    ("keep", "before", "after"),
    [("tail", {}, {"truncation_side": "left"}), ("head", {"truncation_side": "left"}, {"truncation_side": "right"})]
    + [(keep, before, before) for keep in ("head", "head_tail") for before in ({}, {"truncation_side": "right"})],
)
def test_a_new_model_s_tokenizer_cuts_the_side_that_its_training_cut(tmp_path, keep, before, after):
    """And nothing else of its configuration changes, beside which an older file may lie."""
    path, other = tmp_path / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer"}
    path.write_text(json.dumps(other | before))
    (tmp_path / "special_tokens_map.json").write_text('{"mask_token": "<m>"}')
    cut_alike(tmp_path, {"cloze_truncation": {"max_length": 8, "keep": keep}})
    assert json.loads(path.read_text()) == other | after
    cut_alike(tmp_path, {})
