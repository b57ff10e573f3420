"""What every section checks."""

from __future__ import annotations

from pipeline.errors import UserError


def at_least(section: str, config: object, **minimums: float) -> None:
    """Raise UserError, naming the field, if a value is below its minimum."""
    for name, least in minimums.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise UserError(f"{section}.{name}: found {value}, expected at least {least}")
