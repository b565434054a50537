"""Idle time of the compute lane, booked on causes and owners: nothing lost, nothing twice, and nobody wronged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.planner.program.program import op_or_text
from outsize.planner.simulate.simulator import Event
from outsize.planner.simulate.stalls import Waits, Window


def event(lane: str, op: str, start_s: float, end_s: float, waited_for: str = "") -> Event:
    after = op_or_text(waited_for) if waited_for else None
    return Event(lane=lane, op=op_or_text(op), start_s=start_s, end_s=end_s, waited_for=after)


def window(began_s=0.0, asked_s=0.0, given_s=0.0, ended_s=10.0) -> Window:
    return Window(began_s=began_s, asked_s=asked_s, given_s=given_s, ended_s=ended_s)


def total(booked) -> float:
    return sum(seconds for owners in booked.values() for seconds in owners.values())


def test_a_short_load_that_waited_for_a_long_step_leaves_the_wait_to_the_optimizer():
    waits = Waits(
        [
            event("host", "STEP 0", 0.0, 7.0),
            event("up:w0", "LOAD 0@w0.0", 7.5, 8.0, "STEP 0"),
            event("compute:w0", "F 0.0@w0", 8.0, 10.0, "LOAD 0@w0.0"),
        ],
        window(),
    )
    assert waits.of("compute:w0") == {
        "optimizer": {"host": 7.0},
        "weights": {"up:w0": 0.5},
        "python": {"none": 0.5},
    }
    assert waits.idle_s("compute:w0") == 8.0


def test_a_load_that_was_submitted_late_waited_for_the_batch():
    waits = Waits(
        [
            event("up:w0", "LOAD 5@w0.1", -1.0, 0.5),  # of the step before: not what anybody waited for
            event("up:w0", "LOAD 0@w0.0", 6.0, 7.0),
            event("compute:w0", "F 0.0@w0", 7.0, 10.0, "LOAD 0@w0.0"),
        ],
        window(asked_s=1.0, given_s=6.0),
    )
    assert waits.of("compute:w0") == {
        "loader": {"none": 5.0},
        "weights": {"up:w0": 1.0},
        "between steps": {"none": 1.0},
    }


def test_a_busy_lane_is_what_the_ops_behind_it_waited_for():
    waits = Waits(
        [
            event("up:w0", "LOAD 0@w0.0", 0.0, 4.0),
            event("up:w0", "LOAD 1@w0.1", 4.0, 8.0),
            event("compute:w0", "F 0.0@w0", 4.0, 5.0, "LOAD 0@w0.0"),
            event("compute:w0", "F 1.0@w0", 8.0, 10.0, "LOAD 1@w0.1"),
        ],
        window(),
    )
    assert waits.of("compute:w0") == {"weights": {"up:w0": 7.0}}


def test_a_worker_waits_for_another_and_both_are_told_apart():
    events = [
        event("compute:w0", "F 0.0@w0", 0.0, 4.0),
        event("down:w0", "SAVE 1.0@w0", 4.0, 5.0, "F 0.0@w0"),
        event("up:w1", "FETCH 1.0@w1", 5.0, 6.0, "SAVE 1.0@w0"),
        event("compute:w1", "FB 1.0@w1", 6.0, 10.0, "FETCH 1.0@w1"),
    ]
    waits = Waits(events, window())
    assert waits.of("compute:w1") == {
        "workers": {"compute:w0": 4.0},
        "activations": {"down:w0": 1.0, "up:w1": 1.0},
    }
    assert waits.of("compute:w0") == {
        "workers": {"compute:w1": 4.0},
        "activations": {"up:w1": 1.0, "down:w0": 1.0},
    }


def test_after_the_last_op_the_step_waits_for_its_clip():
    events = [
        event("compute:w0", "B 0.0@w0", 0.0, 6.0),
        event("down:w0", "GRAD 0@w0", 6.0, 7.0, "B 0.0@w0"),
        event("host", "CLIP", 7.0, 9.0, "GRAD 0@w0"),
        event("host", "STEP 0", 9.0, 9.5, ""),
    ]
    assert Waits(events, window()).of("compute:w0") == {
        "optimizer": {"host": 2.0},
        "gradients": {"down:w0": 1.0},
        "python": {"none": 1.0},
    }


def test_waiting_for_a_checkpoint_between_steps_is_the_checkpoints():
    saved = Window(began_s=0.0, asked_s=5.0, given_s=6.0, ended_s=10.0, saving_s=4.0)
    waits = Waits([event("compute:w0", "F 0.0@w0", 6.0, 10.0)], saved)
    assert waits.of("compute:w0") == {
        "checkpoint": {"store": 4.0},
        "between steps": {"none": 1.0},
        "loader": {"none": 1.0},
    }


def test_a_lane_without_an_op_is_idle_throughout():
    waits = Waits([], window(asked_s=2.0, given_s=3.0))
    assert waits.idle_s("compute:w3") == 10.0
    assert waits.of("compute:w3") == {
        "python": {"none": 7.0},
        "between steps": {"none": 2.0},
        "loader": {"none": 1.0},
    }


TIMES = st.floats(0, 10, allow_nan=False)
OPS = st.sampled_from(["LOAD 0@w0.0", "F 0.0@w0", "B 0.0@w0", "STEP 0", "CLIP", "GRAD 0@w0", "READ 1>h0"])


@st.composite
def lanes_of_events(draw):
    """Any events at all, those of one lane one after the other, each waiting for whatever."""
    events = []
    for lane in ("compute:w0", "compute:w1", "up:w0", "host"):
        times = sorted(draw(st.lists(TIMES, max_size=12)))
        for start_s, end_s in zip(times[::2], times[1::2], strict=False):
            events.append(event(lane, draw(OPS), start_s, end_s, draw(st.one_of(st.just(""), OPS))))
    return events


@given(lanes_of_events(), st.lists(TIMES, min_size=4, max_size=4))
def test_what_is_booked_adds_up_to_the_idle_time(events, times):
    began_s, asked_s, given_s, ended_s = sorted(times)
    waits = Waits(events, window(began_s, asked_s, given_s, ended_s))
    for lane in ("compute:w0", "compute:w1"):
        assert total(waits.of(lane)) == pytest.approx(waits.idle_s(lane), abs=1e-9)
