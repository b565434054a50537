"""Where words go: people read stderr, machines read stdout.

Every line on stdout is either the result that was asked for or, with ``--json``, one JSON object; progress,
notes and errors are on stderr. So ``outsize train … --json | tail -1 | jq`` works while a person watches.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from rich.console import Console

from outsize.cli.text.columns import width_of, wrapped
from outsize.errors import InfeasiblePlanError, OutsizeError
from outsize.units import without_nan


class Output:
    """The two streams of a command.

    Args:
        as_json: whether stdout carries JSON objects only.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._stdout: TextIO = sys.stdout
        self.console = Console(file=sys.stderr, highlight=False, soft_wrap=True)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Keep stdout clean while the block runs: with ``--json``, what libraries print goes to stderr.

        An error on purpose becomes a JSON object as well, before it goes on to end the command.
        """
        if not self.as_json:
            yield
            return
        try:
            with redirect_stdout(sys.stderr):
                yield
        except OutsizeError as error:
            details = {"short_by": error.short_by} if isinstance(error, InfeasiblePlanError) else {}
            self.emit({"error": type(error).__name__, "message": str(error), **details})
            raise

    def say(self, text: str) -> None:
        """Print a line for people."""
        self.console.print(wrapped(text, width_of(self.console.file)), markup=False)

    def emit(self, result: Mapping[str, Any]) -> None:
        """Print ``result`` as one JSON object on one line of stdout, where ``--json`` asks for it."""
        if self.as_json:
            print(json.dumps(without_nan(result)), file=self._stdout, flush=True)

    def print_result(self, text: str) -> None:
        """Print what a command was asked for on stdout, for people; nothing with ``--json``."""
        if not self.as_json:
            print(wrapped(text, width_of(self._stdout)), file=self._stdout, flush=True)
