"""Files that are no text (PDF, Office, images …), recognized by their first bytes or, in a store, by their names."""

import re
from dataclasses import dataclass

START_BYTES = 16
"""Bytes at the beginning of a file that tell its kind."""


@dataclass(frozen=True)
class _Kind:
    """Files of one kind: how they begin, and the endings of their names."""

    start: re.Pattern[bytes]
    suffixes: tuple[str, ...] = ()


# The beginnings are those of the database of file(1). Of what could begin a text, the bytes that follow are asked for
# too.
_KINDS = {
    "PDF": _Kind(re.compile(rb"%PDF-\d\.\d"), (".pdf",)),
    "Office, OpenDocument, EPUB or another ZIP": _Kind(
        re.compile(rb"PK(\x03\x04|\x05\x06)"), (".docx", ".xlsx", ".pptx", ".odt", ".ods", ".odp", ".epub")
    ),
    "Office before 2007": _Kind(re.compile(rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"), (".doc", ".xls", ".ppt")),
    "RTF": _Kind(re.compile(rb"\{\\rtf\d"), (".rtf",)),
    "image": _Kind(
        re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|II\*\0|MM\0\*|RIFF(?s:....)WEBP"),
        (".png", ".jpg", ".jpeg", ".gif", ".tif", ".tiff", ".webp"),
    ),
    "sound or film": _Kind(
        re.compile(rb"ID3[\2-\4]|OggS\0|fLaC\0|RIFF(?s:....)(WAVE|AVI )|\0\0(?s:..)ftyp|\x1aE\xdf\xa3"),
        (".mp3", ".ogg", ".flac", ".wav", ".avi", ".mp4", ".m4a", ".mov", ".mkv", ".webm"),
    ),
    "compressed without the ending of its name": _Kind(
        re.compile(rb"\x1f\x8b|\xfd7zXZ\0|\x28\xb5\x2f\xfd|\x04\x22\x4d\x18|BZh[1-9]1AY&SY|7z\xbc\xaf|Rar!\x1a\x07")
    ),
}
_BY_SUFFIX = {suffix: name for name, kind in _KINDS.items() for suffix in kind.suffixes}


def kind_of(start: bytes) -> str | None:
    """The kind of a file by its first START_BYTES bytes; None: it may be text."""
    return next((name for name, kind in _KINDS.items() if kind.start.match(start)), None)


def kind_by_name(suffix: str) -> str | None:
    """The kind of a file by the ending of its name; None: it may be text."""
    return _BY_SUFFIX.get(suffix)
