"""Error analysis: which classes are confused, as tables and as pictures, and the errors with the highest confidence."""

from pathlib import Path

import numpy as np

from cloze.launch.finetune.examples.base import Examples
from cloze.launch.finetune.examples.prediction_errors import MOST_CLASSES, Confusion
from cloze.launch.system.console import figure, markdown
from cloze.launch.system.pictures import new_figure, save
from cloze.pipeline.fields import Fields

_MOST_DRAWN = 100  # classes whose names can be read in one picture
_WORST = 20
_LONGEST = 300  # number of characters of a text that are shown


def tables(examples: Examples, predictions: list[Fields]) -> dict[str, str]:
    """Tables in Markdown by name: `worst`, and the confusion tables of the kind of prediction."""
    confusions = examples.errors.confusions(predictions)
    if worst := _worst(examples, predictions):
        confusions["worst"] = worst
    return confusions


def page(examples: Examples, predictions: list[Fields]) -> str:
    """All tables on one page."""
    sections = tables(examples, predictions) or {"no mistakes": ""}
    return "\n".join(f"## {name}\n\n{table}" for name, table in sections.items())


def _worst(examples: Examples, predictions: list[Fields]) -> str:
    """Table of the wrong predictions, worst first; empty if there are none."""
    wrong = [
        (badness, number)
        for number, prediction in enumerate(predictions)
        if (badness := examples.errors.error_size(prediction)) is not None
    ]
    wrong.sort(key=lambda pair: (-pair[0], pair[1]))
    rows = []
    for badness, number in wrong[:_WORST]:
        prediction = predictions[number]
        text = examples.text(number)
        rows.append(
            [
                str(prediction.get("place", prediction.get("id"))),
                text[:_LONGEST] + ("..." if len(text) > _LONGEST else ""),
                _shown(prediction["label"]),
                _shown(prediction["prediction"]),
                figure(badness),
            ]
        )
    return markdown(["place", "text", "true", "predicted", "how wrong"], rows) if rows else ""


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "(none)"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items())
    return figure(value) if isinstance(value, float) else str(value) or "(none)"


def draw_confusion(confusion: Confusion, title: str, path: Path) -> None:
    """Draw true classes as rows, with their shares by predicted class as colours, which hide no rare class; nothing for
    more classes than can be read.
    """
    labels = confusion.labels
    if len(labels) > _MOST_DRAWN:
        return
    counts = np.array([[confusion.counts[true, guessed] for guessed in labels] for true in labels])
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = max(3.0, 0.5 * len(labels) if len(labels) <= MOST_CLASSES else 0.2 * len(labels))
    drawn = new_figure(side + 2.5, side + 1.5)
    axes = drawn.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(labels) <= MOST_CLASSES:
        for (row, column), count in np.ndenumerate(counts):
            colour = "white" if shares[row, column] > 0.6 else "black"
            axes.text(column, row, f"{count:,}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=8)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.set_title(title, fontsize=10)
    drawn.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    save(drawn, path)
