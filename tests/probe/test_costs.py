"""Memory that is far, several devices at once, data."""

import os
from dataclasses import replace
from types import SimpleNamespace

import torch

from doctor.records import gpu
from hardware.fake_machine import measured
from outsize.accelerators import CPU
from outsize.hardware.cgroup import Fact
from outsize.hardware.cpu import NumaNode
from outsize.probing import several_gpus
from outsize.probing.data_probe import measure_data
from outsize.probing.host_probe import measure_numa
from outsize.probing.several_gpus import measure_peers, measure_together, read_loaded_link
from probe.efforts import TINY


def node(index, cpus):
    return NumaNode(
        index=index, cpus=Fact.read(cpus, "by the test"), memory_bytes=Fact.read(1, "by the test")
    )


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
