import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.hardware.link_fit import fit_link

SIZES = [2**power for power in range(10, 31)]


def times(latency_s, bytes_per_s):
    return {size: latency_s + size / bytes_per_s for size in SIZES}


@given(latency_s=st.floats(1e-7, 1e-3), bytes_per_s=st.floats(1e8, 1e12))
def test_a_link_of_this_form_is_found_again(latency_s, bytes_per_s):
    every = times(latency_s, bytes_per_s)
    fit = fit_link({n: s for n, s in every.items() if n.bit_length() % 2}, every)
    assert fit.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
    assert fit.held_out_max < 1e-3


def test_a_disturbed_size_shows_in_the_residual_and_moves_nothing():
    disturbed = times(1e-5, 1e10)
    disturbed[2**20] *= 3
    fit = fit_link(disturbed)
    assert fit.latency_s == pytest.approx(1e-5, rel=1e-6)
    assert fit.bytes_per_s == pytest.approx(1e10, rel=1e-6)
    assert fit.residual_max == pytest.approx(2 / 3)
    assert fit.residual_median < 1e-9


def test_no_latency_is_below_zero():
    fit = fit_link({1000: 1e-6, 2000: 3e-6})
    assert fit.latency_s == 0
    assert fit.held_out_median is None


@pytest.mark.parametrize("bad", [{}, {1024: 1e-6}, {1024: 1e-6, 2048: 0.0}])
def test_a_line_needs_two_points(bad):
    with pytest.raises(ValueError, match="two sizes"):
        fit_link(bad)
