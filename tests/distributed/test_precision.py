"""The start table names the formats that a step really has: products, parameters, gradients, masters, moments."""

from functools import partial

import pytest

from tests.engine_reports import assert_formats, formats_main
from tests.forked import ForkedRun
from tests.fp16_on_cpu import fp16_main
from tests.launching import finish, pretrain_arguments
from tests.synthetic import make_shards

slow = pytest.mark.slow
# Of fp32, autocast and bf16 tests/distributed/test_exactness.py shows it at every stage.
CASES = [("bf16", "0"), ("bf16", "2"), *(pytest.param("fp16", stage, marks=slow) for stage in "123")]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("precision"))


@pytest.mark.parametrize(("precision", "stage"), CASES)
def test_the_table_names_what_a_step_has(data, tmp_path, precision, stage):
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
    main = partial(fp16_main, main=formats_main) if precision == "fp16" else formats_main
    assert_formats(finish(ForkedRun(command, 2, main)), precision, stage, processes=2, steps=1)
