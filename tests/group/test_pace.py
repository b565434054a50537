import pytest

from contracts import in_ranks
from outsize.errors import ConfigError
from outsize.group.group import Pace, SingleGroup


def test_a_single_process_has_the_last_word():
    with Pace(SingleGroup()) as pace:
        assert pace.most("samples", 3.0) == 3.0
        pace.meet("anything")


def test_all_ranks_take_the_most_that_anyone_wants():
    def work(group):
        with Pace(group) as pace:
            return [pace.most(what, 1.0 + group.rank) for what in ("samples", "more")]

    assert in_ranks(3, work) == [[3.0, 3.0]] * 3


def test_who_cannot_go_on_keeps_nobody_waiting():
    def work(group):
        with Pace(group) as pace:
            first = pace.most("first", float(group.rank))
            if group.rank == 1:
                raise ConfigError("no clock")
            return first, pace.most("second", float(group.rank)), pace.most("third", float(group.rank))

    first, failed, third = in_ranks(3, work)
    assert (first, third) == ((2.0, 0.0, 0.0), (2.0, 2.0, 2.0))
    assert isinstance(failed, ConfigError)


@pytest.mark.parametrize("last", [True, False])
def test_ranks_that_are_about_to_do_different_things_go_apart(last):
    """Whether one of them has more to say or less."""

    def work(group):
        with Pace(group) as pace:
            words = ["disk", *["again"] * (group.rank + last)] if group.rank else ["link"]
            return [pace.most(word, float(group.rank)) for word in words]

    assert in_ranks(2, work) == [[0.0], [1.0] * (2 + last)]
