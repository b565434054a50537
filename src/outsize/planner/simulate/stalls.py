"""Say where the idle time of compute lanes went: every second booked on a cause and on whoever it waited for.

`Timeline.stalls` names the op that a gap ended with, and that op may itself have begun only within the gap: a LOAD that
waits for its unit's STEP is short, the STEP is not. `blame` follows that chain on simulated timelines, where an op
begins the moment it may. On measured ones there is time between the two, in which the lane's thread wakes up, and a
step has stretches in which no op can run because none has been submitted. So a gap is walked backwards:

1. from the op after it to the op that had to end before that one could begin: the one that it waited for, or else the
   one before it on its lane;
2. the time between the two is ``python``: nothing kept the later op but the program that runs it;
3. the part of the earlier op within the gap is booked on its cause and its lane, and the walk goes on from there;
4. where an op waited for nothing it was submitted late. What is left of the gap is ``loader`` while the run waited for
   its batch, ``between steps`` before it asked for one (or ``checkpoint``, as far as it waited for one there), and
   ``python`` elsewhere.

Each gap is cut into parts without overlap, so what is booked adds up to the idle time.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from outsize.planner.program.program import Op
from outsize.planner.simulate.simulator import Event, Stall, Timeline, idle_s

WORKERS, RANKS = "workers", "ranks"
LOADER, BETWEEN, PYTHON = "loader", "between steps", "python"
CHECKPOINT, STORE_LANE = "checkpoint", "store"
# The owner of what no lane was at work for.
NOBODY = "none"
# What compute waits for: by what is carried over links, and by lane elsewhere.
_CONTENTS: Mapping[str | None, str] = {
    "weights": "weights",
    "gradient": "gradients",
    "sum": "gradients",
    "input": "activations",
    "input gradient": "activations",
    "kept": "activations",
}
_LANES: Mapping[str, str] = {
    "host": "optimizer",
    "read": "disk",
    "write": "disk",
    "read:units": "disk",
    "write:units": "disk",
    "commit": "commit",
    "net:reduce": RANKS,
    "net:gather": RANKS,
    "store": CHECKPOINT,
}
# What a step that is known has not waited for: by what its lanes are, and LOADs.
_AFTERWARDS = frozenset({"disk", "commit", CHECKPOINT, "optimizer"})

Booked = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A step on the clock of its events.

    Attributes:
        began_s: when the step before was known.
        asked_s: when the run asked for its batch.
        given_s: when it had the batch; ops are submitted from then on.
        ended_s: when loss and norm of the step were known.
        saving_s: how long until ``asked_s`` the run waited for a checkpoint, or made one.
    """

    began_s: float
    asked_s: float
    given_s: float
    ended_s: float
    saving_s: float = 0.0


class Waits:
    """The idle time of compute lanes in one step.

    Args:
        events: ops known so far that ended within the window or after it, in any order.
        window: the step.
    """

    def __init__(self, events: Iterable[Event], window: Window) -> None:
        self._window = window
        self._by_op: defaultdict[Op | str, list[Event]] = defaultdict(list)
        self._by_lane: defaultdict[str, list[Event]] = defaultdict(list)
        self._num_events = 0
        for event in sorted(events, key=_end):
            self._num_events += 1
            self._by_op[event.op].append(event)
            self._by_lane[event.lane].append(event)

    def idle_s(self, lane: str) -> float:
        """Return the part of the window in which ``lane`` ran nothing."""
        return idle_s(self._by_lane.get(lane, ()), lane, self._start_s, self._end_s)

    def of(self, lane: str) -> Booked:
        """Return the seconds that ``lane`` stood still, by cause and owner, the longest first.

        An owner is a lane, or ``none`` where no lane was at work.
        """
        booked: defaultdict[tuple[str, str], float] = defaultdict(float)
        free_s = self._start_s
        for event in self._inside(lane):
            if event.start_s > free_s:
                self._walk(event, free_s, event.start_s, booked)
            free_s = max(free_s, event.end_s)
        if self._end_s > free_s:
            self._walk_to_the_end(free_s, booked)
        return _nested(booked)

    @property
    def _start_s(self) -> float:
        return self._window.began_s

    @property
    def _end_s(self) -> float:
        return self._window.ended_s

    def _inside(self, lane: str) -> list[Event]:
        return [e for e in self._by_lane.get(lane, ()) if e.end_s > self._start_s and e.start_s < self._end_s]

    def _walk(
        self, event: Event, start_s: float, end_s: float, booked: defaultdict[tuple[str, str], float]
    ) -> None:
        """Book the gap before ``event``, from its end back to its start."""
        before = self._cause(event)
        for _ in range(self._num_events):  # ops that take no time could lead back to themselves
            if before is None or end_s <= start_s:
                break
            ready_s = min(max(before.end_s, start_s), end_s)
            self._book_nobody(ready_s, end_s, booked)
            begun_s = min(max(before.start_s, start_s), ready_s)
            booked[_cause_of(before), before.lane] += ready_s - begun_s
            end_s, before = begun_s, self._cause(before)
        self._book_nobody(start_s, end_s, booked)

    def _walk_to_the_end(self, start_s: float, booked: defaultdict[tuple[str, str], float]) -> None:
        """Book what comes after the lane's last op: the step is known when its CLIP, or all gradients, are."""
        done = [e for lane in self._by_lane.values() for e in lane if self._start_s < e.end_s <= self._end_s]
        last = max(
            (e for e in done if _decides(e)),
            default=max((e for e in done if not _comes_afterwards(e)), key=_end, default=None),
            key=_end,
        )
        end = Event(
            lane="", op="", start_s=self._end_s, end_s=self._end_s, waited_for=last.op if last else None
        )
        self._walk(end, start_s, self._end_s, booked)

    def _cause(self, event: Event) -> Event | None:
        """Return what had to end before ``event`` could begin; None where it was not submitted any earlier."""
        if event.waited_for:
            return _latest(self._by_op.get(event.waited_for, []), event)
        before = _latest(self._by_lane.get(event.lane, []), event)
        given_s = self._window.given_s
        # Submitted with this step, on a lane that had nothing to do any more: the lane is not what it waited for.
        late = event.start_s >= given_s and before is not None and before.end_s < given_s
        return None if late else before

    def _book_nobody(self, start_s: float, end_s: float, booked: defaultdict[tuple[str, str], float]) -> None:
        window = self._window
        saving_from_s = max(window.began_s, window.asked_s - window.saving_s)
        between_s = _overlap(start_s, end_s, window.began_s, saving_from_s)
        saving_s = _overlap(start_s, end_s, saving_from_s, window.asked_s)
        loader_s = _overlap(start_s, end_s, window.asked_s, window.given_s)
        booked[BETWEEN, NOBODY] += between_s
        booked[CHECKPOINT, STORE_LANE] += saving_s
        booked[LOADER, NOBODY] += loader_s
        booked[PYTHON, NOBODY] += max(0.0, end_s - start_s) - between_s - saving_s - loader_s


def _cause_of(event: Event) -> str:
    row = event.row
    if row is None or row.lane == "compute":
        return WORKERS
    return _LANES.get(row.lane) or _CONTENTS[row.carries]


def _decides(event: Event) -> bool:
    """Whether the loss and norm of a step are known behind it: a CLIP."""
    row = event.row
    return row is not None and row.lane == "host" and "coefficient" in row.writes


def _comes_afterwards(event: Event) -> bool:
    row = event.row
    loads = row is not None and row.lane == "up" and row.carries == "weights"
    return loads or _cause_of(event) in _AFTERWARDS


def _end(event: Event) -> float:
    return event.end_s


def _latest(runs: list[Event], event: Event) -> Event | None:
    """Return the last of ``runs``, which are ordered by their ends, that ended by the start of ``event``."""
    at = bisect_right(runs, event.start_s, key=_end)
    while at and runs[at - 1] is event:  # an op that takes no time ends when it starts
        at -= 1
    return runs[at - 1] if at else None


def _overlap(start_s: float, end_s: float, from_s: float, to_s: float) -> float:
    return max(0.0, min(end_s, to_s) - max(start_s, from_s))


def _nested(booked: Mapping[tuple[str, str], float]) -> Booked:
    sums: Booked = {}
    for (cause, owner), seconds in sorted(booked.items(), key=lambda item: -item[1]):
        if seconds > 0:
            sums.setdefault(cause, {})[owner] = seconds
    return sums


# What compute waits for, by what is carried.
_CARRIED: Mapping[str | None, str] = {
    "weights": "weights",
    "sum": "gradient sums",
    "gradient": "gradients",
    "input": "activations",
    "input gradient": "activations",
    "kept": "activations",
    None: "norms",
}
COMPUTE = "another GPU's compute"
STEP_BEFORE = "the step before to end"
# Between two ops of a chain, where lanes are threads that were measured; in a simulation nothing lies there.
HANDED_OUT = "Python to hand out work"
_NEAR_S = 1e-9
# What a thread takes at most to wake up and begin the next op of its lane, on a machine that is busy.
_WAKING_S = 1e-3


def waits_by_cause(timeline: Timeline, lanes: Iterable[str]) -> list[dict[str, float]]:
    """Return for each of ``lanes`` the seconds that it stood still, by what went on meanwhile, longest first.

    A gap is walked back op by op, and each op is charged with the part of the gap in which it ran.

    They add up to the gaps of the lane within the timeline's span.
    """
    index = _Index(timeline)
    return [_waits(timeline.stalls(lane), index) for lane in lanes]


def _waits(stalls: Iterable[Stall], index: "_Index") -> dict[str, float]:
    totals: defaultdict[str, float] = defaultdict(float)
    for stall in stalls:
        event, end_s = index.latest(stall.waited_for, stall.end_s), stall.end_s
        while event is not None and end_s > stall.start_s + _NEAR_S:
            ready_s = min(end_s, max(event.end_s, stall.start_s))
            if end_s - ready_s > _NEAR_S:
                totals[HANDED_OUT] += end_s - ready_s
            end_s = ready_s
            start_s = max(event.start_s, stall.start_s)
            totals[_carried_by(event)] += max(0.0, end_s - start_s)
            end_s = min(end_s, start_s)
            event = index.cause(event)
        totals[STEP_BEFORE] += max(0.0, end_s - stall.start_s)
    ordered = sorted(totals.items(), key=lambda item: -item[1])
    return {cause: seconds for cause, seconds in ordered if seconds > 0}


def _carried_by(event: Event) -> str:
    """Return in words what waiting for an op is waiting for."""
    row = event.row
    if row is None:
        return COMPUTE
    if row.lane in ("up", "peer", "down"):
        return f"{_CARRIED[row.carries]} to {'leave' if row.lane == 'down' else 'arrive'}"
    if row.is_net:
        return f"{_CARRIED[row.carries]} of other nodes"
    if row.price == "disk":
        return "disk reads" if row.lane in ("read", "read:units") else "disk writes"
    return "the optimizer on the host" if row.price == "step" else COMPUTE


class _Index:
    """Finds the run of an op that ended last before a time, and what an event waited for."""

    def __init__(self, timeline: Timeline) -> None:
        self._runs: defaultdict[Op | str, list[Event]] = defaultdict(list)
        for event in sorted(timeline.events, key=lambda event: event.end_s):
            self._runs[event.op].append(event)
            self._runs[f"lane {event.lane}"].append(event)

    def latest(self, op: Op | str | None, before_s: float) -> Event | None:
        """Return the latest run of ``op`` that ended by ``before_s``."""
        runs = [] if op is None else self._runs.get(op, [])
        at = bisect_right(runs, before_s + _NEAR_S, key=lambda event: event.end_s)
        return runs[at - 1] if at else None

    def cause(self, event: Event) -> Event | None:
        """Return what had to end for ``event`` to start: the op it waited for, or the one before it on its lane.

        One before it on its lane that ended long before was not what it waited for: it was submitted late.
        """
        before = self.latest(event.waited_for or f"lane {event.lane}", event.start_s)
        if before is event or before is None:
            return None
        return before if event.waited_for or before.end_s >= event.start_s - _WAKING_S else None
