"""Every optimizer, and every place of its states, in a real run of two processes: after a SIGKILL the same bits."""

import pytest

from tests.engine_reports import compile_deepspeed_adam
from tests.forked import ForkedRun
from tests.launching import assert_killed_equals_whole, finish, pretrain_arguments
from tests.synthetic import make_shards

RUN = ("--train.max_steps", "24", "--train.log_every_steps", "3", "--checkpoint.every_steps", "8")
OPTIONS_OF_MUON = (
    *("--optimizer.name", "muon", "--optimizer.matrices", "heads"),
    *("--optimizer.matrix_decay", "hyperball", "--optimizer.embedding_rate", "0.5"),
)
MUP = ("--model.parametrization", "mup", "--model.base_hidden_size", "16", "--model.base_num_layers", "1")
slow = pytest.mark.slow
CASES = [
    pytest.param("MuonWithAdamW", "0", ("--optimizer.name", "muon"), id="muon", marks=slow),
    pytest.param(
        "UncorrectedAdamW",
        "2",
        ("--optimizer.bias_correction", "false", "--optimizer.layer_decay", "0.8"),
        id="uncorrected-layer_decay",
        marks=slow,
    ),
    pytest.param("UncorrectedAdamW", "3", ("--optimizer.bias_correction", "false"), id="uncorrected-3", marks=slow),
    pytest.param("MuonWithAdamW", "2", (*OPTIONS_OF_MUON, "--ema.decay", "0.9"), id="muon-2", marks=slow),
    pytest.param("Lamb", "1", ("--optimizer.name", "lamb", "--train.precision", "bf16"), id="lamb-1", marks=slow),
    pytest.param("StableAdamW", "2", ("--optimizer.name", "stable_adamw", *MUP), id="stable_adamw-2-mup", marks=slow),
    pytest.param("AdamW", "1", MUP, id="adamw-1-mup", marks=slow),  # DeepSpeed's partition, of more groups
    pytest.param("AdamW", "2", ("--zero.offload_optimizer", "true"), id="offload", marks=slow),
    pytest.param(
        "AdamW",
        "3",
        ("--zero.offload_optimizer", "true", "--zero.offload_parameters", "true"),
        id="offload-3",
        marks=slow,
    ),
    pytest.param("AdamW", "2", ("--train.precision", "autocast"), id="autocast", marks=slow),
    pytest.param(
        "DeepSpeedCPUAdam",
        "3",
        ("--optimizer.implementation", "deepspeed", "--zero.offload_optimizer", "true"),
        id="deepspeed",
        marks=slow,
    ),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("optimizers"))


@pytest.mark.parametrize(("kind", "stage", "overrides"), CASES)
def test_killed_and_resumed(data, tmp_path, kind, stage, overrides):
    whole, cut = (
        pretrain_arguments(data, tmp_path / name, *RUN, "--zero.stage", stage, *overrides) for name in ("whole", "cut")
    )
    if "deepspeed" in overrides:
        compile_deepspeed_adam()
    said = finish(ForkedRun(whole, 2))
    assert f"{kind}, ZeRO stage {stage}" in said, "the table names the live class"
    assert ("mup, " in said) == ("mup" in overrides), "and the parametrization with its factors"
    assert_killed_equals_whole(tmp_path / "whole", 12, cut, 2)
