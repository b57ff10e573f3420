"""Cloze pretrains BERT at scale and puts the result to work.

The three floors lie at the top of the repository; the links beside this file make them `cloze.pipeline`,
`cloze.model` and `cloze.launch`. An installed package has folders instead of links.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloze.version import __version__ as __version__

if TYPE_CHECKING:
    from cloze.launch.predict import Predictor

# An archive that was unpacked without links (a zip, git with core.symlinks=false) has small text files in their place.
for _floor in ("pipeline", "model", "launch", "configs"):
    if not (Path(__file__).parent / _floor).is_dir():
        raise ImportError(
            f"{Path(__file__).parent / _floor}: found no folder, expected a link to {_floor}/; "
            "clone with git where links are allowed (core.symlinks=true), or install the wheel"
        )


def load(model: str | Path, **options: Any) -> Predictor:
    """A model that is ready for use.

    >>> cloze.load("runs/sst2").classify("a good film")

    Args:
        model: the folder of a Cloze run (of pretraining: its newest good checkpoint), a Hugging Face folder, or the
            name of a hub model; ~ is the home folder.
        options: of a hub model: revision, cache_dir, offline, pickled_weights, as of `ModelConfig`.

    Raises:
        UserError, ModelError: there is no such model, or something in it is damaged.
    """
    from cloze.launch.predict import Predictor

    return Predictor.from_hub(model, **options)
