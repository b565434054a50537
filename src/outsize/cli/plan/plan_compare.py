"""Other ways to train on the same machine beside the prediction of ours, as a table, with what they cost there."""

from collections.abc import Sequence
from dataclasses import asdict
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from outsize.cli.plan.plan_question import Asked
from outsize.errors import ConfigError
from outsize.planner.predict.alternatives import (
    ACTIVATION_SUMS,
    Alternative,
    alternatives,
    managed_tokens_per_s,
)
from outsize.planner.predict.prediction import Prediction
from outsize.units import format_bytes

WIDTH = 110
# Of a step: what waits longer is warned of.
MUCH = 0.1


def other_ways(asked: Asked) -> tuple[Alternative, ...]:
    """Return other ways to train what was asked about.

    Raises:
        ConfigError: several nodes were asked about.
    """
    if asked.question.nodes > 1:
        raise ConfigError("--compare is of one machine; leave --nodes out")
    return alternatives(asked.question)


def to_dict(asked: Asked, found: Sequence[Alternative]) -> dict[str, Any]:
    """Return the comparison in what JSON knows."""
    return {
        "other_ways": [asdict(way) for way in found],
        "managed_memory_tokens_per_s": managed_tokens_per_s(asked.question),
        "warnings": warnings(asked, found),
    }


def render(asked: Asked, prediction: Prediction, found: Sequence[Alternative]) -> str:
    """Return the comparison for people."""
    table = Table(title="other ways on this machine, at most", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "each GPU", "host", "tokens/s", "of ours", ""):
        table.add_column(heading, justify="left" if not heading else "right", overflow="fold")
    device, host = (prediction.total_bytes(tier) for tier in ("device", "host"))
    table.add_row(
        "outsize, predicted",
        format_bytes(device),
        format_bytes(host),
        f"{prediction.tokens_per_s:,.0f}",
        "1.00",
        "",
    )
    for way in found:
        speed = f"{way.tokens_per_s:,.0f}" if way.fits else "-"
        ratio = f"{way.tokens_per_s / prediction.tokens_per_s:.2f}" if way.fits else "-"
        where = format_bytes(way.host_bytes) if way.host_bytes else ""
        table.add_row(way.name, format_bytes(way.device_bytes), where, speed, ratio, _remark(way))
    text = StringIO()
    console = Console(file=text, width=WIDTH, highlight=False, markup=False)
    console.print(table)
    for line in warnings(asked, found):
        console.print(line)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _remark(way: Alternative) -> str:
    if not way.fits:
        return "does not fit"
    waits = _waits(way)
    return f"waits {waits:.0%} of a step, most for {way.waits_for}" if waits >= MUCH else ""


def _waits(way: Alternative) -> float:
    """Return the share of a step in which nothing computes."""
    return way.waits_s / (way.compute_s + way.waits_s)


def warnings(asked: Asked, found: Sequence[Alternative]) -> list[str]:
    """Return what to say of ways that PCIe does not suit."""
    question = asked.question
    sums = [_waits(way) for way in found if way.waits_for == ACTIVATION_SUMS]
    lines = []
    if sums and max(sums) >= MUCH:
        lines.append(
            f"warning: tensor parallelism sums activations in every block while nothing computes: at least "
            f"{max(sums):.0%} of a step on these links; it is made for GPUs with a wire of their own (NVLink)"
        )
    lines.append(
        "note: managed (unified) memory loads a page when a kernel faults on it, so nothing is loaded ahead: "
        f"at most {managed_tokens_per_s(question):,.0f} tokens/s here, if faults were free; PyTorch does not offer it"
    )
    return lines
