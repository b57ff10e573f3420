"""What a server says of its model: what the page names, and the fields that it shows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Literal

from cloze.launch.predict.labels import Classify
from cloze.launch.predict.predictor import Predictor
from cloze.launch.predict.tags import TagWords
from cloze.launch.pretrained.cards import card_examples
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.pipeline.fields import Fields


def describe(predictor: Predictor, name: str) -> Fields:
    """The answer of GET /model.

    Args:
        name: the model as the command names it.
    """
    loaded = predictor.loaded
    labelled = predictor.has_head(Classify) or predictor.has_head(TagWords)
    return {
        "model": name,
        "class": type(loaded.model).__name__,
        "revision": loaded.revision,
        "labels": list(loaded.model.head.labels) if labelled else [],
        "operations": predictor.abilities(),
        "pairs": _pairs(loaded),
        "columns": list(loaded.columns.texts) if loaded.columns else [],
        "examples": [asdict(example) for example in card_examples(Path(loaded.source))],
    }


def _pairs(loaded: LoadedModel) -> Literal["never", "maybe", "always"]:
    """Whether a classifier reads pairs of texts; maybe: its training is not known."""
    if not loaded.encoder.takes_pairs:
        return "never"
    if loaded.columns is None:
        return "maybe"
    return "always" if len(loaded.columns.texts) == 2 else "never"
