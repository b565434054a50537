import pytest

from outsize.planner.program.program import op_or_text
from outsize.planner.simulate.simulator import Event, Timeline
from outsize.planner.simulate.stalls import COMPUTE, HANDED_OUT, STEP_BEFORE, waits_by_cause


def event(op, start_s, end_s, lane="compute:w0", waited_for=""):
    after = op_or_text(waited_for) if waited_for else None
    return Event(lane=lane, op=op_or_text(op), start_s=start_s, end_s=end_s, waited_for=after)


def waits(*events):
    return waits_by_cause(Timeline(events), ["compute:w0"])[0]


def test_a_load_that_waits_for_its_step_is_charged_with_its_own_time_only():
    found = waits(
        event("F 0.0@w0", 0, 1),
        event("STEP 1", 0, 8, lane="host"),
        event("LOAD 1@w0.0", 8, 10, lane="up:w0", waited_for="STEP 1"),
        event("F 1.0@w0", 10, 11, waited_for="LOAD 1@w0.0"),
    )
    assert found == {"the optimizer on the host": 7, "weights to arrive": 2}


def test_what_waited_on_its_own_lane_is_followed_there():
    found = waits(
        event("F 0.0@w0", 0, 1),
        event("LOAD 5@w0.0", 0, 4, lane="up:w0"),
        event("FETCH 1.0@w0", 4, 5, lane="up:w0"),
        event("F 1.0@w0", 5, 6, waited_for="FETCH 1.0@w0"),
    )
    assert found == {"weights to arrive": 3, "activations to arrive": 1}


def test_other_workers_and_the_step_before():
    found = waits(
        event("F 3.0@w1", 0, 3, lane="compute:w1"),
        event("B 3.0@w0", 3, 4, waited_for="F 3.0@w1"),
        event("LOAD 0@w0.0", 6, 7, lane="up:w0"),
        event("F 0.0@w0", 7, 8, waited_for="LOAD 0@w0.0"),
    )
    assert found == {COMPUTE: 3, STEP_BEFORE: 2, "weights to arrive": 1}


def test_threads_that_take_time_to_wake_up_do_not_end_a_chain():
    """As measured: nothing begins in the instant in which it may."""
    found = waits(
        event("F 0.0@w0", 0, 1),
        event("STEP 1", 0, 7.75, lane="host"),
        event("LOAD 1@w0.0", 8, 9.875, lane="up:w0", waited_for="STEP 1"),
        event("F 1.0@w0", 10, 11, waited_for="LOAD 1@w0.0"),
    )
    assert found == {"the optimizer on the host": 6.75, "weights to arrive": 1.875, HANDED_OUT: 0.375}


@pytest.mark.parametrize("lane", ["compute:w0", "compute:w1"])
def test_causes_add_up_to_the_gaps_of_a_simulated_step(lane):
    from outsize.planner.predict.prediction import fastest
    from planner.questions import ask

    timeline = fastest(ask("2x4090", microbatches=4)).timeline
    (found,) = waits_by_cause(timeline, [lane])
    gaps = sum(stall.duration_s for stall in timeline.stalls(lane))
    assert sum(found.values()) == pytest.approx(gaps, rel=1e-6)
