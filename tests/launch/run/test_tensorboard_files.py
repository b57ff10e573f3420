"""TensorBoard's files."""

import resource
from pathlib import Path

from cloze.launch import cli
from cloze.launch.run.tensorboard_files import board_in
from tests.forked import ForkedRun
from tests.launching import finish


def on_a_full_disk(words: list[str]) -> int:
    """A command that writes events until no more fit."""

    def write(*_) -> None:
        with board_in(Path(words[0])) as board:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            for step in range(9):
                board.add_text("sentences", 1000 * "word ", step)

    cli.called = write
    return cli.main([])


def test_other_events_that_no_longer_fit_are_one_line_that_names_their_folder(tmp_path):
    said = finish(ForkedRun([str(tmp_path)], main=on_a_full_disk), status=2)
    assert said.startswith(f"error: {tmp_path}: File too large; ") and len(said.splitlines()) == 1, said
