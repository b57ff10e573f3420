"""The comparison of a table of the product with a test's own table, whose failure says which of both lacks what."""

from collections.abc import Collection


def assert_same_names(table: Collection[str], own: Collection[str], where: str) -> None:
    """Fail if a name of `table` is not in `own`, or the other way round.

    Args:
        table: names of the product's table.
        own: names of the test's table.
        where: the name of the test's table and its file, and what an entry of it is.
    """
    missing, unknown = sorted(set(table) - set(own)), sorted(set(own) - set(table))
    assert not missing, (
        f"{where}: found no entry for {', '.join(missing)}, expected one for each of the product's table"
    )
    assert not unknown, f"{where}: found {', '.join(unknown)}, which the table lacks"
