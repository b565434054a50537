"""What each unit of a step took, lane by lane, from the ops of its timeline."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from outsize.planner.program.ops import COMPUTE_KINDS, Op
from outsize.planner.program.table import OpRow
from outsize.planner.simulate.timeline import Event

# Columns of the table.
COLUMNS: Final = ("load", "forward", "backward", "activations", "gradient", "optimizer")


def column_of(row: OpRow) -> str | None:
    """Return the column that the seconds of an op are added to; None where they are in none."""
    if row.lane == "compute":
        computing = {"forward": "forward", "turn": "forward", "recompute": "backward", "backward": "backward"}
        return computing.get(row.price, "gradient" if row.price == "norm" else None)
    if row.lane in ("up", "down") and row.carries != "sum":
        by_content = {
            "weights": "load",
            "gradient": "gradient",
            "input": "activations",
            "kept": "activations",
        }
        return by_content.get(row.carries or "")
    return "optimizer" if row.price in ("disk", "step") else None


def unit_latencies(events: Iterable[Event]) -> dict[int, dict[str, float]]:
    """Return for each unit that has an op the seconds of its ops by column, and how long compute ``waited`` for it.

    Args:
        events: of one step.
    """
    seconds: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event, op in _with_ops(events):
        column = column_of(op.row)
        if op.unit is None or column is None:
            continue
        row = seconds[op.unit]
        row[column] += event.end_s - event.start_s
        if op.kind in COMPUTE_KINDS:
            row["waited"] += event.waited_s
    return {unit: {name: seconds[unit][name] for name in (*COLUMNS, "waited")} for unit in sorted(seconds)}


def round_starts(events: Iterable[Event], round_size: int) -> list[float]:
    """Return when the first forward of each round began, as ``events`` of one step tell the time.

    Args:
        events: of one step.
        round_size: microbatches of a round.
    """
    starts: dict[int, float] = {}
    for event, op in _with_ops(events):
        if column_of(op.row) == "forward" and op.microbatch is not None:
            number = op.microbatch // round_size
            starts[number] = min(starts.get(number, event.start_s), event.start_s)
    return [starts[number] for number in sorted(starts)]


def _with_ops(events: Iterable[Event]) -> Iterator[tuple[Event, Op]]:
    """Yield events with their ops, without those of another version, or of a lane without a program."""
    for event in events:
        if isinstance(event.op, Op):
            yield event, event.op
