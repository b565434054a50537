"""Passes for several workers: stages dealt out in turn, activations handed over, gradients summed over rounds.

A worker runs all microbatches of a visit, one after the other through the units of its stage, then goes on to
its next visit. While it does, the weights of that next visit come up in pieces between its activations, into
the other half of its slots. So an activation that is waited for is behind one weight at most. A unit that the
next visit runs too comes up after this visit has given it back, and so does all that has no other half.

A backward visit recomputes all its units before the gradient is needed, so that it may do so while it waits. What
forwards have kept for that recompute comes up one microbatch ahead, unit by unit between the backwards, whose graphs
make room for it.

What a stage makes for the next one goes by way of host memory (SAVE and FETCH, SEND and RECV), or from device to device
(PASS, RETURN) between workers that can. It then lies in a place of the next worker, which has one for each microbatch
of a visit: so a worker gives away what it has made although the next one is not there yet, and waits only for a place
that the visit before has not left. An input that a backward needs goes below from where it has arrived.

Gradients of a unit are summed in the order of the microbatches whatever the number of workers: each round takes
up the sum where the one before left it. The gradient of a rest that trains goes the same way from visit to visit
of the units that add to it.
"""

from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass

from outsize.planner.passes.cycle import gradient_ops
from outsize.planner.program.program import Kind, Op, Program
from outsize.planner.program.stages import Visit, visits_of
from outsize.planner.program.step_layout import StepLayout


@dataclass(slots=True)
class _Turn:
    """A visit and the places of its units.

    Attributes:
        visit: the visit.
        slots: slot by unit.
        accumulators: accumulator by unit.
        rest: how it takes up the gradient of the rest, ACC or SUM; None where it adds nothing to it.
        ends_rest: whether nothing is added to the gradient of the rest after it.
    """

    visit: Visit
    slots: dict[int, int]
    accumulators: dict[int, int]
    rest: Kind | None = None
    ends_rest: bool = False


def build_staged(layout: StepLayout) -> Program:
    """Return the program of a step that is dealt out in stages, before steps and tiles are inserted."""
    if layout.cut:
        return Program(staged_forward(layout, range(1)).ops + staged_backward(layout).ops)
    return _built(_visits(layout), layout)


def staged_forward(layout: StepLayout, rounds: range) -> Program:
    """Return the forwards of ``rounds`` of a step that is cut; they leave nothing in slots."""
    return _built([visit for visit in _visits(layout) if visit.forward and visit.round in rounds], layout)


def staged_backward(layout: StepLayout) -> Program:
    """Return what follows the forward of the first round of a step that is cut, whatever lies in slots."""
    return _built([visit for visit in _visits(layout) if visit.backward or visit.round], layout)


def _visits(layout: StepLayout) -> list[Visit]:
    assert layout.stages is not None
    return list(visits_of(layout.stages, layout.num_microbatches, layout.num_workers, apart=layout.cut))


def _built(visits: list[Visit], layout: StepLayout) -> Program:
    turns = _turns(visits, layout)
    ops: list[Op] = []
    last_of_worker = {turn.visit.worker: turn for turn in turns}
    begun: set[int] = set()
    without_rest = list(last_of_worker) if layout.rest_has_weights else []
    following = _following(turns)
    for turn in turns:
        worker = turn.visit.worker
        # Once its gradient is whole the rest may step: workers that begin later have taken its weights by then.
        for taker in [w for w in without_rest if turn.ends_rest or w == worker]:
            ops.append(Op(kind=Kind.LOAD, unit=layout.rest, worker=taker, slot=layout.resident_slot))
            without_rest.remove(taker)
        if worker not in begun:
            begun.add(worker)
            ops += _arrivals(turn, range(*turn.visit.units))
        after = following.get(id(turn))
        shared = set(range(*turn.visit.units)) & set(range(*after.visit.units)) if after else set()
        coming = _arrivals(after, range(*after.visit.units)) if after else []
        ahead = [op for op in coming if op.unit not in shared and _has_other_half(op, layout)]
        ops += _visit(turn, layout, ahead)
        ops += (op for op in coming if op not in ahead)
        if layout.rest_has_weights and turn is last_of_worker[worker]:
            ops.append(Op(kind=Kind.FREE, unit=layout.rest, worker=worker, slot=layout.resident_slot))
    return Program(tuple(ops))


def _turns(visits: list[Visit], layout: StepLayout) -> list[_Turn]:
    """Return the visits with their slots: each worker's visits use its halves by turns."""
    stages = layout.stages
    assert stages is not None
    visits_begun: defaultdict[int, int] = defaultdict(int)
    backwards_begun: defaultdict[int, int] = defaultdict(int)
    turns, own_slots = [], layout.own_slots
    for visit in visits:
        weights = [u for u in range(*visit.units) if layout.weight_bytes[u] and u not in own_slots]
        trained = [u for u in range(*visit.units) if layout.trainable[u] and visit.backward]
        worker = visit.worker
        slot_half, sum_half = visits_begun[worker] % stages.slot_halves, backwards_begun[worker]
        slots = _half(weights, layout.weight_bytes, layout.slot_bytes, stages.slot_halves, slot_half)
        slots |= {u: own_slots[u] for u in range(*visit.units) if u in own_slots}
        sums = _half(
            trained,
            layout.gradient_bytes,
            layout.accumulator_bytes,
            stages.accumulator_halves,
            sum_half % stages.accumulator_halves,
        )
        visits_begun[visit.worker] += 1
        backwards_begun[visit.worker] += bool(trained)
        turns.append(_Turn(visit, slots, sums))
    adding = [turn for turn in turns if turn.visit.backward and _uses_rest(turn.visit, layout)]
    for index, turn in enumerate(adding):
        turn.rest = Kind.SUM if index else Kind.ACC
        turn.ends_rest = index + 1 == len(adding)
    return turns


def _has_other_half(op: Op, layout: StepLayout) -> bool:
    """Whether what ``op`` brings finds a free place while a visit goes on."""
    assert layout.stages is not None
    if op.kind is Kind.LOAD and op.unit in layout.stays:
        return True
    return (layout.stages.slot_halves if op.kind is Kind.LOAD else layout.stages.accumulator_halves) == 2


def _uses_rest(visit: Visit, layout: StepLayout) -> bool:
    return not layout.rest_users.isdisjoint(range(*visit.units))


def _half(
    units: list[int], needed: tuple[int, ...], sizes: tuple[int, ...], num_halves: int, which: int
) -> dict[int, int]:
    """Return the place of each unit in one half of the places, the largest unit in the first."""
    half = len(sizes) // num_halves
    base = half * which
    ordered = sorted(units, key=lambda unit: -needed[unit])
    if len(ordered) > half or any(needed[u] > sizes[base + j] for j, u in enumerate(ordered)):
        raise ValueError(f"half of the places {sizes} does not hold units {units}")
    return {unit: base + j for j, unit in enumerate(ordered)}


def _following(turns: list[_Turn]) -> dict[int, _Turn]:
    """Return the next turn of the same worker, by the identity of a turn."""
    latest: dict[int, _Turn] = {}
    successors = {}
    for turn in turns:
        before = latest.get(turn.visit.worker)
        if before is not None:
            successors[id(before)] = turn
        latest[turn.visit.worker] = turn
    return successors


def _arrivals(turn: _Turn, wanted: Container[int]) -> list[Op]:
    """Return what of ``wanted`` must come up before a turn can run, in the order in which it is needed."""
    worker, visit = turn.visit.worker, turn.visit
    units = range(*visit.units) if visit.forward else reversed(range(*visit.units))
    ops = []
    for unit in units:
        if unit not in wanted:
            continue
        if unit in turn.slots:
            ops.append(Op(kind=Kind.LOAD, unit=unit, worker=worker, slot=turn.slots[unit]))
        if unit in turn.accumulators:
            kind = Kind.SUM if visit.round else Kind.ACC
            ops.append(Op(kind=kind, unit=unit, worker=worker, slot=turn.accumulators[unit]))
    return ops


def _visit(turn: _Turn, layout: StepLayout, ahead: list[Op]) -> list[Op]:
    """Return the ops of a visit, and between its microbatches what comes up ``ahead`` for the next one.

    Weights are spread evenly. Sums come last: the round before may still be adding to them.
    """
    visit = turn.visit
    count = len(visit.microbatches)
    weights = [op for op in ahead if op.kind is Kind.LOAD]
    sums = [op for op in ahead if op.kind is not Kind.LOAD]
    inputs = [_inputs(visit, microbatch, layout) for microbatch in visit.microbatches]
    returning = [_returning(visit, microbatch, layout) for microbatch in visit.microbatches]
    gradients = [_gradient(visit, microbatch, layout) for microbatch in visit.microbatches]
    ops = [*inputs[0], *returning[0], *gradients[0]]
    for index, microbatch in enumerate(visit.microbatches):
        following: list[Op] = []
        if index + 1 < count:
            following = [*returning[index + 1], *gradients[index + 1]]
            ops += inputs[index + 1]
        if not any(returning):  # behind nothing that takes long
            ops += following
            following = []
        ops += weights[len(weights) * index // count : len(weights) * (index + 1) // count]
        ops += sums if index + 1 == count else []
        if turn.rest is not None and index == 0:  # behind what this visit starts from: it may have to wait
            place = layout.resident_accumulator
            ops.append(Op(kind=turn.rest, unit=layout.rest, worker=visit.worker, slot=place))
        ops += _compute(visit, microbatch, layout, following)
    ops += (Op(kind=Kind.FREE, unit=u, worker=visit.worker, slot=slot) for u, slot in turn.slots.items())
    for unit in sorted(turn.accumulators, reverse=True):
        last_round = visit.round == layout.num_rounds - 1
        ops += gradient_ops(unit, layout, visit.worker, last_round=last_round)
    if turn.rest is not None:
        ops += gradient_ops(layout.rest, layout, visit.worker, last_round=turn.ends_rest)
    return ops


def _inputs(visit: Visit, microbatch: int, layout: StepLayout) -> list[Op]:
    """Return what brings the inputs that a microbatch needs in a visit: of its first unit, of all for a backward."""
    first, end = visit.units
    units: Iterable[int] = reversed(range(first, end))
    if visit.forward:
        units = () if _arrives(visit, layout) else (first,)
    return [_on(Kind.FETCH, unit, microbatch, visit) for unit in units if unit]


def _returning(visit: Visit, microbatch: int, layout: StepLayout) -> list[Op]:
    """Return what brings back what the forwards of a backward visit have kept below, in the order of its recomputes."""
    units = () if visit.forward else range(*visit.units)
    leaving = [unit for unit in units if layout.choice(unit, microbatch).leaves]
    return [_on(Kind.ONLOAD, unit, microbatch, visit) for unit in leaving]


def _gradient(visit: Visit, microbatch: int, layout: StepLayout) -> list[Op]:
    """Return what brings the gradient that a backward visit starts from."""
    given = visit.forward or visit.units[1] > layout.last or _arrives(visit, layout)
    return [] if given else [_on(Kind.RECV, visit.units[1], microbatch, visit)]


def _compute(visit: Visit, microbatch: int, layout: StepLayout, following: list[Op]) -> list[Op]:
    """Return a microbatch's way through a visit, what leaves on it, and what comes up meanwhile for the next one."""
    ops = _forwards(visit, microbatch, layout) if visit.forward else []
    if not visit.backward:
        return ops
    first, end = visit.units
    if visit.forward:
        ops.append(_on(Kind.FORWARD_BACKWARD, layout.last, microbatch, visit))
    elif end <= layout.last:  # a B of the others recomputes by itself: there is nothing to wait for
        ops += (_on(Kind.RECOMPUTE, unit, microbatch, visit) for unit in range(first, end))
    backwards = range(first, end if layout.cut else min(end, layout.last))
    for index, unit in enumerate(reversed(backwards)):
        share = len(following) * index // len(backwards), len(following) * (index + 1) // len(backwards)
        ops += following[slice(*share)]
        ops.append(_on(Kind.BACKWARD, unit, microbatch, visit))
    if first > layout.first_backward:
        ops.append(_handed_on(Kind.SEND, first, microbatch, visit, layout))
    return ops


def _forwards(visit: Visit, microbatch: int, layout: StepLayout) -> list[Op]:
    """Return the forwards of a visit; what the next visit waits for leaves before what only a backward needs."""
    first, end = visit.units
    ops = []
    for unit in range(first, end if layout.cut else min(end, layout.last)):
        choice = layout.choice(unit, microbatch)
        ops.append(_on(choice.forward, unit, microbatch, visit))
        arrived = first < unit or _arrives(visit, layout)
        if arrived and not visit.backward and unit >= layout.first_backward:
            ops.append(_on(Kind.SAVE, unit, microbatch, visit))
        if not visit.backward and unit + 1 == end <= layout.last:
            ops.append(_handed_on(Kind.SAVE, end, microbatch, visit, layout))
        if choice.leaves:
            ops.append(_on(Kind.OFFLOAD, unit, microbatch, visit))
    return ops


def _arrives(visit: Visit, layout: StepLayout) -> bool:
    """Whether what ``visit`` starts from comes to its worker from another one's memory; the first has the ids."""
    return layout.takes_from_peer(visit.worker) and not (visit.forward and visit.units[0] == 0)


def _handed_on(kind: Kind, unit: int, microbatch: int, visit: Visit, layout: StepLayout) -> Op:
    """Return what takes the input of ``unit``, or its gradient, towards the next stage: ``kind`` goes below."""
    if not layout.gives_to_peer(visit.worker):
        return _on(kind, unit, microbatch, visit)
    return Op(
        kind=Kind.PASS if kind is Kind.SAVE else Kind.RETURN,
        unit=unit,
        microbatch=microbatch,
        worker=visit.worker,
        target=(visit.worker + 1) % layout.num_workers,
        slot=microbatch - visit.microbatches.start,
    )


def _on(kind: Kind, unit: int, microbatch: int, visit: Visit) -> Op:
    return Op(kind=kind, unit=unit, microbatch=microbatch, worker=visit.worker)
