import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.runtime.trial.measured import extrapolate

LENGTHS = (64, 128, 256)
coefficients = st.integers(0, 10_000)


@given(fixed=coefficients, linear=coefficients, square=coefficients, length=st.integers(257, 10_000))
def test_polynomials_of_second_degree_are_met(fixed: int, linear: int, square: int, length: int):
    def alive(of: int) -> int:
        return fixed + linear * of + square * of**2

    traces = tuple((alive(of),) for of in LENGTHS)
    assert extrapolate(LENGTHS, traces, length) == pytest.approx(alive(length), rel=1e-9)
    several = fixed + 3 * (alive(length) - fixed)
    assert extrapolate(LENGTHS, traces, length, 3) == pytest.approx(several, rel=1e-9)


def test_the_op_that_counts_may_be_another_for_a_longer_sequence():
    """A linear op is the largest up to 256 tokens; at 1024 the quadratic one is."""
    traces = tuple((100_000 + 100 * of, of**2) for of in LENGTHS)
    assert extrapolate(LENGTHS, traces, 256) == 125_600
    assert extrapolate(LENGTHS, traces, 1024) == 1024**2


def test_what_flattens_goes_on_as_it_did_last():
    """A window of 128 tokens: from there on the growth is linear."""
    traces = tuple((of * min(of, 128),) for of in LENGTHS)
    assert extrapolate(LENGTHS, traces, 1024) == 1024 * 128


def test_other_ops_at_other_lengths_leave_the_peaks():
    assert extrapolate(LENGTHS, ((1, 64), (128,), (2, 256, 3)), 512) == 512


def test_one_length_is_the_length():
    assert extrapolate((12,), ((5, 7, 6),), 12) == 7
    assert extrapolate((12,), ((5, 7, 6),), 12, 4) == 28
    assert extrapolate((12,), ((),), 12) == 0


def test_there_is_never_less_than_nothing():
    assert extrapolate(LENGTHS, ((-5,), (-10,), (-20,)), 1024, 2) == 0


def test_what_two_sequences_have_twice_is_there_for_each():
    """Of 100 bytes for the weights, 50 for the image and 2 for each token of a sequence."""
    traces = tuple((100 + rows * (50 + 2 * length),) for rows, length in ((1, 8), (1, 16), (1, 32), (2, 8)))
    assert extrapolate((8, 16, 32), traces, 64, 3) == 100 + 3 * (50 + 2 * 64)
