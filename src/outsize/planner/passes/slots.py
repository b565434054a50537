"""Give units slots, stage what lies below the device through buffers, and check programs.

Which unit lies in which slot when is an offline choice, since the order of visits is known.

A *visit* is a run of compute ops of one unit: with N units there are N visits down and up to N-1 back up. A unit that
still lies in a slot is used again without a LOAD; a unit is visited at most twice in a round, so it is loaded at most
twice in one.

The slot of a missing unit is the one whose LOAD can start early enough for the prefetch depth, looking one depth ahead
so that a unit with only one slot to go to finds it free; among these, the one whose occupant is needed again farthest
in the future (Belady's rule, optimal in misses); then the smallest.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType

from outsize.errors import ProgramError
from outsize.planner.memory.step_bytes import ActivationMeter
from outsize.planner.program.program import Kind, Op, Program, excerpt, parse, render
from outsize.planner.program.program_rules import Rules
from outsize.planner.program.rules_home import BrokenRuleError
from outsize.planner.program.stages import KeptBytes
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.program.table import BACKWARD_KINDS
from outsize.units import format_bytes


@dataclass(frozen=True, slots=True)
class Stay:
    """A unit's stay in a slot.

    Attributes:
        unit: the unit.
        slot: where it lies.
        load_visit: the LOAD comes before the first op of this visit.
        last_visit: the FREE comes after the last op of this visit.
    """

    unit: int
    slot: int
    load_visit: int
    last_visit: int


class _Slot:
    """A slot during the sweep over the visits."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.unit: int | None = None
        self.load_visit = 0
        self.last_visit = -1


def assign_slots(
    visits: Sequence[int],
    weight_bytes: Sequence[int],
    slot_bytes: Sequence[int],
    depth: int,
    own_slots: Mapping[int, int] = MappingProxyType({}),
) -> list[Stay]:
    """Return the stays of units in slots, in the order of the visits that begin them.

    Args:
        visits: unit of each visit.
        weight_bytes: bytes by unit; a unit of 0 bytes needs no slot.
        slot_bytes: sizes of the slots that units share; every unit must fit one.
        depth: how many visits ahead a LOAD should start.
        own_slots: the slots, behind those, of units that stay from their first visit to their last.
    """
    slots = [_Slot(size) for size in (*slot_bytes, *[0] * len(own_slots))]
    needed = [0 if unit in own_slots else weight_bytes[unit] for unit in visits]
    stays: dict[int, Stay] = {}  # by the visit that begins the stay, since they end in another order
    begun: dict[int, int] = {}
    uses: defaultdict[int | None, list[int]] = defaultdict(list)
    for visit, unit in enumerate(visits):
        uses[unit].append(visit)

    def end(index: int) -> None:
        slot = slots[index]
        if slot.unit is not None:
            stays[begun[index]] = Stay(slot.unit, index, slot.load_visit, slot.last_visit)

    for visit, unit in enumerate(visits):
        if weight_bytes[unit] == 0:
            continue
        index = own_slots.get(unit, next((i for i, slot in enumerate(slots) if slot.unit == unit), None))
        if index is None:
            index = _choose(slots, uses, needed, visit, depth)
        if slots[index].unit != unit:
            end(index)
            begun[index] = visit
            slots[index].unit = unit
            slots[index].load_visit = max(visit - depth, slots[index].last_visit + 1, 0)
        slots[index].last_visit = visit
    for index in range(len(slots)):
        end(index)
    return [stays[visit] for visit in sorted(stays)]


def _choose(
    slots: list[_Slot], uses: Mapping[int | None, list[int]], needed: list[int], visit: int, depth: int
) -> int:
    """Return the index of the slot that the unit of ``visit`` is loaded into; ``uses`` are the visits of each unit."""

    def fits(size: int) -> list[int]:
        return [i for i, slot in enumerate(slots) if slot.size_bytes >= size]

    # The next visit soon to come that has only one slot to go to.
    narrow = next(
        (v for v in range(visit + 1, min(visit + depth + 1, len(needed))) if len(fits(needed[v])) == 1),
        None,
    )

    def cost(index: int) -> tuple[int, bool, float, int, int]:
        slot = slots[index]
        late = max(0, slot.last_visit + 1 - (visit - depth))
        taken_soon = narrow is not None and fits(needed[narrow]) == [index]
        if narrow is not None and taken_soon:
            late += max(0, visit + 1 - (narrow - depth))
        later = uses.get(slot.unit, [])
        at = bisect_left(later, visit)
        next_use = later[at] if at < len(later) else inf
        return late, taken_soon, -next_use, slot.size_bytes, index

    return min(fits(needed[visit]), key=cost)


def insert_disk(program: Program, layout: StepLayout) -> Program:
    """Stage units through host buffers where the layout says so, cut the optimizer's steps into tiles, and commit.

    It comes last. What it inserts lies between the disk and host memory; the device's side of the program stays as it
    is, except that gradients which pass through the ring leave in tiles.
    """
    if layout.staged:
        program = _stage(program, layout)
    if any(layout.tiles):
        program = _tile(program, layout)
    return Program((*program.ops, Op(kind=Kind.COMMIT))) if layout.commits else program


def _stage(program: Program, layout: StepLayout) -> Program:
    """Put a READ before every LOAD and a WRITE after every GRAD, with a host buffer between them.

    With two buffers or more, weights and gradients have buffers of their own, so that a READ ahead of its
    time does not wait for a gradient. Gradients that pass through a ring need none.
    """
    num_gradients = 0 if layout.ring else layout.num_host_buffers // 2
    num_weights = layout.num_host_buffers - num_gradients
    gradients = range(num_weights, layout.num_host_buffers) or range(1)
    loads = grads = 0
    ops: list[Op] = []
    for op in program:
        if op.kind is Kind.LOAD:
            buffer = loads % num_weights
            loads += 1
            ops += (Op(kind=Kind.READ, unit=op.unit, buffer=buffer), replace(op, buffer=buffer))
        elif op.kind is Kind.GRAD and not layout.ring:
            buffer = gradients[grads % len(gradients)]
            grads += 1
            ops += (replace(op, buffer=buffer), Op(kind=Kind.WRITE, unit=op.unit, buffer=buffer))
        else:
            ops.append(op)
    return Program(tuple(ops))


def _tile(program: Program, layout: StepLayout) -> Program:
    """Replace each run of STEPs of tiled units by their tiles, READs as far ahead as there are buffers.

    Where gradients pass through the ring, the GRAD before a STEP goes with its tiles.
    """
    ops: list[Op] = []
    pending: list[tuple[int, int]] = []
    workers: dict[int, int | None] = {}
    done = 0
    for op in program:
        if op.kind is Kind.GRAD and op.unit is not None and layout.ring:
            workers[op.unit] = op.worker
            continue
        if op.kind is Kind.STEP and op.unit is not None and layout.tiles[op.unit]:
            pending += [(op.unit, tile) for tile in range(layout.tiles[op.unit])]
            continue
        ops += _pipeline(pending, done, layout, workers)
        done += len(pending)
        pending = []
        ops.append(op)
    ops += _pipeline(pending, done, layout, workers)
    return Program(tuple(ops))


def _pipeline(
    tiles: list[tuple[int, int]], done: int, layout: StepLayout, workers: Mapping[int, int | None]
) -> list[Op]:
    """Return READ, GRAD, STEP and WRITE of ``tiles``, each READ right after the WRITE that frees its buffer.

    READs and WRITEs are those of a home on disk, GRADs those of gradients that pass through the ring; each GRAD then
    comes right behind what fills or frees its buffer, so that it runs ahead of the STEPs.
    """
    num_buffers = layout.num_tile_buffers

    def on_tile(kind: Kind, index: int) -> Op:
        unit, tile = tiles[index]
        return Op(kind=kind, unit=unit, tile=tile, buffer=(done + index) % num_buffers)

    def fill(index: int) -> list[Op]:
        read = [on_tile(Kind.READ, index)] if layout.tiles_on_disk else []
        if not layout.ring:
            return read
        return [*read, replace(on_tile(Kind.GRAD, index), worker=workers[tiles[index][0]])]

    ops = [op for index in range(min(num_buffers, len(tiles))) for op in fill(index)]
    for index in range(len(tiles)):
        ops.append(on_tile(Kind.STEP, index))
        if layout.tiles_on_disk:
            ops.append(on_tile(Kind.WRITE, index))
        if index + num_buffers < len(tiles):
            ops += fill(index + num_buffers)
    return ops


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """What the tiers hold besides activations, and what they may hold.

    Attributes:
        boundary_bytes: bytes of the input of each streamed unit, for one microbatch.
        kept_bytes: bytes that forwards of each extent keep.
        below: tier that saved activations go to, ``host`` or ``disk``.
        static_bytes: bytes by tier that are allocated for the whole step.
        budget_bytes: most bytes by tier; a tier without an entry has no limit.
    """

    boundary_bytes: tuple[int, ...]
    below: str
    kept_bytes: KeptBytes = field(default_factory=dict)
    static_bytes: Mapping[str, int] = field(default_factory=dict)
    budget_bytes: Mapping[str, int] = field(default_factory=dict)


def limits_of(
    program: Program,
    layout: StepLayout,
    memory: Mapping[str, Mapping[str, int]],
    below: str,
    boundary_bytes: tuple[int, ...],
    kept_bytes: KeptBytes,
) -> MemoryLimits:
    """Return the memory of a plan, whose ``program`` this is, as limits of other programs: of all workers together.

    Other programs may hold what the plan has set aside for activations, and at least as much as its own does.
    """
    meter = ActivationMeter(layout, boundary_bytes, kept_bytes)
    peaks = [max(held) for held in zip(*map(meter.add, program), strict=True)]
    static, budgets = {}, {}
    for tier, count, peak in (("device", layout.num_workers, peaks[0]), (below, 1, peaks[1])):
        room = count * sum(size for name, size in memory[tier].items() if "activations" in name)
        static[tier] = count * sum(memory[tier].values()) - room
        budgets[tier] = static[tier] + max(peak, room)
    return MemoryLimits(
        boundary_bytes=boundary_bytes,
        below=below,
        kept_bytes=kept_bytes,
        static_bytes=static,
        budget_bytes=budgets,
    )


def validate(program: Program, layout: StepLayout, limits: MemoryLimits | None = None) -> None:
    """Check ``program`` against `planner.program.program_rules`, and against ``limits`` where they are given.

    It walks the program, meters its bytes, and shows the program with an arrow at the op that is wrong.

    Raises:
        ProgramError: a rule is broken; the message names it and shows the program around the op.
    """
    rules = Rules(layout)
    meter = ActivationMeter(layout, limits.boundary_bytes, limits.kept_bytes) if limits is not None else None
    position = 0
    try:
        for position, op in enumerate(program):  # noqa: B007 - read where an error is caught
            rules.check(op)
            if meter is not None and limits is not None:
                _check_bytes(*meter.add(op), limits)
        position = len(program)
        rules.check_end()
    except BrokenRuleError as broken:
        where = str(program.ops[position]) if position < len(program) else "end of the program"
        shown = excerpt(program, position)
        raise ProgramError(f"op {position}, {where}: {broken}\n{shown}") from None


def _check_bytes(device_bytes: int, below_bytes: int, limits: MemoryLimits) -> None:
    for tier, live_bytes in (("device", device_bytes), (limits.below, below_bytes)):
        total = limits.static_bytes.get(tier, 0) + live_bytes
        budget = limits.budget_bytes.get(tier, total)
        if total > budget:
            raise BrokenRuleError(f"{tier} holds {format_bytes(total)}, its budget is {format_bytes(budget)}")


def rewritten(
    program: Program,
    change: Callable[[str], str],
    layout: StepLayout,
    limits: MemoryLimits,
    adding: Container[int | None],
) -> Program:
    """Return what ``change`` makes of the text of ``program``, where it is one for the same memory and the same bits.

    Backwards of units ``adding`` to the gradient of outer parameters keep their order, which its rounding depends on.

    Raises:
        ProgramError: it breaks a rule, does not fit, or adds in another order; shows where.
    """
    user = parse(change(render(program)))
    validate(user, layout, limits)
    sums, planned = (
        ", ".join(str(op) for op in each if op.kind in BACKWARD_KINDS and op.unit in adding)
        for each in (user, program)
    )
    if sums != planned:
        raise ProgramError(
            f"gradients of outer parameters would add up, and round, in another order than {planned}"
        )
    return user
