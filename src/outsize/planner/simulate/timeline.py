"""What happened when: the events of lanes, and where the compute lane's time went.

The executor measures a timeline on real lanes; a simulator may compute one for a model of the machine.
"""

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property

from outsize.planner.program.ops import Op
from outsize.planner.program.table import OpRow

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


@dataclass(frozen=True, slots=True, kw_only=True)
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
                stalls.append(
                    Stall(
                        start_s=end_s,
                        end_s=event.start_s,
                        op=event.op,
                        waited_for=event.waited_for,
                        owner=owner,
                    )
                )
            end_s = max(end_s, event.end_s)
        if self.end_s > end_s:
            last = max(self.events, key=lambda event: event.end_s)
            stalls.append(
                Stall(start_s=end_s, end_s=self.end_s, op=None, waited_for=last.op, owner=last.lane)
            )
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
