"""Write to the terminal: columns and wrapped lines, results on stdout, streams that may break, a live line of progress.

Every line on stdout is either the result that was asked for or, with ``--json``, one JSON object; progress,
notes and errors are on stderr. So ``outsize train … --json | tail -1 | jq`` works while a person watches.

What could not be written is counted. Of a reader that has gone, as in ``outsize … | head``, nothing more is heard, and
that is no failure; where a result could not be written for another reason, the command says so and fails at its end.

On a terminal one line is rewritten with every step; anywhere else each step is a line of its own, so that a
log file reads like a table. Nothing runs in the background: the line changes when a step reports.
"""

import contextlib
import errno
import io
import json
import os
import sys
import textwrap
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from outsize import files
from outsize.detail import Detail
from outsize.errors import InfeasiblePlanError, OutsizeError, explain
from outsize.units import format_rate, format_seconds, without_nan

if TYPE_CHECKING:
    from outsize.training.records import StepRecord


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
        setting = os.environ.get("COLUMNS", "")
        width = (
            int(setting)
            if setting.isdigit() and int(setting)
            else os.get_terminal_size(stream.fileno()).columns
        )
    except (OSError, ValueError):
        return None
    return min(max(width or 80, NARROWEST), WIDEST)


def table_width() -> int:
    """Return the columns that a table may take on stdout."""
    return width_of(sys.stdout) or TABLE_WIDTH


def as_text(*parts: object) -> str:
    """Return lines and tables for people as text, as wide as `table_width` says, without blanks at ends."""
    stream = io.StringIO()
    console = Console(file=stream, width=table_width(), highlight=False, markup=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


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


LOST_STATUS = 1
# What a pipe says whose reader is gone, and a terminal that was hung up.
_GONE = (errno.EPIPE, errno.EIO)


class Told:
    """A stream of text whose writes and flushes never raise what the system says; all else is the stream's.

    Attributes:
        num_lost: writes that did not arrive, but for those that nobody waits for any more.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.num_lost = 0

    def write(self, text: str) -> int:
        """Write, as far as that goes."""
        with self._counted():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush, as far as that goes."""
        with self._counted():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.num_lost += error.errno not in _GONE
            self._forget(forever=error.errno in _GONE)

    def _forget(self, *, forever: bool) -> None:
        """Drop what the stream could not write, which it would try to again; ``forever`` all that follows, too."""
        with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
            descriptor = self._stream.fileno()
            there, nowhere = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, descriptor)
                self._stream.flush()
                if not forever:
                    os.dup2(there, descriptor)
            finally:
                os.close(there)
                os.close(nowhere)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Have nothing that is said end the command; exit with `LOST_STATUS` where the result could not be written.

    Raises:
        SystemExit: of the body; or as said.
    """
    _open_closed_streams()
    streams = sys.stdout, sys.stderr
    out, err = Told(sys.stdout), Told(sys.stderr)
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield
    except SystemExit as ended:
        out.flush()
        if not ended.code and out.num_lost:
            err.write("outsize: the result could not be written to stdout; is its disk full?\n")
            raise SystemExit(LOST_STATUS) from None
        raise
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = streams


def _open_closed_streams() -> None:
    """Lead streams that a shell has closed (``>&-``) to nowhere: nobody waits for what they say."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            nowhere = Path(os.devnull).open("w" if descriptor else "r", encoding="utf-8")  # noqa: SIM115 - stays open
            setattr(sys, name, nowhere)


# What a step waited for, by the cause in its record, in words.
WAITS = {
    "weights": "weights to arrive",
    "gradients": "gradients to move",
    "activations": "activations to move",
    "optimizer": "the optimizer",
    "disk": "the disk",
    "commit": "a step to be safe on the disk",
    "checkpoint": "a checkpoint",
    "workers": "other workers",
    "ranks": "other ranks",
    "loader": "the next batch",
    "between steps": "the run between two steps",
    "python": "Python to hand out work",
}
# Steps whose mean says how long the rest will take.
_RECENT = 20


class Progress:
    """Shows step records as they come.

    Args:
        console: where to.
        verbose: whether details, rates, waits, learning rate, gradient norm and lanes are shown as well.
    """

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self._console = console
        self._verbose = verbose
        self._live: Live | None = None
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        self._followed: StepRecord | None = None  # the last step whose waits were followed to their causes

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # auto_refresh would start a thread; a step refreshes instead.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """Print a line above the live one; details of those where the screen is verbose."""
        if self._verbose or not isinstance(text, Detail):
            self._console.print(wrapped(text, width_of(self._console.file)), markup=False)

    def update(self, record: "StepRecord") -> None:
        """Show ``record``."""
        self._recent_s.append(record.seconds)
        left_s = (record.num_steps - record.step) * sum(self._recent_s) / len(self._recent_s)
        self._followed = record if record.waits_s else self._followed
        line = describe(record, left_s, self._followed, verbose=self._verbose)
        if self._live is None:
            self.say(line)
        else:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)


def describe(
    record: "StepRecord", left_s: float, followed: "StepRecord | None" = None, *, verbose: bool = False
) -> str:
    """Return a step as one line, its columns aligned from step to step.

    Args:
        record: of the step.
        left_s: seconds that the run is expected to take from here on.
        followed: the last step whose waits were followed to their causes; ``record`` by default.
        verbose: whether learning rate, gradient norm, rates and lanes are told as well.
    """
    parts = [
        f"step {record.step:>{len(str(record.num_steps))}}/{record.num_steps}",
        f"loss {record.loss:.4f}",
        f"{format_seconds(left_s)} left",
    ]
    if record.skipped:
        parts.append("skipped: not finite")
    if verbose:
        stall = f"stall {record.stall_share:6.1%}"
        parts += [
            *([] if record.epoch is None else [f"epoch {record.epoch:.2f}"]),
            f"{record.tokens_per_s:.0f} trained tokens/s",
            waited(record, followed or record),
            f"lr {record.lr:.2e}",
            f"norm {record.grad_norm:.3f}",
            f"in {format_rate(record.up_bytes_per_s)}",
            f"out {format_rate(record.down_bytes_per_s)}",
            f"{stall} {record.stall_owner}" if record.stall_owner else stall,
        ]
    return "  ".join(parts)


def waited(record: "StepRecord", followed: "StepRecord") -> str:
    """Return which share of a step the compute lane that stood still longest waited, and mostly for what.

    The cause is that of ``followed``, which is named where it is another step: causes are known of one step in several.
    """
    lane = max(record.idle_s, key=lambda name: record.idle_s[name], default=None)
    if lane is None or record.seconds <= 0:
        return "waits   0%"
    causes = {
        cause: sum(owners.values()) for cause, owners in followed.waits_s.get(lane, {}).items() if owners
    }
    most = max(causes, key=lambda cause: causes[cause], default=None)
    share = f"waits {min(1.0, record.idle_s[lane] / record.seconds):4.0%}"
    if most is None or record.idle_s[lane] < 0.005 * record.seconds:
        return share
    at = "" if followed.step == record.step else f" (step {followed.step})"
    return f"{share}, mostly for {WAITS.get(most, most)}{at}"


def write_output(path: Path, text: str) -> None:
    """Write the file that an option names, whole or not at all; a device or a pipe takes the text as it comes.

    Raises:
        StorageError: it cannot be written; what was there before still is.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            files.write_whole(Path(os.path.realpath(path)), text, shared=True)
    except OSError as error:
        raise explain(error, f"write {path}", "choose another file") from error
