"""The picture of a confusion matrix."""

from pathlib import Path

import numpy as np

from cloze.launch.finetune.examples.predicted import MOST_CLASSES, Confusion
from cloze.launch.system.pictures import new_figure, save

_MOST_DRAWN = 100  # classes whose names can be read in one picture


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
    figure = new_figure(side + 2.5, side + 1.5)
    axes = figure.subplots()
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
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    save(figure, path)
