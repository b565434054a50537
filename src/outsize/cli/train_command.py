"""Commands that train: `train`, `verify` and `sweep`.

``outsize train``: train, with a live line; the last line on stdout is the result.

``outsize verify``: the same steps streamed and resident, compared bit for bit.

``outsize sweep``: which tokens per step are the fastest on this machine, measured.
"""

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli.text.console import Output, columns, write_output
from outsize.cli.text.options import ConfigArgument, JsonOption, SetOption, with_run_options
from outsize.errors import ConfigError
from outsize.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from outsize.config import Config
    from outsize.training.records import TrainResult, VerifyResult
    from outsize.training.short_runs import ShortRun


VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", help="Show all that is known of the run and of each step: rates, waits, norm."),
]


@partial(with_run_options, more={"verbose": (VerboseOption, False)})
def train(config: "Config", output: Output, dry_run: bool, verbose: bool) -> None:
    """Train a model larger than its memory.

    Ctrl-C ends after the step under way, saves, and exits with status 0; a second one stops at once, with 130. Started
    by torchrun, the processes train together, see docs/nodes.md.
    """
    from outsize.checkpoint.begun_adapters import with_saved_model
    from outsize.cli.text.console import Progress
    from outsize.cli.text.records_text import print_plan
    from outsize.group.gloo import launched
    from outsize.training.evaluation import Interrupt

    place = launched()
    with Interrupt() as starting:
        starting.doing = "torch and transformers were loaded"
        from outsize.objectives.recipes import training_of

        config = with_saved_model(config, output.say if place is None or place.rank == 0 else lambda _: None)
        train_run = training_of(config)
    if dry_run:
        print_plan(config, output)
        return
    if place is not None and place.rank > 0:  # rank 0 speaks for all
        train_run(config)
        return
    with Progress(output.console, verbose=verbose) as progress:
        result = train_run(config, progress=progress.update, announce=progress.say)
    output.emit(result.to_dict())
    output.print_result(_summary(result, verbose=verbose))
    if result.steps < result.num_steps and not result.stopped_early:
        again = shlex.join(("outsize", "train", f"{result.run_dir}/config.yaml", "--resume", "auto"))
        output.say(
            f"interrupted and saved; {again} --run-dir {shlex.quote(result.run_dir)} goes on from here"
        )


def _summary(result: "TrainResult", *, verbose: bool) -> str:
    """Return the result in a few lines; ``verbose`` with what it took."""
    lines = [f"{result.steps} {'step' if result.steps == 1 else 'steps'}, loss {result.loss:.4f} in the last"]
    if result.eval_loss is not None:
        lines.append(f"evaluation: loss {result.eval_loss:.4f}, perplexity {result.eval_perplexity:.4g}")
    if result.skipped_steps:
        lines.append(f"{result.skipped_steps} steps skipped: loss or gradient norm not finite")
    if verbose:
        lines += _figures(result)
    lines.append(f"run directory {result.run_dir}")
    if result.best_dir and result.best_dir != result.export_dir:
        lines.append(f"best model {result.best_dir}")
    if result.export_dir:
        lines.append(f"trained model {result.export_dir}")
    return "\n".join([*lines, *_verdict(Path(result.run_dir))])


def _figures(result: "TrainResult") -> list[str]:
    """Return what a run took of time, memory and disk."""
    waited = f" (mostly for {result.stall_owner})" if result.stall_owner else ""
    everything = (
        f", {result.all_tokens_per_s:.0f} with prompts and padding" if result.all_tokens_per_s else ""
    )
    return [
        f"{result.tokens_per_s:.0f} trained tokens/s{everything}",
        f"device budget {format_bytes(result.budget_bytes)}, peak RSS {format_bytes(result.peak_rss_bytes)}",
        f"waited for bytes {result.stall_share:.1%} of the time{waited}",
        f"disk: {format_bytes(result.bytes_read)} read, {format_bytes(result.bytes_written)} written",
    ]


def _verdict(run_dir: Path) -> list[str]:
    """Return the bubble of several workers, and what limited the run; nothing of a run that does not tell."""
    from outsize.doctor.examine import examine
    from outsize.doctor.run_record import Facts, read_run
    from outsize.errors import ConfigError

    try:
        recorded = read_run(run_dir)
        bottleneck = examine(Facts(recorded=recorded)).bottleneck
    except ConfigError:
        return []
    lines = []
    busy_s = [s for lane, s in recorded.lane_s("busy_s").items() if lane.startswith("compute")]
    if len(busy_s) > 1:
        share = max(0.0, 1 - sum(busy_s) / len(busy_s) / recorded.mean("seconds"))
        lines = [f"bubble {share:.1%}: of the time of all workers, they computed nothing"]
    if bottleneck is None:
        return lines
    return [*lines, f"limited by {bottleneck.limits}: {bottleneck.evidence}", f"first try: {bottleneck.fix}"]


@with_run_options
def verify(config: "Config", output: Output, dry_run: bool) -> None:
    """Train streamed and resident, and compare every loss and weight bit for bit.

    Exit status 1 where they differ. The resident run needs memory for the whole training state.
    """
    from outsize.checkpoint.begun_adapters import with_saved_model
    from outsize.cli.text.records_text import print_plan
    from outsize.training import short_runs as comparison

    config = with_saved_model(config, output.say)
    if dry_run:
        print_plan(config, output)
        return
    result = comparison.verify(config, announce=output.say)
    output.emit(result.to_dict())
    output.print_result(_table(result))
    if not result.equal:
        raise typer.Exit(1)


def _table(result: "VerifyResult") -> str:
    """Return the losses of both runs side by side, and the verdict."""
    lines = [f"{'step':>5}  {'streamed':>22}  {'resident':>22}"]
    for step, pair in enumerate(zip(result.loss_streamed, result.loss_resident, strict=True), start=1):
        mark = "" if repr(pair[0]) == repr(pair[1]) else "  differs"  # a NaN is a NaN
        lines.append(f"{step:>5}  {pair[0]!r:>22}  {pair[1]!r:>22}{mark}")
    lines.append(f"largest difference of a weight: {result.max_weight_difference:g}")
    if result.differing:
        lines.append(f"parameters that differ: {', '.join(result.differing[:5])}")
    lines.append("equal, bit for bit" if result.equal else "NOT EQUAL")
    return "\n".join(lines)


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
    from outsize.checkpoint.begun_adapters import with_saved_model
    from outsize.config import load_config
    from outsize.config.load import dump_config
    from outsize.training import short_runs

    output = Output(as_json=as_json)
    with output.guarded():
        if output_file is not None and not output_file.absolute().parent.is_dir():
            raise ConfigError(f"--output {output_file}: there is no such directory; create it first")
        config = with_saved_model(load_config(config_path, overrides or ()), output.say)
        config = short_runs.settled(config, output.say)
        sizes = sorted(set(tokens_per_step or short_runs.sizes_around(config)))
        rows = short_runs.sweep(config, sizes, steps, output.say)
        best = short_runs.best_of(rows)
        if best is None:
            raise ConfigError(f"no size fits: {rows[0].why_not}")
        output.emit({"sizes": [row.to_dict() for row in rows], "best": best.tokens_per_step})
        output.print_result(_sweep_table(rows, best))
        if output_file is not None:
            text = dump_config(short_runs.with_size(config, best.tokens_per_step))
            write_output(output_file, text)


def _sweep_table(rows: "list[ShortRun]", best: "ShortRun") -> str:
    lines: list[tuple[str, ...]] = [
        ("tokens per step", "microbatches", "step", "tokens/s", "device", "host", "disk", "")
    ]
    for row in rows:
        size = f"{row.tokens_per_step:,}"
        if row.why_not:
            lines.append((size, "", "", "", "", "", "", row.why_not))
            continue
        memory = (format_bytes(row.memory_bytes[tier]) for tier in ("device", "host", "disk"))
        cells = (size, f"{row.microbatches}", format_seconds(row.step_s), f"{row.tokens_per_s:.0f}", *memory)
        lines.append((*cells, "best" if row is best else ""))
    return "\n".join(columns(lines))
