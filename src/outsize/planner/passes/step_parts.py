"""A step cut in three, for a training loop that somebody else writes: forward, backward, and the optimizer's steps.

`StepLayout.cut` makes the last unit run F and B like any other. The whole step is put in order as ever and then cut
behind its last F: what the forward leaves in slots, the backward that follows at once finds there (*warm*). A backward
that comes later, after other passes or a step, loads everything itself (*cold*). A forward that no backward follows
has a program of its own, which keeps nothing.

What the layout keeps of a forward has room once. So there is a forward that keeps inputs only, for a second one before
the backward of the first; any backward goes with either, since a B recomputes what was not kept.

A forward returns what the model makes of all microbatches before any backward begins. So of several rounds the forward
keeps what the first one needs, and nothing of the others (`following`); the backward runs the forward of each later
round again, right before its backwards. What is there at once is that of one round.

Gradients go on from those that are at home already where `summing` says so: a SUM takes the place of the ACC.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from outsize.planner.passes.cycle import insert_gradients, insert_loads, insert_saves, v_cycle
from outsize.planner.passes.slots import insert_disk
from outsize.planner.passes.stage_passes import staged_backward, staged_forward
from outsize.planner.program.ops import FORWARD_KINDS, Kind, Op
from outsize.planner.program.program import Program
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
    whole = _complete(Program(compute), layout)
    end = _end_of_forward(whole)
    cold = _complete(Program(compute[len(forwards) - len(following) :]), layout)
    return Passes(
        forward=Program(whole.ops[:end]),
        lean_forward=Program(_lean(whole.ops[:end])),
        following=_forward_alone(following, layout),
        backward=cold if following else Program(whole.ops[end:]),
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
    steps = tuple(Op(kind=Kind.STEP, unit=unit) for unit in layout.step_order if unit in units)
    return insert_disk(Program(steps), layout)


def summing(program: Program, units: Collection[int]) -> Program:
    """Return a backward in which the gradients of ``units`` go on from those that are at home."""
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
    kept = (op for op in ops if op.kind is not Kind.OFFLOAD)
    return tuple(replace(op, kind=Kind.FORWARD) if op.kind in FORWARD_KINDS else op for op in kept)


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
