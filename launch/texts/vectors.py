"""How a model pools one vector from a text: saved with the model, the same in training and in use."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

VECTORS = "cloze_vectors"  # entry of a model's config.json: the fields of a Vectors


@dataclass(frozen=True)
class Vectors:
    """How the vectors of the tokens are pooled to the vector of a text."""

    pooling: Literal["cls", "mean", "max"] = "mean"
    """The vector of [CLS], or mean or maximum over all tokens, special ones included."""
    normalize: bool = False
    """Whether it is divided by its length."""


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Vectors (..., size) divided by their norms; zero vectors stay zero."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
