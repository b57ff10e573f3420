"""Places: local paths, and URLs of object stores with the same methods (`StorePath`)."""

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import overload

from cloze.pipeline.errors import UserError
from cloze.pipeline.stores.clients import HubClient, ObjectClient, ObjectInfo, open_client
from cloze.pipeline.untrusted import MOST_BYTES

SCHEMES = ("s3", "gs", "az", "hf")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_QUERY = re.compile(r"\?[^/]*=")  # a question mark alone may be a part of a name
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_SLIP = re.compile(rf"({'|'.join(SCHEMES)}):/?[^/]", re.IGNORECASE)
# parts of a hub repository in hf:// URLs: datasets/OWNER/NAME, else OWNER/NAME
_REPOSITORY_PARTS = {"datasets": 3, "spaces": 3}


@dataclass(frozen=True)
class StorePath:
    """A place in an object store, with the methods of pathlib.Path that are used for places.

    A store has objects, not folders: a folder exists if there is an object below it.
    """

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.key}" if self.key else "")

    def __truediv__(self, name: str) -> "StorePath":
        return StorePath(self.scheme, self.bucket, str(PurePosixPath(self.key, name)) if self.key else name)

    @cached_property
    def client(self) -> ObjectClient | HubClient:
        return open_client(self.scheme, self.bucket)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "StorePath":
        return StorePath(self.scheme, self.bucket, self.key.rpartition("/")[0])

    def resolve(self) -> "StorePath":
        """The place itself: a URL is absolute."""
        return self

    def info(self) -> ObjectInfo | None:
        """The object's ObjectInfo; None if it does not exist."""
        return self.client.info(self.key) if self.key else None

    def is_file(self) -> bool:
        return self.info() is not None

    def is_dir(self) -> bool:
        return self.client.is_folder(self.key)

    def stat(self) -> SimpleNamespace:
        """st_size, st_mtime_ns and `content`, which identifies the content.

        Raises:
            FileNotFoundError: there is no such object.
        """
        info = self.info()
        if info is None:
            raise not_found(self)
        return SimpleNamespace(st_size=info.size, st_mtime_ns=info.changed, content=info.content)

    def iterdir(self) -> Iterator["StorePath"]:
        return (self / name for name in self.client.names(self.key))

    def objects(self) -> Iterator[ObjectInfo]:
        """All objects below, in the order of their keys."""
        return self.client.objects(self.key)

    def at(self, key: str) -> "StorePath":
        """Another object of the same bucket."""
        return StorePath(self.scheme, self.bucket, key)

    def read_bytes(self) -> bytes:
        """The whole object.

        Raises:
            FileNotFoundError: there is no such object.
            UserError: it is too large to be read at once.
        """
        try:
            return self.client.read(self.key, most=MOST_BYTES)
        except FileNotFoundError as error:
            raise not_found(self) from error

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def read_range(self, start: int, stop: int, *, checked: bool = False) -> bytes:
        """Bytes [start, stop).

        Args:
            checked: for what has no checksum of ours, as `ObjectClient.read`.

        Raises:
            FileNotFoundError: there is no such object.
        """
        return self.client.read(self.key, start, stop, checked=checked)

    @property
    def writer(self) -> ObjectClient:
        """The client of a writable store.

        Raises:
            UserError: for the hub.
        """
        if isinstance(self.client, HubClient):
            raise UserError(f"{self}: is only read, expected a URL of s3, gs or az to write to; choose another")
        return self.client

    def write(self, content: bytes | Path) -> None:
        """Write the object from bytes or a local file."""
        self.writer.write(self.key, content)

    def unlink(self, missing_ok: bool = False) -> None:
        self.writer.delete([self.key])


Place = Path | StorePath


def is_url(text: object) -> bool:
    """Whether this looks like a URL, valid or not."""
    return isinstance(text, StorePath) or isinstance(text, str) and _URL.match(text) is not None


@overload
def to_place(text: StorePath, *, listed: bool = ...) -> StorePath: ...
@overload
def to_place(text: str | Place, *, listed: bool = ...) -> Place: ...
def to_place(text: str | Place, *, listed: bool = False) -> Place:
    """The place of a path or URL.

    The error does not show parts of the URL that may be secret.

    Args:
        listed: whether a listing has it: what looks like a query is then a part of an object's name.

    Raises:
        UserError: for a URL that is not that of a store.
    """
    if not isinstance(text, str):
        return text
    match = _URL.match(text)
    if match is None:
        if (slip := _SLIP.match(text)) and not Path(text).exists():
            raise UserError(
                f"{slip[1]}:…: expected a URL such as s3://bucket/folder; write two slashes, or ./ before "
                "the name of a local folder"
            )
        return Path(text)
    scheme, rest = match[1].lower(), match[2]
    if scheme not in SCHEMES:
        raise UserError(
            f"{scheme}://…: found a URL of scheme {scheme!r}, expected a path or one of "
            f"{', '.join(f'{each}://' for each in SCHEMES)}"
        )
    first = rest.partition("/")[0]
    if "@" in first or ":" in first or not listed and _QUERY.search(rest):
        raise UserError(
            f"{scheme}://…: found credentials or a query in a URL, expected {scheme}://bucket/name; "
            "credentials come from the store's own environment and files"
        )
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in rest):
        raise UserError(f"{scheme}://…: found a line break or another control character in a URL, expected none")
    if "//" in rest or rest.startswith("/"):  # s3://$BUCKET/data of a variable without a value
        raise UserError(
            f"{text}: found an empty part (//) in a URL, expected none, as objects of such names can't be read; write "
            "single slashes, or rename the object"
        )
    parts = [part for part in rest.split("/") if part]
    count = _REPOSITORY_PARTS.get(parts[0] if parts else "", 2) if scheme == "hf" else 1
    bucket = "/".join(parts[:count])
    if len(parts) < count or scheme != "hf" and not _BUCKET.fullmatch(bucket) or {".", ".."} & set(parts):
        example = "hf://datasets/OWNER/NAME/FILE" if scheme == "hf" else f"{scheme}://bucket/folder"
        raise UserError(f"{text}: expected a URL such as {example}")
    return StorePath(scheme, bucket, "/".join(parts[count:]))


def not_found(place: Place) -> FileNotFoundError:
    """The error for an object that is not there, as for a file."""
    return FileNotFoundError(errno.ENOENT, "not found", str(place))


def to_local(text: str, field: str) -> Path:
    """The path of a result that is written on a disk alone.

    Raises:
        UserError: for a URL, which would be a folder named `s3:`.
    """
    place = to_place(text)
    if isinstance(place, StorePath):
        raise UserError(f"{field}: found {place}, expected a path on a disk; copy what was written there to the store")
    return place


def to_output(text: str) -> Place:
    """A place to write to.

    Raises:
        UserError: for none, and for a read-only store.
    """
    if not text:
        raise UserError("output: found none, expected a folder to write; name one with --output")
    place = to_place(text)
    if isinstance(place, StorePath) and place.scheme == "hf":
        raise UserError(f"output: {place} is only read, expected a folder or a URL of s3, gs or az; choose another")
    return place
