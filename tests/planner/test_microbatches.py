"""The numbers of microbatches to try: all sequences, none twice, and enough for several workers."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import InfeasiblePlanError
from outsize.planner.search.microbatch_search import (
    FULL_TOKENS,
    LARGEST_TOKENS,
    NEAR,
    PER_GPU,
    SIZES,
    cuts_to_try,
    may_shorten,
    most_gained_s,
    search_cuts,
)
from outsize.planner.search.offload_balance import Phases
from planner.layouts import make_layout

SEQUENCES, SEQ_LEN = st.integers(1, 300), st.sampled_from([32, 1024, 2048, 32_768])


@settings(max_examples=40)
@given(SEQUENCES, SEQ_LEN, st.integers(1, 8))
def test_numbers_grow_and_none_is_more_than_there_are_sequences(sequences, seq_len, num_workers):
    counts = list(cuts_to_try(sequences, seq_len, num_workers))
    assert counts == sorted(set(counts))
    assert 1 <= counts[0] <= counts[-1] <= sequences


@given(SEQUENCES, SEQ_LEN)
def test_one_worker_goes_from_as_many_sequences_at_once_as_pay_to_one_by_one(sequences, seq_len):
    counts = list(cuts_to_try(sequences, seq_len, 1))
    assert counts[-1] == sequences
    least = min(sequences * seq_len / LARGEST_TOKENS, sequences / SIZES[-1])
    assert counts[0] == sequences or counts[0] >= least
    assert counts[0] == 1 or counts[0] // 2 < least


@given(SEQUENCES, SEQ_LEN, st.integers(2, 8))
def test_several_workers_have_enough_of_them_or_as_many_as_there_can_be(sequences, seq_len, num_workers):
    first = next(cuts_to_try(sequences, seq_len, num_workers))
    busy = first >= PER_GPU * num_workers
    small = sequences // first * seq_len <= max(FULL_TOKENS, seq_len)
    assert (busy and small) or first == sequences


def searched(steps_s, **how):
    """What is found among 1, 2, 3, … microbatches of steps that take so long, None not fitting, and what was tried."""
    tried = []

    def take(count):
        tried.append(count)
        if steps_s[count - 1] is None:
            raise InfeasiblePlanError("no room", {"device": 10 - count})
        return count

    counts = range(1, 1 + len(steps_s))

    def is_less(found, best):
        return steps_s[found - 1] * NEAR < steps_s[best - 1]

    return search_cuts(counts, take, is_less, **how), tried


@pytest.mark.parametrize(
    ("steps_s", "how", "found", "tried"),
    [
        ([10.0, 9.0, 8.95], {}, 2, [1, 2, 3]),
        ([10.0, 9.0, 8.95, 1.0], {}, 4, [1, 2, 3, 4]),
        ([None, None, 8.0, 7.0], {}, 4, [1, 2, 3, 4]),
        ([10.0, None, 8.0], {}, 3, [1, 2, 3]),
        ([10.0, 9.0, 8.0], {"is_enough": lambda best: best == 2}, 2, [1, 2]),
        ([10.0, 9.0, 8.0, 7.0], {"may_gain": lambda best, count: count != 3}, 4, [1, 2, 4]),
    ],
)
def test_a_number_that_gains_little_or_nothing_ends_no_search(steps_s, how, found, tried):
    assert searched(steps_s, **how) == (found, tried)


def test_what_is_short_by_the_least_is_told():
    with pytest.raises(InfeasiblePlanError) as raised:
        searched([None, None, None])
    assert raised.value.short_by == {"device": 7}
    with pytest.raises(InfeasiblePlanError) as raised:
        searched([None, 5.0], may_fit=lambda error: False)
    assert raised.value.short_by == {"device": 9}


def test_only_filling_and_draining_becomes_shorter():
    assert may_shorten(2.0, 100.0, 4, 8)
    assert not may_shorten(2.0, 110.0, 4, 8)


def test_lanes_that_do_as_much_gain_nothing_and_more_slots_may_gain_anything():
    lanes = Phases(
        forward_s=2, forward_up_s=1, forward_down_s=0, backward_s=4, backward_up_s=3, backward_down_s=1
    )
    one_slot, two_slots = (make_layout(slot_bytes=(100,) * count) for count in (1, 2))
    less = replace(lanes, backward_s=3.5, backward_up_s=2.75)
    assert most_gained_s((two_slots, less), (two_slots, lanes)) == 0.75
    assert most_gained_s((two_slots, lanes), (two_slots, less)) == 0
    assert most_gained_s((one_slot, lanes), (two_slots, lanes)) == 0
    assert most_gained_s((two_slots, lanes), (one_slot, lanes)) == inf
