"""Runs programs on a model of the machine: the executor's order and waits, in virtual time.

A lane takes its ops in program order, an op waits for what `hazards` says, and the next step is submitted when
the former's loss and gradient norm are known, as the engine does. What differs from a real run is only where
the durations come from: `CostModel` instead of a clock. The result is the executor's own `Timeline`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from outsize.planner.discrete import Cost, Run, Work, run_work
from outsize.planner.hazards import Hazards
from outsize.planner.lanes import lane_of
from outsize.planner.layout import StepLayout
from outsize.planner.ops import Kind, Op
from outsize.planner.program import Program, render_op
from outsize.planner.timeline import Event, Timeline
from outsize.planner.usage import Change, Changes, changes_of

# R is followed by its B.
_COMPUTE = frozenset({Kind.FORWARD, Kind.FORWARD_KEEP, Kind.FORWARD_BACKWARD, Kind.BACKWARD})


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What ops take on a machine.

    Attributes:
        cost_of: time and bytes of an op.
        capacity: bytes per second of each resource that costs name.
    """

    cost_of: Callable[[Op], Cost]
    capacity: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What would happen.

    Attributes:
        timeline: all ops of all steps.
        step_ends_s: when the last op of each step ended.
        decided_s: when loss and norm of each step were known, and the next one was submitted.
        peak_bytes: by tier (``device:w0``, ``host``), the most bytes that ops held at once.
        left_bytes: by tier, what ops hold behind the last one; zero, or they forget to give it back.
        critical_path: events whose durations add up to the makespan.
    """

    timeline: Timeline
    step_ends_s: tuple[float, ...]
    decided_s: tuple[float, ...]
    peak_bytes: Mapping[str, int]
    left_bytes: Mapping[str, int]
    critical_path: tuple[Event, ...]

    @property
    def makespan_s(self) -> float:
        """End of the last op; the first starts at 0."""
        return self.timeline.end_s

    @property
    def step_s(self) -> float:
        """Time per step once steps follow one another: of the later half of the steps."""
        ends = self.decided_s
        first = len(ends) // 2 - 1 if len(ends) > 2 else 0
        return (ends[-1] - ends[first]) / (len(ends) - 1 - first) if len(ends) > 1 else self.makespan_s


def simulate(
    programs: Sequence[Program],
    layout: StepLayout,
    costs: CostModel,
    *,
    boundary_bytes: Sequence[int] = (),
    saved_bytes: Sequence[int] = (),
    below: str = "host",
) -> Simulation:
    """Run ``programs``, one per step, one after the other.

    Args:
        programs: program of each step; usually the same one several times.
        layout: of all of them.
        costs: what ops take.
        boundary_bytes: bytes of the input of each streamed unit, for the bytes held; none are counted
            where it is empty.
        saved_bytes: bytes that an FK of each streamed unit keeps, likewise.
        below: tier that saved activations go to.
    """
    work: list[Work] = []
    ops: list[Op | None] = []
    names: list[str] = []
    index_of: list[int] = []  # sequence number of the hazards -> index of the work
    decided: list[int] = []
    bounds: list[int] = []
    hazards = Hazards(layout.num_streamed, layout.rest)
    for program in programs:
        first = len(work)
        gate = (decided[-1],) if decided else ()
        for op in program:
            waits = [index_of[seq] for seq in hazards.dependencies(op)]
            index_of.append(len(work))
            work.append(Work(lane_of(op), costs.cost_of(op), (*gate, *waits)))
            ops.append(op)
            names.append(render_op(op))
        decided.append(len(work))
        work.append(Work("", Cost(), tuple(_decisive(ops[first:], first, layout))))
        ops.append(None)
        names.append("")
        bounds.append(len(work))
    run = run_work(work, costs.capacity)

    def changes(op: Op) -> Changes:
        return changes_of(op, layout, boundary_bytes, below, saved_bytes)

    peak, left = _held(ops, run, changes)
    events = {i: _event(i, name, work, names, run) for i, name in enumerate(names) if name}
    starts = [0, *bounds[:-1]]
    return Simulation(
        timeline=Timeline(tuple(sorted(events.values(), key=lambda event: event.start_s))),
        step_ends_s=tuple(max(run.end_s[a:b], default=0.0) for a, b in zip(starts, bounds, strict=True)),
        decided_s=tuple(run.end_s[i] for i in decided),
        peak_bytes=peak,
        left_bytes=left,
        critical_path=tuple(events[i] for i in run.critical_path() if i in events),
    )


def _decisive(ops: Sequence[Op | None], first: int, layout: StepLayout) -> Iterable[int]:
    """Yield the indices of what the engine waits for before it submits the next step."""
    kinds = {Kind.CLIP} if layout.clip and layout.step_order else _COMPUTE | {Kind.GRAD}
    return (first + i for i, op in enumerate(ops) if op is not None and op.kind in kinds)


def _event(index: int, name: str, work: Sequence[Work], names: Sequence[str], run: Run) -> Event:
    cause = run.cause[index]
    other = names[cause] if cause >= 0 else ""
    waited = cause >= 0 and work[cause].lane != work[index].lane
    return Event(
        lane=work[index].lane,
        op=name,
        start_s=run.start_s[index],
        end_s=run.end_s[index],
        waited_s=run.start_s[index] - run.lane_free_s[index],
        waited_for=other if waited else "",
    )


def _held(
    ops: Sequence[Op | None], run: Run, changes: Callable[[Op], Changes]
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
