"""Reports: the counts of a finished task, in a file that is written last and checked when read."""

import hashlib
import json

from cloze.pipeline.storage import publish_text
from cloze.pipeline.stores.places import Place


def save_report(path: Place, content: dict) -> None:
    """Write `content` as JSON behind a line with its SHA-256."""
    text = json.dumps(content)
    # One that a power failure takes is none, and its task is done again.
    publish_text(path, f"{_digest(text)}\n{text}\n", durable=False)


def load_report(path: Place) -> dict | None:
    """What `save_report` wrote; None if it isn't there, or isn't that any more."""
    try:
        digest, text = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ValueError):
        return None
    return json.loads(text) if digest == _digest(text) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
