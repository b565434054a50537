"""Programs of one worker, by passes that each insert ops, and the activation bytes of a round.

A pass takes a program and returns it with what follows from it inserted. They run in the order in which they stand
here; `step_parts.build_step` strings them together. Each looks only at the ops of the program, so a schedule of another
shape (another order of F and B) goes through the same passes.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from itertools import accumulate, chain, groupby, pairwise
from operator import add
from typing import Any

from outsize.planner.memory.step_bytes import Live
from outsize.planner.passes.slots import assign_slots
from outsize.planner.program.hazards import SAVE_WINDOW
from outsize.planner.program.program import FORWARD_KINDS, Kind, Op, Program
from outsize.planner.program.stages import Choice, KeptBytes, bytes_of
from outsize.planner.program.step_layout import WORKER, StepLayout

COMPUTE = FORWARD_KINDS | {Kind.FORWARD_BACKWARD, Kind.BACKWARD}
_BACKWARD = (Kind.FORWARD_BACKWARD, Kind.BACKWARD)
# Backwards ahead of its own that what a forward kept comes back: one, as it may be many times larger than an input.
ONLOAD_AHEAD = 1


def v_cycle(layout: StepLayout) -> Program:
    """Return the compute ops of a step: down through the forward, back up through the backward.

    Layer-major: a unit serves all microbatches of a round before the next unit runs, in the order 0, 1, …, which is
    also the order in which gradients are summed. The next round begins where all backwards of one have run.
    """

    def kind_of(kind: Kind, unit: int, microbatch: int) -> Kind:
        return layout.choice(unit, microbatch).forward if kind is Kind.FORWARD else kind

    kinds = [(Kind.FORWARD, unit) for unit in range(layout.last)]
    turn = (Kind.FORWARD, Kind.BACKWARD) if layout.cut else (Kind.FORWARD_BACKWARD,)
    kinds += [(kind, layout.last) for kind in turn]
    kinds += [(Kind.BACKWARD, unit) for unit in range(layout.last - 1, layout.first_backward - 1, -1)]
    return Program(
        tuple(
            _compute(kind_of(kind, unit, m), unit, m)
            for microbatches in layout.rounds
            for kind, unit in kinds
            for m in microbatches
        )
    )


def insert_loads(program: Program, layout: StepLayout) -> Program:
    """Put every unit into a slot for its visits and free the slot after them; the rest stays throughout."""
    visits = _visits(program)
    before, after = _insertions()
    if layout.rest_has_weights:
        slot = layout.resident_slot
        before[visits[0][1]].append(Op(kind=Kind.LOAD, unit=layout.rest, worker=WORKER, slot=slot))
    units = [unit for unit, _, _ in visits]
    places = (layout.weight_bytes, layout.slot_bytes, layout.prefetch_depth, layout.own_slots)
    for stay in assign_slots(units, *places):
        load = Op(kind=Kind.LOAD, unit=stay.unit, worker=WORKER, slot=stay.slot)
        before[visits[stay.load_visit][1]].append(load)
        free = Op(kind=Kind.FREE, unit=stay.unit, worker=WORKER, slot=stay.slot)
        after[visits[stay.last_visit][2]].append(free)
    if layout.rest_has_weights:
        after[visits[-1][2]].append(Op(kind=Kind.FREE, unit=layout.rest, worker=WORKER, slot=slot))
    return _splice(program, before, after)


def insert_saves(program: Program, layout: StepLayout) -> Program:
    """Let inputs leave right after their unit's forward, and come back ``prefetch_depth`` backwards ahead.

    So does what a forward kept, where it leaves; it comes back `ONLOAD_AHEAD`. Nothing comes back before the first
    backward of its round.
    """
    before, after = _insertions()
    backwards = [i for i, op in enumerate(program) if op.kind in _BACKWARD]
    for index, op in enumerate(program):
        if op.kind in FORWARD_KINDS and op.unit in layout.offload:
            after[index].append(_compute(Kind.SAVE, op.unit, op.microbatch))
        if op.kind in FORWARD_KINDS and _leaves(op, layout):
            after[index].append(_compute(Kind.OFFLOAD, op.unit, op.microbatch))
    begun: dict[int, int] = {}  # round -> its first backward
    for turn, index in enumerate(backwards):
        op = program.ops[index]
        first = begun.setdefault(layout.round_of(op), turn)
        if op.kind is Kind.BACKWARD and op.unit in layout.offload:
            ahead = backwards[max(first, turn - layout.prefetch_depth)]
            before[ahead].append(_compute(Kind.FETCH, op.unit, op.microbatch))
        if op.kind is Kind.BACKWARD and _leaves(op, layout):
            ahead = backwards[max(first, turn - ONLOAD_AHEAD)]
            before[ahead].append(_compute(Kind.ONLOAD, op.unit, op.microbatch))
    return _splice(program, before, after)


def _leaves(op: Op, layout: StepLayout) -> bool:
    return layout.choice(op.unit or 0, op.microbatch or 0).leaves


def insert_gradients(program: Program, layout: StepLayout) -> Program:
    """Give trainable units accumulators for their backwards; then take norms and send gradients home.

    Later rounds sum on: a sum comes up ahead of what is loaded `prefetch_depth` visits ahead, or as soon after as an
    accumulator is free.
    """
    before, after = _insertions()
    visits = _visits(program)
    ends = [last for _, _, last in visits]
    indices_of: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # round and unit -> its backwards
    for index, op in enumerate(program):
        if op.kind in _BACKWARD and op.unit is not None:
            indices_of[layout.round_of(op), op.unit].append(index)
    backwards = list(indices_of.values())
    last_used = [-1] * len(layout.accumulator_bytes)
    if layout.rest_trains:
        before[backwards[0][0]].append(_accumulate(Kind.ACC, layout.rest, layout.resident_accumulator))
    for (number, unit), indices in indices_of.items():
        if not layout.trainable[unit]:
            continue
        if (own_place := layout.own_accumulators.get(unit)) is not None:
            if not number:
                before[indices[0]].append(_accumulate(Kind.ACC, unit, own_place))
            if number == layout.num_rounds - 1:
                after[indices[-1]] += gradient_ops(unit, layout)
            continue
        fitting = [
            i for i, size in enumerate(layout.accumulator_bytes) if size >= layout.gradient_bytes[unit]
        ]
        accumulator = min(fitting, key=lambda i: (last_used[i], layout.accumulator_bytes[i], i))
        start = indices[0]
        if number:
            visits_before = bisect_left(ends, start)
            earliest = max(0, visits_before - (1 + layout.prefetch_depth))
            free = max(last_used[accumulator], indices_of[number - 1, unit][-1])
            start = next((at for _, at, _ in visits[earliest:visits_before] if free < at), start)
        before[start].append(_accumulate(Kind.SUM if number else Kind.ACC, unit, accumulator))
        last_used[accumulator] = indices[-1]
        after[indices[-1]] += gradient_ops(unit, layout, last_round=number == layout.num_rounds - 1)
    if layout.rest_trains:
        after[backwards[-1][-1]] += gradient_ops(layout.rest, layout)
    return _splice(program, before, after)


def insert_steps(program: Program, layout: StepLayout) -> Program:
    """Step units: behind all gradients in the order of the next forward, or unclipped each behind its own."""
    steps = tuple(step_of(unit, layout) for unit in layout.step_order)
    if layout.clip:
        clip = (Op(kind=Kind.CLIP),) if steps else ()
        return Program(program.ops + clip + steps)
    before, after = _insertions()
    last_gradients = {
        op.unit: index for index, op in enumerate(program) if op.kind is Kind.GRAD
    }  # of the last round
    for unit, index in last_gradients.items():
        after[index].append(step_of(unit, layout))
    return _splice(program, before, after)


def step_of(unit: int | None, layout: StepLayout) -> Op:
    """Return the optimizer step of a unit, where it rests."""
    if unit in layout.resident:
        return Op(kind=Kind.UPDATE, unit=unit, worker=WORKER)
    return Op(kind=Kind.STEP, unit=unit)


def _compute(kind: Kind, unit: int | None, microbatch: int | None) -> Op:
    return Op(kind=kind, unit=unit, microbatch=microbatch, worker=WORKER)


def _accumulate(kind: Kind, unit: int | None, accumulator: int) -> Op:
    return Op(kind=kind, unit=unit, worker=WORKER, slot=accumulator)


def gradient_ops(
    unit: int | None, layout: StepLayout, worker: int | None = WORKER, *, last_round: bool = True
) -> list[Op]:
    """Return what becomes of the gradient of a unit that a round has summed: its norm, and its way home."""
    norms = last_round and (layout.clip or layout.unit_clip)
    norm = [Op(kind=Kind.NORM, unit=unit, worker=worker)] if norms else []
    if unit in layout.resident and not layout.cut:  # it steps at once, or all do behind CLIP
        return norm if layout.clip else [*norm, step_of(unit, layout)]
    return [*norm, Op(kind=Kind.GRAD, unit=unit, worker=worker)]


def _visits(program: Program) -> list[tuple[int, int, int]]:
    """Return (unit, index of its first op, index of its last op) for each run of compute ops of one unit."""
    compute = [(i, op.unit) for i, op in enumerate(program) if op.kind in COMPUTE and op.unit is not None]
    starts = (
        [0] + [k for k, ((_, a), (_, b)) in enumerate(pairwise(compute), start=1) if a != b] + [len(compute)]
    )
    return [(compute[a][1], compute[a][0], compute[b - 1][0]) for a, b in pairwise(starts)]


def _insertions() -> tuple[defaultdict[int, list[Op]], defaultdict[int, list[Op]]]:
    """Return what goes before and what goes after the op at each index."""
    return defaultdict(list), defaultdict(list)


def _splice(
    program: Program, before: Mapping[int, Sequence[Op]], after: Mapping[int, Sequence[Op]]
) -> Program:
    ops: list[Op] = []
    for index, op in enumerate(program):
        ops += (*before.get(index, ()), op, *after.get(index, ()))
    return Program(tuple(ops))


# Forwards from which on each one changes what is held as the one before it did: what they save leaves two later.
_UNLIKE = SAVE_WINDOW + 2


def cycle_peak(layout: StepLayout, boundary_bytes: Sequence[int], kept_bytes: KeptBytes) -> Live:
    """Return the most bytes of activations that are ever live on the device, and saved below it.

    It is what `ActivationMeter` counts op by op, for searches that ask much. Microbatches of a unit whose forwards keep
    the same are alike: from the fourth on each adds what the one before it did. The backward is prefix sums, since
    everything comes back a fixed number of backwards ahead.

    Args:
        layout: of one worker; each round uses the room of the one before.
        boundary_bytes: bytes of the input of each streamed unit, for one microbatch.
        kept_bytes: bytes that forwards of each extent keep; what it does not tell counts none.
    """
    sizes = (0, *boundary_bytes[1:], 0)
    runs = [
        [(choice, count, bytes_of(choice, unit, kept_bytes)) for choice, count in _runs(layout, unit)]
        for unit in range(layout.num_streamed)
    ]
    forward, bottom = _Forward(), layout.first_backward
    for unit in range(layout.last + layout.cut):
        gone = sizes[unit] if unit < bottom else 0
        inputs = [sizes[unit]] * (unit in layout.offload)
        forward.unit(
            tuple(
                (count, sizes[unit + 1], bytes_kept - gone, (*inputs, *((bytes_kept,) * choice.leaves)))
                for choice, count, bytes_kept in runs[unit]
            )
        )
    peak = max(forward.peak, _backward_peak(layout, sizes, runs, forward.device, sum(forward.leaving)))
    return Live(peak, forward.below)


_Run = tuple[Choice, int, int]
"""Microbatches of a round that follow one another and keep the same: what, how many, and bytes of each."""


def _runs(layout: StepLayout, unit: int) -> Sequence[tuple[Choice, int]]:
    """Return how many microbatches of a round follow one another that keep the same, and what."""
    if unit >= len(layout.kept):
        return ((Choice.RECOMPUTE, layout.round_size),)
    return _grouped(layout.kept[unit])


@lru_cache(maxsize=64)
def _grouped(choices: tuple[Choice, ...]) -> Sequence[tuple[Choice, int]]:
    """Return the same of a unit: those of one model mostly choose alike."""
    return tuple([(choice, len(list(alike))) for choice, alike in groupby(choices)])


class _Forward:
    """What is held while forwards run."""

    def __init__(self) -> None:
        self.device = self.below = self.peak = 0
        self.leaving: deque[int] = deque()  # bytes of SAVEs that nothing has waited for yet
        self._behind = 0  # of them, those behind the last forward
        self._former: tuple[Any, ...] = ()  # what the last unit ran, and began with
        self._added = (
            0,
            0,
            0,
        )  # what it has added to device and below, and its peak over what was on the device

    def unit(self, runs: tuple[tuple[int, int, int, tuple[int, ...]], ...]) -> None:
        """Add the forwards of a unit; a repeat of the former unit from the same state adds the same bytes."""
        begun, device, below = (runs, *self.leaving, self._behind), self.device, self.below
        if begun == self._former:
            self.peak = max(self.peak, device + self._added[2])
            self.device, self.below = device + self._added[0], below + self._added[1]
            return
        before, self.peak = self.peak, device
        for run in runs:
            self._run(*run)
        self._former, self._added = begun, (self.device - device, self.below - below, self.peak - device)
        self.peak = max(before, self.peak)

    def _run(self, count: int, made_bytes: int, stays: int, saved: tuple[int, ...]) -> None:
        """Run so many forwards of a unit, each of which makes an input, keeps something, and saves something."""
        before = top = 0
        for _ in range(min(count, _UNLIKE)):
            before = self.device
            while len(self.leaving) > max(SAVE_WINDOW - 1, self._behind):
                self.device -= self.leaving.popleft()
            top = self.device + made_bytes
            self.device = top + stays
            top = max(top, self.device) if saved else top
            self.peak = max(self.peak, top)
            self.leaving.extend(saved)
            self._behind = len(saved)
        more = max(0, count - _UNLIKE) * (self.device - before)
        self.peak = max(self.peak, top + more)
        self.device += more
        self.below += count * sum(saved)


def _backward_peak(
    layout: StepLayout, sizes: Sequence[int], runs: Sequence[Sequence[_Run]], device: int, leaving: int
) -> int:
    """Return the most that is live on the device while backwards run.

    Args:
        layout: of the step.
        sizes: of the inputs of units.
        runs: of each unit.
        device: bytes that are live behind the forwards.
        leaving: of them, those of SAVEs that nothing has waited for yet.
    """
    rises: list[int] = []  # by backward: what is live while it runs, over what was before
    changes: list[int] = []  # what is live behind it, over what was before
    fetches, onloads = _Arrivals(layout.prefetch_depth), _Arrivals(ONLOAD_AHEAD)
    bottom = layout.first_backward
    for unit in range(layout.last, bottom - 1, -1):
        made_bytes = sizes[unit] if unit > bottom else 0
        spent = sizes[unit] + sizes[unit + 1]
        for choice, count, kept_bytes in runs[unit]:
            rises += [made_bytes - kept_bytes] * count
            changes += [made_bytes - kept_bytes - spent] * count
            fetches.add(sizes[unit] if unit in layout.offload else None, count)
            onloads.add(kept_bytes if choice.leaves else None, count)
    held = list(accumulate(changes[:-1], initial=device))
    ways = [way for way in (fetches, onloads) if way.first is not None]
    if not ways:
        return max(_sums(held, rises))
    arrived = reduce(lambda one, other: list(_sums(one, other)), [way.arrived() for way in ways])
    firsts = [(way.first or 0, way.ahead) for way in ways]
    first_needed = min(first for first, _ in firsts)
    first_comes = min(max(0, first - ahead) for first, ahead in firsts)
    peak = max(_sums(held[:first_comes], rises), default=0)
    come = arrived[first_comes:]
    held = list(_sums(held[first_comes:], [size - leaving for size in come]))
    # Backwards that need nothing of it may run before anything comes, and so before all SAVEs are done.
    late = [max(0, leaving - size) for size in arrived[first_comes:first_needed]]
    late += [0] * (len(held) - len(late))
    return max(chain((peak,), held, _sums(_sums(held, rises[first_comes:]), late)))


def _sums(one: Iterable[int], other: Iterable[int]) -> Iterator[int]:
    return map(add, one, other)


class _Arrivals:
    """Sizes of offloaded activations that return ``ahead`` backwards before their use.

    Attributes:
        ahead: how many.
        first: the first backward for which anything does; None where nothing does.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.first: int | None = None
        self._sizes: list[int] = []

    def add(self, size: int | None, count: int) -> None:
        """Have ``size`` come back for each of the next ``count`` backwards."""
        if size is not None and self.first is None:
            self.first = len(self._sizes)
        self._sizes += [size or 0] * count

    def arrived(self) -> list[int]:
        """Return what has come back when each backward begins."""
        sums = list(accumulate(self._sizes))
        return [*sums[self.ahead :], *[sums[-1]] * min(self.ahead, len(sums))]
