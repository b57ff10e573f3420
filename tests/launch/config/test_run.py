"""Batch arithmetic, DeepSpeed's configuration, the command line's overrides."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from cloze.launch.cli import main, parse
from cloze.launch.config import BatchArithmetic, PretrainConfig, TrainConfig, ZeroConfig
from cloze.launch.engine.config import deepspeed_config
from cloze.launch.parsing.parser import words_first
from cloze.launch.pretrained.source import find_source
from cloze.model.config import BertConfig, ModelError
from cloze.model.flops import encoder_weights
from cloze.pipeline.errors import UserError
from tests.launching import ROOT, curve, train
from tests.synthetic import make_shards

BASE = PretrainConfig(data="d", output="o")


def test_the_arithmetic_is_checked_and_printed():
    train = TrainConfig(global_batch_size=64, micro_batch_size=8)
    assert str(BatchArithmetic.of(train, 2)) == "64 = 8 micro x 4 accumulation x 2 processes"
    with pytest.raises(UserError, match="found 64, expected a multiple of the 3 .*; set it to 63 or 66,.*: 2 or 4$"):
        BatchArithmetic.of(train, 3)
    with pytest.raises(UserError, match="train.global_batch_size: found 2, .* 3 processes; set it to 3,.*: 2$"):
        BatchArithmetic.of(TrainConfig(global_batch_size=2), 3)
    with pytest.raises(UserError, match="set it to 224 or 280, or, as a run that goes on must, .*processes: 32 or 64$"):
        BatchArithmetic.of(TrainConfig(global_batch_size=256), 56)
    grown = TrainConfig(global_batch_size=96, initial_global_batch_size=32, batch_increment=16,
                        batch_warmup_tokens=1)
    with pytest.raises(UserError, match="processes: 4 or 8$"):  # that divide every size
        BatchArithmetic.of(grown, 5)


@pytest.mark.parametrize(
    ("sizes", "processes", "micro"),
    [((64, None, None), 1, 32), ((64, None, None), 8, 8), ((60, None, None), 2, 30), ((96, None, None), 2, 24),
     ((64, 16, 8), 2, 4), ((62, None, None), 1, 31), ((34, None, None), 2, 17)],
)
def test_the_micro_batch_is_the_largest_that_divides(sizes, processes, micro):
    size, initial, increment = sizes
    train = TrainConfig(global_batch_size=size, micro_batch_size=32, initial_global_batch_size=initial,
                        batch_increment=increment, batch_warmup_tokens=100 if initial else 0)
    assert BatchArithmetic.of(train, processes).micro_batch_size == micro
    assert train.on(processes).micro_batch_size == micro
    assert replace(train, micro_batch_size="auto").on(processes).micro_batch_size == "auto"


def test_a_micro_batch_is_a_number_or_auto():
    options = ["--data", "d", "--output", "o", "--train.micro_batch_size"]
    assert parse("pretrain", [*options, "auto"]).train.micro_batch_size == "auto"
    assert parse("pretrain", [*options, "8"]).train.micro_batch_size == 8
    with pytest.raises(UserError, match="train.micro_batch_size: found 0, expected at least 1"):
        parse("pretrain", [*options, "0"])
    with pytest.raises(UserError, match="train.micro_batch_size"):
        parse("pretrain", [*options, "many"])


def test_compiled_layers_are_refused_where_weights_move():
    with pytest.raises(UserError, match="train.compile: found true at zero.stage 3, expected stage 0 to 2"):
        parse("pretrain", ["--data", "d", "--output", "o", "--train.compile", "true", "--zero.stage", "3"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "autocast"])
def test_gradients_are_accumulated_and_reduced_in_fp32(stage, precision):
    if precision == "fp16" and stage == 0:
        pytest.skip("refused, see test_errors.py")
    config = replace(BASE, zero=ZeroConfig(stage), train=replace(BASE.train, precision=precision))
    made = deepspeed_config(config, 2)
    assert made["communication_data_type"] == "fp32"
    assert made["train_batch_size"] == made["train_micro_batch_size_per_gpu"] * made["gradient_accumulation_steps"] * 2
    if precision == "fp16" or (precision == "bf16" and stage):
        assert made["data_types"] == {"grad_accum_dtype": "fp32"}
    assert ("torch_autocast" in made) == (precision == "autocast" or (precision == "bf16" and stage == 0))
    if "torch_autocast" in made:
        assert made["torch_autocast"]["lower_precision_safe_modules"] == [], "DeepSpeed would send these in bf16"


def test_a_section_of_deepspeeds_own_settings_adds_and_never_contradicts(tmp_path):
    (tmp_path / "c.yaml").write_text("deepspeed:\n  wall_clock_breakdown: true\n  zero_optimization:\n"
                                     "    reduce_bucket_size: 1000\n    stage: 2\n")
    arguments = ["--config", str(tmp_path / "c.yaml"), "--data", "d", "--output", "o", "--zero.stage"]
    made = deepspeed_config(parse("pretrain", [*arguments, "2"]), 1)
    assert made["wall_clock_breakdown"] is True
    assert made["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}
    with pytest.raises(UserError, match="deepspeed.zero_optimization.stage: found 2, expected 1"):
        deepspeed_config(parse("pretrain", [*arguments, "1"]), 1)


def test_deepspeeds_configuration_is_printed_without_a_run(tmp_path, capsys):
    arguments = ["--train.global_batch_size", "512", "--train.micro_batch_size", "4", "--train.precision", "fp16",
                 "--loss_scale.initial_power", "12", "--zero.stage", "3", "--zero.offload_optimizer", "true",
                 "--zero.offload_parameters", "true"]
    assert main(["deepspeed-config", *arguments, "--processes", "64"]) == 0
    printed = json.loads(capsys.readouterr().out)
    run = parse("pretrain", [*arguments, "--data", "d", "--output", "o"])
    assert printed == deepspeed_config(run, 64)
    assert printed["gradient_accumulation_steps"] == 2 and printed["fp16"]["initial_scale_power"] == 12
    assert printed["zero_optimization"] == {
        "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    assert main(["deepspeed-config", "--config", "bert-large-phase1", "--processes", "8"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) and "train.micro_batch_size: found auto, which a run finds out" in printed.err
    assert main(["deepspeed-config", *arguments, "--processes", "7"]) == 2
    assert "expected a multiple of" in capsys.readouterr().err


def test_no_clipping_still_measures_the_norm():
    config = replace(BASE, train=replace(BASE.train, gradient_clipping=0))
    assert deepspeed_config(config, 1)["gradient_clipping"] == 1e30


@pytest.mark.parametrize(("shape", "rate"), [
    ("tiny", 2e-3), ("mini", 1e-3), ("small", 5e-4), ("medium", 2e-4), ("base", 1e-4), ("large", 1e-4)])
def test_the_rate_of_pretraining_goes_by_the_size_of_the_model(shape, rate):
    size = encoder_weights(BertConfig.preset(shape))
    assert TrainConfig().for_size(size).learning_rate == rate
    given = TrainConfig(learning_rate=3e-5)
    assert given.for_size(size) is given
    recipe = {"tiny": "tiny", "mini": "small"}.get(shape)  # shipped for this very shape
    if recipe:
        config = parse("pretrain", ["--config", recipe, "--data", "d", "--output", "o"])
        assert config.train.learning_rate == rate == config.train.for_size(1).learning_rate


def test_a_run_says_the_rate_that_it_takes_by_size_and_keeps_it(tmp_path):
    data, run = make_shards(tmp_path / "data"), tmp_path / "run"
    printed = train(data, run, "--train.learning_rate", "auto", "--train.max_steps", "2")
    assert "peak rate: 0.002, by the model's size (16,384 parameters in its layers)" in printed
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["learning_rate"] == 2e-3
    assert max(line.get("train/learning_rate", 0) for line in curve(run)) == 2e-3
    # The same words as before go on with it, and what is given is said to be nothing else.
    assert "complete" in train(data, run, "--train.learning_rate", "auto", "--train.max_steps", "2")
    assert "peak rate" not in train(data, tmp_path / "given", "--train.max_steps", "1")


def test_overrides_win_over_the_file_whatever_the_order(tmp_path):
    (tmp_path / "c.yaml").write_text("train:\n  max_steps: 7\n  learning_rate: 0.5\n")
    config = parse("pretrain", ["--train.max_steps", "9", "--config", str(tmp_path / "c.yaml"), "--data", "d",
                                "--output", "o"])
    assert (config.train.max_steps, config.train.learning_rate) == (9, 0.5)
    config = parse("pretrain", [f"--config={tmp_path / 'c.yaml'}", "--data", "d", "--output", "o"])
    assert config.train.max_steps == 7


def test_single_fields_win_over_the_file_of_their_section():
    for order in ((0, 1), (1, 0)):
        options = [["--model.hidden_size", "64"], ["--model", "configs/model/tiny.yaml"]]
        arguments = [word for i in order for word in options[i]]
        model = parse("pretrain", [*arguments, "--data", "d", "--output", "o"]).model
        assert (model.hidden_size, model.num_hidden_layers) == (64, 2)


def test_a_list_may_be_several_words_one_word_or_a_list():
    for words in (["a", "b"], ['["a", "b"]']):
        assert parse("vocab", ["--output", "o", "--input", *words, "--vocab_size", "99"]).input == ["a", "b"]
    assert parse("vocab", ["--input", "*.txt", "--output", "o"]).input == ["*.txt"]
    assert parse("vocab", ["--input=x", "--output", "o"]).input == ["x"]


@pytest.mark.parametrize("words", [["predict"], ["predict", "--help"]])
def test_the_first_of_two_words_lists_its_commands(capsys, words):
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "predict fill-mask" in printed and "pretrain" not in printed


def test_print_config_round_trips(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["pretrain", "--data", "d", "--output", "o", "--train.max_steps", "77", "--print_config"])
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert parse("pretrain", ["--config", str(tmp_path / "printed.yaml")]).train.max_steps == 77


def test_the_command_line_without_a_command(capsys):
    assert main([]) == 0 and "pretrain" in capsys.readouterr().out
    assert main(["--version"]) == main(["--local_rank=1", "--version"]) == 0  # as `deepspeed` starts it
    assert main(["pretrian"]) == 2
    assert "did you mean pretrain?" in capsys.readouterr().err


def test_shipped_configurations_go_by_their_names(tmp_path, monkeypatch):
    """What exists in the folder goes first; what is neither is refused with the names that are known."""
    monkeypatch.chdir(tmp_path)
    by_name, by_path = (parse("pretrain", ["--config", name, "--data", "d", "--output", "o"])
                        for name in ("tiny", str(ROOT / "configs" / "pretrain" / "tiny.yaml")))
    assert by_name == by_path and by_name.model.hidden_size == 128
    assert parse("pretrain", ["--model=base", "--data", "d", "--output", "o"]).model.hidden_size == 768
    assert parse("prepare", ["--config", "books", "--output", "o"]).vocabulary.model == "wordpiece"
    for arguments, said in ((["--config", "tinny"], "--config: found no file 'tinny', expected a YAML file or one of"),
                            (["--config", "tinny"], "did you mean tiny?"),
                            (["--model", "bse"], "--model: found no file 'bse', expected a YAML file or one of"),
                            (["--config", "books"], "bert-base-phase1")):
        with pytest.raises(UserError, match=re.escape(said)):
            parse("pretrain", [*arguments, "--data", "d", "--output", "o"])
    Path("tiny").write_text("train: {max_steps: 7}")
    assert parse("pretrain", ["--config", "tiny", "--data", "d", "--output", "o"]).train.max_steps == 7


def test_a_shape_for_fine_tuning_goes_by_its_name(tmp_path, monkeypatch):
    """A run, a folder or a file of that name goes first."""
    monkeypatch.chdir(tmp_path)
    found = parse("finetune", ["sst2", "--model", "mini", "--train", "t", "--validation", "v", "--output", "o"])
    with pytest.raises(UserError, match=r"tokenizer: found none, .*: mini is a shape without a vocabulary"):
        find_source(found)
    Path("mini").mkdir()
    with pytest.raises((UserError, ModelError), match="mini"):
        find_source(found)


def test_words_behind_two_dashes_keep_their_order():
    assert words_first(["m", "--top_k", "3", "a", "--", "-b", "--c"]) == ["--top_k", "3", "--", "m", "a", "-b", "--c"]
    found = parse("predict fill-mask", ["m", "--top_k", "3", "--", "-first", "second", "--third"])
    assert found.model == "m" and found.text == ["-first", "second", "--third"] and found.top_k == 3


def test_a_folder_hides_no_shipped_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "mini"):
        (tmp_path / name).mkdir()
    assert parse("pretrain", ["--config", "tiny", "--model", "mini", "--data", "d", "--output", "o"]).train.max_steps


def test_a_text_given_as_data_is_not_printed_whole(tmp_path):
    (tmp_path / "corpus.txt").write_text("A line of text.\n" * 1000)
    with pytest.raises(UserError, match="^data: found a text, 'A line of text") as error:
        parse("pretrain", ["--data", str(tmp_path / "corpus.txt"), "--output", "o"])
    assert len(str(error.value)) < 400


def test_a_fine_tuning_is_repeated_by_its_own_configuration(tmp_path):
    first = parse("finetune", ["sst2", "--model", "m", "--train", "t", "--validation", "v", "--output", "o"])
    first = replace(first, evaluate_every_epochs=1.0).for_units(3200)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(first)))
    assert parse("finetune", ["--config", str(tmp_path / "config.yaml")]) == first
