"""Cloze pretrains BERT at scale and puts the result to work.

The three floors lie at the top of the repository; the links beside this file make them `cloze.pipeline`,
`cloze.model` and `cloze.launch`. An installed package has folders instead of links.
"""

from pathlib import Path

__version__ = "0.1.0"

# An archive that was unpacked without links (a zip, git with core.symlinks=false) has small text files in their place.
for _floor in ("pipeline", "model", "launch", "configs"):
    if not (Path(__file__).parent / _floor).is_dir():
        raise ImportError(f"{Path(__file__).parent / _floor}: found no folder, expected a link to {_floor}/; "
                          "clone with git where links are allowed (core.symlinks=true), or install the wheel")
