import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import InfeasiblePlanError
from outsize.model.sizes.model_spec import ModelSpec, pack_unit
from outsize.optim.optimizer_spec import StateLayout
from outsize.optim.shares import commit_record_bytes
from outsize.planner.memory.memory_table import COMMIT_COPIES
from outsize.planner.passes.slots import MemoryLimits, validate
from outsize.planner.program.program import Kind
from outsize.planner.search.step_plan import Budgets, Demand, PlanOptions, plan_step

MiB = 2**20
BLOCK, EMBEDDING, REST = 256 * 1024, 1024 * 1024, 2048


def make_model(num_blocks=6, dtype="fp32", rest=True, frozen=()):
    numels = [EMBEDDING, *[BLOCK] * num_blocks, EMBEDDING]
    kinds = ["embedding", *["block"] * num_blocks, "head"]
    units = [
        pack_unit(i, f"unit{i}", kind, [("w", (numel,), i not in frozen, True)])
        for i, (kind, numel) in enumerate(zip(kinds, numels, strict=True))
    ]
    if rest:
        units.append(pack_unit(len(units), "rest", "rest", [("norm", (REST,), True, False)]))
    return ModelSpec(units=tuple(units), dtype=dtype)


def make_demand(model, boundary=MiB // 4, **changes):
    fields = {
        "boundary_bytes": (4096,) + (boundary,) * (model.num_streamed - 1),
        "forward_workspace_bytes": {"block": MiB, "head": 2 * MiB},
        "backward_workspace_bytes": {"block": 3 * MiB, "head": MiB},
        "shared_bytes": 10_000,
        "fixed_bytes": 1_000,
    }
    return Demand(**{**fields, **changes})


HOST = PlanOptions(home="host", below="host", microbatches=2)
DISK = PlanOptions(home="disk", below="disk", microbatches=2)
STAGED = PlanOptions(home="disk", below="host", microbatches=2)
ALL = pytest.mark.parametrize("options", [HOST, DISK, STAGED], ids=["host", "disk", "staged"])


def make_plan(options, device=64 * MiB, model=None, disk=None, **demand):
    model = model or make_model()
    return plan_step(model, make_demand(model, **demand), Budgets(device=device, disk=disk), options)


def check(plan, demand):
    limits = MemoryLimits(
        boundary_bytes=demand.boundary_bytes,
        below=plan.below,
        static_bytes={
            tier: sum(size for name, size in classes.items() if "activations" not in name)
            for tier, classes in plan.memory.items()
        },
        budget_bytes={tier: plan.total_bytes(tier) for tier in plan.memory},
    )
    validate(plan.program, plan.layout, limits)


@ALL
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_program_of_a_plan_validates_within_the_memory_of_the_plan(options, clip, dtype):
    model = make_model(dtype=dtype)
    demand = make_demand(model)
    plan = plan_step(model, demand, Budgets(device=32 * MiB), replace(options, clip=clip))
    assert plan.total_bytes("device") <= 32 * MiB
    check(plan, demand)


@ALL
@settings(max_examples=20)
@given(data=st.data())
def test_any_budget_gives_a_plan_within_it_or_says_by_how_much_it_is_short(options, data):
    device = data.draw(st.integers(1, 64 * MiB))
    short_by = {}
    try:
        plan = make_plan(options, device=device)
    except InfeasiblePlanError as error:
        short_by = error.short_by
        plan = make_plan(options, device=device + short_by["device"])
    assert plan.total_bytes("device") <= device + short_by.get("device", 0)
    if short_by:  # exactly: with one byte less there is no plan
        assert list(short_by) == ["device"]
        assert plan.total_bytes("device") == device + short_by["device"]


@ALL
def test_memory_to_spare_is_spent_in_the_order_of_use(options):
    seen = []
    for device in range(10 * MiB, 96 * MiB, MiB // 2):
        try:
            plan = make_plan(options, device=device)
        except InfeasiblePlanError:
            continue
        layout = plan.layout
        seen.append((len(layout.slot_bytes), len(layout.accumulator_bytes), -len(layout.offload)))
    assert seen[0] == (1, 1, -6)
    assert seen[-1] == (4, 2, 0)
    firsts = list(dict.fromkeys(slots_and_sums[:2] for slots_and_sums in seen))
    assert [x for x in firsts if x[1] == 1] == [(1, 1), (2, 1)]
    assert firsts[-1] == (4, 2)


def test_tiles_grow_to_a_million_elements_where_memory_allows():
    assert make_plan(DISK, device=21 * MiB).tile_elements == 65_536
    assert make_plan(DISK, device=512 * MiB).tile_elements == 1_048_576
    small = make_plan(DISK, model=make_model(num_blocks=1, frozen=(0, 2)))
    assert small.tile_elements == BLOCK


def test_what_the_user_decides_is_kept():
    options = replace(DISK, slots=3, prefetch=1, tile_elements=4096, offload=False)
    layout = make_plan(options).layout
    assert layout.slot_bytes == (4 * EMBEDDING, 4 * BLOCK, 4 * BLOCK)
    assert layout.prefetch_depth == 1
    assert layout.offload == frozenset()
    assert layout.tiles == (256, *[64] * 6, 256, 1)
    assert make_plan(replace(HOST, offload=True), device=512 * MiB).layout.offload == frozenset(range(1, 7))


def test_the_table_names_every_byte():
    plan = make_plan(replace(DISK, slots=2, tile_elements=65_536, offload=True), device=20 * MiB)
    assert plan.memory["device"] == {
        "weight slots": 4 * (EMBEDDING + BLOCK),
        "gradient accumulators": 4 * EMBEDDING + 4 * BLOCK * (len(plan.layout.accumulator_bytes) - 1),
        "resident": 8 * REST,
        "activations": plan.memory["device"]["activations"],
        "workspace": 3 * MiB,
        "shared": 2 * 10_000,
        "fixed": 1_000,
        "optimizer tiles": 3 * 65_536 * 16,
        "checkpoint buffer": 2**20,
        "commits": COMMIT_COPIES * commit_record_bytes(make_model(), 65_536),
    }
    assert plan.memory["host"] == {}
    assert plan.memory["disk"] == {
        "saved activations": 6 * 2 * MiB // 4,
        "home": 28 * (2 * EMBEDDING + 6 * BLOCK + REST) + 2 * commit_record_bytes(make_model()),
    }
    in_place = make_plan(
        replace(DISK, slots=2, tile_elements=65_536, offload=True, commits=False), device=20 * MiB
    )
    assert in_place.memory["disk"]["home"] == 16 * (2 * EMBEDDING + 6 * BLOCK + REST)
    assert "commits" not in in_place.memory["device"]


def test_a_home_on_disk_commits_every_step_unless_asked_not_to():
    kinds = [op.kind for op in make_plan(DISK).program]
    assert kinds.count(Kind.COMMIT) == 1
    assert kinds[-1] is Kind.COMMIT
    for options in (replace(DISK, commits=False), HOST):
        assert Kind.COMMIT not in {op.kind for op in make_plan(options).program}


def test_a_disk_too_small_for_two_sides_is_told_of_one():
    options = replace(DISK, offload=False)
    needed = make_plan(options).memory["disk"]["home"]
    with pytest.raises(InfeasiblePlanError, match=r"memory\.commits=none, which needs about half") as caught:
        make_plan(options, disk=needed - 1)
    assert caught.value.short_by == {"disk": 1}
    assert make_plan(replace(options, commits=False), disk=needed - 1)
    with pytest.raises(InfeasiblePlanError, match=r"disk budget of [^,]* \(short") as caught:
        make_plan(options, disk=needed // 3)  # without commits it would not fit either


def test_tiles_and_buffers_lie_in_host_memory_where_the_device_has_its_own():
    plan = make_plan(replace(STAGED, tile_elements=65_536), model=make_model(dtype="bf16"))
    assert plan.tile_buffer_bytes == 65_536 * 18
    assert plan.memory["host"]["optimizer tiles"] == 3 * 65_536 * 18
    assert plan.memory["host"]["host buffers"] == plan.layout.num_host_buffers * 4 * EMBEDDING
    assert "optimizer tiles" not in plan.memory["device"]


def test_frozen_units_have_no_state_and_no_gradient():
    model = make_model(frozen=(0, 1), rest=False)
    plan = plan_step(model, make_demand(model), Budgets(device=64 * MiB), replace(DISK, offload=False))
    trained = 5 * BLOCK + EMBEDDING
    assert plan.memory["disk"]["home"] == 28 * trained + 4 * (EMBEDDING + BLOCK) + 2 * commit_record_bytes(
        model
    )
    assert plan.traffic.disk_written == (4 + 12) * trained
    assert {op.unit for op in plan.program if op.kind is Kind.STEP} == set(range(2, 8))


@pytest.mark.parametrize(("dtype", "read", "written"), [("fp32", 16, 12), ("bf16", 16, 14)])
def test_disk_traffic_of_a_step_is_the_arithmetic_of_the_model(dtype, read, written):
    model = make_model(dtype=dtype)
    options = replace(DISK, offload=False, slots=2)
    plan = plan_step(model, make_demand(model), Budgets(device=128 * MiB), options)
    elements = sum(unit.numel for unit in model.units)
    weight = 4 if dtype == "fp32" else 2
    # Twice up, but for the rest and the head (once), and the unit that stays in its slot over the turn.
    up = weight * (2 * elements - REST - EMBEDDING - BLOCK)
    assert plan.traffic.up == up
    assert plan.traffic.down == 4 * elements
    assert plan.traffic.disk_read == up + read * elements
    assert plan.traffic.disk_written == 4 * elements + written * elements


def test_saved_activations_cross_the_link_both_ways():
    options = replace(HOST, offload=True, slots=2)
    kept = make_plan(replace(options, offload=False)).traffic
    saved = make_plan(options).traffic
    crossing = 6 * 2 * MiB // 4
    assert (saved.up - kept.up, saved.down - kept.down) == (crossing, crossing)
    assert (saved.disk_read, saved.disk_written) == (0, 0)


def test_staged_units_pass_the_disk_and_the_link():
    plan = make_plan(replace(STAGED, offload=False))
    elements = sum(unit.numel for unit in make_model().units)
    assert plan.traffic.disk_read == plan.traffic.up + 16 * elements
    assert plan.traffic.disk_written == plan.traffic.down + 12 * elements


@pytest.mark.parametrize(
    ("budgets", "options", "demand", "message"),
    [
        ({"device": MiB}, HOST, {}, "first try a device budget of"),
        (
            {"device": 32 * MiB},
            HOST,
            {"boundary": 64 * MiB},
            "first try more microbatches than 2, or shorter",
        ),
        # All that fewer tokens could free is less than what is lacking.
        ({"device": MiB}, HOST, {"boundary": 64 * MiB}, "first try a device budget of 331"),
        # A home on disk would not fit either.
        ({"device": 64 * MiB, "host": MiB, "disk": MiB}, HOST, {}, "first try a host budget of"),
        ({"device": 64 * MiB, "host": MiB}, HOST, {}, "first try the home on disk"),
        ({"device": 64 * MiB, "disk": MiB}, DISK, {}, "first try a disk budget of"),
        ({"device": 64 * MiB, "host": MiB}, STAGED, {}, "first try a host budget of"),
    ],
)
def test_what_cannot_be_says_what_to_try_first(budgets, options, demand, message):
    model = make_model()
    with pytest.raises(InfeasiblePlanError, match=message) as caught:
        plan_step(model, make_demand(model, **demand), Budgets(**budgets), options)
    assert min(caught.value.short_by.values()) > 0


def test_a_plan_is_json():
    plan = make_plan(STAGED)
    read = json.loads(json.dumps(plan.to_dict()))
    assert read["program"][0] == str(plan.program.ops[0])
    assert read["memory_bytes"]["device"]["fixed"] == 1_000
    assert read["slot_bytes"] == list(plan.layout.slot_bytes)


def test_the_table_as_text_shows_tiers_classes_and_traffic():
    text = make_plan(DISK).table
    assert "device" in text
    assert "  optimizer tiles" in text
    assert "  disk_written" in text
    assert "64.00 MiB" in text


@pytest.mark.parametrize(
    "options", [HOST, DISK, replace(DISK, commits=False)], ids=["host", "commits", "disk"]
)
def test_the_home_is_told_by_what_it_is_made_of(options):
    """A home that commits has two commit records besides its planes."""
    plan = make_plan(options)
    besides = plan.memory[plan.home]["home"] - sum(plan.home_parts.values())
    assert (besides > 0) == plan.layout.commits
    assert plan.home_parts["optimizer state"] == 2 * plan.home_parts["gradients"] * (1 + plan.layout.commits)
    assert "\n    optimizer state" in plan.table


def test_gradients_in_a_ring_spare_the_disk_eight_bytes_per_parameter():
    ring = replace(DISK, clip=False, state=StateLayout(dtype="fp32", gradients="none"))
    waiting, passing = make_plan(replace(DISK, clip=False)).traffic, make_plan(ring).traffic
    elements = sum(unit.numel for unit in make_model().units if unit.trainable)
    assert waiting.disk_read - passing.disk_read == 4 * elements
    assert waiting.disk_written - passing.disk_written == 4 * elements
    assert waiting.down == passing.down


def test_a_home_in_host_memory_cannot_lie_behind_the_disk():
    with pytest.raises(ValueError, match="disk cannot lie"):
        PlanOptions(home="host", below="disk")


def test_a_model_of_one_unit_is_planned():
    model = ModelSpec(units=(pack_unit(0, "all", "block", [("w", (2048,), True, True)]),), dtype="fp32")
    plan = plan_step(model, Demand(boundary_bytes=(0,)), Budgets(device=MiB), HOST)
    assert [str(op) for op in plan.program][-1] == "STEP 0"


def test_a_large_model_is_planned_in_little_memory():
    blocks = [("w", (800_000_000 // 80,), True, True)]
    units = [pack_unit(i, f"{i}", "block", blocks) for i in range(80)]
    model = ModelSpec(units=tuple(units), dtype="bf16")
    demand = Demand(boundary_bytes=(0,) + (MiB,) * 79)
    plan = plan_step(model, demand, Budgets(device=2**30), replace(STAGED, microbatches=8))
    check(plan, demand)
