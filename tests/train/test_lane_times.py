import pytest

from outsize.planner.program.program import op_or_text
from outsize.planner.simulate.simulator import Event, Timeline
from outsize.training.measures import lane_times


def event(lane: str, op: str, start_s: float, end_s: float, waited_for: str = "") -> Event:
    after = op_or_text(waited_for) if waited_for else None
    return Event(lane=lane, op=op_or_text(op), start_s=start_s, end_s=end_s, waited_for=after)


def test_seconds_by_lane_by_kind_and_by_owner():
    timeline = Timeline(
        (
            event("up:w0", "LOAD 0@w0.0", 0.0, 1.0),
            event("compute:w0", "F 0.0@w0", 1.0, 3.0, "LOAD 0@w0.0"),
            event("compute:w0", "FB 1.0@w0", 3.0, 5.0),
            event("compute:w0", "B 0.0@w0", 5.0, 6.0),
            event("host", "STEP 0", 5.5, 6.0),
        )
    )
    times = lane_times(timeline)
    assert times.busy_s == {"compute:w0": 5.0, "host": 0.5, "up:w0": 1.0}
    assert times.stall_s == {"up:w0": 1.0}
    assert (times.forward_s, times.backward_s, times.update_s) == pytest.approx((2.0, 3.0, 0.5))


def test_of_several_workers_the_one_that_waits_longest_is_told():
    timeline = Timeline(
        (
            event("compute:w0", "F 0.0@w0", 0.0, 4.0),
            event("up:w1", "LOAD 1@w1.0", 0.0, 3.0),
            event("compute:w1", "F 1.0@w1", 3.0, 4.0, "LOAD 1@w1.0"),
        )
    )
    times = lane_times(timeline)
    assert times.stall_s == {"up:w1": 3.0}


def test_nothing_happened():
    times = lane_times(Timeline(()))
    assert (times.busy_s, times.stall_s, times.forward_s) == ({}, {}, 0)
