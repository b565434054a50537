from dataclasses import replace

import pytest

from outsize.errors import ConfigError
from outsize.hardware.cards import find_card, machine_of, parse_gpus
from outsize.planner.simulate.gpu_times import ROUTED_SHARE, unit_times
from planner.questions import ask

WORK = ask().workload_of(2)


def test_blocks_take_their_flops_and_the_embedding_its_bytes():
    machine = parse_gpus("4090")
    times = unit_times(machine, "bf16", WORK)
    rate = machine.gpus[0].flops_per_s("bf16")
    assert times.forward_s[1:] == pytest.approx([flops / rate for flops in WORK.forward_flops[1:]])
    assert times.forward_s[0] == pytest.approx(2 * WORK.boundary_bytes[1] / 1008e9)
    assert times.recompute_s[1] < times.forward_s[1]
    both = zip(times.forward_s, times.recompute_s, strict=True)
    assert times.backward_s == pytest.approx([2 * down + up for down, up in both])


def test_the_slowest_gpu_sets_the_time():
    pair = parse_gpus("2x4090")
    mixed = replace(pair, gpus=(pair.gpus[0], find_card("3090").gpu()))
    assert (
        unit_times(mixed, "bf16", WORK).forward_s[1:]
        == unit_times(parse_gpus("3090"), "bf16", WORK).forward_s[1:]
    )


def test_a_dtype_without_a_figure():
    with pytest.raises(ConfigError, match="no rate for fp4"):
        unit_times(parse_gpus("4090"), "fp4", WORK)


def test_products_of_experts_take_longer_than_dense_ones():
    dense = unit_times(parse_gpus("4090"), "bf16", WORK)
    half = replace(WORK, routed_flops=tuple(flops / 2 for flops in WORK.forward_flops))
    mixed = unit_times(parse_gpus("4090"), "bf16", half)
    slower = 0.5 + 0.5 / ROUTED_SHARE
    assert mixed.forward_s[1:] == pytest.approx([slower * each for each in dense.forward_s[1:]])
    assert mixed.backward_s[1:] == pytest.approx([slower * each for each in dense.backward_s[1:]])
    assert mixed.forward_s[0] == dense.forward_s[0]


def test_linear_layers_of_blocks_alone_are_faster_in_fp8():
    card = find_card("4090")
    plain, fast = (unit_times(machine_of(card, 1, "fused", fp8=fp8), "bf16", WORK) for fp8 in (False, True))
    gain = card.gpu("fused", fp8=True).fp8_gain.value
    share = 1 - WORK.attention_flops[1] / WORK.forward_flops[1]
    less = 1 - share * (1 - 1 / gain)
    assert 0.6 < less < 0.7
    assert fast.forward_s[1:-1] == pytest.approx([less * each for each in plain.forward_s[1:-1]])
    assert fast.backward_s[1:-1] == pytest.approx([less * each for each in plain.backward_s[1:-1]])
    assert (fast.forward_s[0], fast.backward_s[-1]) == (plain.forward_s[0], plain.backward_s[-1])
    both = zip(WORK.forward_flops, WORK.attention_flops, strict=True)
    experts = replace(WORK, routed_flops=tuple(flops - attention for flops, attention in both))
    plain, fast = (unit_times(machine_of(card, 1, fp8=fp8), "bf16", experts) for fp8 in (False, True))
    assert fast.forward_s == pytest.approx(plain.forward_s)
