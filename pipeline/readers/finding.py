"""Finds the input files that files, folders and globs name; an unreadable file is an error, never skipped."""

import fnmatch
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from cloze.pipeline.config import SourceConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.formats import FORMATS
from cloze.pipeline.readers import compression
from cloze.pipeline.readers.columns import Rows
from cloze.pipeline.readers.files import InputFile, checked_name, last_touched
from cloze.pipeline.storage import describe, readable_errors
from cloze.pipeline.stores.clients import ObjectInfo
from cloze.pipeline.stores.places import StorePath, is_url, to_place

# tables that would otherwise be read as lines of text, with quotes, headers and other columns
_TABLES = (".csv", ".tsv", ".xlsx")
_MAGIC = re.compile(r"[*?[]")


def find_files(
    entries: list[str], source: int, config: SourceConfig, first: int, written: list[str]
) -> list[InputFile]:
    """Files of a source in the order of their names; the order of the entries doesn't matter.

    Linked folders are entered. Hidden files are skipped, and files in `written` places unless an entry names a place
    inside.

    Raises:
        UserError: for an entry that matches nothing, and for unreadable files.
    """
    paths: dict[str, str | None] = {}  # paths, and their real paths where known
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
    if not any(file.size for file in files):
        raise UserError(f"input: found only empty files at {', '.join(entries)}, expected text")
    for file in files:
        if file.compression and not file.size:
            raise UserError(
                f"{file.path}: found no bytes, expected a {file.compression} file, which has some even if there is no "
                "text in it; restore or remove the file"
            )
    return files


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
    """
    parts = entry.key.split("/")
    fixed = next((number for number, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    if (info := entry.info()) is not None:  # also of a name with letters of a glob
        return {str(entry): info}
    folder = entry.at("/".join(parts[:fixed]))
    pattern = parts[fixed:]
    hidden = any(part.startswith(".") for part in pattern)
    aside = [f"{each}/" for each in written if not f"{entry}/".startswith(f"{each}/")]
    found = {}
    for each in folder.objects():
        below = each.key[len(folder.key) :].strip("/").split("/")
        url = str(entry.at(each.key))
        if (
            (each.size or entry.at(each.key).info())  # not what marks a folder (`ObjectClient.objects`)
            and (hidden or not any(part.startswith(".") for part in below))
            and not url.startswith(tuple(aside))
            and (not pattern or _names(pattern, below))
        ):
            found[url] = each
    return found


def _names(pattern: list[str], below: list[str]) -> bool:
    """Whether a glob, part by part, matches an object or one of its parent folders; ** is any number of folders."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_names(pattern[1:], below[count:]) for count in range(len(below)))
    return bool(below) and fnmatch.fnmatchcase(below[0], pattern[0]) and _names(pattern[1:], below[1:])


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
        return InputFile(
            number, source, path, name, form, packed, size, changed, config, content=content, has_rows=rows
        )
    try:
        if not is_file:
            _check_file(path, _status(path))
        opened = os.open(path, os.O_RDONLY)  # detects unreadable files now, not in the middle of the job
        try:
            status = os.fstat(opened)
        finally:
            os.close(opened)
        touched = status.st_ctime_ns if is_file else last_touched(path, status)
    except OSError as error:
        raise UserError(describe(error, path)) from error
    _check_file(path, status)
    name = checked_name(path[len(below) :].replace(os.sep, "/"))
    size, changed = status.st_size, status.st_mtime_ns
    return InputFile(number, source, path, name, form, packed, size, changed, config, touched=touched, has_rows=rows)


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

    With the real paths of those that are files and not links by their folder's listing.
    """
    path = Path(entry).expanduser()
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
    """A folder and those below it, each once, with the paths of their files, but for what is hidden or `written`.

    And of those that the folder calls files, and no links, their places without any: no call to the system for each.
    Linked folders come last, so that a folder's own name goes before that of a link to it.
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
    elif _MAGIC.search(parts[0]):
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
