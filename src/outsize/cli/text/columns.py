"""Columns of text, and lines that fit a terminal."""

import os
import sys
import textwrap
from collections.abc import Iterable
from typing import IO

# Nobody reads lines that are longer, and nothing is readable in narrower ones.
NARROWEST, WIDEST = 40, 200
# Of tables that no terminal shows.
TABLE_WIDTH = 110


def columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return a line for each row, cells of a column below each other; all rows have as many."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def width_of(stream: IO[str]) -> int | None:
    """Return the columns of the terminal that ``stream`` writes to; None for a file or a pipe, which has none."""
    try:
        if not stream.isatty():
            return None
        said = os.environ.get("COLUMNS", "")
        width = int(said) if said.isdigit() and int(said) else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
    return min(max(width or 80, NARROWEST), WIDEST)


def table_width() -> int:
    """Return the columns that a table may take on stdout."""
    return width_of(sys.stdout) or TABLE_WIDTH


def wrapped(text: str, width: int | None) -> str:
    """Return ``text`` with lines of at most ``width`` columns, broken between words and indented; None breaks none."""
    if width is None:
        return text
    return "\n".join(part for line in text.split("\n") for part in _parts(line, width))


def _parts(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = " " * min(len(line) - len(line.lstrip()) + 2, width // 4)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [line]
