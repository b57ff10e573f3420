"""Where a model goes wrong: which classes it takes for which, and the examples it was surest and wrong about."""

from __future__ import annotations

from collections import Counter
from typing import Any

from cloze.launch.finetune.examples.base import Examples
from cloze.launch.system.console import figure

_WORST = 20
_MOST_CLASSES = 30  # a larger matrix is no table that anybody reads: its fullest cells are listed instead
_LONGEST = 300  # characters of a text that are shown


def tables(examples: Examples, predictions: list[dict]) -> dict[str, str]:
    """Tables in Markdown by name: `worst`, and `confusion` where classes are predicted (one a column of labels) or
    independent labels (a row each).
    """
    found, first = {}, predictions[0]
    for column, pairs in _decisions(predictions).items():
        found[f"confusion {column}".strip()] = _confusion(Counter(pairs))
    if isinstance(first["label"], list) and isinstance(first.get("probabilities"), dict):
        found["confusion"] = _confusion_by_label(predictions)
    if worst := _worst(examples, predictions):
        found["worst"] = worst
    return found


def page(examples: Examples, predictions: list[dict]) -> str:
    """The tables, one under the other."""
    found = tables(examples, predictions) or {"no mistakes": ""}
    return "\n".join(f"## {name}\n\n{table}" for name, table in found.items())


def binary_scores(predictions: list[dict]) -> tuple[str, list[int], list[float]] | None:
    """Of two classes the second one, whether each example is of it, and its probability; None for anything else."""
    if not all(isinstance(each["label"], str) and len(each.get("probabilities", ())) == 2 for each in predictions):
        return None
    second = list(predictions[0]["probabilities"])[1]
    return (second, [int(each["label"] == second) for each in predictions],
            [each["probabilities"][second] for each in predictions])


def _decisions(predictions: list[dict]) -> dict[str, list[tuple[str, str]]]:
    """Pairs (true class, predicted class) of each column of labels, whose name is empty if it is the only one."""
    pairs: dict[str, list[tuple[str, str]]] = {}
    for each in predictions:
        true, guessed = each["label"], each["prediction"]
        if isinstance(true, str) and "probabilities" in each:
            pairs.setdefault("", []).append((true, guessed))
        elif isinstance(true, dict) and "probabilities" in each:
            for column, label in true.items():
                pairs.setdefault(column, []).append((label, guessed[column]))
        elif "words" in each:
            pairs.setdefault("", []).extend(zip(true, guessed, strict=True))
    return pairs


def _confusion(counts: Counter) -> str:
    """A row a true class, a column a predicted one; of very many classes the pairs that are confused most."""
    names = sorted({name for pair in counts for name in pair})
    if len(names) > _MOST_CLASSES:
        wrong = [(pair, count) for pair, count in counts.most_common() if pair[0] != pair[1]][:_MOST_CLASSES]
        return _table(["true", "predicted", "examples"], [[*pair, str(count)] for pair, count in wrong])
    return _table(["true \\ predicted", *names],
                  [[true, *(str(counts[true, guessed]) for guessed in names)] for true in names])


def _confusion_by_label(predictions: list[dict]) -> str:
    """Of independent labels each one's four cells in a row; of very many labels those with the most errors."""
    sides = [(set(each["label"]), set(each["prediction"])) for each in predictions]
    rows = []
    for name in predictions[0]["probabilities"]:
        cells = Counter((name in true, name in guessed) for true, guessed in sides)
        rows.append([name, *(cells[cell] for cell in ((True, True), (True, False), (False, True), (False, False)))])
    if len(rows) > _MOST_CLASSES:
        rows = sorted(rows, key=lambda row: -row[2] - row[3])[:_MOST_CLASSES]
    return _table(["label", "true and predicted", "true, not predicted", "predicted, not true", "neither"],
                  [[*map(str, row)] for row in rows])


def _worst(examples: Examples, predictions: list[dict]) -> str:
    """The wrong predictions, worst first; empty if none is wrong."""
    wrong = [(badness, number) for number, each in enumerate(predictions) if (badness := _badness(each)) is not None]
    wrong.sort(key=lambda pair: (-pair[0], pair[1]))
    rows = []
    for badness, number in wrong[:_WORST]:
        each = predictions[number]
        text = examples.text(number)
        rows.append([str(each.get("place", each.get("id"))), text[:_LONGEST] + ("..." if len(text) > _LONGEST else ""),
                     _shown(each["label"]), _shown(each["prediction"]), figure(badness)])
    return _table(["place", "text", "true", "predicted", "how wrong"], rows) if rows else ""


def _badness(each: dict) -> float | None:
    """How wrong a prediction is; None if it is right.

    Classes: the probability that the true one was denied (the largest one of several labels or columns); numbers: the
    distance; tags: the largest probability of a wrong one; answers: the probability of one that matches no right one;
    vectors of texts: how far a rank is from the right one.
    """
    if "rank_error" in each:
        return each["rank_error"] or None
    true, guessed = each["label"], each["prediction"]
    chances: Any = each.get("probabilities")
    if true == guessed or (chances is None and isinstance(true, list) and guessed in (true or [""])):
        return None
    if "words" in each:
        return max(chance for chance, a, b in zip(chances, true, guessed, strict=True) if a != b)
    if isinstance(true, float):
        return abs(true - guessed)
    if isinstance(true, str):
        return 1 - chances[true]
    if isinstance(true, dict):
        return max(abs(value - guessed[name]) if chances is None else 1 - chances[name][value]
                   for name, value in true.items())
    if chances is None:
        return each["probability"]
    return max(abs(chance - (name in true)) for name, chance in chances.items())


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "(none)"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items())
    return figure(value) if isinstance(value, float) else str(value) or "(none)"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)
