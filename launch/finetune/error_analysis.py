"""Error analysis: which classes are confused, and the errors with the highest confidence."""

from cloze.launch.finetune.examples.base import Examples
from cloze.launch.system.console import figure, markdown
from cloze.pipeline.fields import Fields

_WORST = 20
_LONGEST = 300  # number of characters of a text that are shown


def tables(examples: Examples, predictions: list[Fields]) -> dict[str, str]:
    """Tables in Markdown by name: `worst`, and the confusion tables of the kind of prediction."""
    confusions = examples.kind.confusions(predictions)
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
        if (badness := examples.kind.error_size(prediction)) is not None
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
