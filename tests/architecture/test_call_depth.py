"""The way from the command line to the optimizer's step can be read aloud: few frames of our own, in short files."""

import traceback
from pathlib import Path

import torch

from cloze.launch import cli
from tests.forked import ForkedRun
from tests.launching import ROOT, finish, pretrain_arguments
from tests.synthetic import make_shards

FLOORS = {str(Path(cli.__file__).parent), str(Path(cli.__file__).resolve().parent)}
MOST_FRAMES = 5
MOST_LINES = 800  # of all files on the way


def main_that_shows_its_frames(command: list[str]) -> int:
    """`cloze` that prints, in the optimizer's step, which functions of ours are at work."""
    step = torch.optim.AdamW.step

    def show(*arguments):
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(tuple(FLOORS))]
        names = [frame.name for frame in frames]
        way = frames[names.index("main") :]
        print("frames:", *(f"{frame.filename}:{frame.name}" for frame in way), flush=True)
        return step(*arguments)

    torch.optim.AdamW.step = show
    return cli.main(command)


def test_few_frames_of_ours_lie_between_the_command_line_and_the_optimizers_step(tmp_path):
    data = make_shards(tmp_path / "data")
    command = pretrain_arguments(data, tmp_path / "run", "--train.max_steps", "1", "--schedule.warmup_steps", "0")
    said = finish(ForkedRun(command, main=main_that_shows_its_frames))
    (line,) = {line for line in said.splitlines() if line.startswith("frames:")}
    way = [word.rpartition(":") for word in line.split()[1:]]
    names = [name for *_, name in way]
    assert len(names) <= MOST_FRAMES, names
    assert names == ["main", "train", "run", "step", "step"], "the command line, the start, the loop, the engine"
    files = {Path(path).resolve() for path, *_ in way}
    assert all(path.is_relative_to(ROOT) for path in files)
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert sum(lines.values()) <= MOST_LINES, lines
