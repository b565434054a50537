"""The step as a program: the V-cycle of one worker, or stages of several, with everything that follows.

Down: units 0, 1, … forward, each for all microbatches; only inputs of units are kept. Turn: the last unit
forward, loss and backward in one op. Up: each unit recomputed and differentiated, its gradient sent home, its
optimizer stepped. Stages go the same way, see `planner.passes.stage_passes`.
"""

from collections.abc import Iterator
from dataclasses import replace

from outsize.planner.passes.cycle import insert_gradients, insert_loads, insert_saves, insert_steps, v_cycle
from outsize.planner.passes.exchange_pass import insert_exchange
from outsize.planner.passes.slots import insert_disk
from outsize.planner.passes.stage_passes import build_staged
from outsize.planner.program.ops import Kind, Op
from outsize.planner.program.program import Program
from outsize.planner.program.stages import cursor_after
from outsize.planner.program.step_layout import StepLayout

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
