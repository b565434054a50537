"""What commands write fits the terminal that they write to, and is whole where there is none."""

import io

import pytest
from rich.console import Console

from outsize.cli.text.console import Progress, width_of, wrapped
from outsize.detail import Detail

TEXT = (
    "limited by the link: weights take 0.4 s of each step\n  fix  more tokens per step, in as many microbatches "
    * 4
)


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_lines_fit_and_no_word_is_lost(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    written = wrapped(TEXT, width_of(Terminal()))
    assert max(map(len, written.splitlines())) <= columns
    assert written.split() == TEXT.split()


def test_a_file_gets_whole_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert wrapped(TEXT, width_of(io.StringIO())) == TEXT


@pytest.mark.parametrize(("verbose", "count"), [(False, 1), (True, 2)])
def test_details_are_for_a_verbose_screen(verbose, count):
    written = io.StringIO()
    with Progress(Console(file=written), verbose=verbose) as progress:
        progress.say("interrupted")
        progress.say(Detail("attention sdpa"))
    assert len(written.getvalue().splitlines()) == count
