"""The protocol by which long jobs report progress, so that nothing below `launch/` prints."""

from typing import Protocol


class Progress(Protocol):
    """Receives the stages of a job, their progress, and remarks."""

    def stage(self, name: str, total: int, unit: str) -> None:
        """A stage begins; `total` in `unit` ("bytes" or "tokens")."""

    def advance(self, amount: int, documents: int, tokens: int) -> None:
        """`amount` more of the stage's total is done, with this number of documents and tokens."""

    def note(self, text: str) -> None:
        """A remark for the user."""


class Silent:
    """A Progress that ignores everything."""

    def stage(self, name: str, total: int, unit: str) -> None:
        pass

    def advance(self, amount: int, documents: int, tokens: int) -> None:
        pass

    def note(self, text: str) -> None:
        pass
