from dataclasses import replace

import pytest

from outsize.errors import ConfigError
from outsize.hardware.cards import find_card, machine_of, parse_gpus
from outsize.model.sizes.model_spec import Workload
from outsize.planner.program.stages import Extent
from outsize.planner.simulate.gpu_times import (
    ADAPTED_EAGER,
    ADAPTED_FUSED,
    EAGER_BLOCK_S,
    ROUTED_EAGER,
    ROUTED_EAGER_ON_SEVERAL,
    USUAL_ELEMENTS,
    unit_times,
)
from planner.questions import ask

COUNTED = ask().workload_of(8)
# What lies between its products is that of the models that a share of the peak was read off.
WORK = replace(COUNTED, moved_elements=())


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


@pytest.mark.parametrize(
    ("machine", "share"),
    [
        (parse_gpus("4090"), ROUTED_EAGER),
        (parse_gpus("8x4090"), ROUTED_EAGER_ON_SEVERAL),
    ],
    ids=["eager", "eager on eight"],
)
def test_products_of_experts_take_longer_than_dense_ones(machine, share):
    dense = unit_times(machine, "bf16", WORK)
    half = replace(WORK, routed_flops=tuple(flops / 2 for flops in WORK.forward_flops))
    mixed = unit_times(machine, "bf16", half)
    slower = 0.5 + 0.5 / share
    assert mixed.forward_s[1:] == pytest.approx([slower * each for each in dense.forward_s[1:]])
    assert mixed.backward_s[1:] == pytest.approx([slower * each for each in dense.backward_s[1:]])
    assert mixed.forward_s[0] == dense.forward_s[0]


def test_fused_products_of_experts_take_what_liger_published():
    tokens, chosen, hidden, inner = 32768, 8, 2048, 768  # a layer of Qwen3-30B-A3B: 501 TFLOP/s on an H100
    flops = 6.0 * tokens * chosen * hidden * inner
    moved = float(tokens * chosen * (2 * hidden + 3 * inner))
    work = Workload(
        tokens=tokens, forward_flops=(0.0, flops, 1.0), recompute_flops=(0.0, flops, 1.0),
        gradient_flops=(0.0, 2 * flops, 1.0), boundary_bytes=(1, 1, 1), forward_workspace_bytes={},
        backward_workspace_bytes={}, held_bytes=0, saved_bytes=(0, 0, 0), routed_flops=(0.0, flops, 0.0),
        moved_elements=(0.0, 0.0, 0.0), routed_moved_elements=(0.0, moved, 0.0),
    )  # fmt: skip
    times = unit_times(machine_of(find_card("h100"), 1, "fused"), "bf16", work)
    assert flops / times.forward_s[1] == pytest.approx(501e12, rel=0.05)


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


def test_narrow_models_take_longer_for_what_lies_between_products():
    """A token's elements per FLOP are the more, the narrower its products are; those of a usual model cost nothing."""
    machine = parse_gpus("4090")
    narrow, usual = (unit_times(machine, "bf16", work) for work in (COUNTED, WORK))
    flops = COUNTED.forward_flops[1] - COUNTED.attention_flops[1]
    more_s = (
        2 * (COUNTED.moved_elements[1] - USUAL_ELEMENTS * flops) / machine.gpus[0].memory_bytes_per_s.value
    )
    assert COUNTED.moved_elements[1] == COUNTED.tokens * (7 * 2048 + 8192 + 2 * (1024 + 8192) + 2 * 2048)
    assert 0.02 < more_s / usual.forward_s[1] < 0.1
    assert narrow.forward_s[1] - usual.forward_s[1] == pytest.approx(more_s)
    gradient_s = narrow.backward_s[1] - narrow.recompute_s[1] - usual.backward_s[1] + usual.recompute_s[1]
    assert gradient_s == pytest.approx(2 * more_s)
    at_most = replace(COUNTED, moved_elements=tuple(USUAL_ELEMENTS * f for f in COUNTED.forward_flops))
    assert unit_times(machine, "bf16", at_most).forward_s[1] == pytest.approx(usual.forward_s[1], rel=0.01)


def test_adapters_take_what_their_casts_and_sums_move():
    adapted = replace(WORK, low_rank_elements=tuple(1e9 * (flops > 0) for flops in WORK.forward_flops))
    for kernels, each in (("fused", ADAPTED_FUSED), ("eager", ADAPTED_EAGER)):
        machine = machine_of(find_card("4090"), 1, kernels)
        plain, slower = (unit_times(machine, "bf16", work) for work in (WORK, adapted))
        more_s = each * 1e9 / machine.gpus[0].memory_bytes_per_s.value
        assert slower.forward_s[1] - plain.forward_s[1] == pytest.approx(more_s)
        kept, before = (times.spared_s[Extent.PRODUCTS][1] for times in (slower, plain))
        assert kept - before == pytest.approx(0.0, abs=0.3 * more_s)  # a recompute has them to make again


def test_a_small_eager_block_takes_what_asking_for_its_operations_takes():
    small = ask(seq_len=64).workload_of(1)
    eager, fused = (
        unit_times(machine_of(find_card("h100"), 1, kernels), "bf16", small) for kernels in ("eager", "fused")
    )
    assert set(eager.forward_s[1:-1]) == {EAGER_BLOCK_S}
    assert eager.backward_s[1] == 2 * EAGER_BLOCK_S
    assert max(fused.forward_s[1:-1]) < EAGER_BLOCK_S
    assert eager.forward_s[-1] < EAGER_BLOCK_S  # the head is a product or two


def test_gradients_of_a_reference_in_loops_are_not_those_of_kernels_made_for_it():
    loops = replace(WORK, gradient_flops=tuple(5 * flops for flops in WORK.forward_flops))
    eager, fused = (machine_of(find_card("4090"), 1, kernels) for kernels in ("eager", "fused"))
    assert unit_times(fused, "bf16", loops) == unit_times(fused, "bf16", WORK)
    one, other = (unit_times(eager, "bf16", work) for work in (loops, WORK))
    assert one.backward_s[1] - other.backward_s[1] == pytest.approx(3 * other.forward_s[1])
