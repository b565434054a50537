"""What ops of a simulated run hold, tier by tier, and which of them its length is made of.

Held are bytes in use: a slot counts while a unit lies in it, an activation while it lives. What a plan sets
aside is never less.
"""

from collections import defaultdict
from collections.abc import Sequence

from outsize.planner.memory.step_bytes import NOTHING, ActivationMeter, Live
from outsize.planner.program.program import FORWARD_KINDS, Kind, Op, Program
from outsize.planner.program.stages import KeptBytes, bytes_of
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.simulate.discrete import LaneRun
from outsize.planner.simulate.simulator import Simulation

Change = tuple[str, int]
Changes = tuple[list[Change], list[Change]]


def held_bytes(
    done: Simulation,
    layout: StepLayout,
    boundary_bytes: Sequence[int] = (),
    kept_bytes: KeptBytes = NOTHING,
    below: str = "host",
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the most bytes held in each tier (``device:w0``, ``host``), and those held at the end; see `changes_of`.

    Of changes at the same time those at an end come first, and then those of earlier ops.
    """
    moments: list[tuple[float, int, int, Change]] = []
    for index, op in enumerate(done.steps.ops):
        if op is None:
            continue
        at_start, at_end = changes_of(op, layout, boundary_bytes, below, kept_bytes)
        moments += [(done.run.start_s[index], 1, 2 * index + 1, change) for change in at_start]
        moments += [(done.run.end_s[index], 0, 2 * index + 2, change) for change in at_end]
    held: defaultdict[str, int] = defaultdict(int)
    peak: defaultdict[str, int] = defaultdict(int)
    for *_, (tier, size) in sorted(moments, key=lambda moment: moment[:3]):
        held[tier] += size
        peak[tier] = max(peak[tier], held[tier])
    return dict(peak), dict(held)


def peak_activations(
    program: Program, layout: StepLayout, boundary_bytes: Sequence[int], kept_bytes: KeptBytes = NOTHING
) -> Live:
    """Return the most bytes of activations that are ever live on the device, and saved below it."""
    meter = ActivationMeter(layout, boundary_bytes, kept_bytes)
    live = [meter.add(op) for op in program]
    return Live(max((x.device_bytes for x in live), default=0), max((x.below_bytes for x in live), default=0))


def critical_path(run: LaneRun) -> tuple[int, ...]:
    """Return the chain of work, first to last, whose durations add up to the makespan."""
    if not run.end_s:
        return ()
    path = [max(range(len(run.end_s)), key=lambda i: (run.end_s[i], -i))]
    while run.cause[path[-1]] >= 0:
        path.append(run.cause[path[-1]])
    return tuple(reversed(path))


def changes_of(
    op: Op, layout: StepLayout, boundary_bytes: Sequence[int], below: str, kept_bytes: KeptBytes = NOTHING
) -> Changes:
    """Return the changes, (tier, bytes), at the start and at the end of ``op``.

    Args:
        op: any op.
        layout: of its program.
        boundary_bytes: bytes of the input of each streamed unit for one microbatch; empty counts none.
        below: tier that saved activations go to.
        kept_bytes: bytes that forwards of each extent keep; what it does not tell counts none.
    """
    device, unit = f"device:w{op.worker}", op.unit or 0
    if op.kind is Kind.LOAD:
        return [(device, layout.weight_bytes[unit])], []
    if op.kind is Kind.FREE:
        return [], [(device, -layout.weight_bytes[unit])]
    if op.kind in (Kind.ACC, Kind.SUM):
        return [(device, layout.gradient_bytes[unit])], []
    if op.kind is Kind.GRAD:
        whole = op.tile is None or op.tile + 1 == layout.tiles[unit]
        return [], [(device, -layout.gradient_bytes[unit])] if whole else []
    if not boundary_bytes or op.microbatch is None:
        return [], []
    of = _of_activations if layout.stages is None else _of_staged
    at_start, at_end = of(op, layout, (0, *boundary_bytes[1:], 0), device, below)
    kept = bytes_of(layout.choice(unit, op.microbatch), unit, kept_bytes)
    if op.kind in FORWARD_KINDS:
        at_end = [*at_end, (device, kept)]
    elif op.kind is _consumer(unit, layout):
        at_start = [(device, -kept), *at_start]
    elif op.kind is Kind.OFFLOAD:
        at_start, at_end = [(below, kept)], [(device, -kept)]
    elif op.kind is Kind.ONLOAD:
        at_start, at_end = [(device, kept)], [(below, -kept)]
    return at_start, at_end


def _consumer(unit: int, layout: StepLayout) -> Kind:
    """Return the kind of the op from which on what a forward of ``unit`` kept is part of the workspace."""
    apart = layout.stages is not None and unit < layout.stages.backward[0][0]
    return Kind.RECOMPUTE if apart else Kind.BACKWARD


def _of_activations(op: Op, layout: StepLayout, sizes: tuple[int, ...], device: str, below: str) -> Changes:
    unit = op.unit or 0
    size, following = sizes[unit], sizes[unit + 1]
    made = size if unit > layout.first_backward else 0
    if op.kind in FORWARD_KINDS:
        return [(device, following)], [(device, -size if unit < layout.first_backward else 0)]
    if op.kind is Kind.FORWARD_BACKWARD:
        return [(device, made)], [(device, -size)]
    if op.kind is Kind.BACKWARD:
        return [(device, made)], [(device, -size - following)]
    if op.kind is Kind.SAVE:
        return [(below, size)], [(device, -size)]
    if op.kind is Kind.FETCH:
        return [(device, size)], [(below, -size)]
    return [], []


# What may run the first unit of a visit that goes forward.
_AT_A_START = FORWARD_KINDS | {Kind.FORWARD_BACKWARD, Kind.BACKWARD}


def _of_staged(op: Op, layout: StepLayout, sizes: tuple[int, ...], device: str, below: str) -> Changes:
    """Return the changes in a step of stages: a copy of every input lies below until its backward."""
    unit = op.unit or 0
    size, following = sizes[unit], sizes[unit + 1]
    made = size if unit > layout.first_backward else 0
    assert layout.stages is not None
    fetched = any(unit == first for first, _ in (*layout.stages.forward, layout.stages.backward[0]))
    fused = unit >= layout.stages.backward[0][0]
    arrived = fetched and unit > 0 and op.kind in _AT_A_START and layout.takes_from_peer(op.worker)
    fetched = fetched and not arrived  # what has arrived lies in a place, and nowhere else
    saved = -size if not fused or fetched else 0
    if op.kind in FORWARD_KINDS:
        leaves = -size if unit < layout.first_backward or (fetched and not fused) else 0
        spent = -size if unit < layout.first_backward and fetched else 0
        return [(device, following)], [(device, leaves), (below, spent)]
    if op.kind is Kind.FORWARD_BACKWARD:
        return [(device, made)], [(device, -size), (below, saved)]
    if op.kind is Kind.BACKWARD:
        return [(device, made)], [(device, -size - following), (below, saved)]
    if op.kind in (Kind.SAVE, Kind.SEND):
        return [(below, size)], [(device, -size)]
    if op.kind in (Kind.PASS, Kind.RETURN):
        return [(f"device:w{op.target}", size)], [(device, -size)]
    if op.kind is Kind.RECV:
        return [(device, size)], [(below, -size)]
    return ([(device, size)], []) if op.kind is Kind.FETCH else ([], [])
