"""What a user sees while data is prepared: bars on a terminal, lines in a log."""

import re
from contextlib import redirect_stderr

import pytest

from cloze.launch.tools import data as data_commands
from tests.pipeline import corpus
from tests.terminal import terminal

pytestmark = pytest.mark.usefixtures("a_task_for_each_file")


@pytest.fixture
def config(tmp_path):
    for number in range(3):
        corpus.write_jsonl(tmp_path / f"in/{number}.jsonl", corpus.documents(30, seed=number))
    return corpus.config(tmp_path, [tmp_path / "in"])


def test_a_log_has_a_line_now_and_then(config, monkeypatch, capsys):
    monkeypatch.setattr(data_commands, "_SECONDS_A_LINE", 0)
    data_commands.prepare(config)
    written = capsys.readouterr()
    lines = [line for line in written.err.splitlines() if line.endswith(" left")]
    rates = r"[\d,]+ documents/s, [\d,]+ tokens/s, "
    for stage in ("tokenize", "build"):
        found = [line for line in lines if line.startswith(stage)]
        assert all(re.fullmatch(rf"{stage}: \d+%, {rates}\d+:\d\d:\d\d left", line) for line in found)
        assert len(found) >= 3 and "100%" in found[-1] and "0:00:00 left" in found[-1]
        assert re.search(rf"stage {stage} +│ [\d.]+ s, ", written.out)


def test_a_short_job_writes_no_lines_into_a_log(config, monkeypatch, capsys):
    monkeypatch.setattr(data_commands, "_SECONDS_A_LINE", 3600)
    data_commands.prepare(config)
    assert " left" not in capsys.readouterr().err


def test_a_terminal_has_a_bar_for_each_stage(config, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    with terminal() as (stream, shown), redirect_stderr(stream):
        data_commands.prepare(config)
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown.decode())
    for stage in ("tokenize", "build"):
        assert re.search(rf"{stage} .*100% [\d,]+ documents/s, [\d,]+ tokens/s left", text)


def test_plain_text_is_prepared_with_a_note_on_what_a_document_is(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("One sentence here. Another one there.\n\nA second paragraph follows it.\n" * 9)
    data_commands.prepare(corpus.config(tmp_path, [tmp_path / "book.txt"]))
    assert "note: book.txt: read as plain text, in which each paragraph" in capsys.readouterr().err
