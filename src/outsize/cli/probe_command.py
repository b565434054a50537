"""``outsize probe`` and ``outsize all-reduce``: measure this machine, and sums over the ranks of several."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize import files
from outsize.cli.plan.plan_machine import size_of
from outsize.cli.text.console import Output, columns, write_output
from outsize.cli.text.options import JsonOption, with_options
from outsize.errors import ConfigError, ExecutionError
from outsize.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from outsize.hardware.link_fit import AllReduceRates
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
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Time this tokenizer.json instead of one made here.")
    ] = None
    tensors: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Try every codec on this safetensors file.")
    ] = None
    num_ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", min=2, help="Processes that sum (with --full). Default: GPUs, or processors."
        ),
    ] = None
    table: Annotated[
        bool,
        typer.Option("--table", help="Also show copies by size: up, down, pinned and pageable, as measured."),
    ] = False


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
    wishes = Wishes(tokenizer=options.tokenizer, tensors=options.tensors, num_ranks=options.num_ranks)
    with _progress(output) as announce:
        effort = FULL if options.full else QUICK
        probed = run_probe(effort, options.directories or [Path()], announce=announce, wishes=wishes)
    if options.output_file is not None:
        write_output(options.output_file, probed.to_json())
    changes = compare(old, probed) if old else ()
    compared = {"compared": [asdict(change) for change in changes]} if old else {}
    output.emit({**probed.model_dump(mode="json"), **compared})
    output.print_result(probe_text.describe(probed))
    if options.table:
        output.print_result("\n" + "\n".join(probe_text.copies_by_size(probed)))
    if old:
        output.print_result(probe_text.describe_changes(changes))


def _check(options: ProbeOptions) -> None:
    """Refuse what would fail only once everything was measured."""
    output_file, tokenizer, tensors = options.output_file, options.tokenizer, options.tensors
    if output_file is not None and not output_file.absolute().parent.is_dir():
        raise ConfigError(f"--output {output_file}: there is no such directory; create it first")
    if tokenizer is not None and not tokenizer.exists():
        raise ConfigError(f"--tokenizer {tokenizer}: no such file; name a tokenizer.json or its directory")
    if tensors is not None and not tensors.is_file():
        raise ConfigError(f"--tensors {tensors}: no such file; name a safetensors file")


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


def all_reduce(
    num_ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", min=2, help="Processes here. Default: GPUs, or up to 4 processors; of an estimate 8."
        ),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="auto, gloo, or that of the devices, one for each process: nccl, xccl, hccl.")
    ] = "auto",
    bytes_max: Annotated[str, typer.Option(help="The largest sum, on each rank.")] = "64MiB",
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the rates here; in a machine.json of `outsize probe` they take their place.",
        ),
    ] = None,
    estimate: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Measure nothing: how long would a sum of SIZE take, over PCIe and NVLink?"
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="With --estimate: of one link, per direction, e.g. 25GB."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time sums from 1 KiB on: latency, bus bandwidth and their fit, which `plan --net FILE` and `doctor` read.

    Over several machines, start it on each: torchrun --nnodes 2 --rdzv-endpoint HOST:29500 ... -m outsize all-reduce
    """
    output = Output(as_json=as_json)
    with output.guarded():
        if estimate is not None:
            rows = _estimated(size_of("--estimate", estimate), num_ranks or 8, rate)
            output.emit({"kind": "estimate", "ranks": num_ranks or 8, "links": rows})
            output.print_result(_estimate_table(rows, num_ranks or 8))
            return
        if rate is not None:
            raise ConfigError("--rate is of an estimate: add --estimate SIZE, e.g. 14GB")
        if output_file is not None and not output_file.absolute().parent.is_dir():
            raise ConfigError(f"--output {output_file}: there is no such directory; create it first")
        rates = _measured(num_ranks, backend, size_of("--bytes-max", bytes_max))
        if int(os.environ.get("RANK", "0")):
            return
        if rates.fit is None:
            raise ExecutionError(f"no sum over ranks was measured: {rates.note}")
        if output_file is not None:
            _write_rates(output_file, rates)
        output.emit(rates.model_dump(mode="json"))
        output.print_result(_table(rates))


# Of a message, where nothing was measured: a copy's fixed cost of 5 to 7 us, and a launch.
_LATENCY_S = 10e-6


def _estimated(num_bytes: int, num_ranks: int, rate: str | None) -> list[dict[str, Any]]:
    """Return how long a sum takes by way and link, at the full rate of each link."""
    from outsize.hardware.link_fit import estimates
    from outsize.hardware.topology import LANE_BYTES_PER_S, NVLINK_BYTES_PER_S, theory_bytes_per_s

    links = {f"PCIe {generation} x16": theory_bytes_per_s(generation, 16) for generation in LANE_BYTES_PER_S}
    links |= {f"NVLink {generation}": of_all for generation, of_all in NVLINK_BYTES_PER_S.items()}
    if rate is not None:
        links = {rate: float(size_of("--rate", rate))}
    return [
        {"link": name, "bytes_per_s": one, **estimates(num_bytes, num_ranks, one, _LATENCY_S)}
        for name, one in links.items()
        if one > 0
    ]


def _estimate_table(rows: list[dict[str, Any]], num_ranks: int) -> str:
    ways = ("naive", "tree", "ring")
    table = [("link", "each way", *ways)]
    table += [
        (row["link"], format_rate(row["bytes_per_s"]), *(_time(row[way]) for way in ways)) for row in rows
    ]
    return "\n".join(
        [
            *columns(table),
            "",
            f"Arithmetic, of {num_ranks} ranks, every link at its full rate and {_LATENCY_S * 1e6:.0f} us a message.",
            "naive: all to one rank and back; tree: whole messages up and down a tree. NCCL does no worse than a ring.",
        ]
    )


def _measured(num_ranks: int | None, backend: str, bytes_max: int) -> "AllReduceRates":
    from outsize.accelerators import count_of, kind_here
    from outsize.probing.several_gpus import measure_all_reduce, ranks_and_backend, time_as_rank

    kind = kind_here()
    num_devices = 0 if kind is None else count_of(kind)
    if "WORLD_SIZE" in os.environ:
        if num_ranks is not None:
            raise ConfigError("--ranks: torchrun has started the ranks; leave --ranks away")
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        ranks, best = ranks_and_backend(local_ranks, num_devices, local_ranks)
        return time_as_rank(_checked(backend, best, ranks, num_devices), bytes_max)
    ranks, best = ranks_and_backend(num_ranks, num_devices, len(os.sched_getaffinity(0)))
    return measure_all_reduce(ranks, bytes_max, backend=_checked(backend, best, ranks, num_devices))


def _checked(backend: str, best: str, ranks: int, num_devices: int) -> str:
    """Return the backend: ``best`` unless another is ``backend`` for, which these ranks must be able to use."""
    if backend == "auto":
        return best
    if backend not in ("gloo", best):
        raise ConfigError(
            f"--backend {backend}: {ranks} ranks of a machine with {num_devices} devices that torch sees sum by "
            f"{' or '.join(sorted({'gloo', best}))}"
        )
    return backend


def _write_rates(path: Path, rates: "AllReduceRates") -> None:
    """Write ``rates`` to a file of their own, or into the machine that `outsize probe` wrote there."""
    text = rates.model_dump_json(indent=1) + "\n"
    fields = files.read_json(path, ConfigError, "choose another --output") if path.is_file() else {}
    if "schema_version" in fields:
        text = json.dumps({**fields, "all_reduce": rates.model_dump(mode="json")}, indent=1) + "\n"
    write_output(path, text)


def _table(rates: "AllReduceRates") -> str:
    rows = [("bytes on each rank", "seconds", "bus bandwidth")]
    for point in rates.points:
        bus = point.bus_bytes_per_s.median
        rows.append(
            (
                format_bytes(point.num_bytes),
                _time(point.seconds.median or 0.0),
                "not measured" if bus is None else format_rate(bus),
            )
        )
    assert rates.fit is not None
    held = (
        ""
        if rates.fit.held_out_median is None
        else f"; off by {rates.fit.held_out_median:.0%} on held-out sizes"
    )
    return "\n".join(
        [
            *columns(rows),
            "",
            f"{rates.backend}, {rates.num_ranks} ranks: {_time(rates.fit.latency_s)} + "
            f"{format_rate(rates.fit.bytes_per_s)} on each link, each way{held}",
        ]
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else format_seconds(seconds)
