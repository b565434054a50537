"""``outsize probe``: what the machine has and what it does, as ``machine.json``."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli.console import Output
from outsize.cli.options import JsonOption

if TYPE_CHECKING:
    from outsize.probe.run import Announce


def probe(
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Up to 3 minutes, or up to 15 seconds.")
    ] = False,
    output_file: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write machine.json here.")
    ] = None,
    old_file: Annotated[
        Path | None, typer.Option("--compare", metavar="FILE", help="A machine.json to compare with.")
    ] = None,
    directories: Annotated[
        list[Path] | None,
        typer.Option(
            "--directory", metavar="DIR", help="Time the disk of DIR; repeatable. Default: the current one."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine: memory, optimizer, disks, compute and links. Needs no rights and leaves no files."""
    from outsize.cli import probe_text
    from outsize.errors import ConfigError
    from outsize.hardware import machine_file
    from outsize.hardware.compare import compare
    from outsize.probe.effort import FULL, QUICK
    from outsize.probe.run import probe as run_probe

    output = Output(as_json=as_json)
    with output.guarded():
        old = machine_file.read(old_file) if old_file else None
        if output_file is not None and not output_file.absolute().parent.is_dir():
            raise ConfigError(f"--output {output_file}: there is no such directory; create it first")
        with _progress(output) as announce:
            found = run_probe(FULL if full else QUICK, directories or [Path()], announce=announce)
        if output_file is not None:
            try:
                output_file.write_text(found.to_json(), encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"--output {output_file}: {error.strerror}; choose another file") from error
        changes = compare(old, found) if old else ()
        compared = {"compared": [asdict(change) for change in changes]} if old else {}
        output.emit({**found.model_dump(mode="json"), **compared})
        output.print_result(probe_text.describe(found))
        if old:
            output.print_result(probe_text.describe_changes(changes))


@contextmanager
def _progress(output: Output) -> "Iterator[Announce]":
    """Show a bar on a terminal, a line per part anywhere else."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if not output.console.is_terminal:
        yield lambda name, index, total: output.say(f"[{index + 1}/{total}] {name}")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # No thread beside the measurements: the bar moves when a part begins.
    with Progress(*columns, console=output.console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=None)

        def announce(name: str, index: int, total: int) -> None:
            bar.update(task, description=name, completed=index, total=total)
            bar.refresh()

        yield announce
