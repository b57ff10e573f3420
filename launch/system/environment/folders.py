"""Folders of the user outside of a run."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cloze.pipeline.errors import UserError


def cache_folder() -> Path:
    """The user's cache folder (XDG base directories).

    Raises:
        UserError: the environment names none, and the user has no home folder, as one of a number alone in a container.
    """
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "cloze"
    home = os.path.expanduser("~")
    if home == "~":
        raise UserError(
            f"HOME: found none in the environment, and no user of the number {os.getuid()}, expected a folder for "
            "caches; set HOME or XDG_CACHE_HOME"
        )
    return Path(home) / ".cache" / "cloze"


_EXTENSIONS = "TORCH_EXTENSIONS_DIR"


def extensions_folder() -> Path:
    """Where what torch.utils.cpp_extension compiles is kept: a user's own choice, or the cache folder."""
    given = os.environ.get(_EXTENSIONS)
    return Path(given) if given else cache_folder() / "extensions"


@contextlib.contextmanager
def extensions_in(folder: Path) -> Iterator[None]:
    """Context in which torch.utils.cpp_extension compiles in a folder, and loads from it."""
    given = os.environ.get(_EXTENSIONS)
    os.environ[_EXTENSIONS] = str(folder)
    try:
        yield
    finally:
        if given is None:
            del os.environ[_EXTENSIONS]
        else:
            os.environ[_EXTENSIONS] = given
