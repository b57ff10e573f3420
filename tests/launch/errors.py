"""What a command says of a user's mistake."""

from cloze.launch.cli import main


def error_of(capsys, *arguments) -> str:
    """The one line on stderr of a command that ends with status 2."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]
