"""Reads the text of JSON lines that are too long for memory, piece by piece."""

import json
import re
import sys
from collections.abc import Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]  # its stub leaves it out
from typing import Any

from cloze.pipeline.errors import UserError
from cloze.pipeline.readers.files import Segment, between_characters

_SPACES = re.compile(r"[ \t\n\r]*")
_BODY = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)  # of a JSON string, up to its quote or what there is
_UNITS = re.compile(  # units that must not be cut: a byte, a surrogate pair, another \uXXXX, an escape of two
    rb"(?:[^\\]|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u]))"
    rb"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*",
    re.DOTALL,
)
_LOOK_BACK = 4096


def document_id(value: object) -> str | None:
    """An id as text; None for null."""
    return None if value is None else str(value)


def _matched(pattern: re.Pattern[Any], text: Any, start: int = 0, stop: int = sys.maxsize) -> int:
    """End of the match of a pattern that always matches (possibly the empty string)."""
    found = pattern.match(text, start, stop)
    assert found is not None, pattern
    return found.end()


class LongLine:
    """One JSON object whose line is fed in parts; yields its text in pieces of at most `longest` bytes (encoded).

    Everything before the text must be in the first part.

    Raises:
        UserError: it isn't JSON, or lacks the field.
    """

    def __init__(self, segment: Segment, offset: int, longest: int):
        self.where = f"{segment.file.path}: byte {offset}"
        self.config = segment.file.config
        self.longest = longest
        self.id: str | None = None
        self._held = b""
        self._place = "before"  # before the "text", "inside" it, or "after" it

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take the next part of the line; yields the complete JSON-escaped pieces of text."""
        if self._place == "after":
            return
        self._held += data
        if self._place == "before":
            self._held = self._held[self._find_text() :]
            self._place = "inside"
        available = _matched(_BODY, self._held)
        closed = self._held[available : available + 1] == b'"'
        start = 0
        while available - start > self.longest or (closed and start < available):
            stop = min(start + self.longest, available)
            if stop < available:
                stop = start + self._safe_cut(self._held[start : stop + 1], self.longest)
            yield self._held[start:stop]
            start = stop
        self._held = self._held[start:]
        if closed:
            self._held, self._place = b"", "after"

    def finish(self) -> None:
        """The line has ended.

        Raises:
            UserError: the text hasn't.
        """
        if self._place != "after":
            raise UserError(f"{self.where}: the line isn't JSON (a string doesn't end); fix it")

    def decode(self, piece: bytes) -> str:
        try:
            return json.loads(b'"' + piece + b'"')
        except ValueError as error:
            raise UserError(f"{self.where}: the line isn't JSON ({error}); fix it") from error

    def _find_text(self) -> int:
        """Offset of the text after its opening quote; also finds the id."""
        text = self._held.decode(errors="surrogateescape")  # which keeps the places of bytes that aren't UTF-8
        decoder = json.JSONDecoder()
        id_missing = self.config.id_field is not None
        try:
            place = _matched(_SPACES, text)
            if text[place] != "{":
                raise UserError(f"{self.where}: found no object, expected one with {self.config.text_field!r}")
            place = _matched(_SPACES, text, place + 1)
            while True:
                key, place = scanstring(text, place + 1)
                place = _matched(_SPACES, text, place) + 1  # behind the colon
                place = _matched(_SPACES, text, place)
                if key == self.config.text_field:
                    break
                value, place = decoder.raw_decode(text, place)
                if key == self.config.id_field:
                    self.id, id_missing = document_id(value), False
                place = _matched(_SPACES, text, place) + 1  # behind the comma
                place = _matched(_SPACES, text, place)
            if text[place] != '"':
                raise UserError(f"{self.where}: {key}: found no string")
        except UserError:
            raise
        except (ValueError, IndexError) as error:
            raise UserError(
                f"{self.where}: found no field {self.config.text_field!r} at the beginning of a line of more than "
                f"{len(self._held) >> 20} MB; put it before longer fields"
            ) from error
        if id_missing:
            raise UserError(
                f"{self.where}: found no {self.config.id_field!r} before the text of a long line; put it there"
            )
        return len(text[: place + 1].encode(errors="surrogateescape"))

    def _safe_cut(self, data: bytes, limit: int) -> int:
        """A place to cut at or before `limit`: after a space, else between characters and outside of an escape."""
        if (space := data.rfind(b" ", max(0, limit - _LOOK_BACK), limit)) > 0:
            return space + 1
        place = between_characters(data, _matched(_UNITS, data, 0, limit))
        if place == 0:
            raise UserError(f"{self.where}: found an escape that JSON doesn't have; fix it")
        return place
