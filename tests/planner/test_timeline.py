import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.planner.program.program import op_or_text
from outsize.planner.simulate.simulator import UNKNOWN_OWNER, Event, Timeline


def event(lane, op, start_s, end_s, waited_for=""):
    after = op_or_text(waited_for) if waited_for else None
    return Event(lane=lane, op=op_or_text(op), start_s=start_s, end_s=end_s, waited_for=after)


STEP = Timeline(
    (
        event("up:w0", "LOAD 0@w0.0", 10.0, 12.0),
        event("compute:w0", "F 0.0@w0", 12.0, 15.0, "LOAD 0@w0.0"),
        event("down:w0", "SAVE 0.0@w0", 15.0, 16.0, "F 0.0@w0"),
        event("compute:w0", "F 1.0@w0", 16.0, 18.0, "SAVE 0.0@w0"),
        event("compute:w0", "F 2.0@w0", 18.5, 19.0),
        event("host", "STEP 0", 19.0, 20.0),
    )
)


def test_a_timeline_knows_its_span_and_its_lanes():
    assert STEP.span_s == 10.0
    assert STEP.busy_s("compute:w0") == 5.5
    assert STEP.busy_s("nothing") == 0.0
    assert STEP.lanes == ("compute:w0", "down:w0", "host", "up:w0")
    assert [str(e.op) for e in STEP.lane("up:w0")] == ["LOAD 0@w0.0"]


def test_every_gap_belongs_to_the_lane_it_waited_for():
    assert [
        (s.start_s, s.end_s, str(s.op or ""), str(s.waited_for or ""), s.owner) for s in STEP.stalls()
    ] == [
        (10.0, 12.0, "F 0.0@w0", "LOAD 0@w0.0", "up:w0"),
        (15.0, 16.0, "F 1.0@w0", "SAVE 0.0@w0", "down:w0"),
        (18.0, 18.5, "F 2.0@w0", "", UNKNOWN_OWNER),
        (19.0, 20.0, "", "STEP 0", "host"),
    ]
    assert STEP.stall_s_by_owner() == {"up:w0": 2.0, "down:w0": 1.0, "host": 1.0, UNKNOWN_OWNER: 0.5}
    assert STEP.stall_share() == pytest.approx(0.45)


def test_an_op_that_ran_in_several_steps_owns_the_gaps_of_its_own_step():
    timeline = Timeline(
        (
            event("up:w0", "LOAD 0@w0.0", 0.0, 1.0),
            event("compute:w0", "F 0.0@w0", 1.0, 2.0, "LOAD 0@w0.0"),
            event("compute:w0", "F 0.0@w0", 3.0, 4.0, "STEP 0"),
            event("host", "STEP 0", 2.0, 3.0),
            event("host", "STEP 0", 5.0, 6.0),
        )
    )
    assert [stall.owner for stall in timeline.stalls()] == ["up:w0", "host", "host"]


def test_an_empty_timeline_stalls_for_nothing():
    timeline = Timeline(())
    assert (timeline.span_s, timeline.stall_share(), timeline.stalls(), timeline.lanes) == (0.0, 0.0, (), ())


def test_a_lane_without_events_stalls_throughout():
    timeline = Timeline((event("host", "STEP 0", 0.0, 1.0),))
    assert timeline.stall_share() == 1.0
    assert [stall.owner for stall in timeline.stalls()] == ["host"]


@st.composite
def timelines(draw):
    events = []
    for lane in ("compute:w0", "up:w0"):
        now = draw(st.integers(0, 5))
        for n in range(draw(st.integers(0, 5))):
            now += draw(st.integers(0, 3))
            end = now + draw(st.integers(0, 3))
            events.append(
                event(lane, f"{lane} {n}", float(now), float(end), draw(st.sampled_from(("", "up:w0 0"))))
            )
            now = end
    return Timeline(tuple(draw(st.permutations(events))))


@given(timelines())
def test_stalls_add_up_to_the_idle_time(timeline):
    idle = sum(stall.duration_s for stall in timeline.stalls())
    assert idle == pytest.approx(timeline.span_s - timeline.busy_s("compute:w0"))
    assert timeline.stall_share() * timeline.span_s == pytest.approx(idle)
