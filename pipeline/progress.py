"""The protocol by which long jobs report progress, so that nothing below `launch/` prints."""

from typing import Protocol


class Progress(Protocol):
    """Hears of stages, of their advance, and of remarks."""

    def stage(self, name: str, total: int, unit: str) -> None:
        """A stage begins; `total` in `unit` ("bytes" or "tokens")."""

    def advance(self, amount: int, documents: int, tokens: int) -> None:
        """`amount` more of the stage's total is done, and with it so many documents and tokens."""

    def note(self, text: str) -> None:
        """Something that the user should know."""


class Silent:
    """Tells nothing."""

    def stage(self, name: str, total: int, unit: str) -> None:
        pass

    def advance(self, amount: int, documents: int, tokens: int) -> None:
        pass

    def note(self, text: str) -> None:
        pass
