"""Other ways to train on the same machine: bounds that can be computed by hand."""

from dataclasses import replace

import pytest

from outsize.hardware.machine_spec import Figure, Peer
from outsize.planner.predict.alternatives import alternatives, managed_tokens_per_s
from outsize.planner.search.step_plan import Budgets
from planner.questions import ask


def named(question):
    return {way.name: way for way in alternatives(question)}


def test_state_is_sixteen_bytes_a_parameter_and_is_shared_as_the_way_says():
    question = ask("4x4090")
    state = 16 * question.model.num_trainable
    found = named(question)
    assert found["data parallel 4"].device_bytes > state
    for name in ("tensor parallel 4", "pipeline parallel 4", "ZeRO-3 or FSDP"):
        assert state / 4 < found[name].device_bytes < found["data parallel 4"].device_bytes
    offloaded = found["ZeRO-3 or FSDP, state in host memory"]
    assert offloaded.host_bytes == state
    assert offloaded.device_bytes < found["ZeRO-3 or FSDP"].device_bytes
    assert any(" x " in name for name in found)


def test_one_gpu_has_nobody_to_share_with():
    assert list(named(ask("4090"))) == [
        "one GPU, all of it there",
        "ZeRO-3 or FSDP, state in host memory",
    ]


def test_sums_of_activations_are_waited_for_and_a_wire_of_their_own_shortens_them():
    question = ask("4x4090", budgets=Budgets(device=2**40))
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    wire = Figure(value=4e11, source="a wire")
    peers = tuple(Peer(source=a, target=b, bytes_per_s=wire, own_wire=True) for a, b in pairs)
    wired = replace(question, machine=replace(question.machine, peers=peers))
    slow, fast = named(question)["tensor parallel 4"], named(wired)["tensor parallel 4"]
    assert slow.fits
    assert slow.waits_for == "sums of activations"
    assert slow.compute_s == pytest.approx(fast.compute_s)
    assert slow.waits_s > 4 * fast.waits_s
    # Four sums a block where all is kept, each over a link that 2 (n - 1) / n of its bytes cross.
    work = question.workload_of(question.sequences)
    crossing = 4 * sum(2 * 3 / 4 * size for size in work.boundary_bytes[1:-1])
    link = min(link.up_bytes_per_s.value for link in question.machine.links)
    assert slow.waits_s > crossing / link


def test_a_pipeline_idles_for_its_stages_less_one():
    question = ask("4x4090", budgets=Budgets(device=2**40))
    found = named(question)["pipeline parallel 4"]
    assert found.waits_for == "the pipeline's bubble"
    assert found.waits_s >= 3 / question.sequences * found.compute_s


def test_what_comes_when_it_is_missed_is_slower_than_what_computes_alone():
    question = ask("4090")
    alone = question.tokens_per_step / alternatives(question)[0].compute_s
    assert 0 < managed_tokens_per_s(question) < alone


def test_what_crosses_nodes_is_summed_inside_each_before_and_products_are_shared_inside():
    slow = Figure(value=1e8, source="a net")
    question = ask("4xa100", budgets=Budgets(device=2**40))
    nodes = replace(question, net_bytes_per_s=slow).deciding(nodes=2)
    found, gradients = named(nodes), 2 * question.model.num_trainable
    assert "data parallel 8" in found
    # Each of two nodes sends what it has summed inside: 2 (n - 1) / n of the gradients, whatever the number of GPUs.
    data = found["data parallel 8"]
    assert data.waits_for == "gradients of the other replicas"
    assert data.waits_s == pytest.approx(gradients / slow.value, rel=0.1)
    assert found["tensor parallel 8"].waits_s > 2 * named(question)["tensor parallel 4"].waits_s
    # The best hybrid sums activations inside nodes alone, or not at all: so it waits for the network for less.
    hybrid = next(way for name, way in found.items() if " x " in name)
    assert hybrid.tokens_per_s > max(found[f"{way} parallel 8"].tokens_per_s for way in ("tensor", "data"))
    assert "tensor parallel 8" not in hybrid.name
    offloaded = found["ZeRO-3 or FSDP, state in host memory"]
    assert offloaded.host_bytes == 8 * question.model.num_trainable
    assert offloaded.waits_s > 2 * question.model.num_trainable / slow.value
