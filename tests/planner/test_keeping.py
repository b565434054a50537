from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import InfeasiblePlanError
from outsize.planner.passes.slots import validate
from outsize.planner.program.program import Kind
from outsize.planner.program.stages import Choice, Extent
from outsize.planner.search.offload_balance import keep_order, kept_so_far, most_kept
from outsize.planner.search.step_plan import Budgets, Demand, plan_step
from planner.layouts import first_kept, make_layout
from planner.test_plan import HOST, check, make_demand, make_model

KiB, MiB = 2**10, 2**20


def demand(saved, seconds):
    return Demand(boundary_bytes=(0,) * len(saved), saved_bytes=saved, recompute_s=seconds)


def test_units_are_taken_by_seconds_per_byte_and_the_last_of_equals_first():
    layout = make_layout(6)
    order = keep_order(layout, demand((0, 10, 10, 5, 10, 0), (0.0, 2.0, 1.0, 1.0, 1.0, 9.0)))
    assert order == [(unit, Choice.KEEP) for unit in (0, 3, 1, 4, 2)]


def test_what_gains_nothing_is_not_kept():
    assert keep_order(make_layout(3), demand((8, 4, 0), (0.0, 1.0, 1.0))) == [(1, Choice.KEEP)]


def test_units_below_the_lowest_backward_are_not_kept():
    layout = make_layout(4, trainable=(False, False, True, True))
    assert keep_order(layout, demand((4, 4, 4, 0), (1.0,) * 4)) == [(2, Choice.KEEP)]


def test_microbatches_are_counted_unit_by_unit():
    layout = make_layout(4, num_microbatches=3)
    order = [(unit, Choice.KEEP) for unit in (2, 0, 1)]
    assert kept_so_far(layout, order, 4) == first_kept((1, 0, 3, 0), 3)
    order = keep_order(layout, demand((1, 1, 1, 0), (1.0,) * 4))
    assert most_kept(layout, order, lambda kept: num_kept(kept) <= 4) == first_kept((0, 1, 3, 0), 3)
    assert most_kept(layout, order, lambda kept: not num_kept(kept)) == ()


def num_kept(kept):
    return sum(choice is not Choice.RECOMPUTE for choices in kept for choice in choices)


def test_a_unit_keeps_more_as_long_as_that_gains_and_skips_what_gains_less_per_byte():
    """Per byte, attention gains 4, products 2 and the whole 1; of the second unit products gain more than attention."""
    layout = make_layout(4)
    wanted = replace(
        demand((0, 40, 40, 0), (0.0, 44.0, 50.0, 0.0)),
        selected_bytes={Extent.ATTENTION: (0, 4, 4, 0), Extent.PRODUCTS: (0, 14, 10, 0)},
        selected_s={Extent.ATTENTION: (0.0, 16.0, 4.0, 0.0), Extent.PRODUCTS: (0.0, 36.0, 30.0, 0.0)},
    )
    assert keep_order(layout, wanted) == [
        (0, Choice.KEEP),
        (1, Choice.KEEP_ATTENTION),
        (2, Choice.KEEP_PRODUCTS),
        (1, Choice.KEEP_PRODUCTS),
        (2, Choice.KEEP),
        (1, Choice.KEEP),
    ]
    assert (1, Choice.KEEP_ATTENTION) not in keep_order(layout, replace(wanted, least_selected_s=20.0))


def kept_plan(device, activations="auto", **changes):
    model = make_model()
    # A block's workspace, 3 MiB, holds what it keeps.
    fields = {"saved_bytes": (0, *[2 * MiB] * 6, 0), "recompute_s": (0.0, *[1.0] * 7), **changes}
    wanted = make_demand(model, **fields)
    options = replace(HOST, activations=activations)
    return plan_step(model, wanted, Budgets(device=device), options), wanted


@settings(max_examples=40)
@given(st.integers(14 * MiB, 80 * MiB), st.integers(0, 3 * MiB), st.integers(0, MiB))
def test_any_budget_is_kept_and_whatever_else_has_room_comes_first(device, saved, boundary):
    try:
        plan, wanted = kept_plan(device, saved_bytes=(0, *[saved] * 6, 0))
    except InfeasiblePlanError:
        return
    check(plan, wanted)
    without, _ = kept_plan(device, "recompute")
    same = replace(plan.layout, kept=()) == without.layout
    assert same
    spare = device - plan.total_bytes("device")
    assert spare >= 0
    assert spare < saved or plan.layout.kept[1:7] == ((Choice.KEEP,) * 2,) * 6


def test_the_program_says_which_forwards_keep():
    plan, _ = kept_plan(64 * MiB)
    validate(plan.program, plan.layout)
    kept = {(op.unit, op.microbatch) for op in plan.program if op.kind is Kind.FORWARD_KEEP}
    assert kept == {(u, m) for u in range(7) for m in range(2) if plan.layout.choice(u, m) is Choice.KEEP}
    assert plan.to_dict()["activations"] == [{"keep": 2}] * 7 + [{"recompute": 2}]


def test_to_keep_everything_is_refused_where_it_has_no_room():
    plan, _ = kept_plan(64 * MiB, "keep")
    assert plan.layout.kept == first_kept((2,) * 7 + (0,), 2)
    with pytest.raises(InfeasiblePlanError, match=r"first try memory\.activations=auto") as raised:
        kept_plan(20 * MiB, "keep")
    assert raised.value.short_by["device"] > 0
    assert any(kept_plan(20 * MiB)[0].layout.kept)
    with pytest.raises(InfeasiblePlanError, match=r"first try (?!memory\.activations=auto)"):
        kept_plan(4 * MiB, "keep")  # without it there is no room either


def test_without_room_or_knowledge_all_is_recomputed():
    assert kept_plan(64 * MiB, saved_bytes=())[0].layout.kept == ()
    assert kept_plan(64 * MiB, "recompute")[0].layout.kept == ()
