"""The version of Cloze, its folder and its name on package indexes: every floor may import this file, which imports
nothing of theirs.
"""

from pathlib import Path

__version__ = "0.1.0"

DISTRIBUTION = "cloze-bert"
"""The name that pip knows. The one that Python imports, `cloze`, is on PyPI the name of something unrelated."""

PACKAGE = Path(__file__).parent
