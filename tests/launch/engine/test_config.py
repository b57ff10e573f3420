"""DeepSpeed's configuration, made from ours."""

import json
from dataclasses import replace

import pytest

from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.config import PretrainConfig, ZeroConfig
from cloze.launch.engine.config import deepspeed_config
from cloze.pipeline.errors import UserError

BASE = PretrainConfig(data="d", output="o")


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
    (tmp_path / "c.yaml").write_text(
        "deepspeed:\n  wall_clock_breakdown: true\n  zero_optimization:\n    reduce_bucket_size: 1000\n    stage: 2\n"
    )
    arguments = ["--config", str(tmp_path / "c.yaml"), "--data", "d", "--output", "o", "--zero.stage"]
    made = deepspeed_config(parse("pretrain", [*arguments, "2"]), 1)
    assert made["wall_clock_breakdown"] is True
    assert made["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}
    with pytest.raises(UserError, match="deepspeed.zero_optimization.stage: found 2, expected 1"):
        deepspeed_config(parse("pretrain", [*arguments, "1"]), 1)


def test_deepspeeds_configuration_is_printed_without_a_run(tmp_path, capsys):
    arguments = [
        "--train.global_batch_size",
        "512",
        "--train.micro_batch_size",
        "4",
        "--train.precision",
        "fp16",
        "--loss_scale.initial_power",
        "12",
        "--zero.stage",
        "3",
        "--zero.offload_optimizer",
        "true",
        "--zero.offload_parameters",
        "true",
    ]
    assert main(["deepspeed-config", *arguments, "--processes", "64"]) == 0
    printed = json.loads(capsys.readouterr().out)
    run = parse("pretrain", [*arguments, "--data", "d", "--output", "o"])
    assert printed == deepspeed_config(run, 64)
    assert printed["gradient_accumulation_steps"] == 2 and printed["fp16"]["initial_scale_power"] == 12
    assert printed["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
    assert main(["deepspeed-config", "--config", "bert-large-phase1", "--processes", "8"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) and "train.micro_batch_size: found auto, which a run finds out" in printed.err
    assert main(["deepspeed-config", *arguments, "--processes", "7"]) == 2
    assert "expected a multiple of" in capsys.readouterr().err


def test_deepspeed_clips_where_it_partitions_and_the_engine_at_stage_0():
    for stage, clipping, expected in ((0, 1.0, 0.0), (0, 0.0, 0.0), (1, 1.0, 1.0), (3, 0.0, 0.0)):
        config = replace(BASE, train=replace(BASE.train, gradient_clipping=clipping), zero=ZeroConfig(stage))
        assert deepspeed_config(config, 1)["gradient_clipping"] == expected
