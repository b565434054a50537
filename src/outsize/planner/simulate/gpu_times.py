"""Seconds that a GPU computes for a microbatch, from FLOPs and its figures."""

from collections.abc import Sequence

from outsize.hardware.machine_spec import Machine
from outsize.model.sizes.model_spec import Workload
from outsize.planner.program.activation_policy import Extent
from outsize.planner.simulate.costs import UnitTimes


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
    forward = tuple(flops / rate if flops else looked_up_s for flops in work.forward_flops)
    recompute = tuple(flops / rate if flops else looked_up_s for flops in work.recompute_flops)
    gradient = (
        flops / rate if down else 2 * looked_up_s
        for down, flops in zip(work.forward_flops, work.gradient_flops, strict=True)
    )
    again = (flops / rate for flops in work.again_flops or [0.0] * len(recompute))
    backward = tuple(sum(parts) for parts in zip(recompute, gradient, again, strict=True))
    return UnitTimes(
        forward_s=forward,
        backward_s=backward,
        recompute_s=recompute,
        spared_s=_spared(work, recompute, rate, memory),
    )


def _spared(
    work: Workload, recompute: Sequence[float], rate: float, memory: float
) -> dict[Extent, tuple[float, ...]]:
    """Return what of each recompute is spared where attention, or attention and products, are kept.

    Where products are kept too, what lies between them is made again: it is read and written once.
    """
    if not work.attention_bytes:
        return {}
    between = (
        2 * (whole - kept) / memory for whole, kept in zip(work.saved_bytes, work.products_bytes, strict=True)
    )
    products = (max(0.0, all_s - rest_s) for all_s, rest_s in zip(recompute, between, strict=True))
    return {
        Extent.ATTENTION: tuple(flops / rate for flops in work.attention_flops),
        Extent.PRODUCTS: tuple(s * (kept > 0) for s, kept in zip(products, work.products_bytes, strict=True)),
    }
