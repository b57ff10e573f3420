"""A model of sentence-transformers makes the same vectors here, and is exported as what it is."""

import json
import re

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

from cloze.launch.cli import main
from cloze.launch.predict.predictor import Predictor
from cloze.launch.pretrained.sentence_transformers import folder_of_modules, read_max_length, read_pooling
from cloze.pipeline.errors import UserError
from tests.launch.tiny_models import save_model

WIDTH, LENGTH = 32, 12
TEXTS = ["the cat sat on the mat", "a film", "the sky is blue " * 10]


def saved(folder, *modules):
    """A folder as the library writes it; its texts have at most LENGTH tokens."""
    encoder = Transformer(str(save_model(folder / "model", "BertModel", num_hidden_layers=1)), max_seq_length=LENGTH)
    SentenceTransformer(modules=[encoder, *modules], device="cpu").save(str(folder / "saved"))
    return folder / "saved"


def as_before_version_6(folder, pooling):
    names = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}
    modes = {f"pooling_mode_{name}": pooling == ours for ours, name in names.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": WIDTH} | modes))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LENGTH, "do_lower_case": False}))
    values = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(values | {"model_max_length": 512}))


@pytest.mark.parametrize("pooling, old", [("cls", False), ("cls", True), ("max", True), ("mean", False)])
def test_vectors_and_those_of_the_export_are_the_librarys(tmp_path, capfd, pooling, old):
    folder = saved(tmp_path, Pooling(WIDTH, pooling_mode=pooling), *([Normalize()] if pooling == "cls" else []))
    if old:
        as_before_version_6(folder, pooling)
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(Predictor.from_folder(folder).embed(TEXTS), theirs, atol=1e-5)
    assert main(["export", str(folder), "--output", str(tmp_path / "out"), "--onnx", str(old).lower()]) == 0
    said = capfd.readouterr().out
    assert not {"1_Pooling", "modules.json", "sentence_bert_config.json"} & set(re.findall(r"[\w.]+", said))
    if old:  # of some the graph, which takes a while
        described = json.loads((tmp_path / "out" / "onnx.json").read_text())
        assert described["truncation"]["max_length"] == LENGTH and described["vectors"]["pooling"] == pooling
    exported = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert exported.max_seq_length == LENGTH
    np.testing.assert_allclose(exported.encode(TEXTS), theirs, atol=1e-5)


def test_what_is_not_computed_here_is_said_and_not_exported(tmp_path, capfd):
    folder = saved(tmp_path, Pooling(WIDTH, pooling_mode="mean"), Dense(WIDTH, 8))
    Predictor.from_folder(folder)
    assert "found Transformer, Pooling, Dense, expected a pooling of mean, cls, max" in capfd.readouterr().err
    assert main(["export", str(folder), "--output", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out" / "modules.json").exists() and read_max_length(tmp_path / "out") == LENGTH
    said = capfd.readouterr().out
    assert "modules.json" in said and "sentence_bert_config.json" not in said
    for mode, found in (("lasttoken", "lasttoken"), (["cls", "mean"], "cls, mean")):
        said: list[str] = []
        (folder / "modules.json").write_text(
            json.dumps([{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}])
        )
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
        assert read_pooling(folder, said.append) is None and f"found {found}, expected" in said[0]


def test_what_is_done_to_texts_there_and_not_here_is_said(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    (tmp_path / "modules.json").write_text('[{"type": "Transformer"}, {"type": "Pooling", "path": "./1_Pooling/"}]')
    settings = {"default_prompt_name": None, "prompts": {"query": "query: ", "document": ""}}
    for name, said in (("query", ["the default prompt 'query: '"]), ("document", []), (None, [])):
        found: list[str] = []
        text = json.dumps(settings | {"default_prompt_name": name})
        (tmp_path / "config_sentence_transformers.json").write_text(text)
        assert read_pooling(tmp_path, found.append) is not None
        assert len(found) == len(said) and all(map(str.__contains__, found, said))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 12, "do_lower_case": true}')
    read_pooling(tmp_path, found.append)
    assert "found do_lower_case true" in found[0]
    (tmp_path / "config_sentence_transformers.json").write_text('{"truncate_dim": 8}')
    arguments = {"processing_kwargs": {"text": {"max_length": 6}}, "model_kwargs": {}}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(arguments))
    read_pooling(tmp_path, found.append)
    assert "found truncate_dim 8: " in found[1] and "found processing_kwargs, by which" in found[2]
    assert len(found) == 3
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {}, "default_prompt_name": ["q"]}')
    read_pooling(tmp_path, found.append)
    assert """found the default prompt "['q']", which""" in found[3]


def test_a_folder_of_an_old_version_has_its_settings_under_the_family_s_name(tmp_path):
    folder = saved(tmp_path, Pooling(WIDTH, pooling_mode="mean"))
    (folder / "sentence_bert_config.json").unlink()
    (folder / "sentence_xlm-roberta_config.json").write_text('{"max_seq_length": 6, "do_lower_case": true}')
    found: list[str] = []
    assert read_pooling(folder, found.append) is not None
    assert "sentence_xlm-roberta_config.json: found do_lower_case true" in found[0]
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(Predictor.from_folder(folder).embed(TEXTS), theirs, atol=1e-5)


def test_a_transformer_without_pooling_or_in_a_folder_of_its_own_is_not_taken_for_a_mean(tmp_path):
    (tmp_path / "modules.json").write_text('[{"type": "Transformer", "path": ""}]')
    found: list[str] = []
    assert read_pooling(tmp_path, found.append) is None and not found, "a cross-encoder"
    (tmp_path / "sentence_bert_config.json").write_text('{"module_output_name": "sentence_embedding"}')
    assert read_pooling(tmp_path, found.append) is None and "found the model's own pooler, expected" in found[0]
    (tmp_path / "modules.json").write_text('[{"type": "Transformer", "path": "0_Transformer"}]')
    with pytest.raises(UserError, match=f"found the Transformer in 0_Transformer/; give {tmp_path}/0_Transformer"):
        read_pooling(tmp_path, found.append)


def test_a_transformer_in_a_folder_of_its_own_has_the_pooling_beside_it(tmp_path):
    whole = saved(tmp_path, Pooling(WIDTH, pooling_mode="cls"))
    inside = whole / "0_Transformer"
    inside.mkdir()
    for path in [each for each in whole.iterdir() if each.is_file() and "modules" not in each.name]:
        if path.name != "config_sentence_transformers.json":
            path.rename(inside / path.name)
    modules = json.loads((whole / "modules.json").read_text())
    (whole / "modules.json").write_text(json.dumps([modules[0] | {"path": "0_Transformer"}, *modules[1:]]))
    theirs = SentenceTransformer(str(whole), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(Predictor.from_folder(inside).embed(TEXTS), theirs, atol=1e-5)
    found: list[str] = []
    (whole / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    assert read_pooling(inside, found.append) is None and "found lasttoken" in found[0]
    assert folder_of_modules(inside) == whole, "so that an export has no pooling of the mean"
    (whole / "linked").symlink_to(inside)
    for path, named in (("./0_Transformer/", "0_Transformer"), ("linked", "linked")):
        (whole / "modules.json").write_text(json.dumps([{"type": "Transformer", "path": path}, *modules[1:]]))
        assert folder_of_modules(whole / named) == whole
    (whole / "other").mkdir()
    for others in ('{"Modules": []}', "[", '["a"]', '[{"type": "Transformer", "path": "a/b"}]'):
        (whole / "modules.json").write_text(others)  # another program's, or a damaged one
        assert folder_of_modules(whole / "other") is None and read_pooling(whole / "other", found.append) is None
        with pytest.raises(UserError, match="modules.json: "):
            folder_of_modules(inside)
    with pytest.raises(UserError, match="found the path 'a/b', expected a folder beside it"):
        read_pooling(whole, found.append)


def test_vectors_of_other_outputs_than_the_last_hidden_states_are_said(tmp_path):
    """Since version 6; the settings of the first file that has some count."""
    folder = saved(tmp_path, Pooling(WIDTH, pooling_mode="mean"))
    settings = json.loads((folder / "sentence_bert_config.json").read_text())
    found: list[str] = []
    assert read_pooling(folder, found.append) is not None and not found, "as the library writes it"
    (folder / "sentence_bert_config.json").write_text("{}")
    text = {"method": "forward", "method_output_name": ["hidden_states", -2]}
    for changed, said in (
        ({"modality_config": {"text": text}}, 'method_output_name ["hidden_states", -2], expected the last'),
        ({"modality_config": {"text": text | {"method": "generate"}}}, "method 'generate', expected"),
        ({"transformer_task": "fill-mask"}, "transformer_task 'fill-mask', expected"),
    ):
        found.clear()
        (folder / "sentence_roberta_config.json").write_text(json.dumps(settings | changed))
        read_pooling(folder, found.append)
        assert len(found) == 1 and f"sentence_roberta_config.json: found {said}" in found[0]


@pytest.mark.parametrize(
    "name, content, found",
    [
        ("modules.json", "[", "can't be read as JSON"),
        ("modules.json", "{}", "found dict, expected list"),
        ("modules.json", '["Pooling"]', "found no types of modules"),
        ("modules.json", '[{"type": "Transformer"}, {"type": "Pooling", "path": "../x"}]', "found the path '../x'"),
        ("1_Pooling/config.json", "[]", "found list, expected dict"),
        ("sentence_bert_config.json", '{"max_seq_length": "12"}', "found '12', expected a whole number"),
    ],
)
def test_damaged_files_are_a_line(tmp_path, name, content, found):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    (tmp_path / "modules.json").write_text('[{"type": "Transformer"}, {"type": "Pooling", "path": "1_Pooling"}]')
    assert read_pooling(tmp_path, print) is not None and read_max_length(tmp_path) is None
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"{name}: .*{found}"):
        read_pooling(tmp_path, print)
        read_max_length(tmp_path)
