"""What a run keeps of the model folder that it began with, for its exports: config.json, with fields that are not used
here, and the tokenizer's files, if its tokenizer is still that one.
"""

import shutil
from pathlib import Path

from cloze.launch.run import integrity, runs
from cloze.model.config_files import (
    FINGERPRINT,
    SLOW_TOKENIZER_FILES,
    TOKENIZER_FILES,
    copy_tokenizer_file,
    read_object,
)
from cloze.model.families.family import Json
from cloze.model.huggingface import load_note
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import readable_errors
from cloze.pipeline.tokenization.backends import stand_around_texts
from cloze.pipeline.tokenization.tokenizer import Tokenizer, holds_tokenizer
from cloze.pipeline.untrusted import MOST_BYTES

_CONFIG = "config.json"


def keep_origin(source: Path, folder: Path, tokenizer: Tokenizer, *, pairs: bool, segments: bool) -> None:
    """Copy what is kept of a source into a new folder; nothing, if the source is a run that began with random weights.

    Args:
        source: a run or a model folder.
        tokenizer: of the run. The source's files are kept if they make the same sequences of texts.
        pairs: whether the run joins pairs of texts.
        segments: whether the model has segments, which its tokenizer has to number then.
    """
    source = origin_of(source) or source
    if not (source / _CONFIG).is_file():
        return
    folder.mkdir(parents=True)
    shutil.copyfile(source / _CONFIG, folder / _CONFIG)
    if not holds_tokenizer(source):
        return
    own = Tokenizer.from_folder(source)
    numbered = not (pairs and segments) or own.gives_token_types(as_saved=False)
    alike = numbered and stand_around_texts(own.backend, own.names, pairs, segments)
    if alike and own.fingerprint == tokenizer.fingerprint:
        for name in (*TOKENIZER_FILES, *SLOW_TOKENIZER_FILES):
            if (source / name).is_file():
                copy_tokenizer_file(source / name, folder / name)


def origin_of(run: Path) -> Path | None:
    """The folder in which a run keeps what it began with; None: it began with nothing of a model folder.

    Raises:
        UserError: a file there is not as the run has written it.
    """
    folder = run / runs.ORIGIN
    if not folder.is_dir() and integrity.seal_of(folder) is None:
        return None
    integrity.check_sealed(folder)
    return folder


def read_origin(run: Path) -> Json | None:
    """The config.json that a run began with, if any.

    Raises:
        ModelError: it is damaged.
    """
    folder = origin_of(run)
    return read_object(folder / _CONFIG) if folder else None


def tokenizer_for_export(run: Path) -> Path:
    """The folder whose tokenizer goes out with the run's model.

    Raises:
        UserError: it is not the one that the run was trained with, or has lost its file.
    """
    origin = origin_of(run)
    of_origin = origin is not None and holds_tokenizer(origin)
    folder = origin if origin and of_origin else integrity.own_tokenizer(run)
    if (run / runs.DATA).is_file():
        tokenizer = Tokenizer.from_folder(folder)
        check_tokenizer(tokenizer, run)
        if not of_origin:
            check_vocab_txt(tokenizer, folder)
            if not stand_around_texts(tokenizer.backend, tokenizer.names):
                raise UserError(
                    f"{folder / 'tokenizer.json'}: found a post_processor that puts other special tokens around texts, "
                    "or numbers its segments otherwise, than the run did; restore the file"
                )
    return folder


def check_vocab_txt(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise UserError for a vocab.txt with other tokens than a tokenizer that Cloze wrote: it is not read here, but
    goes out with the model, and old classes of transformers read nothing else.
    """
    path = folder / "vocab.txt"
    with readable_errors(path):
        if path.is_file() and path.stat().st_size < MOST_BYTES and path.read_bytes() == tokenizer.vocab_txt().encode():
            return
    if path.exists():
        raise UserError(
            f"{path}: found other tokens than tokenizer.json has, expected the same; restore the file, or remove it"
        )


def trained_fingerprint(folder: Path) -> object:
    """Fingerprint of the tokenizer that a run of pretraining, or a model folder that was made here, was trained with;
    None: unknown.

    Raises:
        UserError, ModelError: the file that says it is missing or damaged.
    """
    if (folder / _CONFIG).is_file():
        return load_note(folder, FINGERPRINT)
    return runs.read_fields(folder / runs.DATA).get(FINGERPRINT)


def check_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise UserError unless the tokenizer of a run of pretraining, or of a model folder that was made here, is the one
    that it was trained with: its files may have been edited or exchanged since, by which the same words have other ids.
    """
    expected = trained_fingerprint(folder)
    if expected not in (None, tokenizer.fingerprint):
        restored = "restore its files"
        if (folder / _CONFIG).is_file():
            restored += f", or remove {FINGERPRINT} from {_CONFIG} if they are meant"
        raise UserError(
            f"{tokenizer.folder}: found a tokenizer with fingerprint {tokenizer.fingerprint[:12]}, expected "
            f"{expected!s:.12}, the one that {folder} was trained with; {restored}"
        )
