"""Whose fault a wait is: a gap of the compute lane followed back to the work that really went on in it.

`Timeline.stalls` names the op that compute waited for last. That op may itself have begun only within the gap: a
LOAD that waits for its unit's STEP is short, the STEP is not. So each gap is walked back op by op, and each op is
charged with the part of the gap in which it ran.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping

from outsize.planner.program.ops import Op
from outsize.planner.simulate.timeline import Event, Stall, Timeline

# What compute waits for, by what is carried.
_CONTENTS: Mapping[str | None, str] = {
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
            totals[_cause_of(event)] += max(0.0, end_s - start_s)
            end_s = min(end_s, start_s)
            event = index.cause(event)
        totals[STEP_BEFORE] += max(0.0, end_s - stall.start_s)
    ordered = sorted(totals.items(), key=lambda item: -item[1])
    return {cause: seconds for cause, seconds in ordered if seconds > 0}


def _cause_of(event: Event) -> str:
    """Return in words what waiting for an op is waiting for."""
    row = event.row
    if row is None:
        return COMPUTE
    if row.lane in ("up", "peer", "down"):
        return f"{_CONTENTS[row.carries]} to {'leave' if row.lane == 'down' else 'arrive'}"
    if row.is_net:
        return f"{_CONTENTS[row.carries]} of other nodes"
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
