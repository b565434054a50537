"""Runs programs on a model of the machine: the executor's order and waits, in virtual time.

A lane takes its ops in program order, an op waits for what `hazards` says, and the next step is submitted when
the former's loss and gradient norm are known, as the engine does. What differs from a real run is only where
the durations come from: `CostModel` instead of a clock. The result is the executor's own `Timeline`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from outsize.planner.memory.activation_liveness import NOTHING
from outsize.planner.memory.usage import Change, Changes, changes_of
from outsize.planner.program.activation_policy import KeptBytes
from outsize.planner.program.hazards import Hazards
from outsize.planner.program.lanes import lane_of
from outsize.planner.program.ops import COMPUTE_KINDS, Kind, Op
from outsize.planner.program.program import Program
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.simulate.discrete import Cost, LaneRun, Work, run_work
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
    """What would happen. Events and bytes are told when somebody asks.

    Attributes:
        work: all that was done, in the order of the programs.
        ops: the op of each; None where it is an exchange between nodes, or the decision of a step.
        run: when each piece of work ran.
        changes: bytes that an op takes and gives back.
        step_ends_s: when the last op of each step ended.
        decided_s: when loss and norm of each step were known, and the next one was submitted.
    """

    work: Sequence[Work]
    ops: Sequence[Op | None]
    run: LaneRun
    changes: Callable[[Op], Changes] = field(compare=False)
    step_ends_s: tuple[float, ...]
    decided_s: tuple[float, ...]

    @cached_property
    def timeline(self) -> Timeline:
        """All ops of all steps."""
        return self.between(-1.0, inf)

    def between(self, first_s: float, end_s: float) -> Timeline:
        """Return the ops that ended after ``first_s``, and not after ``end_s``."""
        ends, lanes = self.run.end_s, self.work
        chosen = [i for i, end in enumerate(ends) if first_s < end <= end_s and lanes[i].lane]
        chosen.sort(key=self.run.start_s.__getitem__)
        return Timeline(tuple([self._event(index) for index in chosen]))

    @property
    def critical_path(self) -> tuple[Event, ...]:
        """Events whose durations add up to the makespan."""
        return tuple(self._event(index) for index in self.run.critical_path() if self.work[index].lane)

    @property
    def peak_bytes(self) -> Mapping[str, int]:
        """By tier (``device:w0``, ``host``), the most bytes that ops held at once."""
        return self._held[0]

    @property
    def left_bytes(self) -> Mapping[str, int]:
        """By tier, what ops hold behind the last one; zero, or they forget to give it back."""
        return self._held[1]

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

    @cached_property
    def _held(self) -> tuple[dict[str, int], dict[str, int]]:
        return _held(self.ops, self.run, self.changes)

    def _event(self, index: int) -> Event:
        run, lane, cause = self.run, self.work[index].lane, self.run.cause[index]
        waited = cause >= 0 and self.work[cause].lane != lane
        return Event(
            lane=lane,
            op=self._name(index),
            start_s=run.start_s[index],
            end_s=run.end_s[index],
            waited_s=run.start_s[index] - run.lane_free_s[index],
            waited_for=self._name(cause) if waited else "",
        )

    def _name(self, index: int) -> str:
        op, work = self.ops[index], self.work[index]
        if op is not None:
            return str(op)
        if not work.lane:
            return ""
        of = self.ops[work.after[0]]  # an exchange: of the op that it follows
        assert of is not None
        return f"{work.lane.removeprefix('net:').upper()} {of.unit}"


def simulate(
    programs: Sequence[Program],
    layout: StepLayout,
    costs: CostModel,
    *,
    boundary_bytes: Sequence[int] = (),
    kept_bytes: KeptBytes = NOTHING,
    below: str = "host",
) -> Simulation:
    """Run ``programs``, one per step, one after the other.

    Args:
        programs: program of each step; usually the same one several times.
        layout: of all of them.
        costs: what ops take.
        boundary_bytes: bytes of the input of each streamed unit, for the bytes held; none are counted
            where it is empty.
        kept_bytes: bytes that forwards of each extent keep, likewise.
        below: tier that saved activations go to.
    """
    work: list[Work] = []
    ops: list[Op | None] = []
    index_of: list[int] = []  # sequence number of the hazards -> index of the work
    decided: list[int] = []
    bounds: list[int] = []
    hazards = Hazards(layout.num_streamed, layout.rest, at_once=layout.microbatches_at_once)
    repeats = all(program is programs[0] for program in programs)
    for number, program in enumerate(programs):
        first = len(work)
        gate = (decided[-1],) if decided else ()
        if number > 1 and repeats:
            work += _again(work[-len(program) - 1 : -1], decided[-1])
            ops += program
        else:
            for op in program:
                waits = [index_of[seq] for seq in hazards.dependencies(op)]
                index_of.append(len(work))
                work.append(Work(lane_of(op), costs.cost_of(op), (*gate, *waits)))
                ops.append(op)
        decided.append(len(work))
        work.append(Work("", Cost(), tuple(_decisive(ops[first:], first, layout))))
        ops.append(None)
        bounds.append(len(work))
    run = run_work(work, costs.capacity)

    def changes(op: Op) -> Changes:
        return changes_of(op, layout, boundary_bytes, below, kept_bytes)

    starts = [0, *bounds[:-1]]
    return Simulation(
        work=work,
        ops=ops,
        run=run,
        changes=changes,
        step_ends_s=tuple(max(run.end_s[a:b], default=0.0) for a, b in zip(starts, bounds, strict=True)),
        decided_s=tuple(run.end_s[i] for i in decided),
    )


def _again(former: Sequence[Work], decided: int) -> Iterable[Work]:
    """Yield the work of a step again: but for the first, what ops of a program wait for is the same in each.

    Args:
        former: of the step before, which was not the first.
        decided: index of the decision that lets it begin, right behind ``former``.
    """
    count = len(former) + 1
    for lane, cost, waits in former:
        yield Work(lane, cost, (decided, *[index + count for index in waits[1:]]))


def _decisive(ops: Sequence[Op | None], first: int, layout: StepLayout) -> Iterable[int]:
    """Yield the indices of what the engine waits for before it submits the next step."""
    kinds = {Kind.CLIP} if layout.clip and layout.step_order else _COMPUTE | {Kind.GRAD}
    return (first + i for i, op in enumerate(ops) if op is not None and op.kind in kinds)


def _held(
    ops: Sequence[Op | None], run: LaneRun, changes: Callable[[Op], Changes]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the most bytes held in each tier, and those held at the end.

    At the same instant, what ends gives back first.
    """
    moments: list[tuple[float, int, int, Change]] = []
    for index, op in enumerate(ops):
        if op is None:
            continue
        at_start, at_end = changes(op)
        moments += [(run.start_s[index], 2 * index + 1, 1, change) for change in at_start]
        moments += [(run.end_s[index], 2 * index + 2, 0, change) for change in at_end]
    held: defaultdict[str, int] = defaultdict(int)
    peak: defaultdict[str, int] = defaultdict(int)
    for *_, (tier, size) in sorted(moments, key=lambda moment: (moment[0], moment[2], moment[1])):
        held[tier] += size
        peak[tier] = max(peak[tier], held[tier])
    return dict(peak), dict(held)
