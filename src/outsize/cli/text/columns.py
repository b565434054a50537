"""Columns of text."""

from collections.abc import Iterable


def columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return a line for each row, cells of a column below each other; all rows have as many."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
