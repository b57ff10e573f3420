"""Pictures of a model: its attention heads, and vectors of texts in their two principal components."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cloze.launch.predict.operation import Row
from cloze.launch.predict.vectors import Attentions, Embedding
from cloze.launch.system.pictures import LARGEST_INCHES, colours, new_figure, save
from cloze.pipeline.errors import UserError
from cloze.pipeline.untrusted import is_number

_MOST_NAMED = 60  # points with their texts beside them: more would cover each other
_LONGEST_NAME = 30  # characters of such a text
_MOST_COLOURS = 20  # values with a colour of their own; the rarer ones share one
_OTHERS = "others"
_SCALE = "attention of the row's token to the column's,\nas a share of the head's largest (above it)"


def draw_attention(attention: Attentions, path: Path) -> None:
    """Draw all heads: one row per layer, one column per head; dark where a token (row) attends to another (column).
    Each head has a scale of its own, up to its largest weight, which stands above it: a weak one shows its pattern too.
    """
    layers, heads, length, _ = attention.weights.shape
    side = min(max(2.6, 0.24 * length + 0.6), LARGEST_INCHES / max(layers, heads))
    figure = new_figure(side * heads + 1, side * layers + 0.5)
    panels = figure.subplots(layers, heads, squeeze=False)
    size = min(9.0, 50 * side / length)  # font size in points: as high as a row
    for layer in range(layers):
        for head in range(heads):
            panel = panels[layer, head]
            weights = attention.weights[layer, head]
            image = panel.imshow(weights / weights.max(), cmap="Blues", vmin=0, vmax=1)
            panel.set_title(f"layer {layer + 1} head {head + 1}: 0 to {weights.max():.2f}", fontsize=9)
            panel.set_xticks(range(length), attention.tokens, rotation=90, fontsize=size)
            panel.set_yticks(range(length), attention.tokens, fontsize=size)
    figure.colorbar(image, ax=panels, aspect=40, pad=0.01).set_label(_SCALE, fontsize=9)
    save(figure, path)


class Points:
    """Vectors of texts, for a picture.

    Args:
        path: the picture.
        column: column of their table that says the colour; None: all have one.
    """

    def __init__(self, path: Path, column: str | None) -> None:
        self._path, self._column = path, column
        self._names: list[str] = []
        self._values: list[Any] = []
        self._vectors: list[np.ndarray] = []

    def noting(self, results: Iterator[tuple[Row, Embedding]]) -> Iterator[tuple[Row, Embedding]]:
        """Yield texts with their vectors as they are, and keep what the picture shows of them.

        Raises:
            UserError: a text has no such column.
        """
        for row, result in results:
            if self._column is not None:
                if self._column not in (row.values or {}):
                    found = ", ".join(map(repr, row.values)) if row.values else "a text that is not of a table"
                    raise UserError(
                        f"{row.place}: found {found}, expected the column {self._column!r}; name the column of the "
                        "table that says the colours with --colour_column"
                    )
                self._values.append((row.values or {})[self._column])
            self._names.append(row.both)
            self._vectors.append(result.vector)
            yield row, result

    def draw(self) -> str:
        """Draw the two principal components of the vectors, each point with its text if they are few.

        Returns:
            A line that says so.

        Raises:
            UserError: there are fewer than three.
        """
        if len(self._vectors) < 3:
            raise UserError(f"picture: found {len(self._vectors)} texts, expected at least three to draw")
        vectors = np.stack(self._vectors)
        if not np.isfinite(vectors).all():
            raise UserError("picture: found vectors with numbers that are not finite, expected numbers")
        places, shares = principal_components(vectors)
        figure = new_figure(9, 7)
        axes = figure.subplots()
        numbers = [_number(value) for value in self._values]
        if self._column is not None and None not in numbers:
            points = axes.scatter(*places.T, c=numbers, cmap="viridis", alpha=0.8)
            figure.colorbar(points, ax=axes, label=self._column)
        else:
            self._draw_classes(axes, places)
        if len(self._names) <= _MOST_NAMED and max(map(len, self._names)) <= _LONGEST_NAME:
            for name, place in zip(self._names, places, strict=True):
                axes.annotate(name, place, xytext=(4, 3), textcoords="offset points", fontsize=8)
        axes.set_xlabel(f"first principal component ({shares[0]:.0%} of the variance)")
        axes.set_ylabel(f"second principal component ({shares[1]:.0%})")
        axes.margins(0.08)
        save(figure, self._path)
        return f"drew {len(places):,} texts to {self._path}"

    def _draw_classes(self, axes: Any, places: np.ndarray) -> None:
        """Points by the text of their value, the most frequent value first."""
        if self._column is None:
            axes.scatter(*places.T, alpha=0.8)
            return
        texts = ["(none)" if value in (None, "") else str(value) for value in self._values]
        found = [text for text, _ in Counter(texts).most_common()]
        named = found if len(found) <= _MOST_COLOURS else found[: _MOST_COLOURS - 1]
        groups = np.array([named.index(text) if text in named else len(named) for text in texts])
        if len(named) < len(found):
            named = [*named, f"{len(found) - len(named)} {_OTHERS}"]
        for number, (name, colour) in enumerate(zip(named, colours(len(named)), strict=True)):
            label = f" {name}" if name.startswith("_") else name  # matplotlib leaves others out of the legend
            axes.scatter(*places[groups == number].T, color=colour, alpha=0.8, label=label)
        axes.legend(title=self._column, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def principal_components(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two principal components of vectors (N, hidden): places (N, 2), and the shares of the variance (2,)."""
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    variances, directions = np.linalg.eigh(centred.T @ centred)  # in ascending order
    first = directions[:, [-1, -2]]
    first *= np.sign(first[np.abs(first).argmax(0), [0, 1]])  # a direction has no sign: the same picture each time
    return centred @ first, variances[[-1, -2]] / max(variances.sum(), np.finfo(np.float64).tiny)


def _number(value: object) -> float | None:
    """A cell as a number, also of a table whose cells are texts; None: it is none."""
    if is_number(value):
        return value
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None
