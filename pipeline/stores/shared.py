"""Objects that all processes need, read from the store once per machine; one process reads each and sends its
SHA-256.
"""

import hashlib

from cloze.pipeline.stores.cache import Cache
from cloze.pipeline.stores.places import Place, StorePath, not_found

_told: dict[StorePath, tuple[Cache, str | None]] = {}


def ask(path: StorePath, cache: Cache) -> str | None:
    """Read an object, cache it for the processes of this machine, and return its SHA-256; None if it does not exist.

    Raises:
        UserError: as `ObjectClient` and `Cache` do.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest = hashlib.sha256(content).hexdigest()
    cache.keep(content, digest)
    return digest


def use_digest(path: StorePath, cache: Cache, digest: str | None) -> None:
    """From now on this process uses the object with this SHA-256 (None: does not exist) without a request to the
    store.
    """
    _told[path] = cache, digest


def reset() -> None:
    """Forget all digests, so that objects are read from stores again."""
    _told.clear()


def read(path: Place) -> bytes:
    """All bytes of a file or an object.

    Raises:
        FileNotFoundError, UserError: an object has another hash.
    """
    if path not in _told:
        return path.read_bytes()
    cache, digest = _told[path]
    if digest is None:
        raise not_found(path)
    return cache.whole(path, digest)


def is_file(path: Place) -> bool:
    """Whether there is such a file or object."""
    return _told[path][1] is not None if path in _told else path.is_file()
