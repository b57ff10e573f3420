"""The shape of a run that starts from another model: the source's, or compared with it, before torch is imported."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.config import PretrainConfig
from cloze.launch.pretrain.inputs import open_inputs
from cloze.launch.pretrain.precheck import check_inputs
from cloze.launch.pretrain.sweep import plan
from cloze.model.config import BertConfig
from cloze.pipeline.errors import UserError
from tests.launching import ROOT
from tests.synthetic import make_shards

SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "layer_norm_eps": 1e-7,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("shapes"))


@pytest.fixture
def source(data, tmp_path):
    """A folder as of transformers' BERT, as far as its shape tells."""
    folder = shutil.copytree(data / "tokenizer", tmp_path / "source")
    values = {"model_type": "bert", "vocab_size": 64, "max_position_embeddings": 48, **SHAPE}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def words(data: Path, source: Path, *more: str) -> list[str]:
    return ["--data", str(data), "--output", str(source.parent / "run"), "--init_from", str(source), *more]


def taken(model: BertConfig) -> dict[str, object]:
    return {name: getattr(model, name) for name in SHAPE}


def test_without_a_model_the_shape_is_the_sources_and_typed_fields_win(data, source, capsys):
    given = ("--config", "adapt", "--model.hidden_dropout_prob", "0", "--model.hidden_size", "128")
    config = parse("pretrain", words(data, source, *given))
    assert taken(config.model) == SHAPE and config.model.max_position_embeddings == 48
    assert (config.model.hidden_dropout_prob, config.model.attention_probs_dropout_prob) == (0.0, 0.1)
    check_inputs(config)
    assert open_inputs(config, 1).config.model.vocab_size == 64, "which the data decides"
    for command, others in (("plan", ()), ("sweep", ("--grid", "seed=1,2")), ("deepspeed-config", ())):
        assert taken(parse(command, words(data, source, *others)).model) == SHAPE, command
    with pytest.raises(SystemExit):
        main(["pretrain", "--init_from", str(source), "--print_config"])  # without data and output
    assert taken(BertConfig(**yaml.safe_load(capsys.readouterr().out)["model"])) == SHAPE


def test_the_runs_of_a_sweep_over_sources_have_the_shapes_of_their_sources(data, source):
    other = shutil.copytree(source, source.parent / "other")
    changed = json.loads((other / "config.json").read_text()) | {"num_hidden_layers": 2}
    (other / "config.json").write_text(json.dumps(changed))
    given = words(data, source, "--grid", f"init_from={source},{other}", "--model.hidden_dropout_prob", "0")
    config = parse("sweep", [word for word in given if word not in ("--init_from", str(source))])
    models = [BertConfig(**yaml.safe_load(run.configuration)["model"]) for run in plan(config)]
    assert [taken(model) for model in models] == [SHAPE, SHAPE | {"num_hidden_layers": 2}]
    assert {model.hidden_dropout_prob for model in models} == {0.0}
    with pytest.raises(UserError, match="model.hidden_size: found 256, expected 128"):
        plan(replace(config, model=BertConfig.preset("mini")))


def test_layers_are_those_that_are_taken(data, source):
    assert parse("pretrain", words(data, source, "--init_layers", "[0, 2]")).model.num_hidden_layers == 2


@pytest.mark.parametrize("way", ["name", "file", "recipe"])
def test_all_differences_from_a_given_model_are_said_at_once(data, source, tmp_path, way):
    """BERT-base has the values of the defaults, and is given all the same."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {ROOT}/configs/model/base.yaml\n")
    shape = yaml.safe_dump(asdict(BertConfig()))
    (tmp_path / "own.yaml").write_text(shape)
    given = {"name": ("--model", "base"), "file": ("--model", tmp_path / "own.yaml"), "recipe": ("--config", recipe)}
    config = parse("pretrain", words(data, source, *map(str, given[way])))
    assert config.model == BertConfig()
    with pytest.raises(UserError) as found:
        check_inputs(config)
    said = str(found.value)
    for name, value in SHAPE.items():
        assert f"model.{name}: found {getattr(BertConfig(), name)!r}, expected {value!r}" in said
    assert "model.max_position_embeddings: found 512, expected 48" in said and "--init_positions extend" in said
    assert f"those of init_from = {source}; leave the model out" in said and "\n" not in said
    with pytest.raises(UserError, match="model.hidden_size: found 768, expected 128; model"):
        open_inputs(PretrainConfig(str(data), str(tmp_path / "run"), init_from=str(source)), 1)  # in Python


def test_fewer_positions_than_learned_are_refused_and_other_dropout_is_not(data, source):
    check_inputs(parse("pretrain", words(data, source, "--model.attention_probs_dropout_prob", "0")))
    with pytest.raises(UserError, match="max_position_embeddings: found 32, expected at least 48: that of init_from"):
        check_inputs(parse("pretrain", words(data, source, "--model.max_position_embeddings", "32")))


def test_a_run_that_goes_on_has_the_shape_that_it_has(data, source):
    """The source may be gone by then."""
    first = parse("pretrain", words(data, source))
    output = Path(first.output)
    output.mkdir()
    (output / "config.yaml").write_text(
        yaml.safe_dump(asdict(replace(first, model=replace(first.model, vocab_size=64))))
    )
    (output / "checkpoints" / "step-00000002").mkdir(parents=True)
    shutil.rmtree(source)
    again = parse("pretrain", words(data, source))
    assert taken(again.model) == SHAPE and again.model.vocab_size == 64
    check_inputs(again)


def test_a_run_of_ours_is_a_source(data, source, tmp_path):
    shutil.rmtree(source)
    source.mkdir()
    shape = BertConfig.preset("tiny", vocab_size=64, hidden_dropout_prob=0.0)
    config = replace(PretrainConfig(str(data), "o"), model=shape)
    (source / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    assert replace(parse("pretrain", words(data, source)).model, vocab_size=64) == shape
    with pytest.raises(UserError, match="model.num_hidden_layers: found 4, expected 2"):
        check_inputs(parse("pretrain", words(data, source, "--model", "mini")))


def test_a_fine_tuned_model_is_a_source_by_its_run(data, source):
    run = source.parent / "tuned"
    run.mkdir()
    source.rename(run / "model")
    (run / "config.yaml").write_text("train_file: train.tsv\n")
    config = parse("pretrain", words(data, run))
    assert taken(config.model) == SHAPE
    check_inputs(config)
    (run / "model" / "config.json").unlink()
    with pytest.raises(UserError, match="found a run of `cloze finetune` without its model"):
        parse("pretrain", words(data, run))
