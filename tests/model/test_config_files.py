"""config.json of a model folder: what is none is refused in a line; the shape that it tells is that of the weights."""

import os

import pytest

from cloze.model.config import BertConfig, ModelError
from cloze.model.config_files import config_from_huggingface, read_object, read_shape
from cloze.model.huggingface import load_pretrained, save_pretrained
from tests.model.model_batches import TINY, pretraining_model


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_file_that_is_none_is_not_read(tmp_path, make):
    make(tmp_path / "config.json")
    with pytest.raises(ModelError, match="no regular file"):
        read_object(tmp_path / "config.json")


def test_a_configuration_has_bounds(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": ' + "[" * 63 + "]" * 63 + "}")
    assert read_object(path)
    path.write_text('{"a": ' + "[" * 64 + "]" * 64 + "}")
    with pytest.raises(ModelError, match="nested more than"):
        read_object(path)
    path.write_text('{"id2label": {"0": "\\ud800"}}')
    with pytest.raises(ModelError, match="surrogates not allowed"):  # which no file of predictions takes
        read_object(path)
    with open(path, "wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(ModelError, match="68,157,440 bytes, expected at most"):
        read_object(path)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"type_vocab_size": 0},  # which transformers' BERT is never without
        {"family": "roberta", "layer_norm_eps": 1e-5},
        {"embedding_size": 16, "pooler": False},
        {"normalization": "rms_norm"},  # in our own format
    ],
)
def test_the_shape_is_that_of_the_weights(tmp_path, changes):
    model = pretraining_model(BertConfig(**vars(TINY) | changes))
    save_pretrained(tmp_path, model.config, model.state_dict())
    config, _ = load_pretrained(tmp_path)
    assert read_shape(tmp_path) == config


def test_a_value_of_another_kind_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": "wide"}')
    with pytest.raises(ModelError, match="hidden_size"):
        read_shape(tmp_path)


def test_a_quantised_model_is_refused_also_if_its_weights_look_like_others(tmp_path):
    values = {"model_type": "bert", "vocab_size": 99}
    unused = {"quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": False}
    for given in (None, {}, unused):
        assert config_from_huggingface(values | {"quantization_config": given}).vocab_size == 99
    for name, given in (
        ("quantization_config", unused | {"load_in_4bit": True}),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("quantization_config", {"bits": 4}),
        ("quantization_config", "int8"),
        ("compression_config", {"format": "dense"}),
    ):
        with pytest.raises(ModelError, match=f"found {name} with quant_method"):
            config_from_huggingface(values | {name: given})
