from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.hardware.machine_spec import Figure
from outsize.planner.passes.validate import validate
from outsize.planner.predict.fastest import fastest
from outsize.planner.predict.prediction import predict
from outsize.planner.predict.several_workers import TIED, estimate_s, several_workers, without_rest
from outsize.planner.program.activation_policy import Choice, Extent
from outsize.planner.program.ops import Kind
from outsize.planner.program.stages import Stages, spans_down, spans_up
from outsize.planner.search.step_plan import Budgets
from outsize.planner.simulate.simulator import simulate
from planner.questions import CONFIG, GIB, ask


def test_the_norm_travels_with_the_head():
    model = ask().model
    dealt = without_rest(model)
    assert [unit.kind for unit in dealt.units] == ["embedding", *["block"] * 6, "head"]
    assert dealt.num_parameters == model.num_parameters
    assert dealt.units[-1].tensors[-1].name == "model.norm.weight"


def test_a_tied_table_is_counted_twice_and_says_so():
    question = ask("2x4090", config={**CONFIG, "tie_word_embeddings": True})
    table = CONFIG["vocab_size"] * CONFIG["hidden_size"]
    assert without_rest(question.model).num_parameters == question.model.num_parameters + table
    assert TIED in several_workers(question, 8).assumptions
    assert TIED not in several_workers(ask("2x4090"), 8).assumptions


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
        candidate = several_workers(question, microbatches)
    except InfeasiblePlanError:
        assert microbatches < 16  # microbatches too large for the device
        return
    validate(candidate.programs[-1], candidate.layout)
    assert sum(candidate.memory["device"].values()) <= budgets.device
    layout, work = candidate.layout, candidate.work
    kept = {
        extent: tuple(size * (unit in layout.leavable) for unit, size in enumerate(sizes))
        for extent, sizes in (
            (Extent.ATTENTION, work.attention_bytes),
            (Extent.PRODUCTS, work.products_bytes),
        )
    }
    done = simulate(
        candidate.programs, layout, candidate.costs, boundary_bytes=work.boundary_bytes, kept_bytes=kept
    )
    device = candidate.memory["device"]
    places = device["weight slots"] + device["gradient accumulators"] + device["activations"]
    for worker in range(gpus):
        assert done.peak_bytes[f"device:w{worker}"] <= places
    host = candidate.memory["host"]
    assert done.peak_bytes["host"] <= host["saved activations"] + host.get("offloaded activations", 0)
    asked = activations.startswith("offload") and bool(layout.leavable[1:])
    assert layout.any_leaves == asked or activations == "auto"


def test_more_gpus_than_stages():
    with pytest.raises(ConfigError, match="16 GPUs, but 8 units make at most 15 stages; use at most 15"):
        several_workers(ask("16x4090"), 16)


def test_what_is_short_is_said():
    budgets = Budgets(device=GIB // 2, host=100 * GIB)
    with pytest.raises(InfeasiblePlanError, match=r"first try") as raised:
        several_workers(ask("2x4090", budgets=budgets), 16)
    assert raised.value.short_by["device"] > 0
    short = Budgets(device=20 * GIB, host=GIB)
    with pytest.raises(InfeasiblePlanError, match="first try the home on disk") as raised:
        several_workers(ask("2x4090", budgets=short, home="host"), 16)
    assert raised.value.short_by["host"] > 0
    with pytest.raises(InfeasiblePlanError, match=r"first try a host budget of 9\.\d+ GiB"):
        several_workers(ask("2x4090", budgets=short), 16)  # which is on disk by itself where it has to be


@pytest.mark.parametrize("clip", [False, True])
def test_a_home_on_disk_is_staged_and_waited_for(clip):
    question = ask("2x4090", sequences=16, clip=clip)
    host, disk = (several_workers(question, 16, home) for home in ("host", "disk"))
    for program in disk.programs:
        assert {Kind.READ, Kind.WRITE, Kind.COMMIT} <= {op.kind for op in program}
    # The layout is that of the last program.
    validate(disk.programs[-1], disk.layout)
    assert disk.layout.stages.round_size == 16
    assert "home" in disk.memory["disk"]
    assert "home" not in disk.memory["host"]
    assert predict(question, disk).step_s > predict(question, host).step_s
    slow = replace(question.machine.disk, read_bytes_per_s=Figure(value=1e9, source="test"))
    slower = several_workers(replace(question, machine=replace(question.machine, disk=slow)), 16, "disk")
    assert predict(question, slower).step_s > 1.5 * predict(question, disk).step_s


def test_the_home_of_several_goes_to_disk_where_host_memory_is_short():
    budgets = Budgets(device=20 * GIB, host=6 * GIB, disk=1000 * GIB)
    assert fastest(ask("2x4090", budgets=budgets)).home == "disk"
    assert fastest(ask("2x4090")).home == "host"
    with pytest.raises(InfeasiblePlanError, match="a disk budget of") as raised:
        fastest(ask("2x4090", budgets=replace(budgets, disk=GIB)))
    assert raised.value.short_by["disk"] > 0


def test_given_stages_are_kept():
    question = ask("2x4090")
    found = several_workers(question, 8)
    first = replace(found.layout.stages, cursor=0)
    again = several_workers(replace(question, stages=first), 8)
    assert again.layout == found.layout


def test_where_two_sets_are_too_much_one_is_enough():
    """fp32 gradients give up their second set first, then weights do."""
    found = set()
    for mib in (600, 700, 900, 1200):
        budgets = Budgets(device=mib * 2**20, host=100 * GIB)
        try:
            candidate = several_workers(ask("2x4090", budgets=budgets), 16)
        except InfeasiblePlanError:
            continue
        stages = candidate.layout.stages
        found.add((stages.slot_halves, stages.accumulator_halves))
        validate(candidate.programs[-1], candidate.layout)
        assert sum(candidate.memory["device"].values()) <= budgets.device
    assert found == {(1, 1), (2, 1), (2, 2)}


def test_the_partitioner_knows_that_one_set_takes_longer():
    """Over slow links, where nothing comes up while the visit before still runs."""
    question = ask("2x4090", sequences=16)
    slow = replace(question.machine, links=(_slow(question.machine.links[0]),) * 2)
    seconds = [
        estimate_s(replace(question, machine=slow, budgets=Budgets(device=mib * 2**20)), 16, None)
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
    found, none, all_of_it = (several_workers(question, 8) for question in (auto, recompute, asked))
    assert found.layout.stages == replace(stages, cursor=found.layout.stages.cursor)
    assert {found.layout.choice(unit, 0) for unit in range(1, 6)} == {Choice.OFFLOAD_ATTENTION}
    assert {all_of_it.layout.choice(unit, 0) for unit in range(1, 6)} == {Choice.OFFLOAD_PRODUCTS}
    assert found.memory["host"]["offloaded activations"] < all_of_it.memory["host"]["offloaded activations"]
    assert predict(auto, found).step_s < 0.95 * predict(recompute, none).step_s
    slow = replace(auto.machine, links=(_slow(auto.machine.links[0], 64),) * 2)
    assert not several_workers(replace(auto, machine=slow), 8).layout.any_leaves
    without = sum(found.memory["host"].values()) - found.memory["host"]["offloaded activations"]
    tight = replace(auto, budgets=replace(budgets, host=without))
    assert not several_workers(tight, 8).layout.any_leaves


def test_graphs_do_not_leave():
    with pytest.raises(ConfigError, match="use offload-products"):
        several_workers(ask("2x4090", activations="offload"), 8)
