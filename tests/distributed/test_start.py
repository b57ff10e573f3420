"""What a start costs beside the training: a preempted run pays it again and again."""

import sys

import pytest

from tests.launching import finish, pretrain_arguments, start
from tests.synthetic import make_shards

MAIN = """
import sys
from cloze.launch.cli import main
status = main(sys.argv[1:])
print("Inductor:", "torch._inductor.compile_fx" in sys.modules)
sys.exit(status)
"""


@pytest.mark.parametrize("stage", ["3", *(pytest.param(stage, marks=pytest.mark.slow) for stage in "02")])
def test_a_start_does_not_import_the_compiler(tmp_path, stage):
    data = make_shards(tmp_path / "data")
    arguments = pretrain_arguments(data, tmp_path / "run", "--train.max_steps", "1", "--zero.stage", stage)
    assert "Inductor: False" in finish(start([sys.executable, "-c", MAIN, *arguments]))
