"""Whose run a folder holds: what a run is known by, whether it is complete, and what an interrupted one has left."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import tokenizers

from cloze.pipeline.config import PrepareConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.jobs.exchange_stage import FILES_AT_ONCE
from cloze.pipeline.jobs.resuming import go_on_as, has_reports
from cloze.pipeline.jobs.source_hashes import source_hash
from cloze.pipeline.readers.files import InputFile, Segment
from cloze.pipeline.shards.manifest import FILE_NAME, TOKENIZER_FOLDER, Manifest, has_lost_manifest
from cloze.pipeline.shards.reader import fault_of_shards
from cloze.pipeline.storage import publish_text, readable_errors, remove_tree, sha256_of
from cloze.pipeline.stores.places import Place, StorePath, to_place
from cloze.pipeline.tokenization.tokenizer import Tokenizer, described_in_copy
from cloze.pipeline.untrusted import check_readable, load_json

# Version of the rules for words, sentences, samples and masks. Increased when the same input gives other ids or masks:
# an interrupted run must not be finished with other rules.
_RULES = 4
_OF_EACH_FILE = ("sources", "times of change", "ETags")  # of what a run is known by
_IDENTITY = "run.json"  # file of the work folder
# Of the files of a complete run, on disks: up to so many are hashed again, in a second or two. Names are relative and
# times tell nothing of a folder that was exchanged for another, whose files may have the same names and sizes.
_HASHED_AGAIN_BYTES = 1 << 30
_CLOCKS_APART = 600 * 10**9  # nanoseconds by which a store's clock may be another than this machine's


def length_folder(config: PrepareConfig, length: int) -> Place:
    """Folder of the shards of a length: OUTPUT, or OUTPUT/length-N for additional lengths."""
    return to_place(config.output) if length == config.max_length else to_place(config.output) / f"length-{length}"


def run_identity(
    config: PrepareConfig, tokenizer: Tokenizer, files: list[InputFile], segments: list[list[Segment]]
) -> Fields:
    """The identity of a run: everything that determines its bytes and its tasks, as JSON values so that it can be
    compared after a round trip.
    """
    tasks = json.dumps([[[part.file.number, part.start, part.stop] for part in task] for task in segments])
    return {
        "preparation": json.loads(json.dumps(config.preparation(config.max_length))),
        "lengths": config.lengths,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "sources": [[file.source, file.name, file.size] for file in files],
        "times of change": [0 if file.content else file.changed for file in files],
        **({"ETags": [file.content for file in files]} if any(file.content for file in files) else {}),
        "rules": _RULES,
        "parts read at once": FILES_AT_ONCE,
        # Other versions of pyarrow may write other bytes.
        "library versions": {each.__name__: each.__version__ for each in (np, pa, tokenizers)},
        "division of the input": hashlib.sha256(tasks.encode()).hexdigest(),
    }


def complete_manifest(
    config: PrepareConfig,
    identity: Fields,
    tokenizer: Tokenizer,
    files: list[InputFile],
    output: Place,
    note: Callable[[str], None],
) -> Manifest | None:
    """The manifest of a complete run of the same command, or None; UserError for another command's."""
    if not (output / FILE_NAME).is_file():
        return None
    manifest = Manifest.load(output)
    prepared = {
        "preparation": manifest.preparation,
        "tokenizer_fingerprint": manifest.tokenizer_fingerprint,
        "sources": [[source.get("source", 0), source["name"], source["bytes"]] for source in manifest.sources],
    }
    different = [name for name, value in prepared.items() if value != identity[name]]
    if different:
        raise UserError(
            f"output: {output} holds data prepared with another {_difference(prepared, identity, different[0])}; "
            "choose another --output or remove the folder"
        )
    # What the fingerprint does not show, such as the longest text and the class for transformers, goes out with models.
    # (A run that is interrupted has nothing of it: the one that goes on copies the tokenizer anew.)
    described = tokenizer.contents(described_in_copy(tokenizer))["tokenizer_config.json"]
    if manifest.tokenizer_hashes.get("tokenizer_config.json") not in (
        None,
        hashlib.sha256(described).hexdigest(),
    ):
        raise UserError(
            f"output: {output} holds data prepared with another tokenizer_config.json of {tokenizer.folder}, whose "
            "content has changed since; restore it, choose another --output or remove the folder"
        )
    published = (output / FILE_NAME).stat().st_mtime_ns
    all_again = sum(file.size for file in files) <= _HASHED_AGAIN_BYTES and all(file.touched for file in files)
    for file, source in zip(files, manifest.sources, strict=True):
        digest = source.get("sha256")
        by_a_store = isinstance(output, StorePath) or file.content is not None
        since = published - _CLOCKS_APART if by_a_store else published
        again = digest and (all_again or max(file.changed, file.touched) >= since)
        if again and source_hash(file, source.get("piece_bytes")) != digest:
            raise UserError(
                f"output: {output} holds data prepared from other content of {file.path}, which has changed since; "
                "choose another --output or remove the folder"
            )
    missing = [length for length in config.lengths if not (length_folder(config, length) / FILE_NAME).is_file()]
    if lost := [
        length_folder(config, length) / FILE_NAME for length in missing if length in (manifest.more_lengths or ())
    ]:
        raise UserError(
            f"output: {output} is complete, but {lost[0]} is gone; restore it, or remove {output} and run the same "
            "command again"
        )
    if missing:
        raise UserError(
            f"output: {output} is complete, but not with more_lengths {missing}; choose another --output or remove the "
            "folder"
        )
    for length in config.lengths:
        made = manifest if length == config.max_length else Manifest.load(length_folder(config, length))
        check_there(made, f"restore it, or remove {output} and run the same command again")
    compared = "" if all_again else "; its input was compared by names, sizes and times of change"
    note(f"{output} is complete already{compared}")
    return manifest


def _difference(found: Fields, expected: Fields, name: str) -> str:
    """The first difference of two identities, by name, with both values if they are short, or with the file's name."""
    old, new = found.get(name), expected.get(name)
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        number = next(number for number, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1])
        if name in _OF_EACH_FILE and not isinstance(new[number], dict):
            return f"{name} of {expected['sources'][number][1]}"
        old, new = old[number], new[number]
    if isinstance(old, dict) and isinstance(new, dict):
        for key in new:
            if old.get(key) != new[key]:
                return f"{name}." + _difference(old, new, key)
    values = f" ({found.get(name)!r}, now {expected.get(name)!r})"
    return name + (values if len(values) < 160 else "")


def check_there(manifest: Manifest, advice: str) -> None:
    """Raise UserError, with `advice`, unless what a manifest names is there: something may have removed or changed it
    since. Of shards, which may be terabytes, the sizes tell.
    """
    for name, split in manifest.splits.items():
        if fault := fault_of_shards(manifest.folder, name, split.shards):
            raise UserError(f"{fault}; {advice}")
    for name, expected in manifest.tokenizer_hashes.items():
        path = manifest.tokenizer_folder / name
        with readable_errors(path):
            found = "no such" if not path.is_file() else "another" if sha256_of(path) != expected else None
        if found:
            raise UserError(f"{path}: found {found} file, expected it as it was written; {advice}")


def make_work(output: Place, work: Place) -> None:
    """Make the work folder, unless the output holds other files than those of a command that was faster."""
    with readable_errors(output):
        is_lost = has_lost_manifest(output)
        is_foreign = not work.is_dir() and output.is_dir() and any(output.iterdir())
        complete = (output / FILE_NAME).is_file()  # asked last: a faster command may have written it meanwhile
        if is_lost and not complete:
            raise UserError(
                f"output: {output} holds shards without their {FILE_NAME}, expected a new or empty folder; restore "
                "that file, choose another --output or remove the folder"
            )
        if is_foreign and not complete:
            raise UserError(
                f"output: {output} holds other files, expected a new or empty folder; choose another --output"
            )
        if isinstance(work, Path):
            work.mkdir(parents=True, exist_ok=True)


def open_work(output: Place, work: Place, identity: Fields, note: Callable[[str], None]) -> Place:
    """Begin or continue a run, alone in its folder. An interrupted run of another command of which no task is complete
    has nothing to lose, and is begun anew: mostly it stopped at something that the user has changed in the command.

    Returns:
        The folder of its reports and parts, whose name says whose they are: none of another run is taken for one of
        this.
    """
    own = work / _folder_name(identity)
    with readable_errors(output):
        found = _identity_of(work)
        if found != identity:
            others = [path for path in work.iterdir() if path.name not in (own.name, _IDENTITY) and path.is_dir()]
            kept = any(map(has_reports, others))
            if found is None and kept:
                raise UserError(
                    f"output: {output} holds an interrupted run, whose command {work / _IDENTITY} should tell, but "
                    "that is missing or damaged; choose another --output, or remove the folder"
                )
            if found is not None:
                different = next(name for name in {**identity, **found} if found.get(name) != identity.get(name))
                what = f"{output} holds an interrupted run with another {_difference(found, identity, different)}"
                if kept and _has_no_errors(found, identity) and go_on_as(others, own):
                    note(f"{what}; what is complete has no such bytes, and is kept")
                elif kept:
                    raise UserError(
                        f"output: {what}; repeat that command, choose another --output, or remove the folder"
                    )
                else:
                    note(f"{what}; nothing of it was complete: it is begun anew")
            for stale in (*others, output / TOKENIZER_FOLDER):
                remove_tree(stale)
        if isinstance(own, Path):
            own.mkdir(exist_ok=True)
        if found != identity:
            publish_text(work / _IDENTITY, json.dumps(identity))
    return own


def _has_no_errors(found: Fields, identity: Fields) -> bool:
    """Whether a command differs from that of an interrupted run only in that it replaces bytes that are not UTF-8, at
    which the other one stopped: what that has completed of stage 1 has none, and is the same for both.
    """
    before, now = found["preparation"]["sources"], identity["preparation"]["sources"]
    changed = {**found, "preparation": {**found["preparation"], "sources": now}}
    return (
        changed == identity
        and len(before) == len(now)
        and all(
            old == new or {**old, "encoding_errors": "replace"} == new for old, new in zip(before, now, strict=True)
        )
    )


def _folder_name(identity: Fields) -> str:
    return f"run-{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]}"


def check_ours(own: Place) -> None:
    """Before a worker puts something in a store where another command may have put its own: raise UserError unless the
    folder of reports and parts is still that of the command at work there. On a disk its lock says so.
    """
    if isinstance(own, StorePath):
        found = _identity_of(own.parent)
        if found is None or _folder_name(found) != own.name:
            raise UserError(
                f"{own.parent / _IDENTITY}: found {'none' if found is None else 'that of another command'}, expected "
                "the one of this run: it was suspended for so long that another command took over the output, or "
                "removed it; run the same command again, with another --output"
            )


def _identity_of(work: Place) -> Fields | None:
    """What the run in a work folder is known by; None if that is missing or damaged."""
    check_readable(work / _IDENTITY)
    try:
        found: Fields = load_json((work / _IDENTITY).read_text(encoding="utf-8"))
        sources = found["preparation"]["sources"]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(sources, list) and all(isinstance(each, dict) for each in sources) else None
