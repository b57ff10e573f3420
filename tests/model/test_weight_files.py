"""Folders of models that are damaged, quantised, split or described wrongly: read as they are, or refused in a line."""

import dataclasses
import json
import resource
import shutil
import zipfile

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cloze.model.config import ModelError
from cloze.model.families import BY_TYPE
from cloze.model.huggingface import copy_pretrained, load_head, load_pretrained, save_pretrained
from cloze.model.problems import HeadConfig
from cloze.model.tasks import ARCHITECTURES, BertForMaskedLM, BertForSequenceClassification
from tests.model.model_batches import TINY, pretraining_model
from tests.model.tiny_families import tiny

QUERY, KEY, VALUE = (f"bert.encoder.layer.0.attention.self.{part}.weight" for part in ("query", "key", "value"))
SEGMENTS = "bert.embeddings.token_type_embeddings.weight"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    BertForSequenceClassification(TINY, head=HeadConfig(("a", "b", "c"))).save(folder)
    return folder


def changed(classifier, folder, weights=(), **values):
    """A copy with other weights or fields."""
    shutil.copytree(classifier, folder, dirs_exist_ok=True)
    if weights:
        save_file(load_file(folder / "model.safetensors") | dict(weights), folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def refused(folder, found):
    with pytest.raises(ModelError, match=found) as caught:
        load_head(folder)
        BertForSequenceClassification.from_folder(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_weights_that_are_no_floating_point_numbers_are_refused(classifier, tmp_path, dtype):
    weights = {name: tensor.to(dtype) for name, tensor in load_file(classifier / "model.safetensors").items()}
    refused(changed(classifier, tmp_path, weights), f"{str(dtype).removeprefix('torch.')}, expected floating-point")


@pytest.mark.parametrize("name", [QUERY, "bert.encoder.layer.1.output.dense.weight", "classifier.bias"])
def test_one_weight_of_whole_numbers_is_refused(classifier, tmp_path, name):
    weights = {name: load_file(classifier / "model.safetensors")[name].to(torch.int8)}
    refused(changed(classifier, tmp_path, weights), f"found {name} of int8")


def test_a_pickled_weight_of_one_number_in_a_large_shape_is_refused_at_once(classifier, tmp_path):
    weights = load_file(classifier / "model.safetensors")
    changed(classifier, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights | {QUERY: torch.ones(1).expand(1 << 40)}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, f"found {QUERY} with fewer numbers than its shape has")
    for name, tensor, found in (
        (QUERY, torch.empty(2, 2, device="meta"), "a strided tensor on the device meta"),
        (QUERY, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
        (QUERY, torch._neg_view(weights[QUERY]), "a negated tensor"),
        ("bert.embeddings.position_ids", torch.zeros(1).expand(1 << 36), "with fewer numbers than its shape has"),
    ):
        torch.save(weights | {name: tensor}, tmp_path / "pytorch_model.bin")
        refused(tmp_path, found)
    torch.save([1], tmp_path / "pytorch_model.bin")
    refused(tmp_path, "weights without names")
    torch.save({"a": [1]}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "'a' that is no tensor")


def test_old_weights_that_are_compressed_are_refused(classifier, tmp_path):
    """A small file of them could take all memory; torch writes none."""
    changed(classifier, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "stored.bin")
    with (
        zipfile.ZipFile(tmp_path / "stored.bin") as stored,
        zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for record in stored.namelist():
            packed.writestr(record, stored.read(record))
    refused(tmp_path, "pytorch_model.bin: found compressed tensors")


@pytest.mark.parametrize(
    ("mark", "place"),
    [(b"PK\x01\x02", 0), (b"PK\x01\x02", 46), (b"PK\x06\x07", 16)],
    ids=["an entry", "a name", "the number of disks"],
)
def test_old_weights_with_a_damaged_list_of_records_are_refused(classifier, tmp_path, mark, place):
    changed(classifier, tmp_path)
    path, weights = tmp_path / "pytorch_model.bin", load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, path)
    content = bytearray(path.read_bytes())
    content[content.index(mark) + place] = 0xFF
    path.write_bytes(content)
    refused(tmp_path, "pytorch_model.bin: found a damaged list of records")


@pytest.mark.parametrize(
    "shapes",
    [
        {QUERY: (33, 32), KEY: (31, 32)},
        {QUERY: (64, 32), KEY: (0, 32)},
        {QUERY: (32,), KEY: (32, 32, 1)},
        {QUERY: (32, 32, 1), KEY: (32, 32, 1), VALUE: (32, 32, 1)},
        {QUERY: ()},
        {VALUE: (32, 31)},
    ],
)
def test_queries_keys_and_values_are_checked_one_by_one(classifier, tmp_path, shapes):
    assert TINY.hidden_size == 32
    refused(changed(classifier, tmp_path, {name: torch.ones(shape) for name, shape in shapes.items()}), "found shape")


@pytest.mark.parametrize("shape", [(), (1,), (2, 2, 2)])
def test_tensors_of_no_and_three_dimensions_are_one_line_wherever_they_are(classifier, tmp_path, shape):
    for name in load_file(classifier / "model.safetensors"):
        refused(changed(classifier, tmp_path, {name: torch.ones(shape)}), "found .*shape")
        shutil.copyfile(classifier / "model.safetensors", tmp_path / "model.safetensors")


def test_segments_that_the_configuration_denies_are_refused(classifier, tmp_path):
    refused(changed(classifier, tmp_path, type_vocab_size=0), f"{SEGMENTS}: found shape .2, ")
    refused(changed(classifier, tmp_path, {SEGMENTS: torch.ones(())}, type_vocab_size=0), f"{SEGMENTS}: found shape")
    zeros = torch.zeros_like(load_file(classifier / "model.safetensors")[SEGMENTS])
    assert load_pretrained(changed(classifier, tmp_path, {SEGMENTS: zeros}, type_vocab_size=0))[0].type_vocab_size == 0


@pytest.mark.parametrize("field, value", [("type_vocab_size", 0), ("num_hidden_layers", 2)])
def test_parts_of_our_own_format_that_the_configuration_denies_are_refused(tmp_path, field, value):
    config = dataclasses.replace(TINY, pooler=False)
    save_pretrained(tmp_path, config, pretraining_model(config).state_dict())
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["model_type"] == "cloze"
    (tmp_path / "config.json").write_text(json.dumps(values | {field: value}))
    with pytest.raises(ModelError, match="which a model of this config.json lacks"):
        ARCHITECTURES["BertForPreTraining"].from_folder(tmp_path)


@pytest.mark.parametrize(
    "labels",
    [
        None,
        {},
        [],
        ["a", "b", "c"],
        3,
        {"0": "a", "1": "a", "2": "b"},
        {"0": "a", "1": "b", "3": "c"},
        {"1": "a", "2": "b", "3": "c"},
        {"x": "a", "y": "b", "z": "c"},
        {"0": "a", "00": "b", "1": "c"},
        {"0": None, "1": "b", "2": "c"},
        {"0": True, "1": "b", "2": "c"},
        {"0": ["a"], "1": "b", "2": "c"},
    ],
)
def test_labels_without_names_or_numbers_are_refused(classifier, tmp_path, labels):
    refused(changed(classifier, tmp_path, id2label=labels), "id2label|'a' twice")


def test_another_number_of_labels_than_there_are_is_refused(classifier, tmp_path):
    refused(changed(classifier, tmp_path, num_labels=2), "found num_labels 2 with 3 labels in id2label")


@pytest.mark.parametrize(
    "numbers", [{"a": 1, "b": 2, "c": 0}, {"a": 0, "b": 1, "c": None}, {"a": False, "b": 1, "c": 2}]
)
def test_labels_of_other_numbers_than_their_rows_are_refused(classifier, tmp_path, numbers):
    """As where one of the two was shifted. Other names in label2id say nothing: transformers' default ones, say."""
    labels = {"0": "a", "1": "b", "2": "c"}
    refused(changed(classifier, tmp_path, id2label=labels, label2id=numbers), "in id2label and as .* in label2id")
    for harmless in ({"a": 0, "b": 1, "c": 2}, {"a": "0", "b": "1", "c": "2"}, {"LABEL_0": 1}, {}, None):
        assert load_head(changed(classifier, tmp_path, id2label=labels, label2id=harmless)).labels == ("a", "b", "c")


def test_labels_that_are_numbers_are_texts_here(classifier, tmp_path):
    assert load_head(changed(classifier, tmp_path, id2label={"0": 1, "1": 2, "2": 3})).labels == ("1", "2", "3")


@pytest.mark.parametrize("problem", ["sorting", 3, [], {}, True, "regression "])
def test_an_unknown_problem_type_is_refused(classifier, tmp_path, problem):
    refused(changed(classifier, tmp_path, problem_type=problem), "problem_type")


def test_a_head_of_other_labels_is_described_as_it_is(classifier, tmp_path):
    refused(
        changed(classifier, tmp_path, id2label={"0": "a", "1": "b"}),
        r"found classifier.weight of shape \(3, 32\), expected a BertForSequenceClassification with shape \(2, 32\)",
    )


def sharded(folder):
    theirs = transformers.BertForSequenceClassification.from_pretrained(folder)
    path = folder / "sharded"
    theirs.save_pretrained(path, max_shard_size="30KB")
    names = {each.name for each in path.iterdir()}
    assert len(names) > 4 and "model.safetensors.index.json" in names and "model.safetensors" not in names
    return path


def test_a_folder_that_transformers_has_split_holds_the_same(classifier, tmp_path):
    path = sharded(changed(classifier, tmp_path))
    (config, weights), (same, parts) = load_pretrained(classifier), load_pretrained(path)
    assert config == same and weights.keys() == parts.keys()
    assert all(torch.equal(weights[name], parts[name]) for name in weights)
    (path / "vocab.txt").write_text("[PAD]\n")
    assert copy_pretrained(path, tmp_path / "copy") == []
    assert load_pretrained(tmp_path / "copy")[1].keys() == weights.keys()


def test_shards_that_do_not_fit_their_index_are_refused(classifier, tmp_path):
    path = sharded(changed(classifier, tmp_path))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    files = index["weight_map"]
    first, last = min(files.values()), max(files.values())
    name = next(name for name, file in files.items() if file == first)
    for content, found in (
        ({}, "no weight_map"),
        ({"weight_map": []}, "no weight_map"),
        ({"weight_map": {name: "../model.safetensors"}}, "expected a .*safetensors file of the folder"),
        ({"weight_map": {name: "/etc/passwd"}}, "expected a .*safetensors file of the folder"),
        ({"weight_map": {name: 3}}, "expected a .*safetensors file of the folder"),
        ({"weight_map": files | {name: last}}, "is found|is missing"),
        ({"weight_map": files | {"another": first}}, "another is missing"),
        ({"weight_map": files | {"another": "model-9.safetensors"}}, "model-9.safetensors: not found"),
    ):
        (path / "model.safetensors.index.json").write_text(json.dumps(content))
        refused(path, found)


def test_weights_that_find_no_space_are_an_error_of_the_file_system(tmp_path):
    """The library's own error is none: commands ended with a traceback."""
    model = BertForSequenceClassification(TINY, head=HeadConfig(("a", "b", "c")))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large: .*model.safetensors.tmp"):
            model.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("kind", BY_TYPE)
def test_what_the_configuration_ties_is_the_same_under_both_names(kind, tmp_path):
    family, config = BY_TYPE[kind], tiny(kind, vocab_size=64, tie_word_embeddings=True)
    BertForMaskedLM(config).save(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    (embeddings,) = family.names(config, "masked_lm")["bert.embeddings.word.weight"]
    pairs = {family.decoder[0]: embeddings.name, family.second_bias: family.decoder[1]}

    def read(**changes):
        save_file(whole | changes, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return load_pretrained(tmp_path)[1]

    plain = read()
    for second, first in pairs.items():
        if first not in whole:  # a family without such a bias
            continue
        if second:
            assert all(torch.equal(plain[name], each) for name, each in read(**{second: whole[first].clone()}).items())
            with pytest.raises(ModelError, match=f"{second}: found other numbers than in {first}"):
                read(**{second: whole[first] + 1})
        value = whole.pop(first)
        with pytest.raises(ModelError, match=r"found no (bert\.embeddings\.word|masked_lm\.decoder)"):
            read()
            BertForMaskedLM.from_folder(tmp_path)
        whole[first] = value
    if family.second_bias:  # as transformers reads it
        whole[family.second_bias] = whole.pop(family.decoder[1])
        assert torch.equal(read()["masked_lm.decoder.bias"], plain["masked_lm.decoder.bias"])


def test_a_decoder_of_our_own_format_is_the_embeddings_that_it_is_tied_to(tmp_path):
    config = dataclasses.replace(TINY, pooler=False, num_hidden_layers=1)
    save_pretrained(tmp_path, config, pretraining_model(config).state_dict())
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "cloze"
    weights = load_file(tmp_path / "model.safetensors")
    weights["masked_lm.decoder.weight"] = weights["bert.embeddings.word.weight"] + 1
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="other numbers than in bert.embeddings.word.weight"):
        load_pretrained(tmp_path)
