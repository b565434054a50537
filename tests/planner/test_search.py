from dataclasses import replace

import pytest

from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.hardware.cards import find_card, machine_of, parse_gpus
from outsize.hardware.machine_spec import Figure
from outsize.planner.predict import decision, decision_search
from outsize.planner.predict.decision_search import decide, planned_at
from outsize.planner.predict.prediction import fastest, figures_used, predict
from outsize.planner.predict.what_if import missing_host_bytes
from outsize.planner.search.microbatch_search import FULL_TOKENS, NEAR, PER_GPU, cuts_to_try
from outsize.planner.search.plan_stages import plan_stages
from outsize.planner.search.step_plan import Budgets
from planner.questions import CONFIG, GIB, ask


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
    assert roomy.sequences_per_microbatch == 32  # the most that is tried: a round of one of them keeps all
    assert 1 <= tight.sequences_per_microbatch < 32


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


def test_numbers_of_microbatches_of_several_gpus_are_compared():
    question = ask("4x4090", sequences=32, clip=False)
    found = fastest(question)
    cuts = list(cuts_to_try(32, 1024, 4))
    assert len(cuts) > 1
    each = {count: fastest(replace(question, microbatches=count)).step_s for count in cuts}
    assert found.step_s == each[found.microbatches]
    assert found.step_s < 1.02 * min(each.values())
    assert found.microbatches > cuts[0] or each[cuts[1]] * NEAR >= each[cuts[0]]


def test_smaller_microbatches_are_tried_where_they_leave_memory_for_larger_stages():
    """Stages of single units fill and drain soon, and wait for each other all the time."""
    config = {**CONFIG, "num_hidden_layers": 14, "hidden_size": 1024, "intermediate_size": 4096}
    budgets = Budgets(device=900 * 2**20, host=100 * GIB, disk=1000 * GIB)
    question = ask("4x4090", config=config, budgets=budgets, sequences=128, activations="recompute")
    question = replace(question, machine=machine_of(find_card("4090"), 4, "fused"))
    assert decide(question).step_s * NEAR < planned_at(question, 32, "host").step_s


def test_one_plan_is_made_where_gpus_do_not_wait_for_each_other(monkeypatch):
    """A global norm over a slow optimizer is what they wait for, whatever the microbatches."""
    question = ask("2x4090", sequences=16)
    slow = Figure(value=1e8, source="test")
    host = replace(question.machine.host, adamw_params_per_s=slow)
    planned = plans_made(monkeypatch)
    found = fastest(replace(question, machine=replace(question.machine, host=host)))
    assert planned == [found.microbatches] == [next(cuts_to_try(16, 1024, 2))]
    assert found.bubble > 0.3


def plans_made(monkeypatch) -> list[int]:
    """Microbatches of each plan of several GPUs that is made from now on."""
    planned = []

    def noted(model, demand, budgets, options, max_visits=None):
        planned.append(options.microbatches)
        return plan_stages(model, demand, budgets, options, max_visits)

    monkeypatch.setattr(decision_search, "plan_stages", noted)
    return planned


@pytest.mark.parametrize(("card", "device_gib"), [("3060", 3), ("3060", 5), ("b580", 3)])
def test_steps_are_simulated_where_computing_does_not_tell_which_is_shorter(monkeypatch, card, device_gib):
    """To the same decision as if all were; a 3060 computes for most of a step, a B580 waits for its disk."""
    budgets = Budgets(device=device_gib * GIB, host=4 * GIB, disk=1000 * GIB)
    question = ask(card, budgets=budgets, sequences=16, seq_len=4096)
    simulated, simulate = [], decision.Decision.simulate

    def noted(decided, *, every_round):
        simulated.append(decided.plan.plan_id)
        return simulate(decided, every_round=every_round)

    monkeypatch.setattr(decision.Decision, "simulate", noted)
    found = decide(question)
    assert found.least_s < found.step_s
    few = tuple(simulated)
    assert len(set(few)) == len(few)
    monkeypatch.setattr(decision.Decision, "least_s", 0.0)
    every = decide(question)
    assert (found.plan.plan_id, found.step_s) == (every.plan.plan_id, every.step_s)
    assert (len(few) < len(simulated) - len(few)) == (card == "3060")


def test_stages_hand_over_from_gpu_to_gpu_where_that_is_no_slower():
    question = ask("2xh100", sequences=16, microbatches=8)
    found = fastest(question)
    alone = fastest(replace(question, machine=replace(question.machine, peers=())))
    assert any("from GPU to GPU" in line for line in found.assumptions)
    assert found.step_s <= alone.step_s
    assert found.memory["device"]["arrivals from devices"] > 0
    assert found.usage["link between GPUs"] > 0
    assert "link between GPUs" not in alone.usage
    told = [[each.name for each in figures_used(question, plan)] for plan in (found, alone)]
    assert ["link between GPUs" in names for names in told] == [True, False]
    crawling = tuple(
        replace(peer, bytes_per_s=Figure(value=1e7, source="test")) for peer in question.machine.peers
    )
    slow = fastest(replace(question, machine=replace(question.machine, peers=crawling)))
    # It was cut for what host memory has to carry where GPUs hand over themselves.
    assert "link between GPUs" not in slow.usage
    assert slow.step_s == pytest.approx(alone.step_s, rel=0.03)


def test_what_arrives_has_to_have_room():
    question = ask("2xh100", sequences=16, microbatches=8)
    roomy = fastest(question)
    device = roomy.total_bytes("device")
    tight = fastest(
        replace(question, budgets=replace(question.budgets, device=device - 1)).deciding(stages=roomy.stages)
    )
    assert "arrivals from devices" in roomy.memory["device"]
    assert "arrivals from devices" not in tight.memory["device"]


def fastest_with_codecs(question):
    found = decide(replace(question, auto=("weights",)))
    return replace(found.question, auto=()), predict(found)


def mostly_frozen(gpus, **changes):
    question = ask(gpus, sequences=8, seq_len=128, clip=False, **changes)
    frozen = [
        replace(unit, tensors=tuple(replace(tensor, trainable=False) for tensor in unit.tensors))
        for unit in question.model.units[:-2]
    ]
    return replace(question, model=replace(question.model, units=(*frozen, *question.model.units[-2:])))


@pytest.mark.parametrize("gpus", ["4090", "2x4090"])
def test_weights_are_encoded_where_the_link_is_what_a_step_waits_for(gpus):
    """Slow links, few tokens, no room for what could stay, and units that do not train but for two.

    No core has to encode them again.
    """
    question = mostly_frozen(gpus, budgets=Budgets(device=GIB, host=1000 * GIB, disk=1000 * GIB))
    links = tuple(
        replace(link, up_bytes_per_s=replace(link.up_bytes_per_s, value=1e9))
        for link in question.machine.links
    )
    slow = replace(question, machine=replace(question.machine, links=links))
    raw, (encoded, found) = fastest(slow), fastest_with_codecs(slow)
    assert found.step_s < 0.97 * raw.step_s
    assert any("weights go over links as lossless" in line for line in found.assumptions)
    assert found.memory["host"]["encoded weights"] > 0
    assert found.memory["device"]["codecs"] > 0
    assert encoded.microbatches is None
    assert fastest(encoded).step_s <= found.step_s * NEAR
    many = ask(gpus, sequences=64)
    assert fastest_with_codecs(many) == (many, fastest(many))
    shared = replace(slow, net_bytes_per_s=Figure(value=1e11, source="test")).deciding(nodes=2, clip=True)
    assert fastest_with_codecs(shared) == (shared, fastest(shared))


@pytest.mark.parametrize("disk", [True, False])
@pytest.mark.parametrize(("gpus", "short_bytes"), [("4090", 2**29), ("2x4090", 100 * 2**20)])
def test_weights_that_do_not_train_are_encoded_where_host_memory_holds_them_only_so(gpus, short_bytes, disk):
    roomy = fastest(mostly_frozen(gpus)).memory["host"]
    tight = Budgets(device=20 * GIB, host=sum(roomy.values()) - short_bytes, disk=1000 * GIB)
    question = mostly_frozen(gpus, budgets=tight)
    if disk:
        assert fastest(question).home == "disk"
    else:
        question = replace(question, machine=replace(question.machine, disk=None))
        with pytest.raises(InfeasiblePlanError):
            fastest(question)
    encoded, found = fastest_with_codecs(question)
    assert found.home == "host"
    assert encoded.options.transport.weights in ("lossless4", "lossless3")
    assert sum(found.memory["host"].values()) <= tight.host
    assert "weights" in found.memory["host"]
