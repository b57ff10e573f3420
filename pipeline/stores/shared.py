"""Objects that all processes of a run need: one process reads each from the store and sends its SHA-256 to the others,
which read a cached copy, downloaded once per machine."""

import hashlib

from cloze.pipeline.stores.cache import Cache
from cloze.pipeline.stores.places import Place, StorePath

_told: dict[StorePath, tuple[Cache, str | None]] = {}


def ask(path: StorePath, cache: Cache) -> str | None:
    """Read an object, keep it for the processes of this machine, and return its SHA-256; None if there is none.

    Raises UserError as `ObjectClient` and `Cache` do.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest = hashlib.sha256(content).hexdigest()
    cache.keep(content, digest)
    return digest


def use_digest(path: StorePath, cache: Cache, digest: str | None) -> None:
    """From now on this process reads the object of that SHA-256, or finds none (None), without asking the store."""
    _told[path] = cache, digest


def reset() -> None:
    """From now on all is asked of stores again."""
    _told.clear()


def read(path: Place) -> bytes:
    """All bytes of a file or an object. Raises FileNotFoundError, and UserError if an object has another hash."""
    if path not in _told:
        return path.read_bytes()
    cache, digest = _told[path]
    if digest is None:
        raise FileNotFoundError(2, "not found", str(path))
    return cache.whole(path, digest)


def is_file(path: Place) -> bool:
    """Whether there is such a file or object."""
    return _told[path][1] is not None if path in _told else path.is_file()
