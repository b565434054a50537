"""Contracts as functions, for the tests of every implementation.

What every home, scratch and device promises is a tuple of checks. Each takes a factory that makes a fresh object and
raises AssertionError where a promise is broken. In a test::

    @pytest.mark.parametrize("check", HOME_CONTRACT)
    def test_home(check):
        check(lambda model: MyHome(model, planes_for(model.dtype)))

For codecs and groups of ranks the checks are methods of a class to subclass, `CodecContract` and `GroupContract`.
`in_ranks` runs the ranks of a group as threads of one process.
"""

from contracts.device_contract import (
    DEVICE_CONTRACT,
    CodecContract,
    MakeDevice,
    pattern,
    raises,
    same_values,
    small_model,
)
from contracts.group_contract import GroupContract, ThreadGroup, ThreadWorld, in_ranks
from contracts.home_contract import HOME_CONTRACT, SCRATCH_CONTRACT, MakeHome, MakeScratch

__all__ = [
    "DEVICE_CONTRACT",
    "HOME_CONTRACT",
    "SCRATCH_CONTRACT",
    "CodecContract",
    "GroupContract",
    "MakeDevice",
    "MakeHome",
    "MakeScratch",
    "ThreadGroup",
    "ThreadWorld",
    "in_ranks",
    "pattern",
    "raises",
    "same_values",
    "small_model",
]
