"""Patterns of names against those of the standard library, on folders of all that they tell apart."""

import glob
import itertools
from pathlib import Path

from cloze.pipeline.patterns import is_named


def test_a_file_is_named_by_what_the_shell_would_find(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["a.txt", "b.json", "[x]"]
    files = [
        Path(*folders, name)
        for count in range(3)
        for folders in itertools.product("ab", repeat=count)
        for name in names
    ]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    parts = ["*", "a", "?", "**", "*.txt", "[ab]*", "[[]x]"]
    for pattern in (list(each) for count in (1, 2, 3) for each in itertools.product(parts, repeat=count)):
        found = {Path(each) for each in glob.iglob("/".join(pattern), recursive=True)}
        if pattern[-1] != "**":  # for which the library has the folder itself too
            expected = {file for file in files if found & {file, *file.parents}}
            assert {file for file in files if is_named(pattern, list(file.parts))} == expected, pattern
    assert {file for file in files if is_named(["a", "**"], list(file.parts))} == {
        file for file in files if file.parts[0] == "a" and len(file.parts) > 1
    }
