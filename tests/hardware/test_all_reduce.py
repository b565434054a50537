import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.hardware.link_fit import crossing_bytes, summarize

LATENCY_S, BUS = 40e-6, 5e9


def rates(num_ranks=4):
    samples = {
        2**power: (LATENCY_S + crossing_bytes(2**power, num_ranks) / BUS,) * 3 for power in range(10, 26)
    }
    return summarize(samples, backend="gloo", num_ranks=num_ranks, note="by the test")


def test_bus_bandwidth_is_that_of_nccl_tests():
    """Its PERFORMANCE.md: busbw = algbw * 2 (n - 1) / n."""
    assert crossing_bytes(8 * 10**9, 8) == 14e9
    (largest,) = rates().points[-1:]
    algorithm = largest.num_bytes / largest.seconds.median
    assert largest.bus_bytes_per_s.median == pytest.approx(algorithm * 1.5)
    assert largest.bus_bytes_per_s.median == pytest.approx(BUS, rel=0.01)


def test_the_estimator_finds_latency_and_bandwidth_again():
    found = rates()
    assert found.fit.held_out_median == pytest.approx(0, abs=1e-6)
    assert found.seconds(3 * 10**6) == pytest.approx(LATENCY_S + 4.5e6 / BUS, rel=1e-3)
    # Eight ranks send 14 messages one after the other, four send 6.
    assert found.seconds(0, 8) == pytest.approx(LATENCY_S * 7 / 3, rel=1e-3)


@given(num_bytes=st.integers(1, 2**40), num_ranks=st.integers(2, 4096))
def test_a_link_carries_between_once_and_twice_the_bytes(num_bytes, num_ranks):
    assert num_bytes <= crossing_bytes(num_bytes, num_ranks) < 2 * num_bytes


def test_one_rank_has_nothing_to_exchange():
    with pytest.raises(ValueError, match="needs two"):
        crossing_bytes(1, 1)
    nothing = summarize({}, backend="nccl", num_ranks=2, note="no NCCL here")
    with pytest.raises(ValueError, match="no NCCL here"):
        nothing.seconds(1024)
