"""Reports: the counts of a finished task, in a file that is written last and checked when read."""

import hashlib
import json

from cloze.pipeline.fields import Fields
from cloze.pipeline.jobs.run_folder import mark_of
from cloze.pipeline.storage import publish_text
from cloze.pipeline.stores.places import Place
from cloze.pipeline.untrusted import check_readable


def save_report(path: Place, content: Fields) -> None:
    """Write `content` as JSON after a line with the SHA-256 of its mark and itself."""
    text = json.dumps(content)
    # Not synced: a report lost in a power failure only means that its task runs again.
    publish_text(path, f"{_digest(path, text)}\n{text}\n", durable=False)


def load_report(path: Place) -> Fields | None:
    """The content that `save_report` wrote; None if the file is missing, damaged, or another one in its place."""
    check_readable(path)
    try:
        digest, text = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ValueError):
        return None
    return json.loads(text) if digest == _digest(path, text) else None


def _digest(path: Place, text: str) -> str:
    return hashlib.sha256(mark_of(path) + text.encode()).hexdigest()
