"""Checks of what is given to `cloze pretrain` or `cloze plan`, before torch is imported, which takes seconds."""

from pathlib import Path

from cloze.launch.config import PretrainConfig
from cloze.launch.pretrain.shapes import check_early
from cloze.launch.run import runs
from cloze.pipeline.errors import UserError
from cloze.pipeline.shards.manifest import check_prepared
from cloze.pipeline.stores.places import is_url


def check_folders(config: PretrainConfig) -> None:
    """Raise UserError for a data folder without prepared data. Stores, which may be slow, are checked later."""
    for folder in [*(source.path for source in config.sources), *config.evaluation.sets.values()]:
        if folder and not is_url(folder):
            check_prepared(folder)


def check_inputs(config: PretrainConfig) -> None:
    """Raise UserError for data that is not there, and as `check_start`."""
    check_folders(config)
    check_start(config)


def check_start(config: PretrainConfig) -> None:
    """Raise UserError for `init_from` or word vectors that are not there, or `init_from` of another shape.

    A run that has checkpoints goes on from them and reads neither again. A run that was begun may have some in a store;
    if not, they are looked for when it starts anew.
    """
    output = Path(config.output)
    if is_url(config.output) or runs.has_checkpoints(output) or (output / runs.CONFIG).is_file():
        return
    if config.init_word_vectors and not Path(config.init_word_vectors).is_file():
        raise UserError(
            f"init_word_vectors: found no file {config.init_word_vectors}, expected word2vec's text; check the path"
        )
    if config.init_from and not is_url(config.init_from):
        check_early(config, Path(config.init_from))
