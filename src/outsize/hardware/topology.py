"""PCIe in numbers, and the paths between GPUs.

What lies between two GPUs, judged twice: by what the driver says and by what copies reach.

Peer access is not NVLink, and neither is promised by the other: so both are asked, and where they differ both are told.

PCIe in numbers: what one lane carries by generation, and what is left of it in copies.
"""

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
