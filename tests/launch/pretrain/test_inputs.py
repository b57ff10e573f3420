"""What a run of pretraining reads."""

from dataclasses import replace

import pytest

from cloze.launch.commands import parse
from cloze.launch.pretrain.inputs import choose_data_streams, open_inputs
from cloze.pipeline.errors import UserError
from tests.launching import pretrain_arguments
from tests.synthetic import make_shards


def test_the_streams_of_a_run_are_kept_by_any_number_of_processes(tmp_path, monkeypatch):
    """Where they are fewer than a batch has samples, the first start's processes decide."""
    monkeypatch.setattr("cloze.pipeline.loading.order.MOST_STREAMS", 4)
    config = parse("pretrain", ["--data", "d", "--output", str(tmp_path), "--train.global_batch_size", "48"])
    assert [choose_data_streams(config, world_size) for world_size in (1, 3, 4, 6)] == [4, 3, 4, 6]
    (tmp_path / "config.yaml").write_text("data_streams: 3\n")
    assert [choose_data_streams(config, world_size) for world_size in (1, 3, 4, 6)] == [3, 3, 3, 3]
    assert choose_data_streams(replace(config, data_streams=8), 6) == 8


def test_validation_data_is_compared_with_the_inputs(tmp_path):
    """Before, after the model had been built."""
    data, foreign = make_shards(tmp_path / "data", validation=0), make_shards(tmp_path / "foreign", vocab_size=80)
    words = pretrain_arguments(data, tmp_path / "run")[1:]
    with pytest.raises(UserError, match="evaluation.sets: found a tokenizer with fingerprint"):
        open_inputs(parse("pretrain", [*words, "--evaluation.sets.own", str(foreign)]), 1)
    with pytest.raises(UserError, match="evaluation.patience: found 2, expected none: the validation split of"):
        open_inputs(parse("pretrain", [*words, "--evaluation.patience", "2"]), 1)
