from dataclasses import replace

import pytest

from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.hardware.presets import parse_gpus
from outsize.planner.microbatches import FULL_TOKENS, PER_GPU
from outsize.planner.plan import Budgets
from outsize.planner.search import fastest, missing_host_bytes
from planner.questions import GIB, ask


def test_the_home_goes_to_disk_where_memory_is_short():
    tight = Budgets(device=20 * GIB, host=6 * GIB, disk=1000 * GIB)
    found = fastest(ask(budgets=tight))
    assert found.home == "disk"
    assert "optimizer state" in found.memory["disk"]
    missing = missing_host_bytes(ask(budgets=tight), found.microbatches)
    enough = replace(tight, host=tight.host + missing)
    assert fastest(ask(budgets=enough, microbatches=found.microbatches)).home == "host"
    assert missing_host_bytes(ask(budgets=enough), found.microbatches) == 0


def test_a_machine_without_a_disk():
    machine = replace(parse_gpus("4090"), disk=None)
    with pytest.raises(ConfigError, match="no disk"):
        fastest(replace(ask(), machine=machine, home="disk"))
    assert fastest(replace(ask(), machine=machine)).home == "host"


def test_microbatches_are_as_large_as_memory_lets_them():
    roomy = fastest(ask(sequences=64))
    tight = fastest(ask(sequences=64, budgets=Budgets(device=3 * GIB // 2, host=100 * GIB)))
    assert roomy.sequences_per_microbatch == 16
    assert 1 <= tight.sequences_per_microbatch < 16


def test_several_gpus_get_microbatches_enough_that_fill_them():
    found = fastest(ask("2x4090", sequences=64))
    assert found.microbatches >= PER_GPU * 2
    assert found.sequences_per_microbatch * 1024 <= FULL_TOKENS
    few = fastest(ask("2x4090", sequences=2))
    assert (few.microbatches, few.sequences_per_microbatch) == (2, 1)


def test_the_failure_that_is_short_by_the_least_is_told():
    budgets = Budgets(device=GIB // 2, host=100 * GIB)
    with pytest.raises(InfeasiblePlanError) as smallest:
        fastest(ask(budgets=budgets, microbatches=16))
    with pytest.raises(InfeasiblePlanError) as searched:
        fastest(ask(budgets=budgets))
    assert searched.value.short_by == smallest.value.short_by
