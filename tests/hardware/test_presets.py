import json
from dataclasses import replace

import pytest

from outsize.errors import ConfigError
from outsize.hardware.cards import (
    cards,
    find_card,
    known_card,
    parse_gpus,
    pcie_bytes_per_s,
    share_of_peak,
)
from outsize.hardware.machine_spec import Figure, Link, Machine, Peer, from_json
from outsize.hardware.topology import LANE_BYTES_PER_S


def test_every_figure_has_a_source_and_none_claims_to_be_measured():
    for card in cards().values():
        gpu = card.gpu()
        for figure in (*gpu.peak_flops_per_s.values(), gpu.efficiency, gpu.memory_bytes_per_s):
            assert figure.source
            assert not figure.measured


@pytest.mark.parametrize(("generation", "expected"), [(3, 15.75), (4, 31.5), (5, 63.0)])
def test_sixteen_lanes_per_direction(generation, expected):
    assert LANE_BYTES_PER_S[generation] * 16 / 1e9 == pytest.approx(expected, rel=1e-3)


def test_half_the_lanes_give_half_the_rate():
    assert pcie_bytes_per_s(4, 8).value == pytest.approx(pcie_bytes_per_s(4).value / 2)
    with pytest.raises(ConfigError, match="PCIe 9"):
        pcie_bytes_per_s(9)


@pytest.mark.parametrize(
    "name", ["4090", "RTX 4090", "rtx-4090", "GeForce RTX 4090", "NVIDIA GeForce RTX 4090"]
)
def test_a_gpu_is_found_however_it_is_spelt(name):
    assert find_card(name).name == "4090"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("rtx-pro-6000", "pro6000"),
        ("7900xtx", "7900xtx"),
        ("4060ti", "4060ti"),
        ("4060 Ti 16GB", "4060ti-16gb"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "4090-laptop"),
        ("NVIDIA RTX 6000 Ada Generation", "6000ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "pro6000maxq"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Radeon PRO W7900", "w7900"),
        ("Intel(R) Arc(TM) B580 Graphics", "b580"),
    ],
)
def test_gpus_are_found_by_what_people_and_drivers_call_them(name, found):
    assert known_card(name).name == found


def test_many_cards_are_there_and_no_name_stands_for_two():
    assert len(cards()) >= 60
    words = [word for card in cards().values() for word in (card.name, *card.aliases)]
    found = {word: known_card(word) for word in words}
    for card in cards().values():
        assert all(found[word] is card for word in (card.name, *card.aliases)), card.name
        assert card.memory_bytes > 0
        assert card.memory_bytes_per_s > 0
        assert "fp16" in card.peaks
        assert card.peer in ("none", "pcie", "nvlink", "c2c", "unified")
        assert (card.peer_bytes_per_s > 0) == (card.peer not in ("none", "pcie"))
    for kind in (
        "2080ti",
        "5090",
        "a6000",
        "6000ada",
        "t4",
        "l4",
        "l40s",
        "a10",
        "a30",
        "a40",
        "b200",
        "gb10",
        "mi210",
    ):
        assert kind in cards()


def test_what_products_reach_depends_on_class_and_kernels():
    fused, eager = share_of_peak("geforce-ada", "fused"), share_of_peak("geforce-ada", "eager")
    assert 0.80 <= fused.value <= 0.89
    assert eager.value < fused.value
    assert 0.57 <= share_of_peak("server-hopper-sxm", "fused").value <= 0.63
    assert share_of_peak("no such class", "eager").within > fused.within > 0


def test_fp16_accumulation_is_twice_as_fast_on_geforce_only():
    card, server = find_card("4090").gpu(), find_card("h100").gpu()
    assert card.flops_per_s("fp16acc") == 2 * card.flops_per_s("bf16")
    assert server.flops_per_s("fp16acc") == server.flops_per_s("bf16")
    with pytest.raises(ConfigError, match="no rate for fp7"):
        server.flops_per_s("fp7")


def test_parse_gpus():
    machine = parse_gpus("8x4090")
    assert (machine.name, len(machine.gpus), len(machine.links)) == ("8x4090", 8, 8)
    assert parse_gpus("H100").name == "1xh100"
    two = parse_gpus("2x RTX 4090")
    assert two.links[0].up_bytes_per_s.value == pytest.approx(
        parse_gpus("4090").links[0].up_bytes_per_s.value / 2
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("7900xtx", "1x7900xtx"),
        ("9070 XT", "1x9070xt"),
        ("2x 7900 xt", "2x7900xt"),
        ("4090x2", "2x4090"),
        ("RTX 4090 x 8", "8x4090"),
        ("Quadro RTX 8000", "1xrtx8000"),
    ],
)
def test_a_letter_of_a_name_is_no_sign_of_a_number(text, name):
    assert parse_gpus(text).name == name


def test_gpus_of_two_kinds_are_refused_with_what_to_plan_instead():
    with pytest.raises(ConfigError, match="are alike; plan with the slowest"):
        parse_gpus("4090,3090")


@pytest.mark.parametrize("name", ["gb10", "mi300a", "8060s"])
def test_memory_that_host_and_gpu_share_is_counted_once(name):
    machine = parse_gpus(name)
    assert machine.gpus[0].memory_bytes + machine.host.memory_bytes == find_card(name).memory_bytes
    assert machine.host.bytes_per_s.value < machine.gpus[0].memory_bytes_per_s.value


def test_a_superchip_has_its_own_host():
    machine = parse_gpus("gh200")
    assert machine.host.memory_bytes == 480 * 2**30
    assert machine.links[0].up_bytes_per_s.value <= machine.host.bytes_per_s.value


def test_a_rented_gpu_has_the_cores_and_memory_that_are_rented_out_beside_it():
    """As they were measured beside an H200: half the optimizer's rate of a server."""
    one, eight, own = parse_gpus("H200 cloud"), parse_gpus("8xh200-cloud"), parse_gpus("h200")
    assert (one.name, one.host.cores, eight.host.cores) == ("1xh200-cloud", 16, 128)
    assert one.host.adamw_params_per_s.value == 4.4e9 < own.host.adamw_params_per_s.value / 2
    assert eight.host.memory_bytes == 8 * one.host.memory_bytes
    assert one.gpus[0].peak_flops_per_s == own.gpus[0].peak_flops_per_s


def test_an_unknown_name_suggests_near_ones():
    with pytest.raises(ConfigError, match=r"did you mean .*4090"):
        parse_gpus("8x4091")
    with pytest.raises(ConfigError, match="there are 2060"):
        parse_gpus("abacus")


@pytest.mark.parametrize("text", ["", "0x4090", "  "])
def test_what_is_no_number_of_gpus(text):
    with pytest.raises(ConfigError, match="not a number of GPUs"):
        parse_gpus(text)


def test_a_machine_survives_json():
    machine = parse_gpus("8x4090")
    assert from_json(machine.to_json()) == machine


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "x", "gpus": 3}'])
def test_what_is_no_machine(text):
    with pytest.raises(ConfigError, match="not the description of a machine"):
        from_json(text)


def test_a_link_behind_a_switch_needs_its_uplink():
    machine = parse_gpus("4090")
    rate = Figure(value=1e9, source="test")
    link = Link(up_bytes_per_s=rate, down_bytes_per_s=rate, latency_s=rate, switch="plx")
    with pytest.raises(ConfigError, match="plx"):
        Machine(name="x", gpus=machine.gpus, links=(link,), host=machine.host)
    with pytest.raises(ValueError, match="positive"):
        Figure(value=0, source="test")


def test_gpus_of_a_server_copy_to_each_other_and_cards_do_not():
    machine = parse_gpus("4xh100")
    assert len(machine.peers) == 12
    assert machine.peer(0, 3).own_wire
    assert machine.peer(0, 3).bytes_per_s.value > 5 * machine.links[0].up_bytes_per_s.value
    assert machine.peer(2, 2) is None
    assert from_json(machine.to_json()) == machine
    assert parse_gpus("8x4090").peers == parse_gpus("h100").peers == ()
    older = json.loads(parse_gpus("8x4090").to_json())
    del older["peers"]
    assert from_json(json.dumps(older)) == parse_gpus("8x4090")


def test_more_gpus_copy_to_each_other_where_all_do():
    assert len(parse_gpus("4xh100").with_more_gpus(1).peers) == 20
    some = replace(parse_gpus("4xh100"), peers=parse_gpus("4xh100").peers[:3])
    assert some.with_more_gpus(1).peers == some.peers
    assert len(some.with_more_gpus(1).links) == 5


@pytest.mark.parametrize("pairs", [[(0, 1), (0, 1)], [(0, 0)], [(0, 2)]])
def test_peers_are_two_gpus_of_the_machine(pairs):
    rate = Figure(value=1e9, source="test")
    peers = tuple(Peer(source=a, target=b, bytes_per_s=rate, own_wire=False) for a, b in pairs)
    with pytest.raises(ConfigError, match="peers are two of 2 GPUs"):
        replace(parse_gpus("2x4090"), peers=peers)
