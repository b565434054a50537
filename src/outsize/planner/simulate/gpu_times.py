"""Seconds that a GPU computes for a microbatch, from FLOPs and its figures."""

from collections.abc import Sequence

from outsize.hardware.machine_spec import Machine
from outsize.model.sizes.model_spec import Workload
from outsize.planner.program.activation_policy import Extent
from outsize.planner.simulate.costs import UnitTimes

# Of the rate of dense products, what products of tokens with the experts that they visit reach: many small ones, with
# tokens gathered and scattered around them. RoundPipe (arXiv 2604.27085) trains adapters of Qwen3-235B-A22B at 38 % of
# the bound that dense products set, beside 100 % of that bound for its dense models.
ROUTED_SHARE = 0.38


def unit_times(machine: Machine, dtype: str, work: Workload) -> UnitTimes:
    """Return the times of each streamed unit on the slowest GPU of ``machine``.

    A unit without matrix products, the embedding, takes what its bytes take in the GPU's memory: it reads and writes
    its output once forward, twice backward.

    Raises:
        ConfigError: a GPU has no figure for ``dtype``.
    """
    rate = min(gpu.flops_per_s(dtype) for gpu in machine.gpus)
    memory = min(gpu.memory_bytes_per_s.value for gpu in machine.gpus)
    looked_up_s = 2 * work.boundary_bytes[-1] / memory
    slower = _slower(work)
    forward = _seconds(work.forward_flops, slower, rate, looked_up_s)
    # What goes in parts, a mixture included, is computed again by the backward: the recompute leaves it out.
    again_flops = work.again_flops or (0.0,) * len(slower)
    of_recompute = (1.0 if again else more for again, more in zip(again_flops, slower, strict=True))
    recompute = _seconds(work.recompute_flops, tuple(of_recompute), rate, looked_up_s)
    gradient = tuple(
        flops * more / rate if down else 2 * looked_up_s
        for down, flops, more in zip(work.forward_flops, work.gradient_flops, slower, strict=True)
    )
    again = (
        (flops + (more - 1) * forward_flops * (flops > 0)) / rate
        for flops, more, forward_flops in zip(again_flops, slower, work.forward_flops, strict=True)
    )
    backward = tuple(sum(parts) for parts in zip(recompute, gradient, again, strict=True))
    forward, recompute, backward = (
        tuple(one * less for one, less in zip(seconds, _faster(machine, work, slower), strict=True))
        for seconds in (forward, recompute, backward)
    )
    return UnitTimes(
        forward_s=forward,
        backward_s=backward,
        recompute_s=recompute,
        spared_s=_spared(work, recompute, rate, memory),
    )


def _seconds(
    flops: Sequence[float], slower: Sequence[float], rate: float, idle_s: float
) -> tuple[float, ...]:
    return tuple(one * more / rate if one else idle_s for one, more in zip(flops, slower, strict=True))


def _slower(work: Workload) -> tuple[float, ...]:
    """Return how many times as long each unit takes as all of its FLOPs in dense products would."""
    if not work.routed_flops:
        return (1.0,) * len(work.forward_flops)
    lost = 1 / ROUTED_SHARE - 1
    return tuple(
        1 + lost * routed / flops if flops else 1.0
        for routed, flops in zip(work.routed_flops, work.forward_flops, strict=True)
    )


def _faster(machine: Machine, work: Workload, slower: Sequence[float]) -> tuple[float, ...]:
    """Return what of its time each unit takes where its linear layers multiply in fp8: blocks, and not the head."""
    gains = [gpu.fp8_gain for gpu in machine.gpus if gpu.fp8_gain is not None]
    saved = 1 - 1 / min(gain.value for gain in gains) if gains else 0.0
    nothing = (0.0,) * len(slower)
    others = zip(work.attention_flops or nothing, work.routed_flops or nothing, strict=True)
    blocks = zip(work.forward_flops[:-1], others, slower[:-1], strict=False)
    shares = ((flops - sum(other)) / (flops * more) if flops else 0.0 for flops, other, more in blocks)
    return (*(1 - saved * share for share in shares), 1.0)


def _spared(
    work: Workload, recompute: Sequence[float], rate: float, memory: float
) -> dict[Extent, tuple[float, ...]]:
    """Return what of each recompute is spared where attention, or attention and products, are kept.

    Where products are kept too, what lies between them is made again: it is read and written once.
    """
    if not work.attention_bytes:
        return {}
    between = (
        2 * (saved_bytes - products_bytes) / memory
        for saved_bytes, products_bytes in zip(work.saved_bytes, work.products_bytes, strict=True)
    )
    products = (max(0.0, all_s - rest_s) for all_s, rest_s in zip(recompute, between, strict=True))
    return {
        Extent.ATTENTION: tuple(flops / rate for flops in work.attention_flops),
        Extent.PRODUCTS: tuple(
            s * (products_bytes > 0) for s, products_bytes in zip(products, work.products_bytes, strict=True)
        ),
    }
