"""What a table names by `module:name`, imported when it is needed: help and completion list a table without torch."""

import importlib
from dataclasses import dataclass
from typing import Any


def load(reference: str) -> Any:
    """What `module:name` names."""
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Entry:
    """A row of a table of values of a field."""

    reference: str
    """`module:name` of its class."""
    about: str
    """A phrase for the help of the field."""

    def load(self) -> Any:
        """Its class."""
        return load(self.reference)
