"""The step as a program: the V-cycle of one worker, or stages of several, with everything that follows.

Down: units 0, 1, … forward, each for all microbatches; only inputs of units are kept. Turn: the last unit
forward, loss and backward in one op. Up: each unit recomputed and differentiated, its gradient sent home, its
optimizer stepped. Stages go the same way, see `planner.staged`.
"""

from outsize.planner.disk import insert_disk
from outsize.planner.layout import StepLayout
from outsize.planner.passes import insert_gradients, insert_loads, insert_saves, insert_steps, v_cycle
from outsize.planner.program import Program
from outsize.planner.staged import build_staged

__all__ = ["StepLayout", "build_step"]


def build_step(layout: StepLayout) -> Program:
    """Return the program of one training step; it is the same for every step."""
    if layout.stages is not None:
        program = build_staged(layout)
    else:
        program = v_cycle(layout)
        for insert in (insert_loads, insert_saves, insert_gradients):
            program = insert(program, layout)
    for insert in (insert_steps, insert_disk):
        program = insert(program, layout)
    return program
