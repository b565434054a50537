"""What streaming gets of a device: does a copy hide behind compute, and which way of feeding keeps it busy."""

from typing import Literal

from outsize.hardware.cgroup import Fact, Measurement, Record

# Ways to feed a device chunk after chunk, from the one without any plan to VELOCITY's four buffers.
Way = Literal["demand-paged", "waited for", "two buffers", "four buffers"]
# What timing may be off by before figures that cannot all be true are noise.
NOISE = 0.05


class Overlap(Record):
    """A matrix product and copies of about the same length, each alone and both at once.

    Attributes:
        what: the product and the copies.
        matmul_s: of the product alone.
        copy_s: of the copies alone.
        both_s: until the later of the two has ended, begun together.
        matmul_beside_s: of the product beside the copies.
        copy_beside_s: of the copies beside the product.
    """

    what: str
    matmul_s: Measurement
    copy_s: Measurement
    both_s: Measurement
    matmul_beside_s: Measurement
    copy_beside_s: Measurement

    def hidden_share(self) -> float | None:
        """Return how much of the shorter one the other hides: 1 for all of it, 0 for none; None where not measured."""
        share = self._share()
        return None if share is None else min(1.0, max(0.0, share))

    def is_noisy(self) -> bool:
        """Whether the times cannot all be true: both at once took less than the longer one."""
        share = self._share()
        return share is not None and share > 1 + NOISE

    def _share(self) -> float | None:
        alone, other, both = self.matmul_s.median, self.copy_s.median, self.both_s.median
        if alone is None or other is None or both is None:
            return None
        return (alone + other - both) / min(alone, other)

    def slowdown(self) -> tuple[float, float] | None:
        """Return how many times as long as alone the product and the copies take; None where not measured."""
        pairs = ((self.matmul_beside_s, self.matmul_s), (self.copy_beside_s, self.copy_s))
        ratios = [
            beside.median / alone.median
            for beside, alone in pairs
            if beside.median is not None and alone.median is not None
        ]
        return (ratios[0], ratios[1]) if len(ratios) == 2 else None


class FeedRates(Record):
    """A device that needs chunk after chunk and computes on each: bytes per second by the way it is fed.

    Attributes:
        source: where the chunks come from.
        chunk_bytes: size of one.
        compute_s: what the device computes on a chunk, alone.
        bytes_per_s: by `Way`; with ``compute_s`` for all there is to do, ``chunk_bytes / compute_s`` is the most.
    """

    source: str
    chunk_bytes: int
    compute_s: Measurement
    bytes_per_s: dict[str, Measurement]

    def busy_share(self, way: str) -> float | None:
        """Return for what share of the time the device computes, 0 to 1, fed this way; None where not measured."""
        share = self._share(way)
        return None if share is None else min(1.0, share)

    def is_noisy(self) -> bool:
        """Whether the times cannot all be true: fed some way, the device computed faster than from its own memory."""
        return any((self._share(way) or 0.0) > 1 + NOISE for way in self.bytes_per_s)

    def _share(self, way: str) -> float | None:
        rate, compute_s = self.bytes_per_s[way].median, self.compute_s.median
        return None if rate is None or compute_s is None else rate * compute_s / self.chunk_bytes


class PinCost(Record):
    """Cost of pinning host memory for copies by a device.

    Attributes:
        way: ``mlock``, ``cudaHostRegister`` (exact, as outsize does) or ``torch pin_memory``.
        asked_bytes: of one piece.
        taken_bytes: by how much the process grew for it.
        pin_s_per_gb: seconds per 1e9 bytes asked for.
    """

    way: Literal["mlock", "cudaHostRegister", "torch pin_memory"]
    asked_bytes: int
    taken_bytes: Fact
    pin_s_per_gb: Measurement


class NumaRates(Record):
    """Copies of memory on one node by somebody near or far.

    Attributes:
        memory_node: where the memory lies.
        by: who copies: ``node 1`` for its processors, or a device.
        local: whether that is the memory's own node; None where it is not known.
        copy_bytes_per_s: read and written together by processors, one way by a device.
    """

    memory_node: int
    by: str
    local: bool | None
    copy_bytes_per_s: Measurement


class ShapeRate(Record):
    """The matrix products of a model's own shape.

    Attributes:
        name: of the parameter.
        num_inputs: columns of the weight.
        num_outputs: rows of the weight.
        num_tokens: rows of what it is multiplied with.
        flops_per_s: 2 · tokens · inputs · outputs operations each, by dtype.
    """

    name: str
    num_inputs: int
    num_outputs: int
    num_tokens: int
    flops_per_s: dict[str, Measurement]


class TogetherRates(Record):
    """One device's copies while all devices copy.

    Attributes:
        device: which.
        direction: ``up`` to the devices or ``down`` from them.
        alone_bytes_per_s: by itself, the same copies.
        together_bytes_per_s: while all others copy as well.
    """

    device: str
    direction: Literal["up", "down"]
    alone_bytes_per_s: Measurement
    together_bytes_per_s: Measurement


def starved_share(num_tokens: float, flops_per_s: float, link_bytes_per_s: float, weight_bytes: int) -> float:
    """Return the share of time, 0 to 1, that compute waits for weights which cross a link once for ``num_tokens``.

    A weight costs two FLOPs for each token (Kaplan et al. 2020, arXiv 2001.08361, section 2.1), and copies hide behind
    products: whatever takes longer sets the pace.

    Args:
        num_tokens: that pass through a unit while it is on the device.
        flops_per_s: that products reach.
        link_bytes_per_s: that the link carries.
        weight_bytes: of each weight.
    """
    compute_s, copy_s = 2 * num_tokens / flops_per_s, weight_bytes / link_bytes_per_s
    return max(0.0, 1 - compute_s / copy_s)


def break_even_tokens(flops_per_s: float, link_bytes_per_s: float, weight_bytes: int) -> float:
    """Return the tokens per visit from which on compute waits for no weight; arguments as of `starved_share`."""
    return weight_bytes * flops_per_s / (2 * link_bytes_per_s)


def slower_than_fp32(flops_per_s: float | None, fp32_flops_per_s: float | None) -> float | None:
    """Return how often as long as in fp32 products of 16 bits take; None where they gain, or where it is not known.

    Weights of two bytes halve what is moved, so fp32 has to be a quarter faster before it is said to be.
    """
    if not flops_per_s or not fp32_flops_per_s or fp32_flops_per_s < 1.25 * flops_per_s:
        return None
    return fp32_flops_per_s / flops_per_s
