"""``outsize verify``: the same steps streamed and resident, compared bit for bit."""

from typing import TYPE_CHECKING

import typer

from outsize.cli.text.console import Output
from outsize.cli.text.options import with_run_options

if TYPE_CHECKING:
    from outsize.config import Config
    from outsize.training.metrics.run_records import VerifyResult


@with_run_options
def verify(config: "Config", output: Output, dry_run: bool) -> None:
    """Train streamed and resident, and compare every loss and weight bit for bit.

    Exit status 1 where they differ. The resident run needs memory for the whole training state.
    """
    from outsize.cli.text.plan_text import print_plan
    from outsize.training import verify as comparison

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
