"""What is wrong in a configuration is one line that names the field, what was found and what was expected."""

import math
import sys
from dataclasses import MISSING, fields, is_dataclass
from typing import get_args, get_type_hints

import pytest

from cloze.launch.commands import COMMANDS
from cloze.launch.config import TrainConfig
from cloze.launch.config.sections import MaskingPhase, PretrainMaskingConfig
from cloze.launch.config.training import BatchPhase
from cloze.launch.parsing.fields import describe
from cloze.pipeline.bounds import Bounds, bounds_of
from cloze.pipeline.errors import UserError
from cloze.pipeline.references import load
from tests.launch.errors import error_of
from tests.launching import TINY
from tests.synthetic import make_shards

# Values of required fields; of others a text.
VALUES = {"global_batch_size": 8, "until_tokens": 5, "rate": 0.5, "input": ["a"], "data": ["d"], "grid": ["seed=1,2"]}

# Items of lists, which their section checks.
CHECKED_BY = {
    BatchPhase: lambda phase: TrainConfig(batch_phases=[phase]),
    MaskingPhase: lambda phase: PretrainMaskingConfig(phases=[phase]),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("errors"))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--train.max_step", "3"], "did you mean --train.max_steps?"),
        (["--train.max_steps", "many"], "train.max_steps"),
        (["--train.learning_rate", "-1"], "train.learning_rate: found -1"),
        (["--train.learning_rate", ".nan"], "train.learning_rate: found nan, expected above 0"),
        (["--train.learning_rate", ".inf"], "--train.learning_rate: found a value that is infinite or no number"),
        (["--seed", str(1 << 63)], "seed: found 9223372036854775808, expected 0 to 9223372036854775807"),
        (["--model.hidden_dropout_prob", "0.999999"], "expected 0 to 0.99998"),
        (["--train.precision", "fp8"], "fp8"),
        (["--train.precision", "fp16"], "found fp16 at zero.stage 0, expected stage 1 to 3"),
        (["--model.hidden_size", "33"], "model.hidden_size: found 33, expected a multiple of"),
        (["--model.vocab_size", "99"], "model.vocab_size: found 99, expected 64"),
        (["--model.max_position_embeddings", "16"], "model.max_position_embeddings: found 16, expected at least 32"),
        (["--schedule.warmup_steps", "2000"], "schedule.warmup_steps: found 2000, expected at most train.max_steps"),
        (["--optimizer.betas", "[0.9]"], "optimizer.betas: found [0.9]"),
        (["--optimizer.name", "lamb", "--zero.stage", "3"], "found lamb at zero.stage 3, expected stage 0 to 2"),
        (
            ["--optimizer.name", "muon", "--zero.stage", "2", "--zero.offload_optimizer", "true"],
            "zero.offload_optimizer: found true with optimizer.name muon",
        ),
        (["--optimizer.name", "lamb", "--train.precision", "fp16"], "found lamb with train.precision fp16, expected"),
        (["--optimizer.name", "muon", "--optimizer.implementation", "deepspeed"], "optimizer.implementation: found"),
        (["--optimizer.name", "muon", "--optimizer.bias_correction", "false"], "optimizer.bias_correction: found"),
        (["--optimizer.layer_decay", "0"], "optimizer.layer_decay: found 0.0, expected above 0"),
        (["--optimizer.trust_ratio_bounds", "[0.3, 0.01]"], "optimizer.trust_ratio_bounds: found [0.3, 0.01]"),
        (["--schedule.warmup_tokens", "10"], "schedule.warmup_tokens: found 10 with schedule.name linear"),
        (["--zero.stage", "4"], "zero.stage"),
        (["--train.learning_rate", "1" * 400], "train.learning_rate"),
        (["--zero.offload_optimizer", "true"], "found true at zero.stage 0, expected stage 2 or 3; add --zero.stage 2"),
        (["--zero.stage", "2", "--zero.offload_parameters", "true"], "zero.offload_parameters: found true at zero"),
        (["--loss_scale.initial_power", "40"], "loss_scale.initial_power: found 40, expected 0 to 32"),
        (["--train.time_budget_hours", "1", "--schedule.warmup_steps", "5"], "schedule.warmup_steps: found 5 with"),
        (["--train.time_budget_hours", "0"], "train.time_budget_hours: found 0.0, expected above 0"),
        (["--train.initial_global_batch_size", "8"], "train.batch_warmup_tokens: found 8 and 0, expected both or none"),
        (["--train.batch_increment", "8"], "train.batch_increment: found 8 without train.initial_global_batch_size"),
        (["--train.initial_global_batch_size", "12", "--train.batch_warmup_tokens", "9"], "train.batch_increment: fo"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--config", sys.executable], "that are no UTF-8, expected a YAML file"),
        (["--deepspeed", '{"bf16": {"enabled": true}}'], "deepspeed.bf16: found a setting, expected none"),
        (["--deepspeed", '{"bfloat16": {"enabled": true}}'], "deepspeed.bfloat16: found a setting, expected none"),
        (
            ["--zero.stage", "2", "--deepspeed", '{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}'],
            "deepspeed.zero_optimization.offload_optimizer: found a setting, expected none: zero.offload_optimizer",
        ),
        (["--deepspeed", '{"zero_optimization": null}'], "deepspeed.zero_optimization: found None, expected"),
        (["--deepspeed", '{"gradient_allreduce_op": "sum"}'], "found 'sum', expected 'mean': the loss counts on"),
        (["--deepspeed", '{"gradient_predivide_factor": 2}'], "gradient_predivide_factor: found 2, expected 1.0: "),
        (["--deepspeed", '{"prescale_gradients": true}'], "prescale_gradients: found True, expected False: "),
        (["--deepspeed", '{"managed_gradient_accumulation": false}'], "found False, expected True: the run tells"),
        (
            ["--zero.stage", "2", "--deepspeed", '{"zero_optimization": {"compute_grad_norm": false}}'],
            "deepspeed.zero_optimization.compute_grad_norm: found False, expected True: by its norm",
        ),
    ],
)
def test_a_wrong_field_names_itself_what_was_found_and_what_was_expected(data, tmp_path, capsys, overrides, expected):
    line = error_of(capsys, "pretrain", *TINY, "--data", data, "--output", tmp_path / "run", *overrides)
    assert expected in line
    assert not (tmp_path / "run").exists(), "nothing is left of a run that could not start"


def sections(kind) -> set[type]:
    """The dataclasses of a configuration: its own, its sections, and those of items of lists."""
    found = {kind}
    for hint in get_type_hints(kind).values():
        for part in (hint, *get_args(hint), *(item for member in get_args(hint) for item in get_args(member))):
            if is_dataclass(part) and part not in found:
                found |= sections(part)
    return found


def outside(bounds: Bounds) -> list[float]:
    lower = [bounds.at_least - 1] if bounds.at_least is not None else [bounds.above] if bounds.above is not None else []
    upper = [bounds.at_most + 1] if bounds.at_most is not None else [bounds.below] if bounds.below is not None else []
    return [*lower, *upper, math.nan]


@pytest.mark.parametrize("stage", ["true", "1.0", "false"])
def test_a_stage_that_only_equals_a_number_is_refused_in_a_file_too(tmp_path, capsys, stage):
    (tmp_path / "c.yaml").write_text(f"zero: {{stage: {stage}}}\n")
    line = error_of(capsys, "pretrain", "--config", tmp_path / "c.yaml", "--data", "d", "--output", tmp_path / "run")
    assert f"zero.stage: found {stage.capitalize()}, expected 0, 1, 2 or 3" in line


def test_every_field_refuses_what_is_out_of_its_bounds_and_says_them_in_its_help():
    checked = 0
    for config in {load(command.config) for command in COMMANDS.values()}:
        described = describe(config)
        for kind in sections(config):
            required = {
                field.name: VALUES.get(field.name, "x")
                for field in fields(kind)
                if field.default is MISSING and field.default_factory is MISSING
            }
            for name, allowed in bounds_of(kind).items():
                for number in outside(allowed):
                    # Of an operation's options the kind is checked before: NaN is no whole number.
                    with pytest.raises(
                        UserError, match=rf"{name}: found {number}, expected ({allowed}|a whole number)"
                    ):
                        value = [number] if "list" in str(get_type_hints(kind)[name]) else number
                        item = kind(**required | {name: value})
                        CHECKED_BY[kind](item)
                checked += 1
            for name, allowed in bounds_of(config).items():
                assert described[name].sentence.endswith(f" {str(allowed).capitalize()}."), name
    assert checked > 100
