"""Finds the input files that files, folders and globs name; an unreadable file is an error, never skipped."""

import fnmatch
import os
import re
import shlex
import stat
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from cloze.pipeline.config import SourceConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.formats import FORMATS
from cloze.pipeline.patterns import MAGIC, is_named
from cloze.pipeline.readers import compression
from cloze.pipeline.readers.binary import START_BYTES, kind_by_name, kind_of
from cloze.pipeline.readers.columns import Rows
from cloze.pipeline.readers.files import InputFile, checked_name, last_touched
from cloze.pipeline.storage import describe, readable_errors
from cloze.pipeline.stores.clients import NotAllowed, ObjectInfo
from cloze.pipeline.stores.places import StorePath, is_url, to_place

# tables that would otherwise be read as lines of text, with quotes, headers and other columns
_TABLES = (".csv", ".tsv")
_NAMED = 3  # files of a kind that are named where they are counted
_GLOBS = 6  # patterns that a line shows at most


def find_files(
    entries: list[str], source: int, config: SourceConfig, first: int, written: list[str], note: Callable[[str], None]
) -> list[InputFile]:
    """Files of a source in the order of their names; the order of the entries doesn't matter.

    Linked folders are entered. Hidden files are skipped, and files in `written` places unless an entry names a place
    inside.

    Args:
        note: called with what is left out (source.binary_files).

    Raises:
        UserError: for an entry that matches nothing, for unreadable files, and for files that are no text.
    """
    paths, stored = _paths(entries, written)
    # A file with several names is read once. The format follows from a link's own name, since the target's name may be
    # a hash (the cache of the Hugging Face hub, DVC, git-annex). Of several names the shortest path is taken.
    real_folder = cache(os.path.realpath)  # realpath checks every parent folder, which takes seconds for 50,000 files
    chosen: dict[str, str] = {}
    for path, real in paths.items():
        real = path if path in stored else real or _real_path(path, real_folder)
        other = chosen.setdefault(real, path)
        if other is not path:
            chosen[real] = min(path, other, key=lambda name: (name.count(os.sep), name))
    ordered = sorted(chosen.values())
    below = os.path.join(_shared_folder(ordered), "")
    files = [
        _input_file(path, below, number, source, config, stored.get(path), paths[path] is not None)
        for number, path in enumerate(ordered, first)
    ]
    if any(file.binary for file in files):
        files = _texts(files, entries, written, note)
    if not any(file.size for file in files):
        raise UserError(f"input: found only empty files at {', '.join(entries)}, expected text")
    for file in files:
        if file.compression and not file.size:
            raise UserError(
                f"{file.path}: found no bytes, expected a {file.compression} file, which has some even if there is no "
                "text in it; restore or remove the file"
            )
    return files


def local_files(entry: str) -> list[str]:
    """The files on this machine's disks that an entry stands for; none for a URL.

    Raises:
        UserError: a link there leads to nothing, or a folder can't be read.
    """
    if isinstance(to_place(entry), StorePath):
        return []
    with readable_errors(Path(entry)):
        return [*_expand(entry, [])]


def _paths(entries: list[str], written: list[str]) -> tuple[dict[str, str | None], dict[str, ObjectInfo]]:
    """The paths of the entries' files, with their real paths where known, and those of them that are in a store."""
    paths: dict[str, str | None] = {}
    stored: dict[str, ObjectInfo] = {}
    for entry in entries:
        if isinstance(name := to_place(entry), StorePath):
            more = _stored_files(name, [each for each in map(to_place, written) if isinstance(each, StorePath)])
            stored |= more
            paths |= dict.fromkeys(more)
            if not more:
                raise UserError(
                    f"input: found nothing at {entry!r}, expected an object, a folder with objects, or a "
                    "glob; check the URL"
                )
            continue
        with readable_errors(Path(entry)):
            found = _expand(entry, [os.path.realpath(each) for each in written if not is_url(each)])
        if not found:
            raise UserError(
                f"input: found nothing at {entry!r}, expected a file, a folder with files, or a glob; check the path"
            )
        paths |= found
    return paths, stored


def _texts(
    files: list[InputFile], entries: list[str], written: list[str], note: Callable[[str], None]
) -> list[InputFile]:
    """The files that may be text, where others are left out.

    Raises:
        UserError: some are not text, and nobody has asked to leave them out.
    """
    binary: dict[str, list[str]] = {}
    for file in files:
        if file.binary:
            binary.setdefault(file.binary, []).append(file.name)
    kinds = ", ".join(
        f"{len(names):,} {kind} ({', '.join(names[:_NAMED])}{', …' * (len(names) > _NAMED)})"
        for kind, names in binary.items()
    )
    rest = [file for file in files if not file.binary]
    found = f"{len(files) - len(rest):,} of {len(files):,} files that are no text: {kinds}"
    if rest and files[0].config.binary_files == "skip":
        note(f"input: left out {found}")
        return [replace(file, number=number) for number, file in enumerate(rest, files[0].number)]
    globs = _globs(entries, [file.path for file in rest], written)
    others = f"take the others with --input {shlex.join(globs)}, or " if globs else ""
    leave = f"; convert these, {others}leave these out with --source.binary_files skip" if rest else ""
    raise UserError(f"input: found {found}; expected text{leave or '; convert them'}")


def _globs(entries: list[str], rest: list[str], written: list[str]) -> list[str]:
    """Patterns in place of the entries that match the rest of their files and nothing else; empty if the endings of
    names do not tell them apart.
    """
    endings = sorted({_ending(path) for path in rest})
    globs: list[str] = []
    for entry in entries:
        folder = re.sub(r"(/|/\*\*?)$", "", entry)
        is_folder = to_place(folder).is_dir()
        globs += [f"{folder}/**/*{ending}" for ending in endings] if is_folder else [entry]
    if len(globs) > _GLOBS:
        return []
    try:
        paths = {path for glob in globs for path in _paths([glob], written)[0]}
    except UserError:
        return []
    return globs if {*map(os.path.realpath, paths)} == {*map(os.path.realpath, rest)} else []


def _ending(path: str) -> str:
    """The ending of a file's name, with that of a compressed one's content."""
    stem, last = os.path.splitext(os.path.basename(path))
    return os.path.splitext(stem)[1] + last if last in compression.SUFFIXES else last


def _shared_folder(paths: list[str]) -> str:
    """The common parent folder or URL; empty if there is none."""
    folders = {os.path.dirname(path) for path in paths}
    if not any(map(is_url, folders)):
        return os.path.commonpath(folders)
    first, last = (folder.split("/") for folder in (min(folders), max(folders)))
    count = next(
        (n for n, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), min(len(first), len(last))
    )
    return "/".join(first[:count]) if count > 2 else ""  # scheme, nothing, bucket


def _stored_files(entry: StorePath, written: list[StorePath]) -> dict[str, ObjectInfo]:
    """The objects of a URL by their URLs: the object itself, those below, or those that match. Hidden objects are
    skipped, and those in a written folder unless the entry names a place inside.

    Raises:
        UserError: there is an object of this name, and others below.
    """
    parts = entry.key.split("/")
    fixed = next((number for number, part in enumerate(parts) if MAGIC.search(part)), len(parts))
    if (info := entry.info()) is not None:  # also of a name with letters of a glob
        if not _is_folder_too(entry):
            return {str(entry): info}
        if info.size and not any(each.size for each in entry.objects()):  # those mark a folder
            return {str(entry): info}
        if info.size:  # otherwise it marks the folder
            raise UserError(
                f"input: found an object {entry} and others below it, expected one of both; name those with "
                f"{entry}/*, or rename the object"
            )
    folder = entry.at("/".join(parts[:fixed]))
    pattern = parts[fixed:]
    hidden = any(part.startswith(".") for part in pattern)
    aside = [f"{place}/" for place in written if not f"{entry}/".startswith(f"{place}/")]
    files = {}
    for listed in folder.objects():
        below = listed.key[len(folder.key) :].strip("/").split("/")
        url = str(entry.at(listed.key))
        if (
            (listed.size or entry.at(listed.key).info())  # not what marks a folder (`ObjectClient.objects`)
            and (hidden or not any(part.startswith(".") for part in below))
            and not url.startswith(tuple(aside))
            and (not pattern or is_named(pattern, below))
        ):
            files[url] = listed
    return files


def _is_folder_too(entry: StorePath) -> bool:
    """Whether objects lie below this one; not for one who may read it and list nothing."""
    try:
        return entry.scheme != "hf" and entry.is_dir()
    except NotAllowed:
        return False


def _real_path(path: str, real_folder: Callable[[str], str]) -> str:
    if os.path.islink(path):
        return os.path.realpath(path)
    folder, name = os.path.split(path)
    return os.path.join(real_folder(folder), name)


def _input_file(
    path: str, below: str, number: int, source: int, config: SourceConfig, stored: ObjectInfo | None, is_file: bool
) -> InputFile:
    """One file of a source.

    Args:
        below: the common folder, with a trailing slash.
        is_file: whether it is known to be a file and not a link.
    """
    form, packed = _format(path, config)
    rows = isinstance(FORMATS[form].load(), Rows)
    if stored is not None:
        name = path.removeprefix(below)
        size, changed, content = stored.size, stored.changed, stored.content
        # by its name: reading the first bytes would cost a request for each object
        kind = None if rows else kind_by_name(os.path.splitext(name)[1].lower())
        return InputFile(
            number, source, path, name, form, packed, size, changed, config, content=content, has_rows=rows, binary=kind
        )
    kind = None
    try:
        if not is_file:
            _check_file(path, _status(path))
        opened = os.open(path, os.O_RDONLY)  # detects unreadable files now, not in the middle of the job
        try:
            status = os.fstat(opened)
            if not rows and not packed and stat.S_ISREG(status.st_mode):
                kind = kind_of(os.pread(opened, START_BYTES, 0))
        finally:
            os.close(opened)
        touched = status.st_ctime_ns if is_file else last_touched(path, status)
    except OSError as error:
        raise UserError(describe(error, path)) from error
    _check_file(path, status)
    name = checked_name(path[len(below) :].replace(os.sep, "/"))
    size, changed = status.st_size, status.st_mtime_ns
    return InputFile(
        number, source, path, name, form, packed, size, changed, config, touched=touched, has_rows=rows, binary=kind
    )


def _check_file(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: is no file, expected files and folders; write its contents into a file")


def _format(path: str, config: SourceConfig) -> tuple[str, str | None]:
    """The format and the compression of a file, by its name and the configuration."""
    *_, inner, last = ["", "", *os.path.basename(path).lower().lstrip(".").split(".")[1:]]
    packed = compression.SUFFIXES.get(f".{last}")
    kind = f".{inner if packed else last}"
    if kind in compression.UNREAD:
        raise UserError(
            f"{path}: found {kind}, expected plain files or compressed ones ({', '.join(compression.SUFFIXES)}); "
            "unpack it, or leave it out by naming the others with a glob"
        )
    if config.format != "auto":
        return config.format, packed
    if kind in _TABLES:
        raise UserError(
            f"{path}: found a table ({kind}), expected text, JSON lines or Parquet; write its column of texts as "
            "one of these, or give --source.format lines to read each line as it is"
        )
    return next((name for name, form in FORMATS.items() if kind in form.suffixes), "text"), packed


def _status(path: Path | str) -> os.stat_result:
    try:
        return os.stat(path)
    except FileNotFoundError as error:
        if os.path.islink(path):
            raise UserError(
                f"{path}: links to {os.readlink(path)}, where nothing is, expected a file or a folder; restore that, "
                "or remove the link"
            ) from error
        raise


def _expand(entry: str, written: list[str]) -> dict[str, str | None]:
    """The files of an entry by their paths, with links resolved above the last part of the entry.

    Values are real paths, where the listing of a folder shows a file that is no link; else None.
    """
    path = Path(os.path.expanduser(entry))  # which leaves the ~ of an unknown user as it is
    written = [folder for folder in written if not Path(os.path.realpath(path)).is_relative_to(folder)]
    places = [path] if os.path.lexists(path) else _matches(Path(path.anchor), path.parts[bool(path.anchor) :], written)
    found: dict[str, str | None] = {}
    for place in places:
        status = _status(place)
        place = place.parent.resolve() / place.name if place.name not in ("", "..") else place.resolve()
        if stat.S_ISDIR(status.st_mode):
            for _, files in _walk(place, written):
                found |= files
        elif not _lies_in(written, place):
            found[str(place)] = None
    return found


def _lies_in(written: list[str], path: Path) -> bool:
    return any(path.is_relative_to(each) for each in written)


def _walk(top: Path, written: list[str]) -> Iterator[tuple[Path, dict[str, str | None]]]:
    """A folder and those below it, each once, with the paths of their files, except hidden and `written` ones.

    A path's value is its real path if the folder's listing shows a file that is no link, which needs no call to the
    system for each file; else None. Linked folders come last, so that a folder's own name goes before a link's.
    """
    waiting: deque[str] = deque([str(top)])  # folders to enter; linked ones wait in `linked` until it is empty
    linked, seen = deque[str](), set()
    while waiting or linked:
        place = (waiting or linked).popleft()
        real = os.path.realpath(place)
        if real in seen or _lies_in(written, Path(real)):
            continue
        seen.add(real)
        hidden = {os.path.basename(each) for each in written if os.path.dirname(each) == real}
        folders: list[os.DirEntry[str]] = []
        files: dict[str, str | None] = {}
        with os.scandir(place) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    if _is_folder(entry):
                        folders.append(entry)
                    elif entry.name not in hidden:
                        is_file = entry.is_file(follow_symlinks=False)
                        files[entry.path] = os.path.join(real, entry.name) if is_file else None
        folders.sort(key=lambda entry: entry.name)
        waiting.extendleft(entry.path for entry in reversed(folders) if not entry.is_symlink())
        linked.extend(entry.path for entry in folders if entry.is_symlink())
        yield Path(place), files


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or a link to one; false for a circular link."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _matches(folder: Path, parts: tuple[str, ...], written: list[str]) -> Iterator[Path]:
    """Paths below `folder` that match a pattern, as glob.glob, which however treats an unreadable folder as empty."""
    if not parts:
        yield folder
    elif parts[0] == "**":
        for place, _ in _walk(folder, written) if len(parts) > 1 else [(folder, [])]:
            yield from _matches(place, parts[1:], written)
    elif MAGIC.search(parts[0]):
        hidden = parts[0].startswith(".")
        for name in sorted(os.listdir(folder)):
            place = folder / name
            if fnmatch.fnmatchcase(name, parts[0]) and (hidden or not name.startswith(".")):
                if len(parts) == 1 or stat.S_ISDIR(_status(place).st_mode):
                    yield from _matches(place, parts[1:], written)
    else:
        place = folder / parts[0]
        try:
            place.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return
        yield from _matches(place, parts[1:], written)
