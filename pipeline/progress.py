"""How long jobs report progress, so that nothing below `launch/` prints."""


class Progress:
    """Receives the stages of a job, their progress, and remarks; this one ignores them."""

    def stage(self, name: str, total: int, unit: str) -> None:
        """A stage begins; `total` in `unit` ("bytes" or "tokens")."""

    def advance(self, amount: int, documents: int, tokens: int) -> None:
        """`amount` more of the stage's total is done, with this number of documents and tokens."""

    def note(self, text: str) -> None:
        """A remark for the user."""


SILENT = Progress()
