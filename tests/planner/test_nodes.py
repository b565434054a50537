"""Several nodes that share a step: what they exchange, and when."""

import pytest

from outsize.codecs.transport import Wire
from outsize.hardware.machine_spec import Figure
from outsize.planner.predict.decision import DECIDED_STEPS
from outsize.planner.predict.decision_search import planned_at
from outsize.planner.predict.prediction import fastest, predict
from outsize.planner.predict.what_if import outcome
from planner.questions import CONFIG, ask


def nodes(count, rate=25e9 / 8, gpus="4090", **changes):
    net = None if count == 1 else Figure(value=rate, source="test")
    changes = {"sequences": 16, "microbatches": 4, **changes}
    return ask(gpus, nodes=count, net_bytes_per_s=net, **changes)


def exchanged(timeline, word):
    return [event for event in timeline.events if str(event.op).startswith(word)]


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("gpus", ["4090", "2x4090"])
def test_every_unit_s_gradient_is_reduced_and_its_weights_are_gathered_once_a_step(gpus, clip):
    question = nodes(4, gpus=gpus, clip=clip, microbatches=8)
    found = fastest(question)
    trained = 9
    for word in ("REDUCE", "GATHER"):
        assert len(exchanged(found.timeline, word)) == DECIDED_STEPS * trained
    assert found.tokens_per_s == pytest.approx(4 * 16 * 1024 / found.step_s)
    assert found.usage["network"] > 0
    assert any("several nodes" in line for line in found.assumptions)


def test_a_step_waits_for_its_reduction_and_the_next_load_for_its_gather():
    done = planned_at(nodes(2), 4, "host").simulated.done
    ends, starts = {}, {}
    for event in done.timeline.events:
        op = str(event.op).partition("<")[0]
        ends.setdefault(op, event.end_s)
        starts.setdefault(op, event.start_s)
    for unit in range(1, 7):
        assert starts[f"STEP {unit}"] >= ends[f"REDUCE {unit}"]
        assert starts[f"GATHER {unit}"] >= ends[f"STEP {unit}"]
    assert starts["CLIP"] >= max(end for op, end in ends.items() if op.startswith("REDUCE"))
    loads = [event for event in done.timeline.events if str(event.op).startswith("LOAD 3@")]
    (gather, *_) = exchanged(done.timeline, "GATHER 3")
    assert any(load.start_s >= gather.end_s for load in loads)


def test_the_network_costs_what_its_bytes_cost():
    """(N - 1) / N of gradients in fp32 and weights in bf16, at its rate and no faster."""
    question = nodes(4, rate=1e6)  # so slow that nothing else counts
    parameters = sum(unit.numel for unit in question.model.units)
    found = predict(planned_at(question, 4, "host"))
    assert found.step_s == pytest.approx(0.75 * 6 * parameters / 1e6, rel=0.02)
    assert found.binding == "network"
    assert set(found.stalls) >= {"gradients of other nodes", "weights of other nodes"}


def test_a_fast_network_costs_nothing_and_steps_share_the_optimizer():
    alone = fastest(nodes(1))
    many = fastest(nodes(4, rate=1e13))
    assert many.step_s <= alone.step_s * 1.01
    assert many.usage["optimizer on the host"] == pytest.approx(
        alone.usage["optimizer on the host"] * alone.step_s / many.step_s / 4, rel=0.01
    )
    states = [found.memory["host"]["optimizer state"] for found in (alone, many)]
    assert states[1] == pytest.approx(states[0] / 4, rel=0.01)
    assert many.memory["host"]["weights"] == alone.memory["host"]["weights"]


@pytest.mark.parametrize("gpus", ["4090", "2x4090"])
def test_a_node_holds_its_share_of_what_the_optimizer_keeps(gpus):
    """Of several GPUs gradients are summed at home from round to round, and so they are whole."""
    decisions = [planned_at(question, 4, "host") for question in (nodes(1), nodes(4, gpus=gpus))]
    whole, shared = map(predict, decisions)
    assert shared.total_bytes("host") == decisions[1].plan.total_bytes("host")
    classes = whole.memory["host"], shared.memory["host"]
    of_each = [classes[1][name] / classes[0][name] for name in ("optimizer state", "gradients")]
    assert of_each == pytest.approx([0.25, 0.25 if gpus == "4090" else 1.0], rel=0.01)


def test_most_of_what_takes_half_of_compute_is_hidden_in_a_deep_model():
    """All but the lowest units': their gradients come last, and their weights are wanted first."""
    hidden = {}
    for layers in (6, 32):
        config = {**CONFIG, "num_hidden_layers": layers}
        free = predict(planned_at(question := nodes(2, rate=1e15, config=config), 4, "host"))
        communication_s = 0.5 * (1 - free.bubble) * free.step_s
        sent = 0.5 * 6 * sum(unit.numel for unit in question.model.units)
        question = nodes(2, rate=sent / communication_s, config=config)
        slow = predict(planned_at(question, 4, "host"))
        hidden[layers] = 1 - (slow.step_s - free.step_s) / communication_s
    assert hidden[32] >= 0.9
    assert 0.7 <= hidden[6] < hidden[32]


def test_codecs_take_time_on_the_lane_that_exchanges():
    """Bytes as those of fp32, times at least those of the codec on one core."""
    question = nodes(2, rate=1e15, wire=Wire(gradients="int8"))
    found = planned_at(question, 4, "host").simulated.done
    numel = question.model.units[3].numel
    reduce, *_ = exchanged(found.timeline, "REDUCE 3")
    assert reduce.end_s - reduce.start_s >= 4 * (numel // 2) * (1 / 5e9 + 1 / 7e9)


def test_more_nodes_and_a_faster_network_are_changes():
    question = nodes(2, rate=2e8)
    base = fastest(question)
    assert outcome(question, base, "net=x2").gain > 0.1
    assert outcome(question, base, "nodes=+2").prediction.tokens_per_s > base.tokens_per_s
    assert "there is one node" in outcome(nodes(1), None, "net=x2").error


def test_nodes_without_a_network():
    with pytest.raises(ValueError, match="a network between"):
        ask(nodes=2)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("num_nodes", [1, 4])
@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_third_step_takes_as_long_as_the_second(home, num_nodes, clip):
    """So that two are simulated: the first begins at rest, with an idle link, optimizer and disk."""
    found = planned_at(nodes(num_nodes, clip=clip, microbatches=8), 8, home)
    costs = found.step.costs(found.question.machine, found.microbatch.times)
    first, second, third = found.step.simulate(costs, 3).done.decided_s
    assert third - second == pytest.approx(second - first)
    assert found.step_s == pytest.approx(second - first)
