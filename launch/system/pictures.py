"""What all pictures share: matplotlib, which is an extra, and how they are checked, coloured and written."""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cloze.pipeline.errors import UserError
from cloze.pipeline.extras import how_to_install
from cloze.pipeline.storage import publishing
from cloze.pipeline.stores.places import to_local

ENDINGS = (".png", ".pdf", ".svg")
DPI = 120
LARGEST_INCHES = 80  # maximum side, 9,600 pixels: many viewers fail beyond 10,000
# Families with the signs that matplotlib's own font lacks (Chinese, Japanese, Korean); those installed are used.
_FAMILIES = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Micro Hei", "PingFang SC", "Arial Unicode MS", "SimHei")


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_ending(name: str, path: str | None) -> None:
    """Raise UserError if a file, named by the field `name`, has none of the endings of pictures, or lies in a store."""
    if path is not None and not to_local(path, name).name.endswith(ENDINGS):
        raise UserError(f"{name}: found {path}, expected a picture: a name that ends in {', '.join(ENDINGS)}")


def check_library(name: str) -> None:
    """Raise UserError, naming the field that asks for a picture, if matplotlib is missing. Imports nothing."""
    if not can_draw():
        raise UserError(f"{name}: found no matplotlib, expected it for pictures; {how_to_install('pictures')}")


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib Figure of so many inches, at most LARGEST_INCHES, whose parts make room for each other."""
    from matplotlib.figure import Figure

    return Figure(figsize=(min(width, LARGEST_INCHES), min(height, LARGEST_INCHES)), layout="constrained")


def colours(number: int) -> list[Any]:
    """So many colours that differ: matplotlib's ten or twenty for classes, or as many shades of one scale."""
    from matplotlib import colormaps

    for name, most in (("tab10", 10), ("tab20", 20)):
        if number <= most:
            return [colormaps[name](place) for place in range(number)]
    return [colormaps["turbo"](place / (number - 1)) for place in range(number)]


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format of its file's ending. Dollars in its texts, which are users', begin no formula.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib import font_manager
    from matplotlib.text import Text

    installed = set(font_manager.get_font_names())
    families = ["DejaVu Sans", *(name for name in _FAMILIES if name in installed)]
    for text in figure.findobj(Text):
        text.set(parse_math=False, fontfamily=families)
    with publishing(path) as aside, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a sign that no font has is drawn as a box
        figure.savefig(aside, format=path.suffix[1:], dpi=DPI)
