"""Words of the command line that are no text."""

import locale
import os
import subprocess
import sys

import pytest

from cloze.launch.system.environment.process import read_and_write_utf8
from tests.launch.errors import error_of
from tests.launching import TINY


def test_a_word_of_the_command_line_that_is_not_utf8(tmp_path, capsys):
    """Configurations, manifests and logs hold such words; it is said before anything is written."""
    for option in ("--output", "--data", "--run_name"):
        line = error_of(capsys, "pretrain", *TINY, "--data", "data", "--output", tmp_path / "run", option, "caf\udce9")
        assert "found the word 'caf\\xe9', expected UTF-8" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("encoding", "chosen", "again"), [("ISO-8859-1", None, True), ("ISO-8859-1", "0", False), ("UTF-8", None, False)]
)
def test_a_locale_without_utf8_does_not_decide_what_is_read_and_printed(monkeypatch, encoding, chosen, again):
    """As en_US on some clusters: a bar or a Chinese token would be a traceback, a path in a configuration another."""
    monkeypatch.setattr(locale, "getpreferredencoding", lambda do_setlocale: encoding)
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    if chosen is not None:
        monkeypatch.setenv("PYTHONUTF8", chosen)
    begun = []
    monkeypatch.setattr(os, "execv", lambda program, words: begun.append((words[1:], os.environ["PYTHONUTF8"])))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "cloze", "plan"])
    read_and_write_utf8()
    assert begun == ([(["-m", "cloze", "plan"], "1")] if again else [])
    read_and_write_utf8()
    assert len(begun) <= 1, "it begins again once"


def test_closed_streams_are_open_again_and_no_file_takes_their_place(tmp_path):
    """As behind `>&-`, and in daemons: a checkpoint would have the number of standard output."""
    program = (
        "import sys; from cloze.launch.system.environment.process import open_standard_streams as again; again(); "
        "print('said'); print('said', file=sys.stderr); assert not sys.stdin.read(); "
        "print(open(sys.argv[1], 'w').fileno() > 2, file=open(sys.argv[1] + '-2', 'w'))"
    )
    subprocess.run(
        ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", sys.executable, "-c", program, tmp_path / "a"], check=True
    )
    assert (tmp_path / "a-2").read_text() == "True\n"
