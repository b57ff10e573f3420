"""The start table names the formats that a step really has: products, parameters, gradients, masters, moments."""

from functools import partial

import pytest

from cloze.launch.training import recipe
from tests.engine_reports import formats_main, told
from tests.forked import ForkedRun
from tests.fp16_on_cpu import fp16_main
from tests.launching import finish, pretrain_arguments
from tests.synthetic import make_shards

FP32 = ["torch.float32"]
NAMES = {"fp32": FP32, "bf16": ["torch.bfloat16"], "fp16": ["torch.float16"]}
# Precision and ZeRO stage; formats of products and of parameters.
CASES = [
    ("fp32", "0", "fp32", "fp32"),
    ("fp32", "3", "fp32", "fp32"),
    ("autocast", "0", "bf16", "fp32"),
    ("autocast", "2", "bf16", "fp32"),
    ("autocast", "3", "bf16", "fp32"),
    ("bf16", "0", "bf16", "fp32"),
    ("bf16", "1", "bf16", "bf16"),
    ("bf16", "2", "bf16", "bf16"),
    ("bf16", "3", "bf16", "bf16"),
    ("fp16", "1", "fp16", "fp16"),
    ("fp16", "2", "fp16", "fp16"),
    ("fp16", "3", "fp16", "fp16"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("precision"))


def slow_main(command: list[str]) -> int:
    """The command on a CPU whose products in bf16 take twice as long."""
    recipe.bf16_slowdown = lambda device: 2.0
    return formats_main(command)


@pytest.mark.parametrize(
    ("precision", "stage", "products", "parameters"),
    [pytest.param(*case, marks=() if case[0] == "bf16" and case[1] in "02" else pytest.mark.slow) for case in CASES],
)
def test_the_table_names_what_a_step_has(data, tmp_path, precision, stage, products, parameters):
    command = pretrain_arguments(
        data,
        tmp_path / "run",
        "--train.max_steps",
        "1",
        "--train.precision",
        precision,
        "--zero.stage",
        stage,
        "--loss_scale.initial_power",
        "8",
    )
    main = partial(fp16_main, main=slow_main) if precision == "fp16" else slow_main
    output = finish(ForkedRun(command, 2, main))
    assert output.count("--train.precision fp32 is faster") == (precision != "fp32"), "rank 0 says it"
    row = " ".join(output.split("│ precision ")[1].splitlines()[0].replace("│", " ").split())
    copies = "" if parameters == "fp32" else " with fp32 master copies"
    assert row == f"{products} products, {parameters} parameters{copies}"
    seen = told(output)
    assert len(seen) == 2
    for each in seen:
        assert (each["products"], each["parameters"]) == (NAMES[products], NAMES[parameters])
        assert each["masters"] == each["moments"] == each["gradients"] == FP32, "what is summed and updated is fp32"
