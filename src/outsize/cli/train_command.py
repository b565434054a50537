"""``outsize train``: train, with a live line; the last line on stdout is the result."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli.text.console import Output
from outsize.cli.text.options import with_run_options
from outsize.units import format_bytes

if TYPE_CHECKING:
    from outsize.config import Config
    from outsize.training.metrics.run_records import TrainResult


VerboseOption = Annotated[
    bool, typer.Option("--verbose", help="Show learning rate, norm, rates and lanes of each step as well.")
]


@partial(with_run_options, more={"verbose": (VerboseOption, False)})
def train(config: "Config", output: Output, dry_run: bool, verbose: bool) -> None:
    """Train a model larger than its memory.

    Ctrl-C ends after the step under way, saves, and exits with status 0; a second one stops at once, with 130. Started
    by torchrun, the processes train together, see docs/nodes.md.
    """
    from outsize.cli.text.plan_text import print_plan
    from outsize.cli.text.progress import Progress
    from outsize.group.launched import launched
    from outsize.training.interrupt import Interrupt

    with Interrupt() as starting:
        starting.doing = "torch and transformers were loaded"
        from outsize.objectives.recipes import training_of

        train_run = training_of(config)
    if dry_run:
        print_plan(config, output)
        return
    place = launched()
    if place is not None and place.rank > 0:  # rank 0 speaks for all
        train_run(config)
        return
    with Progress(output.console, verbose=verbose) as progress:
        result = train_run(config, progress=progress.update, announce=progress.say)
    output.emit(result.to_dict())
    output.print_result(_summary(result))
    if result.steps < result.num_steps and not result.stopped_early:
        output.say(f"interrupted and saved; --resume auto --run-dir {result.run_dir} goes on from here")


def _summary(result: "TrainResult") -> str:
    """Return the result in a few lines."""
    waited = f" (mostly for {result.stall_owner})" if result.stall_owner else ""
    lines = [
        f"{result.steps} steps, loss {result.loss:.4f}, {result.tokens_per_s:.0f} tokens/s",
        f"device budget {format_bytes(result.budget_bytes)}, peak RSS {format_bytes(result.peak_rss_bytes)}",
        f"waited for bytes {result.stall_share:.1%} of the time{waited}",
        f"disk: {format_bytes(result.bytes_read)} read, {format_bytes(result.bytes_written)} written",
        f"run directory {result.run_dir}",
    ]
    if result.skipped_steps:
        lines.insert(1, f"{result.skipped_steps} steps skipped: loss or gradient norm not finite")
    if result.eval_loss is not None:
        lines.insert(1, f"evaluation: loss {result.eval_loss:.4f}, perplexity {result.eval_perplexity:.4g}")
    if result.best_dir and result.best_dir != result.export_dir:
        lines.append(f"best model {result.best_dir}")
    if result.export_dir:
        lines.append(f"trained model {result.export_dir}")
    return "\n".join([*lines, *_verdict(Path(result.run_dir))])


def _verdict(run_dir: Path) -> list[str]:
    """Return what limited the run, as doctor says it; nothing of a run that does not tell."""
    from outsize.doctor.examine import examine
    from outsize.doctor.facts import Facts
    from outsize.doctor.run_record import read_run
    from outsize.errors import ConfigError

    try:
        found = examine(Facts(recorded=read_run(run_dir))).bottleneck
    except ConfigError:
        return []
    return (
        [] if found is None else [f"limited by {found.limits}: {found.evidence}", f"first try: {found.fix}"]
    )
