import pytest
from hypothesis import given, settings
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


def in_regimes(size):
    """One thread copies what is small, two what is larger, and what no cache holds goes at the rate of memory."""
    if size <= 2**17:
        return 2e-6 + size / 8e9
    if size <= 2**22:
        return 2e-6 + 2**17 / 8e9 + (size - 2**17) / 16e9
    return in_regimes(2**22) + (size - 2**22) / 9e9


SEEN, UNSEEN = SIZES[:18], [size * 3 // 2 for size in SIZES[:17]]


def test_regimes_are_told_apart_by_knees_near_where_they_begin():
    seen, unseen = ({size: in_regimes(size) for size in chosen} for chosen in (SEEN, UNSEEN))
    one, several = (fit_link(seen, unseen, num_pieces_max=most) for most in (1, 3))
    assert one.pieces == ()
    assert one.held_out_median > 0.05
    assert several.held_out_max < 0.01
    assert several.latency_s == pytest.approx(2e-6, rel=0.01)
    assert several.bytes_per_s == pytest.approx(9e9, rel=0.01)
    assert [piece.num_bytes for piece in several.pieces] == [2**10, 2**17, 2**22]
    for size, seconds in (seen | unseen).items():
        assert several.copy_s(size) == pytest.approx(seconds, rel=0.01)
    assert several.copy_s(1) == pytest.approx(2e-6, rel=0.01)


def test_a_jump_of_the_fixed_cost_is_found_too():
    seen = {size: (3e-6 if size < 2**18 else 2e-5) + size / 2e10 for size in SEEN}
    fit = fit_link(seen, num_pieces_max=3)
    assert 2**17 <= fit.pieces[1].num_bytes <= 2**18
    assert fit.residual_median < 0.01


@settings(max_examples=20)
@given(noise=st.lists(st.floats(0.97, 1.03), min_size=18, max_size=18))
def test_one_line_that_serves_stays_near_it_however_many_pieces_noise_would_have(noise):
    seen = {size: (5e-6 + size / 1e10) * factor for size, factor in zip(SEEN, noise, strict=True)}
    fit = fit_link(seen, num_pieces_max=3)
    for size in UNSEEN:
        assert fit.copy_s(size) == pytest.approx(5e-6 + size / 1e10, rel=0.1)


def test_one_line_that_serves_is_not_broken():
    seen = {size: (5e-6 + size / 1e10) * (1.02 if size.bit_length() % 3 else 0.98) for size in SEEN}
    assert fit_link(seen, num_pieces_max=3).pieces == ()
    assert fit_link({1024: 1e-6, 2048: 2e-6}, num_pieces_max=3).pieces == ()


@settings(max_examples=20)
@given(noise=st.lists(st.floats(0.95, 1.05), min_size=35, max_size=35))
def test_sizes_that_judge_decide_nothing(noise):
    seen, unseen = (
        {size: in_regimes(size) * factor for size, factor in zip(chosen, noise[start:], strict=False)}
        for chosen, start in ((SEEN, 0), (UNSEEN, 18))
    )
    judged, alone = fit_link(seen, unseen, num_pieces_max=3), fit_link(seen, num_pieces_max=3)
    kept = ("latency_s", "bytes_per_s", "pieces", "residual_median", "residual_max")
    assert [getattr(judged, name) for name in kept] == [getattr(alone, name) for name in kept]
    errors = [abs(judged.copy_s(size) - s) / s for size, s in unseen.items()]
    assert judged.held_out_max == pytest.approx(max(errors))
    assert judged.held_out_median < 0.1


def test_no_latency_is_below_zero():
    fit = fit_link({1000: 1e-6, 2000: 3e-6})
    assert fit.latency_s == 0
    assert fit.held_out_median is None


@pytest.mark.parametrize("bad", [{}, {1024: 1e-6}, {1024: 1e-6, 2048: 0.0}])
def test_a_line_needs_two_points(bad):
    with pytest.raises(ValueError, match="two sizes"):
        fit_link(bad)
