"""Writes the description of a run: what is needed to understand, repeat and export it."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from cloze.launch.config import RunConfig
from cloze.launch.run.integrity import AS_WRITTEN, HASHES, SEALED, check_sealed, own_tokenizer, write_seal
from cloze.launch.run.runs import (
    CONFIG,
    DATA,
    DEEPSPEED,
    DESCRIPTION,
    FIRST_WEIGHTS,
    ORIGIN,
    RUN,
    SOFTWARE,
    STARTS,
    TOKENIZER,
    Facts,
    num_starts,
)
from cloze.launch.system.software import software
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import clear, publish_json, publish_text, readable_errors, sha256_of
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from cloze.pipeline.untrusted import dump_yaml, fields_if_readable


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
    publish_text(folder / CONFIG, dump_yaml(asdict(config), sort_keys=False))
    publish_json(folder / DEEPSPEED, deepspeed)
    sealed = sealed if goes_on else _save_folders(folder, saves, earlier)
    starts: Fields = {STARTS: num_starts(folder) + 1, SEALED: sealed}
    known = {RUN: run, FIRST_WEIGHTS: first_weights or earlier.get(FIRST_WEIGHTS)}
    starts |= {name: value for name, value in known.items() if value is not None}
    publish_json(folder / SOFTWARE, software() | starts)  # after the folders that it names


def _save_folders(folder: Path, saves: Mapping[str, Callable[[Path], object]], earlier: Fields) -> dict[str, object]:
    """Write the folders of `saves` that are not there; returns the seals of those that go out with the run's model.

    Args:
        earlier: the content of software.json.
    """
    recorded = earlier.get(SEALED)
    sealed = {name: recorded[name] for name in saves if name in recorded} if isinstance(recorded, dict) else {}
    for name, save in saves.items():
        aside = folder / f"{name}.tmp"
        if (folder / name).exists():
            if (folder / name / HASHES).is_file():  # a start that wrote it may have been killed before the end of this
                sealed.setdefault(name, sha256_of(folder / name / HASHES))
            continue
        with readable_errors(aside):
            clear(aside, ignore_errors=True)
            save(aside)
            if aside.exists():
                if name in AS_WRITTEN:
                    seal = write_seal(aside)
                    if name == ORIGIN and sealed.get(name, seal) != seal:  # the run began with something else
                        clear(aside)
                        continue
                    sealed[name] = seal
                aside.rename(folder / name)
    for name in sealed:
        check_sealed(folder / name, sealed)
    return sealed


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
