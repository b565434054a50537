"""Plans of several workers: they fit, obey the rules, and set aside what their programs use."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.model.sizes.model_spec import ModelSpec, pack_unit
from outsize.planner.memory.memory_table import Demand
from outsize.planner.passes.slots import validate
from outsize.planner.passes.step_parts import build_step
from outsize.planner.program.program import Kind
from outsize.planner.program.stages import Choice, Extent, Stages, cursor_after, spans_down, spans_up
from outsize.planner.search.offload_balance import UnitRates
from outsize.planner.search.plan_stages import plan_stages
from outsize.planner.search.stage_memory import num_handed_over
from outsize.planner.search.stage_pipeline import clock_of
from outsize.planner.search.step_plan import Budgets, PlanOptions
from outsize.planner.simulate.costs import UnitTimes
from outsize.planner.simulate.discrete import Cost
from outsize.planner.simulate.simulator import CostModel, simulate
from planner.held_bytes import held_bytes
from planner.layouts import staged_layouts

HOST = PlanOptions(home="host", below="host", microbatches=4)
ROOMY = Budgets(device=2**40)


def model(num_blocks: int = 4, *, tied: bool = False, frozen: int = 0) -> ModelSpec:
    """A table, blocks, a head and a rest; the first ``frozen`` units do not train."""

    def unit(index, kind, size):
        rows = [] if size == 0 else [("w", (size,), index >= frozen, True)]
        return pack_unit(index, f"{kind}{index}", kind, rows)

    table = 0 if tied else 20_000
    units = [unit(0, "embedding", table)]
    units += [unit(1 + i, "block", 9_000) for i in range(num_blocks)]
    units += [unit(1 + num_blocks, "head", table), unit(2 + num_blocks, "rest", 20_000 if tied else 100)]
    return ModelSpec(units=tuple(units), dtype="fp32")


def demand(spec: ModelSpec) -> Demand:
    blocks = spec.num_streamed - 2
    return Demand(
        boundary_bytes=(0, *[4096] * (spec.num_streamed - 1)),
        saved_bytes=(0, *[25_000] * blocks, 0),
        recompute_s=(0.0, *[1.0] * blocks, 1.0),
        selected_bytes={
            Extent.ATTENTION: (0, *[2_000] * blocks, 0),
            Extent.PRODUCTS: (0, *[9_000] * blocks, 0),
        },
        selected_s={
            Extent.ATTENTION: (0.0, *[0.6] * blocks, 0.0),
            Extent.PRODUCTS: (0.0, *[0.9] * blocks, 0.0),
        },
        forward_workspace_bytes={"block": 10_000},
        backward_workspace_bytes={"block": 30_000, "head": 50_000},
        shared_bytes=1000,
    )


def plan(spec: ModelSpec, num_workers: int = 2, users: tuple[int, ...] = (5,), budgets=ROOMY, options=HOST):
    """The plan of workers whose links take no time, and carry nothing unasked."""
    options = replace(options, num_workers=num_workers, rates=rates(spec, inf), leaves_unasked=False)
    return plan_stages(spec, replace(demand(spec), rest_users=frozenset(users)), budgets, options)


@settings(max_examples=40)
@given(
    num_blocks=st.integers(1, 6),
    num_workers=st.integers(1, 4),
    microbatches=st.integers(1, 8),
    tied=st.booleans(),
    clip=st.booleans(),
    share=st.floats(0.0, 1.0),
    activations=st.sampled_from(["auto", "recompute", "offload-attention", "offload-products"]),
)
def test_plans_fit_obey_the_rules_and_set_aside_what_is_used(
    num_blocks, num_workers, microbatches, tied, clip, share, activations
):
    spec = model(num_blocks, tied=tied)
    last = spec.num_streamed - 1
    users = (0, 1, last) if tied else (last,)
    options = replace(HOST, microbatches=microbatches, clip=clip, activations=activations)
    least, most = (
        plan(spec, num_workers, users, budgets, options).total_bytes("device")
        for budgets in (_least(spec, num_workers, users, options), ROOMY)
    )
    budget = int(least + share * (most - least))
    found = plan(spec, num_workers, users, Budgets(device=budget), options)
    assert found.total_bytes("device") <= budget
    costs = CostModel(cost_of=lambda op: Cost(seconds=1.0), capacity={})
    layout = found.layout
    boundary, kept = demand(spec).boundary_bytes, demand(spec).kept_bytes
    for program in found.programs:
        validate(program, layout)
    if layout.keeps_any:  # at the turn it is part of the workspace
        kept = {extent: _below_the_turn(layout, sizes) for extent, sizes in kept.items()}
    peak, _ = held_bytes(simulate(found.programs, layout, costs), layout, boundary, kept)
    memory = found.memory["device"]
    classes = ("weight slots", "gradient accumulators", "resident", "activations")
    places = sum(memory.get(name, 0) for name in classes)
    for worker in range(num_workers):
        assert peak.get(f"device:w{worker}", 0) <= places
    below = found.memory["host"].get("saved activations", 0) + found.memory["host"].get(
        "offloaded activations", 0
    )
    assert peak.get("host", 0) <= below
    assert layout.any_leaves == bool(found.offload_rooms)
    assert not activations.startswith("offload") or layout.any_leaves == any(
        1 <= unit < last for unit in layout.leavable
    )
    if tied:
        assert layout.num_rounds == 1 or budget < most
        assert all(len(set(users) & set(range(*span))) <= 1 for span in layout.stages.backward)
        later = [span for span in layout.stages.backward[1:] if set(users) & set(range(*span))]
        assert all(
            end - first == 1 for first, end in later
        )  # nothing else waits for the sum of the one before


def _below_the_turn(layout, sizes):
    return tuple(size * (unit in layout.leavable) for unit, size in enumerate(sizes))


def _least(spec, num_workers, users, options) -> Budgets:
    with pytest.raises(InfeasiblePlanError) as raised:
        plan(spec, num_workers, users, Budgets(device=1), options)
    return Budgets(device=1 + raised.value.short_by["device"])


def test_one_byte_less_than_the_least_does_not_fit():
    least = _least(model(), 2, (5,), HOST).device
    assert plan(model(), budgets=Budgets(device=least)).total_bytes("device") == least
    with pytest.raises(InfeasiblePlanError, match="on each device") as raised:
        plan(model(), budgets=Budgets(device=least - 1))
    assert raised.value.short_by == {"device": 1}


@pytest.mark.parametrize("activations", ["recompute", "offload-attention"])
@pytest.mark.parametrize(("num_workers", "in_a_round"), [(1, 1), (2, 4), (3, 2)])
def test_the_search_counts_what_the_program_moves(num_workers, in_a_round, activations):
    """But for the rest, whose weights each worker has for itself, and whose gradient is that of one unit."""
    options = replace(HOST, round_microbatches=in_a_round, activations=activations, num_workers=num_workers)
    spec = model(6)
    options = replace(options, rates=rates(spec, inf), leaves_unasked=False)
    needed = replace(demand(spec), rest_users=frozenset({7}))
    found = plan_stages(spec, needed, ROOMY, options)
    stages = found.layout.stages
    clock = clock_of(spec, needed, options, found)
    _, up, down = clock.traffic.up_and_down(
        len(stages.forward), stages.backward[0][0], len(stages.backward), 4, stages.round_size
    )
    rest, rounds = spec.units[-1].gradient_bytes, found.layout.num_rounds
    assert up + (num_workers + rounds - 1) * rest == found.traffic.up
    assert down + rounds * rest == found.traffic.down


def test_programs_take_turns_until_the_first_worker_begins_again():
    found = plan(model(), 3)
    cursor, first = 0, found.layout.stages
    for program in found.programs:
        compute = next(op for op in program if op.microbatch is not None)
        assert compute.worker == cursor
        cursor = cursor_after(replace(first, cursor=cursor), 4, 3)
    assert cursor == 0


def test_room_below_is_counted_by_what_is_handed_over():
    found = plan(model(), 2)
    assert num_handed_over(found.layout) * 4096 == found.memory["host"]["saved activations"]


@given(staged_layouts())
def test_what_is_handed_over_is_counted_without_making_the_program(layout):
    """All inputs, and of each microbatch one gradient: it has been received when the next one is sent."""
    ops = [op for op in build_step(layout) if op.microbatch in range(layout.microbatches_at_once)]
    sending = {op.microbatch for op in ops if op.kind is Kind.SEND}
    leaving = sum(op.kind is Kind.SAVE for op in ops) + len(sending)
    same = layout.peers in (
        frozenset(),
        layout.neighbours,
    )  # otherwise it is another number from step to step
    assert num_handed_over(layout) >= leaving
    assert not same or num_handed_over(layout) == leaving


def test_where_two_rounds_have_no_room_one_fills_the_workers_by_itself():
    """And where not even that has, it has fewer microbatches than there are workers."""
    options = replace(HOST, microbatches=16)
    roomy = plan(model(), 4, options=options)
    assert roomy.layout.stages.overlaps
    home = roomy.total_bytes("host") - roomy.memory["host"]["saved activations"]
    of_one = num_handed_over(replace(roomy.layout, num_microbatches=1)) * 4096
    times = []
    for count in (12, 5, 2):
        found = plan(model(), 4, budgets=replace(ROOMY, host=home + count * of_one), options=options)
        stages = found.layout.stages
        assert found.layout.microbatches_at_once <= count
        assert (stages.round_size < 4) == (count < 4)
        assert not stages.overlaps or 2 * stages.round_size <= count
        times.append(found.layout.microbatches_at_once)
    assert times[1] > 3


@pytest.mark.parametrize(("frozen", "most"), [(0, 11), (3, 8), (5, 6)])
def test_more_workers_than_stages(frozen, most):
    spec = model(frozen=frozen)
    spec = ModelSpec(units=spec.units[:-1], dtype="fp32")
    assert plan(spec, most, ()).layout.num_workers == most
    with pytest.raises(ConfigError, match=f"at most {most} stages; use at most {most} devices"):
        plan(spec, most + 1, ())


DISK = replace(HOST, home="disk")


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_home_on_disk_reads_and_writes_whole_units_through_host_buffers(num_workers, clip):
    found = plan(model(), num_workers, options=replace(DISK, clip=clip))
    for program in found.programs:
        validate(program, found.layout)
        assert program.ops[-1].kind is Kind.COMMIT
    layout = found.layout
    assert (layout.num_host_buffers, layout.stages.round_size) == (2 * num_workers, 4)
    assert found.memory["disk"]["home"] > found.memory["host"]["host buffers"] > 0
    gradients = sum(layout.gradient_bytes)
    assert found.traffic.disk_written >= gradients
    assert found.traffic.disk_read >= 2 * sum(layout.weight_bytes[1:-2])


def test_a_home_on_disk_takes_no_more_host_memory_than_there_is():
    roomy = plan(model(), 3, options=DISK)
    budget = roomy.total_bytes("host") - 1
    tight = plan(model(), 3, options=DISK, budgets=Budgets(device=2**40, host=budget))
    assert tight.layout.num_host_buffers == 2
    assert tight.total_bytes("host") <= budget
    with pytest.raises(InfeasiblePlanError, match="on the host"):
        plan(model(), 3, options=DISK, budgets=Budgets(device=2**40, host=1000))
    with pytest.raises(InfeasiblePlanError, match="first try a disk budget of"):
        plan(model(), 3, options=DISK, budgets=Budgets(device=2**40, disk=1000))


def test_the_faster_of_keeping_and_recomputing_at_the_turn_is_taken():
    """Keeping takes the workspace of all units of the stage that turns around."""
    spec = model()
    found = {kind: plan(spec, 1, options=replace(HOST, activations=kind)) for kind in ("auto", "recompute")}
    assert any(found["auto"].layout.kept)
    assert not found["recompute"].layout.kept
    for program in found["auto"].programs:
        validate(program, found["auto"].layout)


def rates(spec: ModelSpec, link: float = 1e6) -> UnitRates:
    """Units of a second forward and two backward beside the recompute, over links of a megabyte per second."""
    count, asked = spec.num_streamed, demand(spec)
    times = UnitTimes(
        forward_s=(1.0,) * count,
        backward_s=tuple(2.0 + seconds for seconds in asked.recompute_s),
        recompute_s=asked.recompute_s,
        spared_s={extent: tuple(seconds) for extent, seconds in asked.selected_s.items()},
    )
    return UnitRates(times=times, up_bytes_per_s=link, down_bytes_per_s=link)


def cut_plan(attention: int = 2_000, products: int = 9_000, budgets: Budgets = ROOMY):
    """The plan of stages that are given, two workers and units whose forwards keep so many bytes."""
    spec = model(8)
    stages = Stages(forward=spans_up([3, 3, 2]), backward=spans_down([2, 2, 2, 2, 2], 10), round_size=2)
    sizes = {Extent.ATTENTION: (0, *[attention] * 8, 0), Extent.PRODUCTS: (0, *[products] * 8, 0)}
    asked = replace(demand(spec), selected_bytes=sizes, rest_users=frozenset({9}))
    options = replace(HOST, rates=rates(spec), num_workers=2, stages=stages)
    return plan_stages(spec, asked, budgets, options)


@pytest.mark.parametrize(
    ("attention", "products", "leaving"),
    [
        (2_000, 9_000, {Choice.OFFLOAD_PRODUCTS}),
        (2_000, 1_100_000, {Choice.OFFLOAD_ATTENTION}),
        (1_050_000, 1_100_000, set()),
    ],
)
def test_what_the_link_carries_while_units_compute_leaves_unasked(attention, products, leaving):
    """A forward is a second, in which a million bytes go down; the units that turn around keep theirs."""
    layout = cut_plan(attention, products).layout
    choices = {unit: layout.choice(unit, 0) for unit in layout.leavable}
    assert {choice for choice in choices.values() if choice.leaves} == leaving
    assert {unit for unit, choice in choices.items() if choice.leaves} == set(range(1, 8) if leaving else ())
    assert layout.choice(8, 0) is Choice.KEEP


def test_no_more_leaves_unasked_than_host_memory_has_room_for():
    def leaving(host_bytes: int):
        found = cut_plan(budgets=Budgets(device=2**40, host=host_bytes))
        assert found.total_bytes("host") <= host_bytes
        assert found.layout.stages == roomy.layout.stages
        return sum(count for count, _ in found.offload_rooms.values())

    roomy = cut_plan()
    needed, parts = roomy.total_bytes("host"), roomy.memory["host"]["offloaded activations"]
    assert parts >= 7 * 4 * 9_000
    assert leaving(2 * needed) == 7 * 4
    assert 0 < leaving(needed - parts // 8) < 7 * 4
    assert leaving(needed - 3 * parts // 4) == 0  # what has room gains less than 3 %


def test_a_graph_does_not_leave_the_worker_that_made_it():
    with pytest.raises(ConfigError, match="stays with the worker that made it; use offload-products"):
        plan(model(), options=replace(HOST, activations="offload"))


def test_what_is_asked_for_and_has_no_room_is_refused():
    options = replace(HOST, activations="offload-products")
    roomy = plan(model(), options=options)
    with pytest.raises(InfeasiblePlanError, match="first try") as raised:
        plan(model(), options=options, budgets=Budgets(device=2**40, host=roomy.total_bytes("host") // 8))
    assert raised.value.short_by["host"] > 0
