"""``outsize probe``: what the machine has and what it does, as ``machine.json``."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli.text.console import Output
from outsize.cli.text.options import with_options
from outsize.errors import ConfigError

if TYPE_CHECKING:
    from outsize.model.sizes.model_spec import ModelSpec
    from outsize.probing.run_probe import Announce


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """What can be asked of the command, option by option."""

    full: Annotated[bool, typer.Option("--full/--quick", help="Up to 3 minutes, or up to 15 seconds.")] = (
        False
    )
    output_file: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write machine.json here.")
    ] = None
    old_file: Annotated[
        Path | None, typer.Option("--compare", metavar="FILE", help="A machine.json to compare with.")
    ] = None
    directories: Annotated[
        list[Path] | None,
        typer.Option(
            "--directory", metavar="DIR", help="Time the disk of DIR; repeatable. Default: the current one."
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="Time this model's matrix products, and AdamW over its units."
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", metavar="FILE", help="Time this tokenizer.json instead of one made here."
        ),
    ] = None
    tensors: Annotated[
        Path | None,
        typer.Option("--tensors", metavar="FILE", help="Try every codec on this safetensors file."),
    ] = None
    num_ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", min=2, help="Processes that sum (with --full). Default: GPUs, or processors."
        ),
    ] = None
    emulated: Annotated[
        int, typer.Option("--emulated", min=0, metavar="N", help="Describe N emulated devices instead.")
    ] = 0
    table: Annotated[
        bool,
        typer.Option("--table", help="Also show copies by size: up, down, pinned and pageable, as measured."),
    ] = False
    link_gb_per_s: Annotated[
        float | None,
        typer.Option("--link-gb-per-s", min=1e-6, help="What links of emulated devices are held to."),
    ] = None


@with_options(ProbeOptions)
def probe(options: ProbeOptions, output: Output) -> None:
    """Measure this machine: memory, optimizer, disks, compute, links, data. Needs no rights and leaves no files."""
    from outsize.cli.text import probe_text
    from outsize.hardware import machine_file
    from outsize.hardware.machine_file import compare
    from outsize.probing.effort import FULL, QUICK
    from outsize.probing.run_probe import Wishes
    from outsize.probing.run_probe import probe as run_probe

    old = machine_file.read(options.old_file) if options.old_file else None
    _check(options)
    link_gb_per_s = options.link_gb_per_s
    wishes = Wishes(
        model=_spec(options.model) if options.model is not None else None,
        tokenizer=options.tokenizer,
        tensors=options.tensors,
        num_ranks=options.num_ranks,
        emulated=options.emulated,
        link_bytes_per_s=None if link_gb_per_s is None else link_gb_per_s * 1e9,
    )
    with _progress(output) as announce:
        effort = FULL if options.full else QUICK
        probed = run_probe(effort, options.directories or [Path()], announce=announce, wishes=wishes)
    if options.output_file is not None:
        _write(options.output_file, probed.to_json())
    changes = compare(old, probed) if old else ()
    compared = {"compared": [asdict(change) for change in changes]} if old else {}
    output.emit({**probed.model_dump(mode="json"), **compared})
    output.print_result(probe_text.describe(probed))
    if options.table:
        output.print_result("\n" + "\n".join(probe_text.copies_by_size(probed)))
    if old:
        output.print_result(probe_text.describe_changes(changes))


def _check(options: ProbeOptions) -> None:
    """Refuse what would fail only once everything was measured.

    Raises:
        ConfigError: a file or directory is not there, or an option is of emulated devices alone.
    """
    output_file, tokenizer, tensors = options.output_file, options.tokenizer, options.tensors
    if output_file is not None and not output_file.absolute().parent.is_dir():
        raise ConfigError(f"--output {output_file}: there is no such directory; create it first")
    if options.link_gb_per_s is not None and not options.emulated:
        raise ConfigError("--link-gb-per-s is of emulated devices: add --emulated N")
    if tokenizer is not None and not tokenizer.exists():
        raise ConfigError(f"--tokenizer {tokenizer}: no such file; name a tokenizer.json or its directory")
    if tensors is not None and not tensors.is_file():
        raise ConfigError(f"--tensors {tensors}: no such file; name a safetensors file")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}; choose another file") from error


def _spec(model: str) -> "ModelSpec":
    """Return the units of a model; reads no weights."""
    from outsize.model.build import build_skeleton, load_hf_config
    from outsize.model.split import split

    return split(build_skeleton(load_hf_config(model), "fp32"), "fp32").spec


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
