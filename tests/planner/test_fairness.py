import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.planner.simulate.discrete import fair_rates


def test_alone_a_flow_gets_its_narrowest_resource():
    assert fair_rates([("link", "memory")], {"link": 25.0, "memory": 100.0}) == [25.0]


def test_equal_flows_share_alike():
    assert fair_rates([("a",), ("a",), ("a",), ("a",)], {"a": 10.0}) == [2.5] * 4


def test_what_a_slow_flow_leaves_goes_to_the_others():
    rates = fair_rates([("slow", "memory"), ("fast", "memory")], {"slow": 2, "fast": 50, "memory": 20})
    assert rates == [2, 18]


NAMES = "abcd"
flows = st.lists(st.sets(st.sampled_from(NAMES), min_size=1).map(lambda s: tuple(sorted(s))), max_size=8)
capacities = st.fixed_dictionaries({name: st.floats(0.5, 100) for name in NAMES})


@given(flows, capacities)
def test_no_flow_can_grow_without_taking_from_one_that_has_no_more(flows, capacity):
    rates = fair_rates(flows, capacity)
    used = {n: sum(r for r, f in zip(rates, flows, strict=True) if n in f) for n in capacity}
    assert all(used[name] <= capacity[name] * (1 + 1e-9) for name in capacity)
    for rate, through in zip(rates, flows, strict=True):
        assert rate > 0
        bottlenecks = [
            name
            for name in through
            if used[name] == pytest.approx(capacity[name])
            and all(r <= rate * (1 + 1e-9) for r, f in zip(rates, flows, strict=True) if name in f)
        ]
        assert bottlenecks
