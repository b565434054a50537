"""``outsize sweep``: which tokens per step are the fastest on this machine, measured."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli.text.columns import columns
from outsize.cli.text.console import Output
from outsize.cli.text.options import ConfigArgument, JsonOption, SetOption
from outsize.errors import ConfigError
from outsize.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from outsize.training.short_runs import ShortRun


def sweep(
    config_path: ConfigArgument = None,
    tokens_per_step: Annotated[
        list[int] | None,
        typer.Option(
            metavar="TOKENS", help="A size to try; repeatable. Default: half to eight times the run's own."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each size; the first does not count.")] = 3,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the configuration with the best size here."
        ),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a few steps of each size of a step, and say which is the fastest; nothing of them is kept.

    The best is the smallest size within 2 % of the most tokens per second.
    """
    from outsize.config import load_config
    from outsize.config.load import dump_config
    from outsize.training import short_runs

    output = Output(as_json=as_json)
    with output.guarded():
        if output_file is not None and not output_file.absolute().parent.is_dir():
            raise ConfigError(f"--output {output_file}: there is no such directory; create it first")
        config = load_config(config_path, overrides or ())
        sizes = sorted(set(tokens_per_step or short_runs.sizes_around(config)))
        rows = short_runs.sweep(config, sizes, steps, output.say)
        best = short_runs.best_of(rows)
        if best is None:
            raise ConfigError(f"no size fits: {rows[0].why_not}")
        output.emit({"sizes": [row.to_dict() for row in rows], "best": best.tokens_per_step})
        output.print_result(_table(rows, best))
        if output_file is not None:
            text = dump_config(short_runs.with_size(config, best.tokens_per_step))
            try:
                output_file.write_text(text, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"--output {output_file}: {error.strerror}; choose another file") from error


def _table(rows: "list[ShortRun]", best: "ShortRun") -> str:
    lines: list[tuple[str, ...]] = [
        ("tokens per step", "microbatches", "step", "tokens/s", "device", "host", "disk", "")
    ]
    for row in rows:
        size = f"{row.tokens_per_step:,}"
        if row.why_not:
            lines.append((size, "", "", "", "", "", "", row.why_not))
            continue
        memory = (format_bytes(row.memory_bytes[tier]) for tier in ("device", "host", "disk"))
        told = (size, f"{row.microbatches}", format_seconds(row.step_s), f"{row.tokens_per_s:.0f}", *memory)
        lines.append((*told, "best" if row is best else ""))
    return "\n".join(columns(lines))
