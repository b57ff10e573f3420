"""Whether the files of a run are there, and as it has written them: by the hashes that it keeps of its tokenizer, of
what it began with, and of a fine-tuned model.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cloze.launch.run.runs import (
    CONFIG,
    MODEL,
    MODEL_HASHES,
    ORIGIN,
    PREDICTIONS,
    RESULTS,
    SOFTWARE,
    TOKENIZER,
    is_pretraining,
    model_folder,
    read_fields,
    stem_of,
)
from cloze.model.config_files import SLOW_TOKENIZER_FILES, TOKENIZER_FILES
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import publish_json, sha256_of
from cloze.pipeline.untrusted import check_readable, fields_if_readable

SEALED = "sealed"  # in software.json: the names of these folders, each with the hash of that file
HASHES = "sha256.json"  # in the folders `tokenizer` and `origin`: of the files beside it
# What these folders should be and what to do, for messages.
AS_WRITTEN = {
    TOKENIZER: "as the run has written it; restore it, or remove the folder: a resume of the run writes it again",
    ORIGIN: "as the run has written it; restore it, or remove the folder: a resume of the run writes it again, if what "
    "the run began with is where it was",
}


def tokenizer_folder(folder: Path) -> Path:
    """The folder with the tokenizer of a run or of a model folder.

    Raises:
        UserError: that of a run has lost its file.
    """
    return own_tokenizer(folder) if is_pretraining(folder) else model_folder(folder)


def own_tokenizer(folder: Path) -> Path:
    """The folder of a run's tokenizer.

    Raises:
        UserError: its tokenizer.json, without which another would be read from vocab.txt, is missing, or a file that
            goes out with the model is not as the run has written it.
    """
    path = folder / TOKENIZER
    if not (path / "tokenizer.json").is_file():
        raise UserError(f"{path}: found no tokenizer.json, expected it {AS_WRITTEN[TOKENIZER]}")
    check_sealed(path)
    return path


def check_sealed(path: Path, sealed: Mapping[str, object] | None = None) -> None:
    """Raise UserError for a file of a run's folder `tokenizer` or `origin` that goes out with the model and is not as
    the run has written it.

    Args:
        sealed: what was recorded of these folders; None: as software.json says.
    """
    expected, recorded = AS_WRITTEN[path.name], seal_of(path) if sealed is None else sealed.get(path.name)
    seal = _hash_of(path / HASHES)
    if recorded not in (None, seal):
        what = "another" if os.path.lexists(path / HASHES) else "no such"
        raise UserError(f"{path / HASHES}: found {what} file, expected it {expected}")
    if seal is None:  # earlier versions wrote none
        return
    hashes, there = read_fields(path / HASHES), {each.name for each in path.iterdir()}
    for name in ("config.json", *TOKENIZER_FILES, *SLOW_TOKENIZER_FILES):
        found = _hash_of(path / name) or ("no file" if name in there else None)
        if found != hashes.get(name):
            what = "no such file" if found is None else "another file"
            raise UserError(f"{path / name}: found {what}, expected it {expected}")


def _hash_of(path: Path) -> str | None:
    """SHA-256 of a file that can be read at once; None if there is none. Raises UserError for a larger one."""
    if not path.is_file():
        return None
    check_readable(path)
    return sha256_of(path)


def hashes_of_model(run: Path) -> dict[str, str]:
    """The hashes of a fine-tuning run's model folder, by the names of its files."""
    return {path.name: sha256_of(path) for path in sorted((run / MODEL).iterdir())}


def check_model(run: Path) -> None:
    """Raise UserError for a file of a fine-tuning run's model folder that is not as the run has written it. Of another
    folder, and of a run of an earlier version, nothing is known.
    """
    if not ((run / MODEL / "config.json").exists() and (run / RESULTS).is_file()):
        return
    hashes = read_fields(run / RESULTS).get(MODEL_HASHES)
    for name, expected in hashes.items() if isinstance(hashes, dict) else ():
        path = run / MODEL / name
        if not path.is_file() or sha256_of(path) != expected:
            raise UserError(
                f"{path}: found {'another' if path.exists() else 'no such'} file, expected it as the run has written "
                f"it; restore it, run the same command again, or name {run / MODEL} if the change is meant"
            )


def write_seal(folder: Path) -> str:
    """Write the hashes of a folder's files beside them; returns the hash of that file."""
    hashes = {path.name: sha256_of(path) for path in sorted(folder.iterdir())}
    publish_json(folder / HASHES, hashes)
    return sha256_of(folder / HASHES)


def seal_of(path: Path) -> object:
    """What a run recorded of its folder `tokenizer` or `origin` when it wrote it; None: it wrote none, or an earlier
    version began it.
    """
    sealed = fields_if_readable(path.parent / SOFTWARE).get(SEALED)
    return sealed.get(path.name) if isinstance(sealed, dict) else None


def check_there(folder: Path) -> None:
    """Raise UserError if something that `write_description` has written is not in the run's folder any more, apart from
    the description.
    """
    if not (folder / TOKENIZER).exists():
        raise UserError(
            f"{folder}: found no {TOKENIZER}, expected it as the run has written it: something was removed while the "
            "run used the folder; the same command writes it again and goes on from the newest checkpoint that is left"
        )
    for name in AS_WRITTEN:
        if (folder / name).exists() or seal_of(folder / name) is not None:
            check_sealed(folder / name)


def lost_of_model(run: Path) -> Path | None:
    """The first file of the model of a run with results that is missing, empty, cut, or no weights and not as it was
    written, or of its predictions that is missing or empty; None: there is no such file. Weights are not read, which
    would take long.
    """
    if not (results := fields_if_readable(run / RESULTS)):
        return None
    hashes = results.get(MODEL_HASHES)
    for name, expected in ({"config.json": None} | (hashes if isinstance(hashes, dict) else {})).items():
        path = run / MODEL / name
        if is_lost(path):
            return path
        whole = _has_its_length(path) if path.suffix == ".safetensors" else expected in (None, _hash_of(path))
        if not whole:
            return path
    return next((path for path in _predictions(run, results) if is_lost(path)), None)


def _predictions(run: Path, results: Fields) -> list[Path]:
    splits = [split for split in results if split == "validation" or split.startswith("test/")]
    return [run / PREDICTIONS / f"{stem_of(split)}.jsonl" for split in splits]


def _has_its_length(weights: Path) -> bool:
    """Whether a file of weights is as long as its beginning says."""
    try:
        with safe_open(weights, "np"):
            return True
    except (OSError, SafetensorError):
        return False


def is_lost(path: Path) -> bool:
    """Whether a file that a run has written is missing or empty."""
    return not path.is_file() or not path.stat().st_size


def found_at(path: Path) -> str:
    """What is found instead of a file as a run has written it, for messages."""
    if not path.is_file():
        return "no such file"
    return "another file" if path.stat().st_size else "nothing in it"


def check_results(folder: Path) -> None:
    """Raise UserError if the model, results and predictions of a complete fine-tuning are not as they were written."""
    if "train_file" not in read_fields(folder / CONFIG):
        return
    for path in (folder / MODEL / "config.json", *_predictions(folder, read_fields(folder / RESULTS))):
        if is_lost(path):
            raise UserError(
                f"{path}: found {found_at(path)}, expected it as the run has written it: something was removed while "
                "the run used the folder; the same command writes it again"
            )
    check_model(folder)
