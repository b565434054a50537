"""Figures of a step, and of all steps of a run."""

import pytest

from outsize.training.measures import stall_share


@pytest.mark.parametrize(
    ("stalls", "seconds", "share"),
    [({}, 2.0, 0.0), ({"up": 0.5, "read": 0.5}, 2.0, 0.5), ({"up": 1.1}, 1.0, 1.0), ({}, 0.0, 0.0)],
)
def test_the_share_of_waiting_is_a_share_also_where_waits_of_steps_overlap(stalls, seconds, share):
    assert stall_share(stalls, seconds) == share
