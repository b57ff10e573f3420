"""Words of the command line that are no text."""

from tests.launch.errors import error_of
from tests.launching import TINY


def test_a_word_of_the_command_line_that_is_not_utf8(tmp_path, capsys):
    """Configurations, manifests and logs hold such words; it is said before anything is written."""
    for option in ("--output", "--data", "--run_name"):
        line = error_of(capsys, "pretrain", *TINY, "--data", "data", "--output", tmp_path / "run", option, "caf\udce9")
        assert "found the word 'caf\\xe9', expected UTF-8" in line
    assert not list(tmp_path.iterdir())
