"""How long units compute beside each other, and what is spared by keeping what a forward made: counted, not timed."""

import contextlib
from dataclasses import replace

from outsize.errors import ModelError
from outsize.model.sizes.spec_from_config import (
    Shape,
    forward_flops,
    read_shape,
    recompute_flops,
)
from outsize.model.split import Split
from outsize.model.tiled_mlp import parts_of
from outsize.planner.program.activation_policy import Extent, KeptBytes
from outsize.planner.simulate.costs import UnitTimes
from outsize.runtime.trial.measured import Measured

# A length at which the operations of units are compared.
SAMPLE_TOKENS = 1024
# What a processor multiplies and adds while it reads a byte and writes one: 10 to 20 on a core with AVX, 250 on an RTX
# 4090. It ranks what is kept of a unit; the exact number only decides between choices that are as good.
FLOPS_PER_BYTE = 20
# A backward takes about two forwards, besides what it recomputes.
GRADIENT_FORWARDS = 2.0


def shape_of(parts: Split) -> Shape:
    """Return the sizes of a model as its config tells them.

    Raises:
        ModelError: its family's config does not.
    """
    to_dict = getattr(getattr(parts.model, "config", None), "to_dict", None)
    if to_dict is None:
        raise ModelError(f"{type(parts.model).__name__} has no config that tells its sizes")
    shape = read_shape(to_dict())
    return replace(shape, mlp_parts=parts_of(parts))


def forward_times(parts: Split, rows: int = 1, length: int = SAMPLE_TOKENS) -> tuple[float, ...]:
    """How long the forwards of units take beside each other: by their operations, or by their parameters."""
    count = parts.spec.num_streamed
    with contextlib.suppress(ModelError):
        flops = forward_flops(shape_of(parts), rows, length)
        if len(flops) == count:
            return flops
    table = max((tensor.numel for unit in parts.spec.units for tensor in unit.all_tensors), default=1)
    numel = [
        0 if unit.kind == "embedding" else sum(tensor.numel for tensor in unit.all_tensors)
        for unit in parts.spec.units[:count]
    ]
    tokens = 2.0 * rows * length
    return tuple(tokens * (size or (table if unit + 1 == count else 1)) for unit, size in enumerate(numel))


def recompute_times(
    parts: Split, measured: Measured, rows: int = 1, length: int = SAMPLE_TOKENS
) -> tuple[float, ...]:
    """The same of recomputes, of which some end early."""
    times = forward_times(parts, rows, length)
    with contextlib.suppress(ModelError):
        flops = recompute_flops(shape_of(parts), rows, length)
        if len(flops) == len(times):
            return tuple(flops[u] if u in measured.needed else s for u, s in enumerate(times))
    return times


def recompute_shares(parts: Split, measured: Measured) -> tuple[float, ...]:
    """Return how much of each streamed unit's forward its recompute takes, 0 to 1."""
    pairs = zip(recompute_times(parts, measured), forward_times(parts), strict=True)
    return tuple(recompute / forward if forward else 1.0 for recompute, forward in pairs)


def counted_times(parts: Split, measured: Measured, flops_per_s: float) -> UnitTimes:
    """Return the times of units for a microbatch as it was measured, by operations, where nobody has timed them."""
    rows, length = measured.num_sequences, measured.seq_len
    forward = forward_times(parts, rows, length)
    # The last unit runs forward before its backward, all of it.
    recompute = (*recompute_times(parts, measured, rows, length)[:-1], forward[-1])
    backward = (again + GRADIENT_FORWARDS * once for again, once in zip(recompute, forward, strict=True))
    seconds = [tuple(flops / flops_per_s for flops in each) for each in (forward, backward, recompute)]
    spared_s = {e: tuple(flops / flops_per_s for flops in each) for e, each in spared_flops(measured).items()}
    return UnitTimes(forward_s=seconds[0], backward_s=seconds[1], recompute_s=seconds[2], spared_s=spared_s)


def kept_bytes(measured: Measured) -> KeptBytes:
    """Bytes of activations kept by a forward, by extent."""
    return {Extent.WHOLE: measured.saved_bytes, **selected_bytes(measured)}


def selected_bytes(measured: Measured) -> dict[Extent, tuple[int, ...]]:
    """What forwards keep where they keep what attention, or attention and products, returned."""
    if not measured.products:
        return {}
    return {
        Extent.ATTENTION: tuple(y.num_bytes for y in measured.attention),
        Extent.PRODUCTS: tuple(y.num_bytes for y in measured.products),
    }


def spared_flops(measured: Measured) -> dict[Extent, tuple[float, ...]]:
    """Return the operations that keeping these spares a recompute.

    Where products are kept, what lies between them is made again, each byte of it at the cost of `FLOPS_PER_BYTE`.
    """
    if not measured.products:
        return {}
    between = [
        FLOPS_PER_BYTE * max(0, whole - products.num_bytes)
        for whole, products in zip(measured.saved_bytes, measured.products, strict=True)
    ]
    spared = [max(0.0, y.flops - rest) for y, rest in zip(measured.products, between, strict=True)]
    return {
        Extent.ATTENTION: tuple(float(y.flops) for y in measured.attention),
        Extent.PRODUCTS: tuple(spared),
    }
