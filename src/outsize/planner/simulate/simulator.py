"""Runs programs on a model of the machine: the executor's order and waits, in virtual time.

A lane takes its ops in program order, an op waits for what `hazards` says, and the next step is submitted when
the former's loss and gradient norm are known, as the engine does. What differs from a real run is only where
the durations come from: `CostModel` instead of a clock. The result is the executor's own `Timeline`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf

from outsize.planner.program.hazards import Hazards
from outsize.planner.program.program import COMPUTE_KINDS, Kind, Op, Program, lane_of
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.simulate.discrete import Cost, LaneRun, Order, run_order
from outsize.planner.simulate.timeline import Event, Timeline

# R is followed by its B.
_COMPUTE = COMPUTE_KINDS - {Kind.RECOMPUTE}


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What ops take on a machine.

    Attributes:
        cost_of: time and bytes of an op.
        capacity: bytes per second of each resource that costs name.
    """

    cost_of: Callable[[Op], Cost]
    capacity: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What would happen. Events are told when somebody asks.

    Attributes:
        steps: what was done after what.
        run: when each piece of it ran.
        step_ends_s: when the last op of each step ended.
        decided_s: when loss and norm of each step were known, and the next one was submitted.
    """

    steps: "OrderedSteps" = field(compare=False)
    run: LaneRun
    step_ends_s: tuple[float, ...]
    decided_s: tuple[float, ...]

    @cached_property
    def timeline(self) -> Timeline:
        """All ops of all steps."""
        return self.between(-1.0, inf)

    def between(self, first_s: float, end_s: float) -> Timeline:
        """Return the ops that ended after ``first_s``, and not after ``end_s``."""
        ends, lanes = self.run.end_s, self.steps.order.lanes
        chosen = [i for i, end in enumerate(ends) if first_s < end <= end_s and lanes[i]]
        chosen.sort(key=self.run.start_s.__getitem__)
        return Timeline(tuple([self._event(index) for index in chosen]))

    @property
    def makespan_s(self) -> float:
        """End of the last op; the first starts at 0."""
        return max(self.step_ends_s, default=0.0)

    @property
    def steady_s(self) -> tuple[float, ...]:
        """When the steps that follow others were known: the end of the step before them, then that of each."""
        ends = self.decided_s
        return ends[len(ends) // 2 - 1 if len(ends) > 2 else 0 :]

    @property
    def step_s(self) -> float:
        """Time per step once steps follow one another: of the later half of the steps."""
        ends = self.steady_s
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else self.makespan_s

    def _event(self, index: int) -> Event:
        run, lanes, cause = self.run, self.steps.order.lanes, self.run.cause[index]
        waited = cause >= 0 and lanes[cause] != lanes[index]
        return Event(
            lane=lanes[index],
            op=self._op(index),
            start_s=run.start_s[index],
            end_s=run.end_s[index],
            waited_s=run.start_s[index] - run.lane_free_s[index],
            waited_for=self._op(cause) if waited else None,
        )

    def _op(self, index: int) -> Op | str:
        return self.steps.ops[index] or ""


@dataclass(frozen=True, slots=True)
class OrderedSteps:
    """Programs of consecutive steps with the dependencies of their ops.

    Attributes:
        order: of all work; the decision of a step is work without a lane.
        ops: the op of each piece; None for the decision of a step.
        decided: index of the decision of each step.
    """

    order: Order
    ops: Sequence[Op | None]
    decided: Sequence[int]


def in_order(programs: Sequence[Program], layout: StepLayout) -> OrderedSteps:
    """Order the ops of ``programs``, one per step, by their dependencies, without costs."""
    lanes: list[str] = []
    after: list[tuple[int, ...]] = []
    ops: list[Op | None] = []
    index_of: list[int] = []  # sequence number of the hazards -> index of the work
    decided: list[int] = []
    hazards = Hazards(layout.num_streamed, layout.rest, at_once=layout.microbatches_at_once)
    repeats = all(program is programs[0] for program in programs)
    for number, program in enumerate(programs):
        first, count = len(ops), len(program)
        gate = (decided[-1],) if decided else ()
        if number > 1 and repeats:  # but for the first, what ops of a program wait for is the same in each
            lanes += lanes[-count - 1 : -1]
            previous = after[-count - 1 : -1]
            after += [(*gate, *[index + count + 1 for index in waits[1:]]) for waits in previous]
        else:
            for op in program:
                waits = hazards.dependencies(op)
                index_of.append(len(lanes))
                lanes.append(lane_of(op))
                after.append((*gate, *[index_of[seq] for seq in waits]))
        ops += program
        decided.append(len(ops))
        lanes.append("")
        after.append(tuple(_decisive(ops[first:], first, layout)))
        ops.append(None)
    return OrderedSteps(Order(lanes, after), ops, decided)


def simulate(
    programs: Sequence[Program],
    layout: StepLayout,
    costs: CostModel,
    *,
    steps: OrderedSteps | None = None,
) -> Simulation:
    """Simulate ``programs`` of consecutive steps.

    Args:
        programs: program of each step; usually the same one several times.
        layout: of all of them.
        costs: what ops take.
        steps: what `in_order` says of them, where that is known.
    """
    steps = steps or in_order(programs, layout)
    none = Cost()
    run = run_order(
        steps.order, [none if op is None else costs.cost_of(op) for op in steps.ops], costs.capacity
    )

    ends = [end + 1 for end in steps.decided]
    return Simulation(
        steps=steps,
        run=run,
        step_ends_s=tuple(max(run.end_s[a:b], default=0.0) for a, b in pairwise([0, *ends])),
        decided_s=tuple(run.end_s[i] for i in steps.decided),
    )


def _decisive(ops: Sequence[Op | None], first: int, layout: StepLayout) -> Iterable[int]:
    """Yield the indices of what the engine waits for before it submits the next step."""
    kinds = {Kind.CLIP} if layout.clip and layout.step_order else _COMPUTE | {Kind.GRAD, Kind.UPDATE}
    return (first + i for i, op in enumerate(ops) if op is not None and op.kind in kinds)
