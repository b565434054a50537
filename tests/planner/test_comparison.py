"""A step's time is taken apart into parts that add up to it, and none of which is less than nothing."""

import pytest

from outsize.planner.program.program import op_or_text
from outsize.planner.simulate.comparison import BETWEEN, COMPUTE, Steps, compare, take_apart
from outsize.planner.simulate.simulator import Event, Timeline


def event(lane, op, start_s, end_s, waited_for=""):
    after = op_or_text(waited_for) if waited_for else None
    return Event(lane=lane, op=op_or_text(op), start_s=start_s, end_s=end_s, waited_for=after)


def steps(events, began_s, ended_s, count=1):
    found = Steps(timeline=Timeline(tuple(events)), began_s=began_s, ended_s=ended_s, count=count)
    return take_apart(found)


def parts_of(found, side):
    return {part.name: getattr(part, f"{side}_s") for part in found.parts}


# The step before was known while an F of this one, and the load before it, went on.
OVERHANGING = steps(
    [
        event("up:w0", "LOAD 0@w0.0", 7.0, 9.0),
        event("compute:w0", "F 0.0@w0", 9.0, 12.0, "LOAD 0@w0.0"),
        event("up:w0", "LOAD 1@w0.0", 10.0, 13.0),
        event("compute:w0", "FB 1.0@w0", 13.0, 15.0, "LOAD 1@w0.0"),
    ],
    began_s=10.0,
    ended_s=16.0,
)


def test_what_ran_before_the_step_began_is_no_part_of_it():
    found = compare(OVERHANGING, OVERHANGING, 1.0)
    assert parts_of(found, "predicted") == {
        COMPUTE: 4.0,
        "waiting for weights to arrive": 1.0,
        BETWEEN: 1.0,
    }
    assert parts_of(found, "measured") == parts_of(found, "predicted")
    assert found.predicted_s == found.measured_s == 6.0


def test_what_lanes_did_is_counted_whole():
    lanes = {lane.name: lane.predicted_s for lane in compare(OVERHANGING, OVERHANGING, 1.0).lanes}
    assert lanes == {"compute:w0": 5.0, "up:w0": 5.0}


def test_steps_that_take_turns_are_compared_by_their_mean():
    by_turns = steps(
        [event("compute:w0", "F 0.0@w0", 0.0, 3.0), event("compute:w0", "F 0.0@w0", 3.0, 4.0)], 0.0, 4.0, 2
    )
    found = compare(by_turns, by_turns, 1.0)
    assert parts_of(found, "predicted") == {COMPUTE: 2.0, BETWEEN: 0.0}
    assert found.num_steps == 2
    assert sum(parts_of(found, "measured").values()) == pytest.approx(found.measured_s)
