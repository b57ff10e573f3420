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


def test_a_metric_of_a_set_that_is_not_there_is_refused_before_anything_is_built(tmp_path, monkeypatch):
    """Before, at the first evaluation, when the model had been built and the folder written."""
    own, other, empty = (
        make_shards(tmp_path / name, validation=count) for name, count in (("own", 16), ("other", 16), ("empty", 0))
    )

    def metric(data, *more):
        words = [*pretrain_arguments(data, tmp_path / "run")[1:], "--config", "adapt", *more]
        return open_inputs(parse("pretrain", words), 1).config.evaluation.metric

    def mixture(*folders):
        path = tmp_path / f"{'-'.join(folder.name for folder in folders)}.yaml"
        path.write_text(f"sources: [{', '.join(f'{{path: {folder}}}' for folder in folders)}]")
        return path

    several = "--evaluation.sets.other", str(other)
    assert metric(own) == metric(own, *several) == metric(empty, *several) == "loss"
    assert metric(mixture(own, other)) == "loss/own" and metric(mixture(other, own)) == "loss/other"
    assert metric(own, *several, "--evaluation.metric", "mlm_loss/other") == "mlm_loss/other"
    named = "--evaluation.metric", "mlm_loss/own"
    for data, more, expected in (
        (own, named, "expected mlm_loss: no validation set of this run has the name own; use --evaluation.metric mlm"),
        (own, (*named, *several), "expected mlm_loss or mlm_loss/other: no"),
        (mixture(other, empty), named, "expected mlm_loss or mlm_loss/other: no"),
        (mixture(empty, own), (), "'loss/empty', expected loss or loss/own: the validation split of empty is empty; "),
    ):
        with pytest.raises(UserError, match=expected):
            metric(data, *more)
    (tmp_path / "measuring.py").write_text(
        "from cloze.launch.training.callbacks import Callback\n"
        "class Watches(Callback): pass\n"
        "class Measures(Callback):\n  def on_evaluation(self, run, scalars): return {'validation/a/b': 1.0}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert metric(own, "--evaluation.metric", "a/b", "--callbacks", "measuring.Measures") == "a/b"
    with pytest.raises(UserError, match="no validation set of this run has the name b"):
        metric(own, "--evaluation.metric", "a/b", "--callbacks", "measuring.Watches")
    assert not (tmp_path / "run").exists()
