"""Versions of the software of a run, and the commit of Cloze."""

import functools
import platform
import subprocess
from importlib import metadata

from cloze.version import PACKAGE, __version__

_LIBRARIES = ("torch", "deepspeed", "tokenizers", "pyarrow", "numpy")


def software() -> dict[str, str | None]:
    """Versions by name; `commit` of Cloze's working tree, followed by + if files differ, None without a working
    tree.
    """
    versions = {name: _version(name) for name in _LIBRARIES}
    return {"cloze": __version__, "commit": _commit(), "python": platform.python_version()} | versions


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _commit() -> str | None:
    root = PACKAGE.resolve().parent
    if not (root / ".git").exists():  # installed from a wheel: a repository around it is not Cloze's
        return None
    try:
        words = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
