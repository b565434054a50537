"""Build the program of a step: whole, or cut into forward, backward and optimizer, with what nodes exchange.

The step is the V-cycle of one worker, or stages of several, with everything that follows. Down: units 0, 1, … forward,
each for all microbatches; only inputs of units are kept. Turn: the last unit forward, loss and backward in one op. Up:
each unit recomputed and differentiated, its gradient sent home, its optimizer stepped. Stages go the same way, see
`planner.passes.stage_passes`.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from outsize.planner.passes.cycle import (
    insert_gradients,
    insert_loads,
    insert_saves,
    insert_steps,
    step_of,
    v_cycle,
)
from outsize.planner.passes.slots import insert_disk
from outsize.planner.passes.stage_passes import build_staged, staged_backward, staged_forward
from outsize.planner.program.program import FORWARD_KINDS, Kind, Op, Program
from outsize.planner.program.stages import cursor_after
from outsize.planner.program.step_layout import StepLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The parts of a step that is cut.

    Attributes:
        forward: all units forward, for the first round; what the layout keeps is kept, slots stay as they are then.
        lean_forward: the same, and nothing is kept but inputs.
        following: all units forward for the rounds that follow; nothing is kept. Empty where there is one round.
        backward: all units backward, right behind ``forward``, and later rounds forward and backward.
        cold_backward: the same, whatever lies in the slots.
        inference: all units forward, for all rounds; nothing is kept.
    """

    forward: Program
    lean_forward: Program
    following: Program
    backward: Program
    cold_backward: Program
    inference: Program


def cut_step(layout: StepLayout) -> Passes:
    """Return the passes of a step.

    `StepLayout.cut` makes the last unit run F and B like any other. The whole step is put in order as ever and then cut
    behind its last F: what the forward leaves in slots, the backward that follows at once finds there (*warm*). A
    backward that comes later, after other passes or a step, loads everything itself (*cold*). A forward that no
    backward follows has a program of its own, which keeps nothing.

    What the layout keeps of a forward has room once. So there is a forward that keeps inputs only, for a second one
    before the backward of the first; any backward goes with either, since a B recomputes what was not kept.

    A forward returns what the model makes of all microbatches before any backward begins. So of several rounds the
    forward keeps what the first one needs, and nothing of the others (`following`); the backward runs the forward of
    each later round again, right before its backwards. What is there at once is that of one round.

    Raises:
        ValueError: the layout is not one of a step that is cut.
    """
    if not layout.cut:
        raise ValueError("only the step of a layout with cut=True can be cut")
    if layout.stages is not None:
        return _cut_stages(layout)
    compute = v_cycle(layout).ops
    forwards = [op for op in _lean(compute) if op.kind is Kind.FORWARD]
    following = [op for op in forwards if layout.round_of(op)]
    complete = _complete(Program(compute), layout)
    end = _end_of_forward(complete)
    cold = _complete(Program(compute[len(forwards) - len(following) :]), layout)
    return Passes(
        forward=Program(complete.ops[:end]),
        lean_forward=Program(_lean(complete.ops[:end])),
        following=_forward_alone(following, layout),
        backward=cold if following else Program(complete.ops[end:]),
        cold_backward=cold,
        inference=_forward_alone(forwards, layout),
    )


def forward_alone(layout: StepLayout) -> Program:
    """Return all units forward and the loss behind the last one, of a step of one worker; nothing is kept.

    Raises:
        ValueError: several workers take turns.
    """
    if layout.stages is not None or layout.cut:
        raise ValueError("a forward by itself is one of a whole step on one worker")
    forwards = [op for op in _lean(v_cycle(layout).ops) if op.kind in (Kind.FORWARD, Kind.FORWARD_BACKWARD)]
    return _forward_alone(forwards, replace(layout, commits=False))


def _forward_alone(forwards: Sequence[Op], layout: StepLayout) -> Program:
    return insert_disk(insert_loads(Program(tuple(forwards)), layout), layout) if forwards else Program(())


def _cut_stages(layout: StepLayout) -> Passes:
    """Return the passes of several workers, on which nothing waits in slots for a backward."""
    forward, backward = staged_forward(layout, range(1)), insert_disk(staged_backward(layout), layout)
    return Passes(
        forward=insert_disk(forward, layout),
        lean_forward=insert_disk(lean(forward), layout),
        following=_staged_alone(layout, range(1, layout.num_rounds)),
        backward=backward,
        cold_backward=backward,
        inference=_staged_alone(layout, range(layout.num_rounds)),
    )


def _staged_alone(layout: StepLayout, rounds: range) -> Program:
    """Return the forwards of ``rounds`` by several workers; nothing is kept."""
    ops = _lean(staged_forward(layout, rounds).ops)
    ran = {_place(op) for op in ops if op.kind is Kind.FORWARD}
    # What goes below is handed over to another worker, or else waits for the backward of the one that has run it.
    handed = (op for op in ops if op.kind is not Kind.SAVE or _place(op) not in ran)
    return insert_disk(Program(tuple(handed)), layout)


def _place(op: Op) -> tuple[int | None, int | None, int | None]:
    return op.unit, op.microbatch, op.worker


def step_units(layout: StepLayout, units: Collection[int]) -> Program:
    """Return the optimizer's steps of ``units``, in the order in which the next forward needs them."""
    steps = tuple(step_of(unit, layout) for unit in layout.step_order if unit in units)
    return insert_disk(Program(steps), layout)


def summing(program: Program, units: Collection[int]) -> Program:
    """Return a backward in which the gradients of ``units`` go on from those that are at home.

    A SUM takes the place of the ACC.
    """
    return Program(
        tuple(
            replace(op, kind=Kind.SUM) if op.kind is Kind.ACC and op.unit in units else op for op in program
        )
    )


def lean(program: Program) -> Program:
    """Return ``program`` with nothing kept of its forwards but inputs."""
    return Program(_lean(program.ops))


def _lean(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Return ``ops`` with every forward an F, and nothing that leaves of what it kept."""
    lean = (op for op in ops if op.kind is not Kind.OFFLOAD)
    return tuple(replace(op, kind=Kind.FORWARD) if op.kind in FORWARD_KINDS else op for op in lean)


def _end_of_forward(program: Program) -> int:
    """Return where the forward of the first round ends: behind its last op, and what it offloads."""
    turn = next(index for index, op in enumerate(program) if op.kind is Kind.BACKWARD)
    last = max(index for index, op in enumerate(program.ops[:turn]) if op.kind in FORWARD_KINDS)
    leaving = takewhile(lambda op: op.kind is Kind.OFFLOAD, program.ops[last + 1 :])
    return last + 1 + sum(1 for _ in leaving)


def _complete(program: Program, layout: StepLayout) -> Program:
    for insert in (insert_loads, insert_saves, insert_gradients, insert_disk):
        program = insert(program, layout)
    return program


def insert_exchange(program: Program, layout: StepLayout) -> Program:
    """Insert REDUCE, AGREE and GATHER where several nodes share the step.

    It comes last. A gradient that has reached host memory is reduced at once, while the next unit's backward runs; of
    several rounds, that of the last, since each node sums its own at home before. The norm that clipping asks for is
    that of the sums, so there is no NORM on a device. What a node has stepped of a unit is gathered right behind it,
    units in the order in which they step, which is that of the next forward. Every node makes the same of its program,
    so that all exchange the same things in the same order.
    """
    if layout.num_nodes == 1:
        return program
    # By which a gradient is whole: of stages, once it has come home.
    home = Kind.WRITE if layout.staged and not layout.reduces_buffers else Kind.GRAD
    last_gradients = {  # of the last round
        op.unit: index for index, op in enumerate(program) if op.kind is home and op.tile is None
    }
    stepped = {op.unit: index for index, op in enumerate(program) if _steps(op)}
    ops: list[Op] = []
    reduced: set[int | None] = set()  # units whose gradient a REDUCE takes, in place of a WRITE
    for index, op in enumerate(program):
        if layout.reduces_buffers and op.kind is home and last_gradients.get(op.unit) == index:
            ops += _reduced(op, layout, len(reduced))
            reduced.add(op.unit)
        elif op.kind is Kind.CLIP:
            ops += (Op(kind=Kind.AGREE), op)
        elif not layout.reduces_buffers and last_gradients.get(op.unit) == index:
            ops += (op, Op(kind=Kind.REDUCE, unit=op.unit))
        elif op.kind is not Kind.NORM and not (
            op.kind is Kind.WRITE and op.tile is None and op.unit in reduced
        ):
            ops.append(op)
        if stepped.get(op.unit) == index:
            ops.append(Op(kind=Kind.GATHER, unit=op.unit))
    return Program(tuple(ops))


def _steps(op: Op) -> bool:
    """Whether a unit has stepped behind ``op``, if no other such op of it follows."""
    return op.kind is Kind.STEP or (op.kind is Kind.WRITE and op.tile is not None)


def _reduced(op: Op, layout: StepLayout, count: int) -> Iterator[Op]:
    """Yield a GRAD into a host buffer, its own or the next in turn, and the REDUCE that takes it from there."""
    buffer = count % layout.num_host_buffers if op.buffer is None else op.buffer
    yield replace(op, buffer=buffer)
    yield Op(kind=Kind.REDUCE, unit=op.unit, buffer=buffer)


__all__ = ["StepLayout", "build_step", "build_store", "steps_from", "successive_steps"]


def build_step(layout: StepLayout) -> Program:
    """Return the program of one training step; it is the same for every step."""
    if layout.stages is not None:
        program = build_staged(layout)
    else:
        program = v_cycle(layout)
        for insert in (insert_loads, insert_saves, insert_gradients):
            program = insert(program, layout)
    for insert in (insert_steps, insert_disk, insert_exchange):
        program = insert(program, layout)
    return program


def successive_steps(layout: StepLayout) -> tuple[Program, ...]:
    """Return the programs of steps that follow one another, until one begins with the worker that the first did."""
    programs = [build_step(layout)]
    if layout.stages is None or layout.cut:
        return tuple(programs)
    stages = layout.stages
    while True:
        cursor = cursor_after(stages, layout.num_microbatches, layout.num_workers)
        if cursor == layout.stages.cursor:
            return tuple(programs)
        stages = replace(stages, cursor=cursor)
        programs.append(build_step(replace(layout, stages=stages)))


def steps_from(layout: StepLayout) -> Iterator[Program]:
    """Yield the programs of steps that follow one another, without end."""
    program = build_step(layout)
    while True:
        yield program
        if layout.stages is not None:
            cursor = cursor_after(layout.stages, layout.num_microbatches, layout.num_workers)
            layout = replace(layout, stages=replace(layout.stages, cursor=cursor))
            program = build_step(layout)


def build_store(layout: StepLayout) -> Program:
    """Return the program of a checkpoint: each unit with weights once, submitted between two steps.

    Units that step come first, in the order in which they step: the next step's STEP of a unit waits for its STORE,
    and for nothing else of the checkpoint.
    """
    others = (unit for unit in range(layout.num_units) if unit not in layout.step_order)
    order = (*layout.step_order, *others)
    return Program(tuple(Op(kind=Kind.STORE, unit=unit) for unit in order if layout.weight_bytes[unit]))
