"""Batch arithmetic, and the peak learning rate by the size of the model, where none is given."""

import re
from dataclasses import replace

import pytest
import yaml

from cloze.launch.commands import parse
from cloze.launch.config import BatchArithmetic, PretrainConfig, TrainConfig
from cloze.launch.config.training import FINETUNING, PRETRAINING, peak_rate
from cloze.model.config import BertConfig
from cloze.model.flops import encoder_weights
from cloze.pipeline.errors import UserError
from tests.launch.finetune.running import config_of
from tests.launching import curve, train
from tests.synthetic import make_shards

BASE = PretrainConfig(data="d", output="o")


def test_the_arithmetic_is_checked_and_printed():
    train = TrainConfig(global_batch_size=64, micro_batch_size=8)
    assert str(BatchArithmetic.of(train, 2)) == "64 = 8 micro x 4 accumulation x 2 processes"
    with pytest.raises(UserError, match="found 64, expected a multiple of the 3 .*; set it to 63 or 66 .*: 2 or 4$"):
        BatchArithmetic.of(train, 3)
    with pytest.raises(UserError, match="train.global_batch_size: found 2, .* 3 processes; set it to 3 .*: 2$"):
        BatchArithmetic.of(TrainConfig(global_batch_size=2), 3)
    with pytest.raises(UserError, match="set it to 224 or 280 .*processes: 32 or 64$"):
        BatchArithmetic.of(TrainConfig(global_batch_size=256), 56)
    with pytest.raises(UserError, match="8184 or 8208 .* with --checkpoint.accept_changes true.*processes: 16 or 32$"):
        BatchArithmetic.of(TrainConfig(global_batch_size=8192), 24)
    grown = TrainConfig(global_batch_size=96, initial_global_batch_size=32, batch_increment=16, batch_warmup_tokens=1)
    with pytest.raises(UserError, match="processes: 4 or 8$"):  # that divide every size
        BatchArithmetic.of(grown, 5)


@pytest.mark.parametrize(
    ("sizes", "processes", "micro"),
    [
        ((64, None, None), 1, 32),
        ((64, None, None), 8, 8),
        ((60, None, None), 2, 30),
        ((96, None, None), 2, 24),
        ((64, 16, 8), 2, 4),
        ((62, None, None), 1, 31),
        ((34, None, None), 2, 17),
    ],
)
def test_the_micro_batch_is_the_largest_that_divides(sizes, processes, micro):
    size, initial, increment = sizes
    train = TrainConfig(
        global_batch_size=size,
        micro_batch_size=32,
        initial_global_batch_size=initial,
        batch_increment=increment,
        batch_warmup_tokens=100 if initial else 0,
    )
    assert BatchArithmetic.of(train, processes).micro_batch_size == micro
    assert train.on(processes).micro_batch_size == micro
    assert replace(train, micro_batch_size="auto").on(processes).micro_batch_size == "auto"


@pytest.mark.parametrize("recipe", ["small", "tiny", "bert-base-phase1", "electra-small"])
def test_a_trial_shorter_than_its_warmup_is_refused_with_the_option(recipe):
    """If the warmup is on the command line; that of the recipe shrinks."""
    words = ["--config", recipe, "--data", "d", "--output", "o", "--train.max_steps", "5"]
    assert parse("pretrain", words).schedule.warmup_in(5) <= 2
    words += ["--schedule.warmup_steps", "20"]
    with pytest.raises(UserError, match=r"expected at most train.max_steps = 5; .* add (--\S+ \S+), which") as refused:
        parse("pretrain", words)
    option = re.search(r"add (--\S+ \S+),", str(refused.value))[1].split()
    assert parse("pretrain", [*words, *option]).train.max_steps == 5


def test_a_micro_batch_is_a_number_or_auto():
    options = ["--data", "d", "--output", "o", "--train.micro_batch_size"]
    assert parse("pretrain", [*options, "auto"]).train.micro_batch_size == "auto"
    assert parse("pretrain", [*options, "8"]).train.micro_batch_size == 8
    with pytest.raises(UserError, match="train.micro_batch_size: found 0, expected at least 1"):
        parse("pretrain", [*options, "0"])
    with pytest.raises(UserError, match="train.micro_batch_size"):
        parse("pretrain", [*options, "many"])


@pytest.mark.parametrize("rates", [PRETRAINING, FINETUNING])
def test_every_size_has_a_rate_and_larger_models_a_smaller_one(rates):
    limits, found = zip(*rates, strict=True)
    assert list(limits) == sorted(limits) and list(found) == sorted(found, reverse=True)
    assert peak_rate(rates, 0) == peak_rate(rates, int(limits[0]) - 1) == found[0]
    assert peak_rate(rates, int(limits[0])) == found[1] and peak_rate(rates, 10**15) == found[-1]


@pytest.mark.parametrize(
    ("shape", "rate"),
    [("tiny", 2e-3), ("mini", 1e-3), ("small", 5e-4), ("medium", 2e-4), ("base", 1e-4), ("large", 1e-4)],
)
def test_the_rate_of_pretraining_goes_by_the_size_of_the_model(shape, rate):
    size = encoder_weights(BertConfig.preset(shape))
    assert TrainConfig().for_size(size).learning_rate == rate
    given = TrainConfig(learning_rate=3e-5)
    assert given.for_size(size) is given
    recipe = {"tiny": "tiny", "mini": "small"}.get(shape)  # shipped for this very shape
    if recipe:
        config = parse("pretrain", ["--config", recipe, "--data", "d", "--output", "o"])
        assert config.train.learning_rate == rate == config.train.for_size(1).learning_rate


@pytest.mark.parametrize(
    ("shape", "rate"),
    [
        ("tiny", 6e-4),
        ("mini", 6e-4),
        ("electra-small", 3e-4),
        ("small", 3e-4),
        ("medium", 1e-4),
        ("base", 3e-5),
        ("large", 3e-5),
    ],
)
def test_the_rate_of_fine_tuning_goes_by_the_size_of_the_model(shape, rate):
    size = encoder_weights(BertConfig.preset(shape))
    assert config_of().for_size(size).train.learning_rate == rate
    assert config_of("--train.learning_rate", "2e-5").for_size(size).train.learning_rate == 2e-5


def test_a_run_says_the_rate_that_it_takes_by_size_and_keeps_it(tmp_path):
    data, run = make_shards(tmp_path / "data"), tmp_path / "run"
    printed = train(data, run, "--train.learning_rate", "auto", "--train.max_steps", "2")
    assert "peak rate: 0.002, by the model's size (16,384 parameters in its layers)" in printed
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["learning_rate"] == 2e-3
    assert max(line.get("train/learning_rate", 0) for line in curve(run)) == 2e-3
    # The same words as before go on with it, and what is given is said to be nothing else.
    assert "complete" in train(data, run, "--train.learning_rate", "auto", "--train.max_steps", "2")
    assert "peak rate" not in train(data, tmp_path / "given", "--train.max_steps", "1")
    more = ("--init_from", str(run), "--train.learning_rate", "auto", "--train.max_steps", "1")
    assert "that is a rate for random weights; --config adapt" in train(data, tmp_path / "continued", *more)
