"""Run programs on a model of the machine in virtual time, and timelines of simulated and measured steps.

A lane takes its ops in program order, an op waits for what `hazards` says, and the next step is submitted when
the former's loss and gradient norm are known, as the engine does. What differs from a real run is only where
the durations come from: `CostModel` instead of a clock. The result is the executor's own `Timeline`.

A timeline holds the events of lanes. What each unit of a step took, and where the compute lane's time went, is read off
it, whether the executor measured it on real lanes or the simulator computed it.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Final

from outsize.planner.program.hazards import Hazards
from outsize.planner.program.program import COMPUTE_KINDS, Kind, Lane, Op, Program, lane_named, lane_of
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.program.table import OpRow
from outsize.planner.simulate.discrete import Cost, LaneRun, Order, run_order

# Owner of a gap that no op accounts for: the lane was not given work, or it was not on the way yet.
UNKNOWN_OWNER = "dispatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An op as it ran.

    Attributes:
        lane: lane that ran it, e.g. ``"compute:w0"``.
        op: what ran; a text where it is no op of a program, or one of another version.
        start_s: when it started, on any clock that all events share.
        end_s: when it ended.
        waited_s: how long its lane waited for other ops before it could start.
        waited_for: the op that it waited for last; None where it waited for none.
    """

    lane: str
    op: Op | str
    start_s: float
    end_s: float
    waited_s: float = 0.0
    waited_for: Op | str | None = None

    @property
    def row(self) -> OpRow | None:
        """What is known of its op; None of a text."""
        return self.op.row if isinstance(self.op, Op) else None

    def later(self, seconds: float) -> "Event":
        """Return the same, so many seconds later."""
        return replace(self, start_s=self.start_s + seconds, end_s=self.end_s + seconds)


@dataclass(frozen=True, slots=True)
class Stall:
    """A gap in a lane.

    Attributes:
        start_s: when it begins.
        end_s: when it ends.
        op: the op that ran after it; None for the gap at the end.
        waited_for: the op that it waited for; None where that is not known.
        owner: lane of that op, or `UNKNOWN_OWNER`.
    """

    start_s: float
    end_s: float
    op: Op | str | None
    waited_for: Op | str | None
    owner: str

    @property
    def duration_s(self) -> float:
        """Length of the gap."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """Events of one or several steps; those of one lane do not overlap, since it does one thing at a time."""

    events: tuple[Event, ...]

    def lane(self, name: str) -> tuple[Event, ...]:
        """Return the events of lane ``name`` by start time."""
        return self._lanes.get(name, ())

    @property
    def lanes(self) -> tuple[str, ...]:
        """Names of the lanes that have events, sorted."""
        return tuple(sorted(self._lanes))

    @property
    def compute_lanes(self) -> list[Lane]:
        """The lanes that compute, one for each worker, in their order."""
        lanes = map(lane_named, self._lanes)
        return sorted((lane for lane in lanes if lane.kind == "compute"), key=lambda lane: lane.worker or 0)

    @cached_property
    def start_s(self) -> float:
        """Start of the first event; 0 for an empty timeline."""
        return min((event.start_s for event in self.events), default=0.0)

    @cached_property
    def end_s(self) -> float:
        """End of the last event; 0 for an empty timeline."""
        return max((event.end_s for event in self.events), default=0.0)

    @property
    def span_s(self) -> float:
        """Time from the start of the first event to the end of the last one."""
        return self.end_s - self.start_s

    def busy_s(self, lane: str) -> float:
        """Return the time that ``lane`` spent on ops."""
        return sum(event.end_s - event.start_s for event in self.lane(lane))

    def stall_share(self, lane: str = "compute:w0") -> float:
        """Return the part of the span, 0 to 1, in which ``lane`` did nothing."""
        return max(0.0, 1.0 - self.busy_s(lane) / self.span_s) if self.span_s > 0 else 0.0

    def stalls(self, lane: str = "compute:w0") -> tuple[Stall, ...]:
        """Return the gaps of ``lane`` within the span, each with what it waited for.

        A gap belongs to the lane of the op that the next op of ``lane`` waited for. The gap at the end
        belongs to the lane that ends last. The gaps add up to ``stall_share`` of the span.
        """
        stalls = []
        end_s = self.start_s
        for event in self.lane(lane):
            if event.start_s > end_s:
                owner = self._lane_that_ran(event.waited_for, before_s=event.end_s)
                stalls.append(Stall(end_s, event.start_s, event.op, event.waited_for, owner))
            end_s = max(end_s, event.end_s)
        if self.end_s > end_s:
            last = max(self.events, key=lambda event: event.end_s)
            stalls.append(Stall(end_s, self.end_s, None, last.op, last.lane))
        return tuple(stalls)

    def stall_s_by_owner(self, lane: str = "compute:w0") -> dict[str, float]:
        """Return the seconds that ``lane`` stood still for each lane that it waited for, longest first."""
        totals: defaultdict[str, float] = defaultdict(float)
        for stall in self.stalls(lane):
            totals[stall.owner] += stall.duration_s
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    @cached_property
    def _lanes(self) -> dict[str, tuple[Event, ...]]:
        events_by_lane: defaultdict[str, list[Event]] = defaultdict(list)
        for event in sorted(self.events, key=lambda event: event.start_s):
            events_by_lane[event.lane].append(event)
        return {name: tuple(events) for name, events in events_by_lane.items()}

    @cached_property
    def _runs(self) -> dict[Op | str, list[Event]]:
        events_by_op: defaultdict[Op | str, list[Event]] = defaultdict(list)
        for event in sorted(self.events, key=lambda event: event.start_s):
            events_by_op[event.op].append(event)
        return events_by_op

    def _lane_that_ran(self, op: Op | str | None, before_s: float) -> str:
        """Return the lane of the latest run of ``op`` that started before ``before_s``."""
        runs = [] if op is None else self._runs.get(op, [])
        at = bisect_left(runs, before_s, key=lambda event: event.start_s)
        return runs[at - 1].lane if at else UNKNOWN_OWNER


# Columns of the table.
COLUMNS: Final = ("load", "forward", "backward", "activations", "gradient", "optimizer")


def column_of(row: OpRow) -> str | None:
    """Return the column that the seconds of an op are added to; None where they are in none."""
    if row.lane == "compute":
        computing = {"forward": "forward", "turn": "forward", "recompute": "backward", "backward": "backward"}
        computing |= {"norm": "gradient", "update": "optimizer"}
        return computing.get(row.price)
    if row.lane in ("up", "down") and row.carries != "sum":
        contents = {"weights": "load", "gradient": "gradient", "input": "activations", "kept": "activations"}
        return contents.get(row.carries or "")
    return "optimizer" if row.price in ("disk", "step") else None


def unit_latencies(events: Iterable[Event]) -> dict[int, dict[str, float]]:
    """Return for each unit that has an op the seconds of its ops by column, and how long compute ``waited`` for it.

    Args:
        events: of one step.
    """
    seconds: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event, op in _with_ops(events):
        column = column_of(op.row)
        if op.unit is None or column is None:
            continue
        row = seconds[op.unit]
        row[column] += event.end_s - event.start_s
        if op.kind in COMPUTE_KINDS:
            row["waited"] += event.waited_s
    return {unit: {name: seconds[unit][name] for name in (*COLUMNS, "waited")} for unit in sorted(seconds)}


def round_starts(events: Iterable[Event], round_size: int) -> list[float]:
    """Return when the first forward of each round began, as ``events`` of one step tell the time.

    Args:
        events: of one step.
        round_size: microbatches of a round.
    """
    starts: dict[int, float] = {}
    for event, op in _with_ops(events):
        if column_of(op.row) == "forward" and op.microbatch is not None:
            number = op.microbatch // round_size
            starts[number] = min(starts.get(number, event.start_s), event.start_s)
    return [starts[number] for number in sorted(starts)]


def _with_ops(events: Iterable[Event]) -> Iterator[tuple[Event, Op]]:
    """Yield events with their ops, without those of another version, or of a lane without a program."""
    for event in events:
        if isinstance(event.op, Op):
            yield event, event.op


def idle_s(events: Iterable[Event], lane: str, began_s: float, ended_s: float) -> float:
    """Return the seconds between two times in which ``lane`` ran nothing."""
    inside = (e for e in events if e.lane == lane and e.end_s > began_s and e.start_s < ended_s)
    busy_s = sum(min(event.end_s, ended_s) - max(event.start_s, began_s) for event in inside)
    return max(0.0, ended_s - began_s - busy_s)


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
