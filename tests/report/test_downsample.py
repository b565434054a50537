"""Fewer points, the same picture: what must not be lost, and what must add up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.reporting.history import means, min_max, smoothed

VALUES = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=300)


@given(VALUES, st.integers(1, 20))
def test_extremes_and_ends_stay_and_nothing_is_made_up(ys, most_buckets):
    points = min_max(range(len(ys)), ys, most_buckets)
    known = [(x, y) for x, y in enumerate(ys) if y is not None]
    assert len(points) <= 2 * most_buckets + 2
    assert set(points) <= set(known)
    assert [x for x, _ in points] == sorted({x for x, _ in points})
    if known:
        assert (points[0], points[-1]) == (known[0], known[-1])
        assert {min(y for _, y in points), max(y for _, y in points)} == {
            min(y for _, y in known),
            max(y for _, y in known),
        }


def test_a_spike_of_one_step_in_fifty_thousand_is_seen():
    ys = [1.0] * 50_000
    ys[31_234] = 99.0
    points = min_max(range(50_000), ys)
    assert (31_234, 99.0) in points
    assert len(points) <= 1002


def test_what_is_not_finite_leaves_a_gap():
    assert min_max([1, 2, 3], [1.0, math.nan, 3.0]) == [(1, 1.0), (3, 3.0)]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=200), st.integers(1, 30))
def test_means_of_stacked_shares_still_add_up(row, most_buckets):
    steps, (first, second) = means(range(len(row)), [row, [1 - share for share in row]], most_buckets)
    assert len(steps) == min(len(row), most_buckets)
    assert steps[-1] == len(row) - 1
    assert [a + b for a, b in zip(first, second, strict=True)] == pytest.approx([1.0] * len(steps))


def test_nothing_gives_nothing():
    assert min_max([], []) == []
    assert means([], [[]]) == ([], [[]])
    assert smoothed([]) == []


def test_a_smooth_curve_does_not_lag_behind_a_straight_one():
    line = [float(x) for x in range(1000)]
    assert smoothed(line) == pytest.approx(line)
    assert smoothed([1.0, None, 1.0, math.nan]) == [1.0, None, 1.0, None]
