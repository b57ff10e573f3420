"""A fine-tuning task: columns of its files, kind of prediction, metrics."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A task: columns of its files, labels and metrics."""

    kind: str
    """What is predicted: a name of KINDS in launch/finetune/tasks.py."""
    texts: tuple[str, ...] = ()
    """Columns of the text, or of the pair of texts; of the texts that all choices share (choice); of the anchor and the
    positive (embedding)."""
    targets: tuple[str, ...] = ("label",)
    """Columns of what is predicted."""
    labels: tuple[str, ...] = ()
    """Classes in the order of their numbers; empty: those of the training file, in the order of their names."""
    metrics: tuple[str, ...] = ("accuracy",)
    """Names in launch/finetune/scoring.py; the first one decides what is best."""
    header: tuple[str, ...] = ()
    """Columns of a file that does not name them."""
    max_length: int = 128
    """Longest sequence in tokens, if the run does not say."""
    window_step: int | None = None
    """Most tokens between windows of a long text, if the run does not say; None: it has no windows."""
    diagnostic: tuple[str, ...] = ()
    """Columns of the two texts and the label in GLUE's diagnostic set, which has its Matthews correlation too."""
    choices: tuple[str, ...] = ()
    """Columns of the choices (choice)."""
    choice_prefix: str = ""
    """Column whose text each choice begins with; empty: none (choice)."""
