from hypothesis import given
from hypothesis import strategies as st

from outsize.planner.passes.slots import assign_slots


def v(num_units):
    return [*range(num_units), *range(num_units - 2, -1, -1)]


@st.composite
def cases(draw):
    num_units = draw(st.integers(1, 8))
    weights = draw(st.lists(st.integers(0, 3), min_size=num_units, max_size=num_units))
    slots = [max(weights), *draw(st.lists(st.integers(0, 3), max_size=4))]
    return v(num_units), weights, slots, draw(st.integers(0, 4))


@given(cases())
def test_every_visit_finds_its_unit_and_no_slot_holds_two(case):
    visits, weights, slots, depth = case
    stays = assign_slots(visits, weights, slots, depth)
    for visit, unit in enumerate(visits):
        here = [stay for stay in stays if stay.unit == unit and stay.load_visit <= visit <= stay.last_visit]
        assert len(here) == (weights[unit] > 0)
    for a in stays:
        assert weights[a.unit] <= slots[a.slot]
        assert not any(
            b is not a and b.slot == a.slot and a.load_visit <= b.last_visit and b.load_visit <= a.last_visit
            for b in stays
        )


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 4))
def test_equal_slots_keep_as_many_units_over_the_turn_as_can_be_kept(num_units, num_slots, depth):
    # 2 N - 1 visits, of which those to the S - 1 units before the turn need no LOAD.
    stays = assign_slots(v(num_units), [1] * num_units, [1] * num_slots, depth)
    assert len(stays) == max(num_units, 2 * num_units - num_slots)


@given(st.integers(3, 12), st.integers(2, 5))
def test_with_a_slot_more_than_the_depth_every_load_starts_that_early(num_units, num_slots):
    visits = v(num_units)
    depth = num_slots - 1
    starts = {}
    for stay in assign_slots(visits, [1] * num_units, [1] * num_slots, depth):
        use = next(i for i in range(stay.load_visit, len(visits)) if visits[i] == stay.unit)
        starts[use] = stay.load_visit
    assert all(use - start >= min(depth, use) for use, start in starts.items())
