"""Which bytes an op takes and gives back, tier by tier, at its start and at its end.

These are bytes in use: a slot counts while a unit lies in it, an activation while it lives. What a plan sets
aside is never less.
"""

from collections.abc import Sequence

from outsize.planner.memory.activation_liveness import NOTHING
from outsize.planner.program.activation_policy import KeptBytes, bytes_of
from outsize.planner.program.ops import FORWARD_KINDS, Kind, Op
from outsize.planner.program.step_layout import StepLayout

Change = tuple[str, int]
Changes = tuple[list[Change], list[Change]]


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
