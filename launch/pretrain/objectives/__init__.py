"""The objectives of `cloze pretrain`: the interface, a table, a file for each; users may add classes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloze.launch.pretrain.objectives.objective import Objective, Term

__all__ = ["Objective", "Term"]


def __getattr__(name: str) -> Any:
    """The interface, imported when it is used: help reads the table beside it without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import cloze.launch.pretrain.objectives.objective as interface

    return getattr(interface, name)
