from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.hardware.machine_spec import Figure
from outsize.planner.passes.slots import validate
from outsize.planner.predict.decision_search import clocked_s, planned_at
from outsize.planner.predict.prediction import fastest
from outsize.planner.program.program import Kind
from outsize.planner.program.stages import Choice, Stages, spans_down, spans_up
from outsize.planner.search.step_plan import Budgets
from outsize.planner.simulate.simulator import simulate
from planner.held_bytes import held_bytes
from planner.questions import CONFIG, GIB, ask


def test_a_rest_lies_on_every_gpu():
    """The norm before the head; the table of tied embeddings and its gradient, whose users are stages of their own."""
    apart, tied = (ask("2x4090", config={**CONFIG, "tie_word_embeddings": tie}) for tie in (False, True))
    table = CONFIG["vocab_size"] * CONFIG["hidden_size"] * (2 + 4)
    resident = [
        planned_at(question, 8, "host").plan.memory["device"]["resident"] for question in (apart, tied)
    ]
    assert 0 < resident[0] < 2**16
    assert resident[1] == resident[0] + table
    assert planned_at(tied, 8, "host").plan.layout.rest_users == {0, 7}


@settings(max_examples=12)
@given(
    gpus=st.integers(2, 5),
    microbatches=st.sampled_from([1, 2, 5, 16]),
    device_gib=st.sampled_from([4, 6, 20]),
    clip=st.booleans(),
    activations=st.sampled_from(["auto", "recompute", "offload-attention", "offload-products"]),
)
def test_steps_obey_the_rules_and_hold_no_more_than_is_counted(
    gpus, microbatches, device_gib, clip, activations
):
    budgets = Budgets(device=device_gib * GIB, host=100 * GIB)
    question = ask(f"{gpus}x4090", budgets=budgets, clip=clip, activations=activations)
    try:
        decision = planned_at(question, microbatches, "host")
    except InfeasiblePlanError:
        assert microbatches < 16  # microbatches too large for the device
        return
    plan, demand = decision.plan, decision.microbatch.demand
    for program in plan.programs:
        validate(program, plan.layout)
    device, host, layout = plan.memory["device"], plan.memory["host"], plan.layout
    assert sum(device.values()) <= budgets.device
    kept = {
        extent: tuple(size * (unit in layout.leavable) for unit, size in enumerate(sizes))
        for extent, sizes in demand.kept_bytes.items()
    }
    done = simulate(plan.programs, layout, decision.simulated.costs)
    peak, _ = held_bytes(done, layout, demand.boundary_bytes, kept)
    places = sum(
        device[name] for name in ("weight slots", "gradient accumulators", "activations", "resident")
    )
    for worker in range(gpus):
        assert peak[f"device:w{worker}"] <= places
    assert peak["host"] <= host["saved activations"] + host.get("offloaded activations", 0)
    asked = activations.startswith("offload") and bool(layout.leavable[1:])
    assert layout.any_leaves == asked or activations == "auto"


def test_more_gpus_than_stages():
    with pytest.raises(ConfigError, match="16 devices, but 8 units make at most 15 stages; use at most 15"):
        planned_at(ask("16x4090"), 16, "host")


def test_what_is_short_is_said():
    budgets = Budgets(device=GIB // 2, host=100 * GIB)
    with pytest.raises(InfeasiblePlanError, match=r"first try") as raised:
        planned_at(ask("2x4090", budgets=budgets), 16, "host")
    assert raised.value.short_by["device"] > 0
    short = Budgets(device=20 * GIB, host=GIB)
    with pytest.raises(InfeasiblePlanError, match="first try the home on disk") as raised:
        planned_at(ask("2x4090", budgets=short, home="host"), 16, "host")
    assert raised.value.short_by["host"] > 0
    with pytest.raises(InfeasiblePlanError, match=r"first try a host budget of 8\.\d+ GiB"):
        planned_at(ask("2x4090", budgets=short), 16, "host")  # which is on disk by itself where it has to be


@pytest.mark.parametrize("clip", [False, True])
def test_a_home_on_disk_is_staged_and_waited_for(clip):
    question = ask("2x4090", sequences=16, clip=clip)
    host, disk = (planned_at(question, 16, home) for home in ("host", "disk"))
    for program in disk.plan.programs:
        assert {Kind.READ, Kind.WRITE, Kind.COMMIT} <= {op.kind for op in program}
        validate(program, disk.plan.layout)
    assert disk.plan.layout.stages.round_size == 16
    assert "home" in disk.plan.memory["disk"]
    assert "home" not in disk.plan.memory["host"]
    assert disk.step_s > host.step_s
    slow = replace(question.machine.disk, read_bytes_per_s=Figure(value=1e9, source="test"))
    slower = planned_at(replace(question, machine=replace(question.machine, disk=slow)), 16, "disk")
    assert slower.step_s > 1.5 * disk.step_s


def test_the_home_of_several_goes_to_disk_where_host_memory_is_short():
    budgets = Budgets(device=20 * GIB, host=6 * GIB, disk=1000 * GIB)
    assert fastest(ask("2x4090", budgets=budgets)).home == "disk"
    assert fastest(ask("2x4090")).home == "host"
    with pytest.raises(InfeasiblePlanError, match="a disk budget of") as raised:
        fastest(ask("2x4090", budgets=replace(budgets, disk=GIB)))
    assert raised.value.short_by["disk"] > 0


def test_given_stages_are_kept():
    question = ask("2x4090")
    found = planned_at(question, 8, "host").plan
    assert planned_at(question.deciding(stages=found.layout.stages), 8, "host").plan == found


def test_where_two_sets_are_too_much_one_is_enough():
    """fp32 gradients give up their second set first, then weights do."""
    found = set()
    for mib in (700, 760, 900, 1200):
        budgets = Budgets(device=mib * 2**20, host=100 * GIB)
        try:
            plan = planned_at(ask("2x4090", budgets=budgets), 16, "host").plan
        except InfeasiblePlanError:
            continue
        stages = plan.layout.stages
        found.add((stages.slot_halves, stages.accumulator_halves))
        assert plan.total_bytes("device") <= budgets.device
    assert found == {(1, 1), (2, 1), (2, 2)}


def test_the_partitioner_knows_that_one_set_takes_longer():
    """Over slow links, where nothing comes up while the visit before still runs."""
    question = ask("2x4090", sequences=16)
    slow = replace(question.machine, links=(_slow(question.machine.links[0]),) * 2)
    seconds = [
        clocked_s(replace(question, machine=slow, budgets=Budgets(device=mib * 2**20)), 16, "host")
        for mib in (2000, 900, 700)
    ]
    assert seconds[0] < seconds[1] < seconds[2]


def _slow(link, times=8):
    figure = Figure(value=link.up_bytes_per_s.value / times, source="test")
    return replace(link, up_bytes_per_s=figure, down_bytes_per_s=figure)


def test_long_sequences_offload_what_their_compute_hides():
    budgets = Budgets(device=20 * GIB, host=400 * GIB)
    stages = Stages(
        forward=spans_up([3, 3]),
        backward=spans_down([2, 1, 1, 1, 1, 1, 1], 8),
        round_size=4,
        accumulator_halves=1,
    )
    long = {"sequences": 8, "seq_len": 16384, "stages": stages}
    auto, recompute, asked = (
        ask("2x4090", budgets=budgets, activations=name, **long)
        for name in ("auto", "recompute", "offload-products")
    )
    decisions = [planned_at(question, 8, "host") for question in (auto, recompute, asked)]
    found, _, all_of_it = (decision.plan for decision in decisions)
    assert found.layout.stages == stages
    assert {found.layout.choice(unit, 0) for unit in range(1, 6)} == {Choice.OFFLOAD_ATTENTION}
    assert {all_of_it.layout.choice(unit, 0) for unit in range(1, 6)} == {Choice.OFFLOAD_PRODUCTS}
    assert found.memory["host"]["offloaded activations"] < all_of_it.memory["host"]["offloaded activations"]
    assert decisions[0].step_s < 0.95 * decisions[1].step_s
    slow = replace(auto.machine, links=(_slow(auto.machine.links[0], 64),) * 2)
    assert not planned_at(replace(auto, machine=slow), 8, "host").plan.layout.any_leaves
    without = sum(found.memory["host"].values()) - found.memory["host"]["offloaded activations"]
    tight = replace(auto, budgets=replace(budgets, host=without))
    assert not planned_at(tight, 8, "host").plan.layout.any_leaves


def test_graphs_do_not_leave():
    with pytest.raises(ConfigError, match="use offload-products"):
        planned_at(ask("2x4090", activations="offload"), 8, "host")
