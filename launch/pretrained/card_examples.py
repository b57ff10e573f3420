"""Examples to try a model with: of its card (README.md), the `widget` of its metadata, which the hub shows; of a
fine-tuning run, rows by which it was measured.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.untrusted import check_characters, check_regular, load_json, load_yaml

CARD = "README.md"
_LONGEST = 1 << 16  # bytes that are read of a card, whose metadata comes first
_MOST = 20  # examples that a list can offer
_MOST_ROWS, _LONGEST_ROW = 5, 500  # examples of rows, and characters of one: longer texts don't fit into the page
_FIRST = ("text", "source_sentence")  # entries of a widget that hold its first text
_SECOND = ("context", "text_pair", "sentences", "choices")  # and those that hold a second one, or several


@dataclass(frozen=True)
class Example:
    """A text to try a model with."""

    text: str
    second: str | None = None
    """The second text; of choices one a line; of several sentences that are compared with the first text, the first."""
    title: str | None = None


def card_metadata(folder: Path) -> Fields:
    """The metadata of the model card in a folder; empty where there is no card, or none that can be read: a model can
    be used without.
    """
    try:
        check_regular(folder / CARD)
        with open(folder / CARD, "rb") as file:
            text = file.read(_LONGEST).decode("utf-8", errors="replace")
        begin, metadata, *rest = text.replace("\r\n", "\n").split("---\n", 2)
        fields = load_yaml(metadata, name=CARD) if rest and not begin.strip() else None
    except (OSError, ValueError, yaml.YAMLError, UserError):
        return {}
    return fields if isinstance(fields, dict) else {}


def card_examples(folder: Path) -> list[Example]:
    """The examples of the model card in a folder."""
    widget = card_metadata(folder).get("widget")
    examples = [example for each in (widget if isinstance(widget, list) else []) if (example := _example(each))]
    return examples[:_MOST]


def row_examples(file: Path, columns: tuple[str, ...]) -> list[Example]:
    """The texts, or pairs of texts, of the first rows in a file of predictions; none where there is no such file.

    Args:
        columns: of the text, or of the pair of texts.
    """
    try:
        check_regular(file)
        with open(file, "rb") as opened:
            *lines, _ = opened.read(_LONGEST).split(b"\n")
        texts_of_lines = [line.decode() for line in lines]
        rows = [load_json(line) for line in texts_of_lines]
        for line, row in zip(texts_of_lines, rows, strict=True):
            check_characters(line, row)
    except (OSError, ValueError):
        return []
    found = []
    for row in rows:
        texts = [text for name in columns[:2] if isinstance(row, dict) and isinstance(text := row.get(name), str)]
        if len(texts) == len(columns[:2]) and all(0 < len(text) <= _LONGEST_ROW for text in texts):
            found.append(Example(*texts))
    return found[:_MOST_ROWS]


def _example(entry: object) -> Example | None:
    """An entry of a widget, as the hub documents them; None for one without a text (of an image, say)."""
    if isinstance(entry, str):
        entry = {"text": entry}
    if not isinstance(entry, dict):
        return None
    text = next((entry[name] for name in _FIRST if isinstance(entry.get(name), str)), "")
    if not text.strip():
        return None
    name = next((name for name in _SECOND if entry.get(name)), "")
    second = entry.get(name)
    if isinstance(second, list):
        second = "\n".join(map(str, second[:1] if name == "sentences" else second))
    title = entry.get("example_title")
    return Example(text, None if second is None else str(second), None if title is None else str(title))
