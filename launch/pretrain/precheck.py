"""Checks that the data given to `cloze pretrain` or `cloze plan` exists, before torch is imported."""

from __future__ import annotations

from cloze.launch.config import PretrainConfig
from cloze.pipeline.shards.manifest import check_prepared
from cloze.pipeline.stores.places import is_url


def check_inputs(config: PretrainConfig) -> None:
    """Raise UserError for a data folder without prepared data. Stores, which may be slow, are checked later."""
    for folder in [*(source.path for source in config.sources), *config.evaluation.sets.values()]:
        if folder and not is_url(folder):
            check_prepared(folder)
