"""Where the time of a step went, read off its timeline for the heartbeat."""

from collections import defaultdict
from dataclasses import dataclass

from outsize.planner.simulate.comparison import compute_lanes
from outsize.planner.simulate.timeline import Timeline

# By the first word of an op's text, see `outsize.planner.program.ops`.
_FORWARD, _BACKWARD, _UPDATE = ("F", "FA", "FP", "FK"), ("FB", "R", "B"), ("STEP",)


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
    by_kind: defaultdict[str, float] = defaultdict(float)
    for event in timeline.events:
        by_kind[event.op.partition(" ")[0]] += event.end_s - event.start_s
    stalls = (timeline.stall_s_by_owner(lane) for lane in compute_lanes(timeline))
    return LaneTimes(
        busy_s={lane: timeline.busy_s(lane) for lane in timeline.lanes},
        stall_s=max(stalls, key=lambda owners: sum(owners.values()), default={}),
        forward_s=sum(by_kind[kind] for kind in _FORWARD),
        backward_s=sum(by_kind[kind] for kind in _BACKWARD),
        update_s=sum(by_kind[kind] for kind in _UPDATE),
    )
