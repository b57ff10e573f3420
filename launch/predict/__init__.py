"""Prediction: an operation a file, and `Predictor`, which runs them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloze.launch.predict.predictor import Predictor

__all__ = ["Predictor"]


def __getattr__(name: str) -> Any:
    """`Predictor`, imported lazily since it imports torch, which the configurations of commands in this room do not
    need.
    """
    if name != "Predictor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cloze.launch.predict.predictor import Predictor

    return Predictor
