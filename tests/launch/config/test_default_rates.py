"""The peak learning rate by the size of the model, where none is given."""

import pytest
import yaml

from cloze.launch.commands import parse
from cloze.launch.config import TrainConfig
from cloze.launch.config.default_rates import FINETUNING, PRETRAINING, peak_rate
from cloze.model.config import BertConfig
from cloze.model.flops import encoder_weights
from tests.launch.finetune.running import config_of
from tests.launching import curve, train
from tests.synthetic import make_shards


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
    [("tiny", 3e-4), ("mini", 3e-4), ("small", 3e-4), ("medium", 1e-4), ("base", 3e-5), ("large", 3e-5)],
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
