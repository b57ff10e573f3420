"""Where the first weights come from."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from cloze.launch.commands import parse
from cloze.launch.config import FinetuneConfig
from cloze.launch.pretrained.source import find_source
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig, ModelError
from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.launch.tiny_models import save_model, tokenizer


def of(model: Path, *more: str) -> FinetuneConfig:
    given = ["--train", "t", "--validation", "v", "--output", "o"]
    return parse("finetune", ["sst2", "--model", str(model), *given, *more])


def test_a_shape_for_fine_tuning_goes_by_its_name(tmp_path, monkeypatch):
    """A run, a folder or a file of that name goes first."""
    monkeypatch.chdir(tmp_path)
    found = parse("finetune", ["sst2", "--model", "mini", "--train", "t", "--validation", "v", "--output", "o"])
    with pytest.raises(UserError, match=r"tokenizer: found none, .*: mini is a shape without a vocabulary"):
        find_source(found)
    Path("mini").mkdir()
    with pytest.raises((UserError, ModelError), match="mini"):
        find_source(found)


def test_a_checkpoint_with_a_nan_is_no_source(tmp_path, monkeypatch):
    """Its fine-tuning would skip each step, and what is left of it would know nothing."""
    ours, run = tokenizer(), tmp_path / "run"
    shape = BertConfig(
        vocab_size=ours.vocab_size, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    weights = BertForPreTraining(shape).state_dict()
    ours.save(run / "tokenizer")
    (run / "config.yaml").write_text(yaml.safe_dump({"model": dataclasses.asdict(shape)}))
    (run / "data.json").write_text(json.dumps({"tokenizer_fingerprint": ours.fingerprint, "max_length": 20}))
    monkeypatch.setattr("cloze.launch.pretrained.loading.read_run_weights", lambda *_: (7, weights))
    source = find_source(of(run))
    assert (source.step, source.trained_length, source.config) == (7, 20, shape)
    weights["bert.pooler.dense.bias"][0] = float("nan")
    with pytest.raises(ModelError, match=f"step 7 of {run}: found bert.pooler.dense.bias with numbers that are not"):
        find_source(of(run))


def test_the_length_of_a_models_texts_is_the_one_that_it_is_used_with(tmp_path):
    """As the model itself has it, or else the files of sentence-transformers."""
    folder = save_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert find_source(of(folder)).trained_length is None
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    assert find_source(of(folder)).trained_length == 12
    (folder / "config.json").write_text(json.dumps(config | {"cloze_truncation": {"max_length": 24}}))
    assert find_source(of(folder)).trained_length == 24


def test_the_tokenizer_that_is_another_is_named_with_what_can_be_done_about_it(tmp_path):
    """The model's own, whose words have exchanged their ids since, or the one of --tokenizer."""
    folder, other = save_model(tmp_path / "model"), tmp_path / "other"
    config = json.loads((folder / "config.json").read_text())
    note = {"tokenizer_fingerprint": Tokenizer.from_folder(folder).fingerprint}
    (folder / "config.json").write_text(json.dumps(config | note))
    content = json.loads((folder / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["cat"], words["mat"] = words["mat"], words["cat"]
    tokenizer().save(other)
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="fingerprint .* in .*/other, expected .*; leave --tokenizer out"):
        find_source(of(folder, "--tokenizer", str(other)))
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="trained with; restore its files, or remove tokenizer_fingerprint from config"):
        find_source(of(folder))
