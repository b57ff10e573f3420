"""Print the installed versions as constraints: `make lock` writes constraints.txt with it.

A version that has given up Python 3.10 is pinned for newer Pythons only; there pip takes the newest one that setup.cfg
allows.
"""

from importlib.metadata import distributions

from packaging.specifiers import SpecifierSet

OURS_AND_PIPS = {"cloze-bert", "pip", "setuptools", "wheel"}

lines = []
for distribution in distributions():
    name, version = distribution.metadata["Name"], distribution.version.partition("+")[0]  # +cpu is one build of torch
    if name.lower() in OURS_AND_PIPS:
        continue
    marker = ""
    if not SpecifierSet(distribution.metadata.get("Requires-Python") or "").contains("3.10.14"):
        marker = '; python_version >= "3.11"'
    lines.append(f"{name}=={version}{marker}")
print("\n".join(sorted(lines, key=str.lower)))
