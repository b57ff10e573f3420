"""The list of valid checkpoints of a run in an object store: one small object, changed by conditional writes only.

A store cannot rename a folder. A checkpoint's files are therefore uploaded to a folder of their own, and the checkpoint
is valid once this object names that folder. Each job that takes over the run first writes its name here, on the
condition that the object is unchanged since it was read. A later write of an older job that was paused fails, since its
condition is the version that it wrote last. No clock is involved.
"""

import json
import re
import uuid
from dataclasses import asdict, dataclass

from cloze.pipeline.bounds import whole_number
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.stores.places import StorePath
from cloze.pipeline.untrusted import load_json

_FORMAT = 1
_PATH = re.compile(r"[\w./-]*", re.ASCII)  # of folders and digests: what a run gives them, and nothing that is no key


class TakenOver(UserError):
    """Another job has taken over the run; this one may not write there any more."""


@dataclass(frozen=True)
class Commit:
    """The folder of a checkpoint in the store, and the hash of its index."""

    folder: str
    """Path of the folder below step-N/."""
    digest: str
    """SHA-256 of its index."""
    num_bytes: int
    """Bytes of all its files."""

    @property
    def attempt(self) -> str:
        """The name of the start (attempt) that uploaded it."""
        return self.folder.rpartition("-")[0]


def is_first(attempt: str) -> bool:
    """Whether this is the name of a run's first start."""
    return whole_number(attempt.partition("-")[0]) == 1


@dataclass(frozen=True)
class _Content:
    owner: str
    starts: int
    commits: dict[int, Commit]


def read_commits(path: StorePath) -> dict[int, Commit]:
    """The valid checkpoints by step; empty if the object does not exist."""
    try:
        return _parsed(path, path.read_bytes())[0].commits
    except FileNotFoundError:
        return {}


def _parsed(path: StorePath, data: bytes) -> tuple[_Content, str]:
    """The content, and the unique mark of the write that made it."""
    found = None
    try:
        saved = load_json(data)
        if type(saved["format"]) is int and saved["format"] == _FORMAT:
            commits = {int(step): Commit(**each) for step, each in saved["commits"].items()}
            found = _Content(saved["owner"], saved["starts"], commits), saved["mark"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{path}: found no list of checkpoints ({type(error).__name__}), expected the one that `cloze "
            "pretrain` wrote; restore it, or choose another --output"
        ) from error
    if found is None:
        raise UserError(
            f"{path}: found format {saved['format']}, expected {_FORMAT}; take the version of Cloze that wrote it"
        )
    commits = found[0].commits
    counts = [found[0].starts, *(each.num_bytes for each in commits.values())]
    texts = [text for each in commits.values() for text in (each.folder, each.digest)]
    kinds = all(type(count) is int for count in counts) and all(type(text) is str for text in texts)
    outside = kinds and any(".." in text.split("/") or not _PATH.fullmatch(text) for text in texts)
    if not kinds or outside or [*map(str, commits)] != [*saved["commits"]]:
        raise UserError(
            f"{path}: found a checkpoint whose folder or hash is no text or lies elsewhere, or whose step or size is "
            "no whole number, expected the list that `cloze pretrain` wrote; restore it, or choose another --output"
        )
    return found


class CommitLog:
    """The list of valid checkpoints of a run that this job holds. One thread at a time changes it.

    Args:
        path: path of the object.
    """

    def __init__(self, path: StorePath) -> None:
        self._path = path
        self._token = uuid.uuid4().hex
        self._version: Fields | None = None
        self._content = _Content("", 0, {})

    @property
    def commits(self) -> dict[int, Commit]:
        """The valid checkpoints by step."""
        return self._content.commits

    def is_new(self) -> bool:
        """Whether no start has claimed the run yet."""
        return self._path.info() is None

    def claim(self, after: int = 0) -> str:
        """Take over the run: from now on no earlier job can commit.

        Args:
            after: number of a start that this one comes after, if the list does not know it.

        Returns:
            The name of this attempt, which sorts after those of earlier attempts.

        Raises:
            UserError: another job takes over at the same time, or the store can't be used.
        """
        self._content, _, self._version = self._read()
        self._write(_Content(self._token, max(self._content.starts, after) + 1, self._content.commits))
        return f"{self._content.starts:04d}-{self._token[:8]}"

    def commit(self, step: int, commit: Commit) -> None:
        """Make a checkpoint valid; it replaces one of the same step.

        Raises:
            TakenOver: another job has taken over the run.
            UserError: the store can't be used.
        """
        self._write(_Content(self._token, self._content.starts, self._content.commits | {step: commit}))

    def remove(self, steps: set[int]) -> None:
        """Remove checkpoints from the list. Raises as `commit`."""
        kept = {step: each for step, each in self._content.commits.items() if step not in steps}
        self._write(_Content(self._token, self._content.starts, kept))

    def _read(self) -> tuple[_Content, str, Fields | None]:
        """Content, its mark and its version, all of one state of the object."""
        while True:
            before = self._path.info()
            if before is None:
                return _Content("", 0, {}), "", None
            try:
                content, mark = _parsed(self._path, self._path.read_bytes())
            except FileNotFoundError:
                continue
            after = self._path.info()
            if after is not None and after.version == before.version:
                return content, mark, after.version

    @staticmethod
    def _encoded(content: _Content) -> tuple[bytes, str]:
        mark = uuid.uuid4().hex  # no two writes are the same, so that no version comes twice
        commits = {str(step): asdict(each) for step, each in sorted(content.commits.items())}
        saved = {"format": _FORMAT, "owner": content.owner, "starts": content.starts, "mark": mark, "commits": commits}
        return (json.dumps(saved, indent=1) + "\n").encode(), mark

    def _write(self, content: _Content) -> None:
        data, mark = self._encoded(content)
        while True:
            version = self._path.writer.write_if(self._path.key, data, self._version)
            if version is not None:
                break
            there, mark_there, now = self._read()
            if mark_there == mark:  # the response was lost, and the retry found this job's own write
                version = now
                break
            if there.owner != self._token:
                raise TakenOver(
                    f"{self._path}: found the run taken over by another job, expected this one to hold it; "
                    "this one ends, and none of its later steps is kept"
                )
            self._version = now  # an earlier write of this job whose response was lost
        self._content, self._version = content, version
