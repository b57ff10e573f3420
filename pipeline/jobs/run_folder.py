"""The folder of a run's reports and parts, and what tells these from other runs', which a copy may bring there."""

from pathlib import Path

from cloze.pipeline.storage import publish_text, readable_errors
from cloze.pipeline.stores.places import Place
from cloze.pipeline.untrusted import check_readable

BEGUN_AS = "begun-as"  # in a folder that another run has begun: its name then


def mark_of(path: Place) -> bytes:
    """What a file's checksum begins with: its own name and that of its run, so that no other file is taken for it."""
    run, begun_as = path.parent.name, path.parent / BEGUN_AS
    if isinstance(begun_as, Path) and begun_as.exists():  # in a store no folder is renamed
        check_readable(begun_as)
        with readable_errors(begun_as):
            run = begun_as.read_text(encoding="utf-8", errors="replace")
    return f"{run}/{path.name}\n".encode()


def take_over(other: Path, own: Path) -> None:
    """Rename the folder of another run. Its files keep their marks."""
    if not (other / BEGUN_AS).exists():
        publish_text(other / BEGUN_AS, other.name)
    other.rename(own)
