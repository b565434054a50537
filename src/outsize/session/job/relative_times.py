"""How long units compute beside each other, and what is spared by keeping what a forward made: counted, not timed."""

from outsize.model.split import Split
from outsize.planner.program.activation_policy import Extent, KeptBytes
from outsize.planner.simulate.costs import UnitTimes
from outsize.runtime.trial.measured import Measured

# What a processor multiplies and adds while it reads a byte and writes one: 10 to 20 on a core with AVX, 250 on an RTX
# 4090. It ranks what is kept of a unit; the exact number only decides between choices that are as good.
FLOPS_PER_BYTE = 20
# A backward takes about two forwards, besides what it recomputes.
GRADIENT_FORWARDS = 2.0


def forward_flops(parts: Split, measured: Measured, rows: int, length: int) -> tuple[float, ...]:
    """Return the operations of units' forwards: as a trial saw them, else two for each parameter and token."""
    known = measured.flops.forward(rows, length)
    if any(known):
        return known
    sizes = [
        0 if unit.kind == "embedding" else sum(tensor.numel for tensor in unit.all_tensors)
        for unit in parts.spec.units[: parts.spec.num_streamed]
    ]
    return tuple(2.0 * rows * length * size for size in sizes)


def recompute_flops(parts: Split, measured: Measured, rows: int, length: int) -> tuple[float, ...]:
    """Return the same of recomputes, of which some end early."""
    forward = forward_flops(parts, measured, rows, length)
    needed = measured.flops.needed(rows, length) or forward
    return tuple(needed[u] if u in measured.needed else whole for u, whole in enumerate(forward))


def recompute_shares(parts: Split, measured: Measured) -> tuple[float, ...]:
    """Return how much of each streamed unit's forward its recompute takes, 0 to 1."""
    size = measured.num_sequences, measured.seq_len
    pairs = zip(recompute_flops(parts, measured, *size), forward_flops(parts, measured, *size), strict=True)
    return tuple(recompute / forward if forward else 1.0 for recompute, forward in pairs)


def counted_times(parts: Split, measured: Measured, flops_per_s: float) -> UnitTimes:
    """Return the times of units for a microbatch as it was measured, by operations, where nobody has timed them."""
    rows, length = measured.num_sequences, measured.seq_len
    forward = forward_flops(parts, measured, rows, length)
    # The last unit runs forward before its backward, all of it.
    recompute = (*recompute_flops(parts, measured, rows, length)[:-1], forward[-1])
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
