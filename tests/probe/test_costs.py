"""Memory that is locked or far, several devices at once, shapes, data."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from doctor.records import gpu
from hardware.fake_machine import measured
from outsize.accelerators import CPU
from outsize.hardware.cgroup import Fact
from outsize.hardware.cpu import NumaNode
from outsize.model.sizes.model_spec import ModelSpec, pack_unit
from outsize.probing import host_probe, several_gpus
from outsize.probing.compute import measure_shapes, shapes_of
from outsize.probing.data_probe import measure_data
from outsize.probing.host_probe import measure_numa, measure_pinning
from outsize.probing.several_gpus import measure_peers, measure_together, read_loaded_link
from probe.efforts import MIB, TINY


def node(index, cpus):
    return NumaNode(
        index=index, cpus=Fact.read(cpus, "by the test"), memory_bytes=Fact.read(1, "by the test")
    )


def test_locking_is_priced_or_says_why_not(monkeypatch):
    (cost,) = measure_pinning(TINY, device=None)
    assert (cost.way, cost.asked_bytes) == ("mlock", MIB * 5 // 4)
    assert (cost.pin_s_per_gb.median is None) == (cost.taken_bytes.value is None)
    monkeypatch.setattr(
        host_probe.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(mlock=lambda *_: -1, munlock=lambda *_: 0)
    )
    monkeypatch.setattr(host_probe.ctypes, "get_errno", lambda: 12)
    (refused,) = measure_pinning(TINY, device=None)
    assert refused.pin_s_per_gb.source == "cannot allocate memory"


def test_memory_of_every_node_by_the_processors_of_every_node():
    cpu = str(min(os.sched_getaffinity(0)))
    before = os.sched_getaffinity(0)
    rates = measure_numa([node(0, cpu), node(1, cpu)], TINY)
    assert [(rate.memory_node, rate.by, rate.local) for rate in rates] == [
        (0, "node 0", True),
        (0, "node 1", False),
        (1, "node 0", False),
        (1, "node 1", True),
    ]
    assert all(rate.copy_bytes_per_s.median > 0 for rate in rates)
    assert os.sched_getaffinity(0) == before


def test_a_node_that_this_process_may_not_use_is_told():
    rates = measure_numa([node(0, "4095"), node(1, "4094")], TINY)
    assert rates[0].copy_bytes_per_s.source == "this process may not run on node 0"
    assert measure_numa([node(0, "0")], TINY) == ()


def test_devices_alone_and_all_at_once():
    rates = measure_together([CPU, CPU], TINY)
    assert [rate.direction for rate in rates] == ["up", "up", "down", "down"]
    assert all(rate.together_bytes_per_s.median > 0 for rate in rates)
    assert "beside those of 1 more" in rates[0].together_bytes_per_s.source
    assert measure_together([CPU], TINY) == ()


def test_pairs_of_gpus_are_classified(monkeypatch):
    monkeypatch.setattr(several_gpus, "_copy_rate", lambda *_: measured(11e9))
    devices = [SimpleNamespace(device=f"cuda:{index}", links=()) for index in range(2)]
    gpus = (gpu(0, peer="chipset not supported"), gpu(1))
    first, second = measure_peers(devices, gpus, TINY)
    assert (first.target, first.source) == ("cuda:0", "cuda:1")
    assert (first.by_topology.value, first.by_rate.value) == ("host-staged", "host-staged")
    assert (second.by_topology.value, second.by_rate.value) == ("PCIe peer", "host-staged")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) == (0, 1))
    blind, other = measure_peers(devices, (), TINY)
    assert (blind.by_topology.value, other.by_topology.value) == ("PCIe peer", "host-staged")
    assert "does not tell NVLink" in blind.by_topology.source
    assert blind.by_rate.status == "not measured"


def test_a_cpu_has_no_link_to_ask_under_load():
    assert {fact.value for fact in read_loaded_link(CPU, TINY)} == {None}


@pytest.fixture
def model():
    block = [("q", (64, 32), True, True), ("k", (64, 32), True, True), ("norm", (32,), True, False)]
    units = (
        pack_unit(0, "embed", "embedding", [("embed", (99, 32), True, True)]),
        pack_unit(1, "layer", "block", block),
        pack_unit(2, "head", "head", [("head", (99, 32), True, True)]),
    )
    return ModelSpec(units=units, dtype="fp32")


def test_each_shape_of_a_model_is_timed_once_and_the_embedding_is_no_product(model):
    assert shapes_of(model) == {(64, 32): "q", (99, 32): "head"}
    first, last = measure_shapes(CPU, model, TINY)
    assert (first.name, first.num_outputs, first.num_inputs, first.num_tokens) == ("q", 64, 32, 64)
    assert last.flops_per_s["fp32"].median > 0
    assert measure_shapes(CPU, None, TINY) == ()


def test_a_tokenizer_of_yours_is_named_and_a_broken_one_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    (tmp_path / "tokenizer.json").write_text("{")
    broken = measure_data(TINY, tmp_path, num_cpus=3)
    assert list(broken.tokenizer_tokens_per_s) == ["1", "2", "3"]
    assert broken.tokenizer.value is None
    assert broken.loader_tokens_per_s["3"].median > 0
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    assert (
        measure_data(replace(TINY, loader_tokens=16), tmp_path, num_cpus=1).loader_tokens_per_s["1"].median
        is None
    )
