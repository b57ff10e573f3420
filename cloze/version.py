"""The version of Cloze, and its folder: a file that imports nothing, so that every floor may import it."""

from pathlib import Path

__version__ = "0.1.0"

PACKAGE = Path(__file__).parent
