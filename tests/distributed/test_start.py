"""What a start costs beside the training: a preempted run pays it again and again."""

import sys
from importlib.util import find_spec

import pytest

from cloze.launch.cli import main
from tests.forked import ForkedRun
from tests.launching import assert_same_weights, finish, pretrain_arguments, start, weights
from tests.synthetic import make_shards

MAIN = """
import importlib.util, os, sys
from cloze.launch.cli import main
programs = set()
sys.addaudithook(lambda event, found: event == "subprocess.Popen" and programs.add(found[0]))
status = main(sys.argv[1:])
print("not needed:", sorted({"torch._dynamo", "torch._inductor.compile_fx", "sympy", "pandas"} & sys.modules.keys()))
print("compilers:", {os.path.basename(each) for each in programs} & {"cc", "gcc", "c++", "g++", "nvcc"})
looked_for = ("mlflow", "botocore")
print("looked for:", sys.modules.keys() & looked_for, [bool(importlib.util.find_spec(name)) for name in looked_for])
sys.exit(status)
"""


@pytest.mark.parametrize("stage", ["2", *(pytest.param(stage, marks=pytest.mark.slow) for stage in "03")])
def test_a_start_imports_neither_the_compiler_nor_pandas_nor_what_others_look_for(tmp_path, stage):
    """torch's optimizers and its profiler import its compiler, as DeepSpeed does at stage 3, and pyarrow pandas as soon
    as a number becomes an Arrow scalar. What DeepSpeed and TensorBoard only look for can still be imported afterwards.
    DeepSpeed would call a compiler to see what it could build.
    """
    data = make_shards(tmp_path / "data")
    options = ("--train.max_steps", "1", "--zero.stage", stage, "--monitor.profile_steps", "[0, 0]")
    arguments = pretrain_arguments(data, tmp_path / "run", *options)
    printed = finish(start([sys.executable, "-c", MAIN, *arguments]))
    there = [find_spec(name) is not None for name in ("mlflow", "botocore")]
    not_needed = ["sympy", "torch._dynamo"] if stage == "3" else []
    assert f"not needed: {not_needed}" in printed and "compilers: set()" in printed
    assert f"looked for: set() {there}" in printed


def test_a_start_says_at_once_what_it_is_doing(tmp_path):
    """On a busy machine the start takes minutes, and each part is announced, to a pipe as to a terminal."""
    data = make_shards(tmp_path / "data")
    command = pretrain_arguments(
        data, tmp_path / "run", "--train.max_steps", "2", "--schedule.warmup_steps", "0", "--train.log_every_steps", "1"
    )
    told = finish(ForkedRun(command)).splitlines()
    stages = [
        "cloze pretrain: loading PyTorch and DeepSpeed",
        "building the model and DeepSpeed's engine",
        "training from step 0: an evaluation first, then a line every step",
    ]
    places = [told.index(stage) for stage in stages]
    assert places == sorted(places) and places[0] == 0, told
    assert told[places[2] + 1].startswith("step 0/2  validation loss"), told
    again = finish(ForkedRun([*command, "--train.max_steps", "3", "--checkpoint.accept_changes", "true"])).splitlines()
    assert "training from step 2: a line every step" in again


def twice(command: list[str]) -> int:
    """The command, and once more into another folder in the same process."""
    place = command.index("--output") + 1
    return main(command) or main([*command[:place], f"{command[place]}-again", *command[place + 1 :]])


@pytest.mark.parametrize("stage", ["0", "2"])
def test_a_process_may_run_one_after_another(tmp_path, stage):
    """As a notebook does: DeepSpeed keeps a group of the world that the first run has left."""
    data = make_shards(tmp_path / "data")
    command = pretrain_arguments(
        data, tmp_path / "run", "--train.max_steps", "2", "--schedule.warmup_steps", "0", "--zero.stage", stage
    )
    finish(ForkedRun(command, main=twice))
    assert_same_weights(weights(tmp_path / "run"), weights(tmp_path / "run-again"))
