"""PCIe in numbers, the paths between GPUs, and what streaming gets of a device."""

from typing import Final, Literal

from outsize.hardware.cgroup import Fact, Measurement, Record
from outsize.hardware.gpus import GpuFacts

# Transfers per second of one lane by generation, and the share that line coding leaves of the bits: 8 of 10 for
# generations 1 and 2, 128 of 130 for 3 to 5; 6 sends flits with 236 bytes of payload in 256.
_TRANSFERS_PER_S = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}
_CODING = {1: 8 / 10, 2: 8 / 10, 3: 128 / 130, 4: 128 / 130, 5: 128 / 130, 6: 236 / 256}
# Bytes per second of one lane and direction, from the base specifications.
LANE_BYTES_PER_S: Final = {
    generation: transfers * _CODING[generation] / 8 for generation, transfers in _TRANSFERS_PER_S.items()
}
# Of NVLink by generation, all links of a GPU together, per direction: Pascal 4 of 20 GB/s, Volta 6 of 25, Ampere 12,
# Hopper 18, Blackwell 18 of 50 (NVIDIA's data sheets, which add up both directions).
NVLINK_BYTES_PER_S: Final = {1: 80e9, 2: 150e9, 3: 300e9, 4: 450e9, 5: 900e9}
# Headers of packets leave 80 to 87 % for large copies: 25 of 31.5 GB/s and 55 of 63 are reported of sound machines.
SOUND_SHARE: Final = 0.8


def theory_bytes_per_s(generation: int, lanes: int) -> float:
    """Return what a link carries per direction.

    Raises:
        ValueError: a generation of unknown rate, or no lanes.
    """
    if generation not in LANE_BYTES_PER_S or lanes < 1:
        raise ValueError(f"no rate is known of PCIe generation {generation} with {lanes} lanes")
    return LANE_BYTES_PER_S[generation] * lanes


Kind = Literal["NVLink", "PCIe peer", "host-staged"]
# Copies faster than this many times the theory of the slower PCIe link did not go over PCIe.
_BEYOND_PCIE: Final = 1.05
# A copy by way of host memory crosses two links, one after the other or half by half.
_PEER_SHARE: Final = 0.55


class PeerLink(Record):
    """Copies from one GPU's memory to another's.

    What lies between the two is judged twice, by what the driver says and by what copies reach: peer access is not
    NVLink, and neither is promised by the other. Where they differ both are told.

    Attributes:
        source: device that is read.
        target: device that is written.
        by_topology: `Kind` by what driver and bus say.
        by_rate: `Kind` by what copies reach.
        copy_bytes_per_s: one direction, large copies.
    """

    source: str
    target: str
    by_topology: Fact
    by_rate: Fact
    copy_bytes_per_s: Measurement


def kind_by_topology(target: GpuFacts, source: int) -> Fact:
    """Return the `Kind` of link over which ``target`` reads GPU number ``source``, by NVML."""
    nvlink, peer = target.peer_nvlinks.get(str(source)), target.peers.get(str(source))
    if nvlink is not None and nvlink.value == "ok":
        return Fact.read("NVLink", nvlink.source)
    if peer is None or peer.value is None:
        return Fact.absent(peer.source if peer is not None else "NVML does not know that GPU")
    if peer.value == "ok":
        return Fact.read("PCIe peer", peer.source)
    return Fact.read("host-staged", f"{peer.source}: {peer.value}")


def kind_by_rate(copy: Measurement, pcie: tuple[int, int] | None, pinned_bytes_per_s: float | None) -> Fact:
    """Return the `Kind` that a measured rate speaks for.

    Args:
        copy: what copies between the two reach.
        pcie: generation and lanes of the slower of their links, where known.
        pinned_bytes_per_s: what the slower of them reaches from pinned host memory, where measured.
    """
    if copy.median is None:
        return Fact.absent(copy.source)
    most = None
    if pcie is not None:
        try:
            most = theory_bytes_per_s(*pcie)
        except ValueError as error:
            return Fact.absent(str(error))
    most = most or (None if pinned_bytes_per_s is None else pinned_bytes_per_s / 0.8)
    if most is None:
        return Fact.absent("neither the PCIe link nor pinned copies are known to compare with")
    rates_text = f"{copy.median / 1e9:.1f} GB/s beside a link of {most / 1e9:.1f}"
    if copy.median > _BEYOND_PCIE * most:
        return Fact.read("NVLink", f"{rates_text}: more than PCIe carries")
    sound = min(most, pinned_bytes_per_s or most)
    if copy.median >= _PEER_SHARE * sound:
        return Fact.read("PCIe peer", rates_text)
    return Fact.read("host-staged", f"{rates_text}: as if each byte crossed two links")


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
        medians = ((beside.median, alone.median) for beside, alone in pairs)
        ratios = [beside / alone for beside, alone in medians if beside is not None and alone is not None]
        return (ratios[0], ratios[1]) if len(ratios) == 2 else None


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
