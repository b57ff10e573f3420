"""The folder of a run: the names of its files, and its description (configuration, data, device, tokenizer)."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeGuard

import yaml
from safetensors import SafetensorError, safe_open

from cloze.launch.config import RunConfig
from cloze.launch.system.software import software
from cloze.model.config import BertConfig
from cloze.model.config_files import SLOW_TOKENIZER_FILES, TOKENIZER_FILES
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.storage import clear, publish_json, publish_text, readable_errors, sha256_of
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from cloze.pipeline.untrusted import (
    check_characters,
    check_readable,
    fields_if_readable,
    load_json,
    load_yaml,
    read_json,
    unique_fields,
)

CONFIG = "config.yaml"
DATA = "data.json"
RESULTS = "results.json"  # of a fine-tuning; in the folder of a sweep, of all its runs
MODEL_HASHES = "model_hashes"  # in it: of the files of the folder `model`
DEVICE = "device.json"  # what was chosen by the device at the first start
DEEPSPEED = "deepspeed.json"
# Versions of the newest start, the number of starts, which run this is, and the folders that go out with its model.
SOFTWARE = "software.json"
# The files of a run's description, that which marks its folder as a run last.
DESCRIPTION = (DATA, DEVICE, DEEPSPEED, SOFTWARE, CONFIG)
STATUS = "status.json"
PREDICTIONS = "predictions"  # of a fine-tuning run: the folder of what it predicts for the rows of its files
METRICS = "metrics.jsonl"
TRACKING = "trackers.json"  # state of the trackers, for resumes
TOKENIZER = "tokenizer"
_HASHES = "sha256.json"  # in the folders `tokenizer` and `origin`: of the files beside it
_SEALED = "sealed"  # in software.json: the names of these folders, each with the hash of that file
# Of the model folder that the run began with: config.json, and the tokenizer's files if it is the same.
ORIGIN = "origin"
# What these folders should be and what to do, for messages.
_AS_WRITTEN = {
    TOKENIZER: "as the run has written it; restore it, or remove the folder: a resume of the run writes it again",
    ORIGIN: "as the run has written it; restore it, or remove the folder: a resume of the run writes it again, if what "
    "the run began with is where it was",
}
MODEL = "model"  # written by a complete fine-tuning run
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
HEARTBEATS = "heartbeats"
STARTS = "starts"  # in software.json
# In software.json, and in state.json of each checkpoint: the hash of the configuration with which the run was begun.
RUN = "run"
# In software.json: a hash of the weights that the run began with, if they are another's.
FIRST_WEIGHTS = "first_weights"
TRAINED_LENGTH = "max_length"  # in data.json
VALIDATION_HASH = "validation_hash"
MODEL_HASH = "model_hash"

Facts = Mapping[str, str | int]  # facts of the inputs of a run, by name: hashes, fingerprints, lengths


def flatten(values: Fields, prefix: str = "") -> dict[str, object]:
    """Nested fields by their dotted names."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def step_name(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def heartbeat_name(rank: int) -> str:
    """Name of the file of a process in HEARTBEATS."""
    return f"rank-{rank:05d}.json"


def data_facts(manifest: Manifest) -> dict[str, str | int]:
    """Facts of the prepared data of a run: two hashes, and the maximum length."""
    return {
        "manifest_hash": manifest.hash,
        "tokenizer_fingerprint": manifest.tokenizer_fingerprint,
        TRAINED_LENGTH: manifest.max_length,
    }


def trained_length(folder: Path) -> int | None:
    """Length in tokens of the longest samples of a pretraining run; None if an earlier version wrote it.

    Raises:
        UserError: the file has a length that the model cannot have been trained on.
    """
    length = _number_in(folder / DATA, TRAINED_LENGTH)
    if length is not None and length > (most := model_config(folder).max_position_embeddings):
        raise UserError(
            f"{folder / DATA}: {TRAINED_LENGTH}: found {length!s:.60}, expected at most {most}, the model's positions; "
            "restore the file"
        )
    return length


def _number_in(path: Path, *names: str) -> int | None:
    """A whole number above 0 in a file of a run, by the names of its sections and its own; None: it has none.

    Raises:
        UserError: as `read_fields`, and for another value.
    """
    value: object = read_fields(path)
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise UserError(
        f"{path}: {'.'.join(names)}: found {value!r:.60}, expected a whole number above 0, as the run wrote it; "
        "restore the file"
    )


def read_fields(path: Path) -> Fields:
    """The fields in a file of a run: its configuration (YAML), or one of the JSON files.

    Raises:
        UserError: there is no such file, or it holds no fields.
    """
    expected = "expected the folder of a run of `cloze pretrain` or `cloze finetune`"
    try:
        with readable_errors(path):
            if not path.is_file():
                found = f"no {path.name} in the folder" if path.parent.is_dir() else "no folder"
                raise UserError(f"run: found {found} {path.parent}, {expected}{_if_lost(path)}")
            check_readable(path)
            text = path.read_text(encoding="utf-8")
            # JSON is not parsed as YAML, in which 1e-05 and NaN are strings.
            content = load_json(text, unique_fields) if path.suffix == ".json" else load_yaml(text, name=str(path))
            if path.suffix == ".json":
                check_characters(text, content)
    except UserError:  # also a ValueError, but with its own message
        raise
    except (ValueError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise UserError(f"{path}: found what is no {kind}, {expected}{_if_lost(path)}") from error
    if not _is_fields(content):
        raise UserError(f"{path}: found no fields, expected those of a run{_if_lost(path)}")
    return content


def _if_lost(path: Path) -> str:
    """What to do about a file of the description that stood beside other files of a run."""
    lost = path.name in DESCRIPTION and (path.parent / STATUS).exists() and not (path.exists() and path.stat().st_size)
    return f"; it was removed or emptied: restore {path.name} from a copy, or give another --output" if lost else ""


def _is_fields(content: object) -> TypeGuard[Fields]:
    """Whether this is a dict whose names are texts, and those of dicts in it too."""
    return isinstance(content, dict) and all(
        isinstance(name, str) and (not isinstance(value, dict) or _is_fields(value)) for name, value in content.items()
    )


def model_config(folder: Path) -> BertConfig:
    """The model configuration of a run.

    Raises:
        UserError: the folder holds no run, or one of another version.
    """
    content = read_fields(folder / CONFIG)
    if "train_file" in content:
        raise UserError(
            f"{folder}: found a run of `cloze finetune` without its model, which is written at the end, "
            "expected a complete one; the command that started it resumes it"
        )
    try:
        return BertConfig(**content["model"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{folder / CONFIG}: found no model that this version knows ({error}), expected the "
            "configuration of a run of `cloze pretrain`"
        ) from error


def fields_of(folder: Path) -> dict[str, object]:
    """The resolved configuration of a run, by dotted names.

    Raises:
        UserError: the folder holds none.
    """
    return flatten(read_fields(folder / CONFIG))


def is_pretraining(folder: Path) -> bool:
    """Whether the folder is a pretraining run: it has checkpoints and no finished model."""
    return (folder / CONFIG).exists() and not (folder / MODEL / "config.json").exists()


def model_folder(folder: Path) -> Path:
    """The Hugging Face folder inside a fine-tuning run, or else the folder itself."""
    return folder / MODEL if (folder / MODEL / "config.json").exists() else folder


def check_holds_model(folder: Path) -> None:
    """Raise UserError for a folder without a model: no such folder, a sweep, an incomplete run."""
    if is_pretraining(folder):
        model_config(folder)
    elif not (model_folder(folder) / "config.json").exists():
        found = "no model in the folder" if folder.is_dir() else "no folder"
        raise UserError(
            f"model: found {found} {folder}, expected a Cloze run or a Hugging Face folder; of a sweep "
            "give one of the runs in it"
        )


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
        raise UserError(f"{path}: found no tokenizer.json, expected it {_AS_WRITTEN[TOKENIZER]}")
    check_sealed(path)
    return path


def check_sealed(path: Path, sealed: Mapping[str, object] | None = None) -> None:
    """Raise UserError for a file of a run's folder `tokenizer` or `origin` that goes out with the model and is not as
    the run has written it.

    Args:
        sealed: what was recorded of these folders; None: as software.json says.
    """
    expected, recorded = _AS_WRITTEN[path.name], seal_of(path) if sealed is None else sealed.get(path.name)
    seal = _hash_of(path / _HASHES)
    if recorded not in (None, seal):
        what = "no such" if seal is None else "another"
        raise UserError(f"{path / _HASHES}: found {what} file, expected it {expected}")
    if seal is None:  # earlier versions wrote none
        return
    hashes, there = read_fields(path / _HASHES), {each.name for each in path.iterdir()}
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


def _seal(folder: Path) -> str:
    """Write the hashes of a folder's files beside them; returns the hash of that file."""
    hashes = {path.name: sha256_of(path) for path in sorted(folder.iterdir())}
    publish_json(folder / _HASHES, hashes)
    return sha256_of(folder / _HASHES)


def seal_of(path: Path) -> object:
    """What a run recorded of its folder `tokenizer` or `origin` when it wrote it; None: it wrote none, or an earlier
    version began it.
    """
    sealed = fields_if_readable(path.parent / SOFTWARE).get(_SEALED)
    return sealed.get(path.name) if isinstance(sealed, dict) else None


def device_facts(folder: Path) -> dict[str, object]:
    """What was chosen by the device at the first start of the run; empty for a new run or one of an earlier version."""
    return read_fields(folder / DEVICE) if (folder / DEVICE).is_file() else {}


def keep_device_facts(folder: Path, facts: dict[str, object]) -> None:
    """Save what was chosen by the device, unless the run has begun."""
    if not (folder / DEVICE).is_file():
        publish_json(folder / DEVICE, facts)


def saved_micro_batch_size(folder: Path) -> int | None:
    """The micro-batch size of an earlier start of this run; None if there is none."""
    return _number_in(folder / CONFIG, "train", "micro_batch_size") if (folder / CONFIG).is_file() else None


def saved_data_streams(folder: Path, accept_changes: bool) -> int | None:
    """The number of data streams of an earlier start of this run; None if there is none.

    Raises:
        UserError: an earlier version began the run with an order of samples that this version lacks, and changes are
        not accepted.
    """
    if not (folder / CONFIG).is_file():
        return None
    streams = _number_in(folder / CONFIG, "data_streams")
    if streams is None and not accept_changes:
        raise UserError(
            f"output: found {folder}, a run begun by an earlier version of Cloze with another order of "
            "samples, expected one with data_streams; finish it with that version, choose another "
            "--output, or continue in the new order with --checkpoint.accept_changes true"
        )
    return streams


def has_checkpoints(folder: Path) -> bool:
    """Whether a run in a folder has checkpoints, good or damaged, from which a start goes on."""
    return any(path.suffix != ".tmp" for path in (folder / CHECKPOINTS).glob("step-*"))


def write_description(
    folder: Path,
    config: RunConfig,
    facts: Facts,
    saves: Mapping[str, Callable[[Path], object]],
    deepspeed: Fields,
    run: str | None = None,
    first_weights: str = "",
    begins: bool = False,
) -> None:
    """Write what is needed to understand, repeat and export the run: the configurations, and the folders of `saves`.

    Args:
        saves: name of a folder -> function that writes the folder, or leaves it out.
        run: the value of RUN; None: an earlier version has begun it.
        first_weights: the value of FIRST_WEIGHTS; empty: that of the earlier starts.
        begins: whether there is no checkpoint yet; what an earlier start has kept may be of other inputs then.

    Raises:
        UserError: the tokenizer that an earlier start has written there is not that of the run any more, or what it
            kept of the model that the run began with is gone and can't be written again.
    """
    if begins:
        for name in saves:
            clear(folder / name)
    earlier = {} if begins else fields_if_readable(folder / SOFTWARE)
    expected = facts.get("tokenizer_fingerprint")
    if expected is not None and (folder / TOKENIZER).exists():
        found = Tokenizer.from_folder(own_tokenizer(folder)).fingerprint
        if found != expected:
            raise UserError(
                f"{folder / TOKENIZER}: found a tokenizer with fingerprint {found[:12]}, expected {expected!s:.12}, "
                "the run's; remove the folder, and the same command writes it again"
            )
    goes_on = (folder / CONFIG).is_file()
    sealed = _save_folders(folder, saves, earlier) if goes_on else {}  # what is refused changes nothing else
    publish_json(folder / DATA, facts)
    # The file that marks the folder as a run comes after the files that a resume compares; after an interruption the
    # next start writes the rest.
    publish_text(folder / CONFIG, yaml.safe_dump(asdict(config), sort_keys=False))
    publish_json(folder / DEEPSPEED, deepspeed)
    sealed = sealed if goes_on else _save_folders(folder, saves, earlier)
    starts: Fields = {STARTS: num_starts(folder) + 1, _SEALED: sealed}
    known = {RUN: run, FIRST_WEIGHTS: first_weights or earlier.get(FIRST_WEIGHTS)}
    starts |= {name: value for name, value in known.items() if value is not None}
    publish_json(folder / SOFTWARE, software() | starts)  # after the folders that it names


def _save_folders(folder: Path, saves: Mapping[str, Callable[[Path], object]], earlier: Fields) -> dict[str, object]:
    """Write the folders of `saves` that are not there; returns the seals of those that go out with the run's model.

    Args:
        earlier: the content of software.json.
    """
    recorded = earlier.get(_SEALED)
    sealed = {name: recorded[name] for name in saves if name in recorded} if isinstance(recorded, dict) else {}
    for name, save in saves.items():
        aside = folder / f"{name}.tmp"
        if (folder / name).exists():
            if (folder / name / _HASHES).is_file():  # a start that wrote it may have been killed before the end of this
                sealed.setdefault(name, sha256_of(folder / name / _HASHES))
            continue
        with readable_errors(aside):
            clear(aside, ignore_errors=True)
            save(aside)
            if aside.exists():
                if name in _AS_WRITTEN:
                    seal = _seal(aside)
                    if name == ORIGIN and sealed.get(name, seal) != seal:  # the run began with something else
                        clear(aside)
                        continue
                    sealed[name] = seal
                aside.rename(folder / name)
    for name in sealed:
        check_sealed(folder / name, sealed)
    return sealed


def identity_of(folder: Path) -> str | None:
    """A hash of a run's configuration at its start and of its data, which tell it from another run; None: an earlier
    version began it.
    """
    path = folder / SOFTWARE
    run = read_fields(path).get(RUN) if path.is_file() else None
    if not isinstance(run, str | None):
        raise UserError(f"{path}: {RUN}: found {run!s:.60}, expected a text; restore the file")
    return run and hashlib.sha256(f"{run} {sha256_of(folder / DATA)}".encode()).hexdigest()


def num_starts(folder: Path) -> int:
    """How often the run has been started; 0 where it is not known, as for a run that an earlier version began."""
    try:
        count = read_json(folder / SOFTWARE).get(STARTS, 0)
        return count if type(count) is int else 0
    except (OSError, ValueError, AttributeError, TypeError, OverflowError):
        return 0


def check_own(folder: Path, checkpoint: Path, state: Fields) -> None:
    """Refuse a checkpoint of another run, which may have been copied into this one's folder, and a configuration of
    another one that lies there instead of its own.

    Args:
        folder: of the run; without a readable record there only the model's shape is compared.
        state: content of the checkpoint's state.json.

    Raises:
        UserError: it is another run's.
    """
    other = f"{checkpoint}: found a checkpoint of another run"
    advice = "move away the one of the two that is not this run's"
    expected = fields_if_readable(folder / SOFTWARE).get(RUN)
    if expected is not None and (found := state.get(RUN)) != expected:
        raise UserError(
            f"{other} ({RUN} is {found!s:.12} in its state.json), expected {expected!s:.12}, as in "
            f"{folder / SOFTWARE}; {advice}"
        )
    shape, saved = fields_of(folder), state.get("shaping", {})
    for name in sorted(shape.keys() & saved.keys()):
        if name.startswith("model.") and shape[name] != saved[name]:
            raise UserError(
                f"{other}, whose {name} is {saved[name]!r:.60}, expected {shape[name]!r:.60}, as in "
                f"{folder / CONFIG}; {advice}"
            )


def description_of(folder: Path) -> dict[str, str]:
    """The files of a run's description, by name."""
    return {name: (folder / name).read_text(encoding="utf-8") for name in DESCRIPTION if (folder / name).exists()}


def describe_again(folder: Path, description: Mapping[str, str], warn: Callable[[str], None]) -> None:
    """Write the files of the description again that are not in the run's folder any more, or are empty: without them
    no command reads the run, and none goes on with it. Does nothing where there is no such folder.

    Args:
        description: as the start has written it (`description_of`).
        warn: called with a line about each that is written again.
    """
    for name, text in description.items() if folder.is_dir() else ():
        path = folder / name
        if not path.exists() or path.is_file() and not path.stat().st_size:
            publish_text(path, text)
            warn(f"{folder}: {name} was removed or emptied while the run used the folder; it is written again")


def check_there(folder: Path) -> None:
    """Raise UserError if something that `write_description` has written is not in the run's folder any more, apart from
    the description.
    """
    if not (folder / TOKENIZER).exists():
        raise UserError(
            f"{folder}: found no {TOKENIZER}, expected it as the run has written it: something was removed while the "
            "run used the folder; the same command writes it again and goes on from the newest checkpoint that is left"
        )
    for name in _AS_WRITTEN:
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


def stem_of(split: str) -> str:
    """What the names of the files in PREDICTIONS begin with for a split of results.json."""
    return split.replace("/", "-")
