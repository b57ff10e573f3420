"""Who may ask: API keys, when they are required, and what replaces them on this machine's own addresses."""

import codecs
import hashlib
import hmac
import ipaddress
import re
from pathlib import Path

from cloze.launch.serve.asgi import Scope
from cloze.launch.serve.config import ServeConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import readable_errors

# Guessing one of 62^16 keys by requests is infeasible; keys invented by people are shorter.
LEAST_CHARACTERS = 16
# Paths that reveal nothing of anyone's texts: probes, and pages that a browser requests without a key.
OPEN = ("/", "/health", "/ready", "/docs", "/openapi.json")
_MOST_BYTES = 1 << 20  # of a file of keys: thousands of them
_ADDRESS = re.compile(
    r"(https?:)?//(?P<host>[a-z0-9.-]+|\[[0-9a-f]*:[0-9a-f:.]*(%\w+)?\])(:[0-9]{0,5})?", re.IGNORECASE
)
STATIC = "/static-offline-docs/"  # files of fastapi_offline


def read_keys(config: ServeConfig) -> list[bytes] | None:
    """SHA-256 of each key in the file, one per line; None: no key is required.

    Raises:
        UserError: a required file is missing, has no keys, or has one that is too short.
    """
    path = config.api_key_file
    if path is None:
        if not (config.no_auth or is_loopback(config.host)):
            raise UserError(
                f"serve.api_key_file: found none for {config.host}, which other machines can reach, "
                "expected a file of keys; add --api_key_file FILE, or --no_auth true where a proxy asks "
                "for them"
            )
        return None
    with readable_errors(Path(path)), open(path, "rb") as file:  # a pipe of the shell, too
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise UserError(f"serve.api_key_file: found more than {_MOST_BYTES:,} bytes in {path}, expected a key a line")
    lines = [line.strip() for line in content.removeprefix(codecs.BOM_UTF8).splitlines()]
    keys = [line for line in lines if line and not line.startswith(b"#")]
    if not keys:
        raise UserError(
            f"serve.api_key_file: found no key in {path}, expected one a line; `openssl rand -hex 32` makes one"
        )
    for number, key in enumerate(keys, 1):
        if len(key.split()) > 1:
            raise UserError(
                f"serve.api_key_file: found white space in key {number} of {path}, expected a key a line, and comments "
                "in lines of their own"
            )
        if len(key) < LEAST_CHARACTERS:
            raise UserError(
                f"serve.api_key_file: found {len(key)} characters in key {number} of {path}, expected at "
                f"least {LEAST_CHARACTERS}; `openssl rand -hex 32` makes one"
            )
    return [hashlib.sha256(key).digest() for key in keys]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_local(address: str) -> bool:
    """Whether an address (`//localhost:8000`, or with a scheme as in the header Origin) is one of this machine.

    A page of another site cannot forge it: where the site's name was made to lead here (DNS rebinding), a browser still
    sends the name.
    """
    named = _ADDRESS.fullmatch(address)
    return named is not None and is_loopback(named["host"].strip("[]").lower())


def is_authorized(scope: Scope, keys: list[bytes] | None) -> bool:
    """Whether a request is authorized: its path is public, or it has `Authorization: Bearer KEY`."""
    if keys is None or scope["path"] in OPEN or scope["path"].startswith(STATIC):
        return True
    given = dict(scope["headers"]).get(b"authorization", b"")
    scheme, _, key = given.partition(b" ")
    digest = hashlib.sha256(key.strip()).digest()
    # All keys are compared, each in constant time, so that the time reveals nothing.
    return scheme.lower() == b"bearer" and any([hmac.compare_digest(digest, known) for known in keys])
