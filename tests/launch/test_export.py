"""What `cloze export` says about the folder that it has written."""

import json

import pytest

from cloze.launch.cli import main
from cloze.launch.predict.predictor import Predictor
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig
from cloze.model.initialization import init_weights
from tests.launch.tiny_models import save_model, tokenizer


def test_a_head_that_is_its_embeddings_comes_back_from_our_own_format(tmp_path):
    ours, text = tokenizer(), "the [MASK] sat on the mat ."
    ours.save(tmp_path)
    config = BertConfig(vocab_size=ours.vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=48, mlm_head="linear", decoder_bias=False, pooler=False, type_vocab_size=0)
    model = BertForPreTraining(config).eval()
    init_weights(model, 0)
    model.save(tmp_path, tmp_path)
    assert Predictor.from_folder(tmp_path).fill_mask(text) == Predictor(LoadedModel(model, ours)).fill_mask(text)


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
    assert ("in its own format, which only Cloze reads" in capsys.readouterr().err) == (model_type == "cloze")
