"""Where the time of a step went, read off its timeline for the heartbeat."""

from collections import defaultdict
from dataclasses import dataclass

from outsize.planner.program.table import Price
from outsize.planner.simulate.comparison import compute_lanes
from outsize.planner.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTimes:
    """Seconds of one step; ops are counted in the step in whose time they ended.

    Attributes:
        busy_s: that each lane spent on ops, by lane.
        stall_s: that a compute lane stood still, by the lane that it waited for, longest first; of the worker that
            stood still longest.
        forward_s: in forwards, less that of the last unit.
        backward_s: in backwards, with recompute, and with the forward of the last unit.
        update_s: in the optimizer.
    """

    busy_s: dict[str, float]
    stall_s: dict[str, float]
    forward_s: float
    backward_s: float
    update_s: float


def lane_times(timeline: Timeline) -> LaneTimes:
    """Add up the events of ``timeline``."""
    by_price: defaultdict[Price, float] = defaultdict(float)
    for event in timeline.events:
        by_price["free" if event.row is None else event.row.price] += event.end_s - event.start_s
    stalls = (timeline.stall_s_by_owner(lane) for lane in compute_lanes(timeline))
    return LaneTimes(
        busy_s={lane: timeline.busy_s(lane) for lane in timeline.lanes},
        stall_s=max(stalls, key=lambda owners: sum(owners.values()), default={}),
        forward_s=by_price["forward"],
        backward_s=by_price["turn"] + by_price["recompute"] + by_price["backward"],
        update_s=by_price["step"],
    )
