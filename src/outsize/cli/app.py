"""The application: its commands, and what becomes of an error."""

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from outsize import __version__
from outsize.cli.bench_command import bench
from outsize.cli.doctor_command import doctor
from outsize.cli.generate_command import generate
from outsize.cli.inspect_command import data, export, inspect
from outsize.cli.plan.plan_command import plan
from outsize.cli.probe_command import all_reduce, probe
from outsize.cli.score_command import score
from outsize.cli.server_commands import report, serve, watch
from outsize.cli.text.console import width_of, wrapped
from outsize.cli.train_command import sweep, train, verify
from outsize.errors import OutsizeError


class _Commands(TyperGroup):
    """A group of commands that turns our errors into messages: an `OutsizeError` is for the user to act upon.

    Anything else is a bug and keeps its traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        _write_any_text()
        from outsize.errors import explain
        from outsize.storage.prealloc import storage_errors

        given = [str(part) for part in ctx.args]
        try:
            with storage_errors():
                return super().invoke(ctx)
        except OutsizeError as error:
            _complain(f"{type(error).__name__}: {error}")
            sys.exit(2)
        except OSError as error:
            if error.filename is not None and _is_below(str(error.filename), given):
                _complain(f"StorageError: {explain(error, f'use {error.filename}')}")
            elif error.errno == errno.ENOSPC and error.filename is None:
                _complain(f"{error}: what a command writes has no room where it goes")
            else:
                raise
            sys.exit(2)
        except KeyboardInterrupt as interrupt:
            _complain(str(interrupt) or "interrupted")
            sys.exit(130)


def _is_below(name: str, given: Sequence[str]) -> bool:
    """Whether a file is one that the command line names, below or around it: then its user can mend it."""
    places = [Path(os.path.abspath(part.rpartition("=")[2])) for part in given if not part.startswith("-")]
    path = Path(os.path.abspath(name))
    return any(str(path).startswith(str(place)) or path in place.parents for place in places)


def _complain(text: str) -> None:
    """Say on stderr what ended the command, in lines that its terminal has room for."""
    typer.echo(wrapped(f"{_speaker()}: {text}", width_of(sys.stderr)), err=True)


def _write_any_text() -> None:
    """Have a stream whose encoding lacks a character, as in a container without a locale, show another."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None and stream.errors in ("strict", "surrogateescape"):
            reconfigure(errors="replace")


def _speaker() -> str:
    """Return who writes a line: of several processes that torchrun has started, which."""
    rank = os.environ.get("RANK") if os.environ.get("WORLD_SIZE", "1") != "1" else None
    return "outsize" if rank is None else f"outsize (rank {rank})"


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train language models larger than the memory of the device that computes them.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outsize {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train language models larger than the memory of the device that computes them."""


for _command in (
    probe,
    doctor,
    plan,
    sweep,
    data,
    train,
    verify,
    generate,
    score,
    serve,
    inspect,
    export,
    report,
    watch,
    bench,
):
    app.command()(_command)
app.command("all-reduce")(all_reduce)
