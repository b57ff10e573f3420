"""Patterns of the names of files, as a shell has them, with ** for any number of folders."""

import fnmatch
import re

MAGIC = re.compile(r"[*?[]")


def is_named(pattern: list[str], below: list[str]) -> bool:
    """Whether a pattern, part by part, matches a file below a folder, or one of the folders that it lies in."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(is_named(pattern[1:], below[count:]) for count in range(len(below)))
    return bool(below) and fnmatch.fnmatchcase(below[0], pattern[0]) and is_named(pattern[1:], below[1:])
