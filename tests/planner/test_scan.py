"""Which units stay while tokens go by, and what that saves."""

from itertools import pairwise

import pytest
from bench_experts import bytes_moved_by_lru
from hypothesis import given
from hypothesis import strategies as st

from outsize.errors import InfeasiblePlanError
from outsize.planner.search.forward_plan import (
    PREFETCH,
    break_even_batch,
    plan_scan,
    spread_order,
)

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)


def test_slots_come_first_and_units_stay_in_what_is_left():
    scan = plan_scan([10] * 8, 50)
    assert scan.num_slots == PREFETCH + 1
    assert len(scan.kept) == 2
    assert scan.streamed == tuple(unit for unit in range(8) if unit not in scan.kept)
    assert (scan.bytes_per_pass, scan.device_bytes) == (60, 50)


def test_all_stay_where_all_fit():
    scan = plan_scan([10, 0, 30], 40)
    assert scan.kept == {0, 2}
    assert (scan.num_slots, scan.bytes_per_pass) == (0, 0)


def test_a_tight_device_loads_fewer_units_ahead():
    assert [plan_scan([10] * 8, room).num_slots for room in (10, 19, 20, 29, 30)] == [1, 1, 2, 2, 3]
    assert plan_scan([10] * 8, 45, prefetch=1).num_slots == 2
    with pytest.raises(InfeasiblePlanError) as refusal:
        plan_scan([10] * 8, 19, prefetch=1)
    assert refusal.value.short_by == {"device": 1}


def test_one_large_unit_is_kept_rather_than_making_every_slot_as_large():
    scan = plan_scan([10] * 8 + [40], 80)
    assert 8 in scan.kept
    assert (scan.slot_bytes, scan.num_slots) == (10, 3)


def test_sparing_keeps_nothing_that_need_not_be_kept():
    assert plan_scan([10] * 8, 79, sparing=True).kept == frozenset()
    assert plan_scan([10] * 8, 160, sparing=True).num_slots == 0
    assert plan_scan([10] * 8, 159, sparing=True).num_slots == 2


def test_what_is_kept_lies_evenly_and_one_more_moves_no_other():
    assert spread_order(range(8)) == [0, 4, 2, 6, 1, 5, 3, 7]
    kept = [plan_scan([10] * 8, room).kept for room in range(30, 80, 10)]
    assert all(fewer < more for fewer, more in pairwise(kept))


@given(SIZES, st.integers(0, 60), st.none() | st.integers(0, 3), st.booleans())
def test_a_scan_holds_what_it_says_within_its_room(sizes, room, prefetch, sparing):
    short_by: dict[str, int] = {}
    try:
        scan = plan_scan(sizes, room, prefetch=prefetch, sparing=sparing)
    except InfeasiblePlanError as refusal:
        short_by = refusal.short_by
    if short_by:
        assert short_by["device"] > 0
        assert room < min(sum(sizes), max(sizes) * (1 if prefetch is None else prefetch + 1))
        return
    assert scan.device_bytes <= room
    assert sorted({*scan.kept, *scan.streamed}) == [unit for unit, size in enumerate(sizes) if size]
    assert not scan.kept & set(scan.streamed)
    assert scan.bytes_per_pass == sum(sizes[unit] for unit in scan.streamed)
    assert all(sizes[unit] <= scan.slot_bytes for unit in scan.streamed)
    assert scan.num_slots <= max(len(scan.streamed), 0)
    assert bool(scan.num_slots) == bool(scan.streamed)


@given(st.integers(2, 12), st.integers(1, 12))
def test_least_recently_used_saves_nothing_in_a_scan(num_units, places):
    """Unless all fit: then both move everything once."""
    moved = bytes_moved_by_lru([1] * num_units, places, 5)
    assert moved == (num_units if places >= num_units else 5 * num_units)


def test_the_break_even_batch_is_where_computing_takes_as_long_as_moving():
    assert break_even_batch(1000, 100.0, 2.0, 4) == 20.0
    assert break_even_batch(10, 100.0, 2.0, 4) == 1.0  # one prompt takes longer to compute than to move
    assert break_even_batch(0, 100.0, 2.0, 4) is None
    assert break_even_batch(1000, 100.0, 0.0, 4) is None
