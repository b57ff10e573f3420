"""Checks of what is given to `cloze pretrain` or `cloze plan`, before torch is imported, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from cloze.launch.config import PretrainConfig
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
    """Raise UserError for data, `init_from` or word vectors that are not there.

    A run that has checkpoints goes on from them and reads neither of the last two again.
    """
    check_folders(config)
    if is_url(config.output) or runs.has_checkpoints(Path(config.output)):
        return
    if config.init_word_vectors and not Path(config.init_word_vectors).is_file():
        raise UserError(
            f"init_word_vectors: found no file {config.init_word_vectors}, expected word2vec's text; check it"
        )
    if config.init_from and not is_url(config.init_from):
        check_source(Path(config.init_from))


def check_source(folder: Path) -> None:
    """Raise UserError for a folder that is neither a run nor a model's."""
    if not any((folder / name).is_file() for name in (runs.CONFIG, "config.json")):
        found = f"neither {runs.CONFIG} nor config.json in" if folder.is_dir() else "no folder"
        raise UserError(
            f"init_from: found {found} {folder}, expected the folder of a run of `cloze pretrain` or of a Hugging Face "
            "BERT; check the path, or give another --init_from"
        )
