"""Damaged files: an error of ours, and nothing else. `bench/bench_fuzz.py` tries far more of the same."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.targets import TARGETS

EXAMPLES = 50
FEW = {"runs by commands": 12}  # each of them is a whole command


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_input_is_an_error_of_ours(name: str) -> None:
    target, strategies = TARGETS[name]
    run = settings(
        max_examples=FEW.get(name, EXAMPLES),
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )(given(st.tuples(*strategies))(lambda values: target(*values)))
    run()
