"""Recorded topologies: what driver and rate make of the way between two GPUs."""

import pytest

from doctor.records import gpu
from hardware.fake_machine import measured
from outsize.hardware.cgroup import Measurement
from outsize.hardware.topology import kind_by_rate, kind_by_topology, theory_bytes_per_s

GEN4, GEN5 = (4, 16), (5, 16)


@pytest.mark.parametrize(
    ("machine", "nvlink", "peer", "rate", "pcie", "pinned", "said", "reached"),
    [
        # name, NVLink and peer access by the driver, copy, slower PCIe link, pinned copies, verdicts
        ("DGX H100", "ok", "ok", 370e9, GEN5, 55e9, "NVLink", "NVLink"),
        ("two A100 PCIe with a bridge", "ok", "ok", 230e9, GEN4, 25e9, "NVLink", "NVLink"),
        ("two A6000 below one switch", "not supported", "ok", 24e9, GEN4, 25e9, "PCIe peer", "PCIe peer"),
        (
            "two RTX 4090",
            "not supported",
            "chipset not supported",
            11e9,
            GEN4,
            25e9,
            "host-staged",
            "host-staged",
        ),
        ("peers behind access control", "not supported", "ok", 6e9, GEN4, 25e9, "PCIe peer", "host-staged"),
        ("a loose NVLink bridge", "ok", "ok", 22e9, GEN4, 25e9, "NVLink", "PCIe peer"),
    ],
)
def test_driver_and_rate_are_asked_apart(machine, nvlink, peer, rate, pcie, pinned, said, reached):
    target = gpu(0, nvlink=nvlink, peer=peer)
    assert kind_by_topology(target, 1).value == said, machine
    assert kind_by_rate(measured(rate), pcie, pinned).value == reached, machine


def test_what_is_not_known_is_not_judged():
    blind = gpu(0).model_copy(update={"peers": {}, "peer_nvlinks": {}})
    assert kind_by_topology(blind, 1).status == "not measured"
    assert kind_by_rate(Measurement.absent("one GPU"), GEN4, 25e9).source == "one GPU"
    assert kind_by_rate(measured(9e9), None, None).value is None
    assert kind_by_rate(measured(9e9), (9, 16), None).source.startswith(
        "no rate is known of PCIe generation 9"
    )


def test_without_the_link_pinned_copies_stand_for_it():
    assert kind_by_rate(measured(200e9), None, 25e9).value == "NVLink"
    assert kind_by_rate(measured(24e9), None, 25e9).value == "PCIe peer"


def test_links_of_the_field():
    assert theory_bytes_per_s(4, 16) == pytest.approx(31.5e9, rel=1e-3)
    assert theory_bytes_per_s(5, 16) == pytest.approx(63e9, rel=1e-3)
    for generation, lanes in ((7, 16), (4, 0)):
        with pytest.raises(ValueError, match="no rate is known"):
            theory_bytes_per_s(generation, lanes)


def test_a_refusal_says_the_driver_s_words():
    assert "chipset not supported" in kind_by_topology(gpu(0, peer="chipset not supported"), 1).source
