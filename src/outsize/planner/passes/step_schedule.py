"""When units step, and the exchanges between nodes before that.

The step as a program: the V-cycle of one worker, or stages of several, with everything that follows.

Down: units 0, 1, … forward, each for all microbatches; only inputs of units are kept. Turn: the last unit
forward, loss and backward in one op. Up: each unit recomputed and differentiated, its gradient sent home, its
optimizer stepped. Stages go the same way, see `planner.passes.stage_passes`.

The pass for several nodes: what they exchange, and when.

It comes last. A gradient that has reached host memory is reduced at once, while the next unit's backward runs; of
several rounds, that of the last, since each node sums its own at home before. The
norm that clipping asks for is that of the sums, so there is no NORM on a device. What a node has stepped of a unit is
gathered right behind it, units in the order in which they step, which is that of the next forward. Every node makes the
same of its program, so that all exchange the same things in the same order.
"""

from collections.abc import Iterator
from dataclasses import replace

from outsize.planner.passes.cycle import insert_gradients, insert_loads, insert_saves, insert_steps, v_cycle
from outsize.planner.passes.slots import insert_disk
from outsize.planner.passes.stage_passes import build_staged
from outsize.planner.program.ops import Kind, Op
from outsize.planner.program.program import Program
from outsize.planner.program.stages import cursor_after
from outsize.planner.program.step_layout import StepLayout


def insert_exchange(program: Program, layout: StepLayout) -> Program:
    """Insert REDUCE, AGREE and GATHER where several nodes share the step."""
    if layout.num_nodes == 1:
        return program
    # By which a gradient is whole: of stages, once it has come home.
    home = Kind.WRITE if layout.staged and not layout.reduces_buffers else Kind.GRAD
    whole = {  # of the last round
        op.unit: index for index, op in enumerate(program) if op.kind is home and op.tile is None
    }
    stepped = {op.unit: index for index, op in enumerate(program) if _steps(op)}
    ops: list[Op] = []
    taken: set[int | None] = set()  # units whose gradient a REDUCE takes, in place of a WRITE
    for index, op in enumerate(program):
        if layout.reduces_buffers and op.kind is home and whole.get(op.unit) == index:
            ops += _reduced(op, layout, len(taken))
            taken.add(op.unit)
        elif op.kind is Kind.CLIP:
            ops += (Op(kind=Kind.AGREE), op)
        elif not layout.reduces_buffers and whole.get(op.unit) == index:
            ops += (op, Op(kind=Kind.REDUCE, unit=op.unit))
        elif op.kind is not Kind.NORM and not (
            op.kind is Kind.WRITE and op.tile is None and op.unit in taken
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
