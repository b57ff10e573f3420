"""`UserError`: an error that a user can fix; why a library has failed, in a line."""

import difflib
from collections.abc import Iterable

# By file descriptor: the names of what could not be printed to, as `filename` of the error.
STANDARD_STREAMS = {1: "standard output", 2: "standard error"}


class UserError(ValueError):
    """A one-line message: what and where, what was found, what was expected and what to do.

    The command line prints it without a traceback and ends with exit status 2.
    """


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the known one that is most like it; empty if none is."""
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def lacks_threads(error: BaseException) -> bool:
    """Whether a thread or process could not be started, of which Python, Arrow and Gloo tell in their messages."""
    return any(said in str(error) for said in ("can't start new thread", "Resource temporarily unavailable"))


def reason_of(error: BaseException) -> str:
    """The first line of what a library says of an error; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def on_one_line(error: BaseException) -> str:
    """All that a library says of an error, on one line; its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
