"""Prediction: an operation a file, and `Predictor`, which runs them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloze.launch.predict.predictor import Predictor

__all__ = ["Predictor"]


def __getattr__(name: str) -> Any:
    """`Predictor`, imported when it is asked for, and torch with it: the options of commands are in this room too."""
    if name != "Predictor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cloze.launch.predict.predictor import Predictor

    return Predictor
