from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.planner.simulate.discrete import Cost, LaneRun, Order, run_order
from planner.held_bytes import critical_path
from planner.plain_clock import Work, run_plainly


def run_work(work: Sequence[Work], capacity: Mapping[str, float]) -> LaneRun:
    """Return when each piece of ``work`` runs, see `run_order`."""
    order = Order([item.lane for item in work], [item.after for item in work])
    return run_order(order, [item.cost for item in work], capacity)


def seconds(lane, duration, *after):
    return Work(lane, Cost(seconds=duration), after)


def test_a_lane_does_one_thing_at_a_time_in_order():
    run = run_work([seconds("a", 2), seconds("a", 3)], {})
    assert (run.start_s, run.end_s) == ((0, 2), (2, 5))


def test_lanes_run_side_by_side_and_wait_for_each_other():
    run = run_work([seconds("a", 2), seconds("b", 1), seconds("b", 1, 0)], {})
    assert run.start_s == (0, 0, 2)
    assert run.cause == (-1, -1, 0)
    assert run.lane_free_s[2] == 1


def test_work_behind_the_head_of_its_lane_does_not_overtake():
    run = run_work([seconds("a", 5), seconds("b", 1, 0), seconds("b", 1)], {})
    assert run.start_s == (0, 5, 6)


def test_two_flows_share_a_link_until_one_is_done():
    def flow(lane, amount):
        return Work(lane, Cost(amount=amount, through=("link",)))

    run = run_work([flow("a", 10), flow("b", 30)], {"link": 10})
    assert run.end_s == (2, 4)


def test_latency_comes_before_the_flow():
    run = run_work([Work("a", Cost(seconds=1, amount=10, through=("link",)))], {"link": 10})
    assert run.end_s == (2,)


def test_parts_of_work_come_one_after_the_other_and_share_what_they_flow_through():
    back = Cost(seconds=1, amount=10, through=("link",))
    both = Cost(amount=6, through=("memory",), then=Cost(seconds=3, then=back))
    capacity = {"link": 10, "memory": 2}
    assert run_work([Work("a", both)], capacity).end_s == (8,)
    assert both.alone_s(capacity) == 8
    other = Work("b", Cost(seconds=7, amount=10, through=("link",)))
    assert run_work([Work("a", both), other, seconds("a", 1)], capacity).end_s == (9, 9, 10)


def test_the_critical_path_is_told():
    run = run_work([seconds("a", 2), seconds("b", 3), seconds("a", 4, 1), seconds("b", 1)], {})
    assert critical_path(run) == (1, 2)


@pytest.mark.parametrize("after", [(0,), (1,), (-1,)])
def test_nothing_waits_for_itself_or_later_work(after):
    with pytest.raises(ValueError, match="does not come before"):
        run_work([Work("a", Cost(), after)], {})


def test_what_flows_needs_something_to_flow_through():
    with pytest.raises(ValueError, match="flow through"):
        Cost(amount=1)
    with pytest.raises(ValueError, match="negative"):
        Cost(seconds=-1)


@st.composite
def works(draw):
    found = []
    for index in range(draw(st.integers(0, 25))):
        cost = None
        for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
            amount = draw(st.sampled_from([0, 0, 1, 3.7]))
            through = tuple(draw(st.sets(st.sampled_from("xyz"), min_size=1))) if amount else ()
            cost = Cost(
                seconds=draw(st.sampled_from([0, 0.1, 1, 2.3])),
                amount=amount,
                through=tuple(sorted(through)),
                then=cost,
            )
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        found.append(Work(draw(st.sampled_from(["a", "b", "c", ""])), cost, tuple(after)))
    return found


@given(works())
def test_the_critical_path_is_as_long_as_the_makespan(work):
    run = run_work(work, {"x": 1, "y": 2, "z": 0.3})
    path = critical_path(run)
    assert all(run.end_s[a] == run.start_s[b] for a, b in pairwise(path))
    if path:
        assert run.start_s[path[0]] == 0
        assert run.end_s[path[-1]] == run.makespan_s
    assert sum(run.end_s[i] - run.start_s[i] for i in path) == pytest.approx(run.makespan_s)


@settings(max_examples=60)
@given(works())
def test_a_plain_clock_says_the_same(work):
    capacity = {"x": 1, "y": 2, "z": 0.3}
    run = run_work(work, capacity)
    start_s, end_s = run_plainly(work, capacity)
    assert run.start_s == pytest.approx(start_s, abs=1e-6)
    assert run.end_s == pytest.approx(end_s, abs=1e-6)


@given(works())
def test_waits_and_lanes_are_kept_and_the_run_is_the_same_every_time(work):
    capacity = {"x": 1, "y": 2, "z": 0.3}
    run = run_work(work, capacity)
    assert run_work(work, capacity) == run
    free = {}
    for index, item in enumerate(work):
        assert all(run.end_s[i] <= run.start_s[index] for i in item.after)
        assert run.end_s[index] >= run.start_s[index] + item.cost.seconds
        if item.lane:
            assert run.start_s[index] >= free.get(item.lane, 0)
            free[item.lane] = run.end_s[index]
