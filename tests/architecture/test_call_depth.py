"""The way from the command line to a training step can be read aloud: few frames of our own, top to bottom."""

import traceback
from pathlib import Path

from cloze.launch import cli
from cloze.launch.training import trainer
from tests.forked import ForkedRun
from tests.launching import finish, pretrain_arguments
from tests.synthetic import make_shards

FLOORS = {str(Path(cli.__file__).parent), str(Path(cli.__file__).resolve().parent)}
MOST = 6


def main_that_shows_its_frames(command: list[str]) -> int:
    """`cloze` that prints, in its first step, the functions of ours that are at work."""
    rate = trainer.set_learning_rate

    def show(*arguments) -> None:
        names = [frame.name for frame in traceback.extract_stack() if frame.filename.startswith(tuple(FLOORS))]
        print("frames:", *names[names.index("main") :], flush=True)
        rate(*arguments)

    trainer.set_learning_rate = show
    return cli.main(command)


def test_few_frames_of_ours_lie_between_the_command_line_and_a_step(tmp_path):
    data = make_shards(tmp_path / "data")
    command = pretrain_arguments(data, tmp_path / "run", "--train.max_steps", "1", "--schedule.warmup_steps", "0")
    said = finish(ForkedRun(command, main=main_that_shows_its_frames))
    (line,) = {line for line in said.splitlines() if line.startswith("frames:")}
    names = line.split()[1:]
    step = names[: names.index("_advance") + 1]
    assert len(step) <= MOST, step
    assert step[0] == "main" and "pretrain" in step and "run" in step
