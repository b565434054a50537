"""Which settings are named where a home does not fit, those that lose nothing first."""

import pytest

from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.search.microbatch_search import smaller_microbatches, smaller_states
from outsize.planner.search.sizing import PlanOptions


@pytest.mark.parametrize(
    ("state", "settings"),
    [
        (
            {"dtype": "bf16"},
            [
                "optimizer.masters=split",
                "optimizer.masters=split and optimizer.clip=unit",
                "optimizer.state=int8 and optimizer.masters=split",
                "optimizer.state=int8, optimizer.masters=split and optimizer.clip=unit",
                "optimizer.state=int8, optimizer.masters=split24 and optimizer.clip=unit",
            ],
        ),
        (
            {"dtype": "bf16", "masters": "split"},
            [
                "optimizer.clip=unit",
                "optimizer.state=int8",
                "optimizer.state=int8 and optimizer.clip=unit",
                "optimizer.state=int8, optimizer.masters=split24 and optimizer.clip=unit",
            ],
        ),
        (
            {"dtype": "fp32"},
            ["optimizer.clip=unit", "optimizer.state=int8", "optimizer.state=int8 and optimizer.clip=unit"],
        ),
        (
            {"dtype": "bf16", "masters": "split", "num_moments": 0},
            ["optimizer.clip=unit", "optimizer.masters=split24 and optimizer.clip=unit"],
        ),
        (
            {"dtype": "bf16", "masters": "split", "gradients": "none", "moments": "int8"},
            ["optimizer.masters=split24"],
        ),
        ({"dtype": "bf16", "masters": "split24", "gradients": "none", "moments": "int8"}, []),
    ],
)
def test_settings_that_lose_nothing_come_first_and_each_takes_less(state, settings):
    layout = StateLayout(**state)
    options = PlanOptions(home="host", below="host", clip=layout.gradients != "none", state=layout)
    found = list(smaller_states(options, layout))
    assert [keys for keys, _ in found] == settings
    sizes = [layout.bytes_per_parameter, *(other.state.bytes_per_parameter for _, other in found)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize(
    ("known", "kind", "advice"),
    [
        ({}, None, "more microbatches than 4, or shorter sequences"),
        ({"most_microbatches": 8}, None, "more microbatches than 4"),
        ({"most_microbatches": 8}, "head", "more microbatches than 4, or a smaller train.head_chunk_tokens"),
        ({"most_microbatches": 4, "can_part": True}, "block", "train.mlp_parts=4, or shorter sequences"),
        ({"most_microbatches": 4}, "block", "shorter sequences"),
        ({"most_microbatches": 4, "can_part": True}, "embedding", "shorter sequences"),
    ],
)
def test_only_what_can_be_done_and_would_help_is_advised(known, kind, advice):
    options = PlanOptions(home="host", below="host", microbatches=4, **known)
    assert smaller_microbatches(options, kind) == advice
