"""What each unit of a step took, lane by lane, from the ops of its timeline."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

from outsize.errors import ProgramError
from outsize.planner.program.ops import Kind, Op
from outsize.planner.program.program import parse_op
from outsize.planner.simulate.timeline import Event

# Columns of the table, and whose ops each adds up.
COLUMNS: Final[dict[str, frozenset[Kind]]] = {
    "load": frozenset({Kind.LOAD}),
    "forward": frozenset(
        {
            Kind.FORWARD,
            Kind.FORWARD_ATTENTION,
            Kind.FORWARD_PRODUCTS,
            Kind.FORWARD_KEEP,
            Kind.FORWARD_BACKWARD,
        }
    ),
    "backward": frozenset({Kind.RECOMPUTE, Kind.BACKWARD}),
    "activations": frozenset({Kind.SAVE, Kind.FETCH, Kind.OFFLOAD, Kind.ONLOAD}),
    "gradient": frozenset({Kind.NORM, Kind.GRAD}),
    "optimizer": frozenset({Kind.READ, Kind.STEP, Kind.WRITE}),
}
_COLUMN_OF = {kind: column for column, kinds in COLUMNS.items() for kind in kinds}
_COMPUTING = COLUMNS["forward"] | COLUMNS["backward"]


def unit_latencies(events: Iterable[Event]) -> dict[int, dict[str, float]]:
    """Return for each unit that has an op the seconds of its ops by column, and how long compute ``waited`` for it.

    Args:
        events: of one step.
    """
    seconds: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event, op in _parsed(events):
        if op.unit is None or op.kind not in _COLUMN_OF:
            continue
        row = seconds[op.unit]
        row[_COLUMN_OF[op.kind]] += event.end_s - event.start_s
        if op.kind in _COMPUTING:
            row["waited"] += event.waited_s
    return {unit: {name: seconds[unit][name] for name in (*COLUMNS, "waited")} for unit in sorted(seconds)}


def round_starts(events: Iterable[Event], round_size: int) -> list[float]:
    """Return when the first forward of each round began, as ``events`` of one step tell the time.

    Args:
        events: of one step.
        round_size: microbatches of a round.
    """
    starts: dict[int, float] = {}
    for event, op in _parsed(events):
        if op.kind in COLUMNS["forward"] and op.microbatch is not None:
            number = op.microbatch // round_size
            starts[number] = min(starts.get(number, event.start_s), event.start_s)
    return [starts[number] for number in sorted(starts)]


def _parsed(events: Iterable[Event]) -> Iterator[tuple[Event, Op]]:
    """Yield events with their ops, without those of another version, or of a lane without a program."""
    for event in events:
        with suppress(ProgramError):
            yield event, parse_op(event.op)
