"""What the configuration of `cloze prepare` refuses before anything is read."""

import pytest

from cloze.pipeline.config import PrepareConfig, SamplesConfig, ShardsConfig, SourceConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 4}, "max_length: found 4, expected 8"),
        ({"workers": 0}, "workers: found 0"),
        ({"executor": "dask"}, "scheduler"),
        ({"scheduler": "tcp://x"}, "scheduler"),
        ({"more_lengths": [128]}, "each length once"),
        ({"samples": SamplesConfig(objective="given_pairs"), "input": ["x"]}, "pairs, with objective given_pairs"),
    ],
)
def test_configuration_is_checked(changes, message):
    with pytest.raises(UserError, match=message):
        PrepareConfig(**{"input": ["x"], "max_length": 128, **changes})


def test_an_id_is_not_the_text():
    with pytest.raises(UserError, match="source.id_field: found 'body', expected another field than text_field, or "):
        SourceConfig(text_field="body", id_field="body")


def test_missing_fields_are_named(tmp_path):
    with pytest.raises(UserError, match="--output"):
        prepare(PrepareConfig(input=["x"], tokenizer="x"))
    with pytest.raises(UserError, match="--tokenizer"):
        prepare(PrepareConfig(input=["x"], output=str(tmp_path / "o")))


def test_shards_config_bounds():
    with pytest.raises(UserError, match="target_tokens"):
        ShardsConfig(target_tokens=1)


@pytest.mark.parametrize(
    "samples",
    [
        {"objective": "full_sentences"},
        {"objective": "single_sentences"},
        {"objective": "given_pairs", "random_share": 0.0},
    ],
)
def test_pair_sets_that_would_be_the_same_are_refused(samples):
    SamplesConfig(**samples)
    with pytest.raises(UserError, match="pair_sets: found 2, expected 1: .* draws no cuts"):
        SamplesConfig(**samples, pair_sets=2)
