from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import InfeasiblePlanError
from outsize.planner.memory.memory_table import Demand, offload_rooms
from outsize.planner.passes.slots import MemoryLimits, validate
from outsize.planner.predict.prediction import fastest
from outsize.planner.program.program import Kind
from outsize.planner.program.stages import Choice, Extent
from outsize.planner.search.offload_balance import UnitRates, balanced, offload_order, phases
from outsize.planner.search.step_plan import Budgets, plan_step
from outsize.planner.simulate.costs import UnitTimes
from planner.layouts import first_kept, make_layout
from planner.questions import GIB, ask
from planner.test_plan import HOST, make_demand, make_model

MiB = 2**20
# A second forward, two backward and one to recompute, of which attention is 0.3 and products 0.9.
TIMES = UnitTimes(
    forward_s=(0.0, *[1.0] * 6, 1.0),
    backward_s=(0.0, *[3.0] * 6, 3.0),
    spared_s={Extent.ATTENTION: (0.0, *[0.3] * 6, 0.0), Extent.PRODUCTS: (0.0, *[0.9] * 6, 0.0)},
)
SELECTED = {
    "saved_bytes": (0, *[20 * MiB] * 6, 0),
    "recompute_s": (0.0, *[1.0] * 6, 0.0),
    "selected_bytes": {
        Extent.ATTENTION: (0, *[MiB] * 6, 0),
        Extent.PRODUCTS: (0, *[8 * MiB] * 6, 0),
    },
    "selected_s": TIMES.spared_s,
    "num_saved": (1,) * 8,
}


def rates(link_mib_per_s):
    size = link_mib_per_s * MiB
    return UnitRates(times=TIMES, up_bytes_per_s=size, down_bytes_per_s=size)


def plan(link, device=48 * MiB, host=None, **changes):
    model = make_model()
    wanted = make_demand(model, **{**SELECTED, **changes})
    options = replace(HOST, rates=rates(link))
    return plan_step(model, wanted, Budgets(device=device, host=host), options), wanted


def chosen(found):
    return Counter(choice for unit in range(1, 7) for choice in found.layout.kept[unit])


def demand():
    return Demand(boundary_bytes=(0,) * 8, **SELECTED)


def test_what_saves_most_per_byte_leaves_first_and_what_its_own_compute_does_not_hide_far_apart():
    layout = make_layout(8)
    order = offload_order(layout, demand(), rates(1000))
    attention = [(unit, Choice.OFFLOAD_ATTENTION) for unit in range(1, 7)]
    products = [(unit, Choice.OFFLOAD_PRODUCTS) for unit in range(1, 7)]
    assert order[:12] == attention + products
    slower = offload_order(layout, demand(), rates(2))
    assert slower[:6] == attention
    units = [unit for unit, choice in slower if choice is Choice.OFFLOAD_PRODUCTS]
    assert sorted(units) == [*range(1, 7)]
    assert all(abs(one - other) > 1 for one, other in pairwise(units))


def test_no_more_leaves_than_goes_over_the_link_meanwhile():
    """Six seconds forward carry 48 MiB: an input of one, and products of five units and attention of the sixth."""
    layout = make_layout(8, offload=frozenset({1}))
    wanted = replace(demand(), boundary_bytes=(0, MiB, *[0] * 6))
    kept = balanced(layout, wanted, rates(8), lambda kept: True)
    found = phases(replace(layout, kept=kept), wanted, rates(8))
    assert found.compute_bound
    assert kept[1:6] == ((Choice.OFFLOAD_PRODUCTS,),) * 5
    assert kept[6] == (Choice.OFFLOAD_ATTENTION,)
    assert found.forward_down_s == pytest.approx(42 / 8)
    none = phases(layout, wanted, rates(8))
    assert none.step_s - found.step_s == pytest.approx(5 * 0.9 + 0.3)


def test_a_fast_link_takes_everything_away_and_a_slow_one_nothing():
    assert all(choice.leaves for choice in chosen(plan(1000)[0]))
    assert chosen(plan(9)[0])[Choice.OFFLOAD_PRODUCTS] > 6
    assert Kind.OFFLOAD not in {op.kind for op in plan(0.01)[0].program}


def test_with_room_for_everything_nothing_leaves():
    assert chosen(plan(1000, device=1024 * MiB)[0]) == {Choice.KEEP: 12}


def test_where_the_host_has_no_room_less_leaves():
    """Per microbatch products take 8 MiB, and a sector for the one tensor that they are said to be."""
    plenty, _ = plan(9)
    host = plenty.total_bytes("host") - 20 * MiB
    little, wanted = plan(9, host=host)
    assert little.total_bytes("host") <= host
    assert 0 < chosen(little)[Choice.OFFLOAD_PRODUCTS] < chosen(plenty)[Choice.OFFLOAD_PRODUCTS]
    rooms = offload_rooms(little.layout, wanted)
    assert rooms[Extent.PRODUCTS] == (chosen(little)[Choice.OFFLOAD_PRODUCTS], 8 * MiB + 4096)
    room = sum(count * size for count, size in rooms.values())
    assert room == little.memory["host"]["offloaded activations"]


def test_activations_come_before_inputs_where_the_link_carries_these_for_nothing():
    """What fits is 6 MiB: products of a microbatch would gain a second, inputs that stay gain nothing."""
    slow = {"boundary": 2 * MiB}
    model = make_model()
    wanted = make_demand(model, **slow, **SELECTED)
    fast_enough = replace(HOST, rates=rates(7))
    spare = Budgets(device=44 * MiB)
    unaware = plan_step(model, wanted, spare, HOST)
    aware = plan_step(model, wanted, spare, fast_enough)
    gained = [phases(p.layout, wanted, rates(7)).step_s for p in (unaware, aware)]
    assert len(aware.layout.offload) > len(unaware.layout.offload)
    assert gained[1] < 0.97 * gained[0]


@settings(max_examples=40)
@given(
    st.integers(14 * MiB, 90 * MiB),
    st.floats(0.1, 50),
    st.integers(0, 2 * MiB),
    st.one_of(st.none(), st.integers(30 * MiB, 160 * MiB)),
)
def test_whatever_the_machine_budgets_hold_and_the_program_validates(device, link, boundary, host):
    model = make_model()
    wanted = make_demand(model, boundary=boundary, **SELECTED)
    try:
        found = plan_step(model, wanted, Budgets(device=device, host=host), replace(HOST, rates=rates(link)))
    except InfeasiblePlanError:
        return
    assert found.total_bytes("device") <= device
    assert host is None or found.total_bytes("host") <= host
    limits = MemoryLimits(
        boundary_bytes=wanted.boundary_bytes,
        below="host",
        kept_bytes=wanted.kept_bytes,
        static_bytes={
            tier: sum(size for name, size in classes.items() if "activations" not in name)
            for tier, classes in found.memory.items()
        },
        budget_bytes={tier: found.total_bytes(tier) for tier in found.memory},
    )
    validate(found.program, found.layout, limits)


LONG = {"seq_len": 31744, "sequences": 2, "budgets": Budgets(device=12 * GIB, host=400 * GIB)}


def test_a_step_of_long_sequences_gains_a_fifth_of_full_recompute():
    """Simulated: a recompute would be a third of what is computed; what is left of it is offloaded behind compute."""
    question = ask(**LONG)

    def in_full(count):
        work = question.workload_of(count)
        return replace(work, recompute_flops=work.forward_flops)

    full = fastest(replace(question, workload_of=in_full).deciding(activations="recompute"))
    found = fastest(question)
    assert full.step_s / found.step_s > 1.2
    assert found.bubble < 0.05
    assert "offloaded activations" in found.memory["host"]
    assert next(iter(found.activations)) == "offload-products"
    assert sum(found.activations.values()) == 7 * found.microbatches


def test_a_choice_may_be_forced_for_all_units():
    found = fastest(ask(activations="offload-attention", **LONG))
    ops = Counter(str(event.op).split()[0] for event in found.timeline.events)
    assert ops["FA"] == ops["OFFLOAD"] == ops["ONLOAD"] > 0
    assert ops["FP"] == ops["FK"] == 0


def test_kept_of_first_microbatches_only():
    layout = make_layout(3, num_microbatches=2, kept=first_kept((0, 1, 0), 2, Choice.OFFLOAD))
    assert layout.any_leaves
    assert [layout.choice(1, m) for m in range(2)] == [Choice.OFFLOAD, Choice.RECOMPUTE]
