"""Figures of common hosts, links and disks, each with its source, and machines made of them and of GPUs.

What is no data sheet's is an assumption until a probe replaces it, and says so.
"""

import re
from dataclasses import replace

from outsize.errors import ConfigError
from outsize.hardware.cards.gpu_table import GIB, Card, Kernels, find_card, known_card
from outsize.hardware.machine_spec import Disk, Figure, Host, Link, Machine, Peer
from outsize.hardware.topology import theory_bytes_per_s

# What pinned copies of 64 MiB and more reach of it: 12.3 of 15.8, 25 of 31.5 and 55 of 63 GB/s.
PCIE_EFFICIENCY = {
    3: Figure(value=0.78, source="assumed: 12.3 GB/s are common on x16"),
    4: Figure(value=0.79, source="assumed: 25 GB/s are common on x16"),
    5: Figure(value=0.87, source="assumed: 55 GB/s are common on x16"),
}
COPY_LATENCY_S = Figure(value=6e-6, source="assumed: an asynchronous copy costs 5 to 7 us")

# What an AdamW steps on each core where memory does not bound it, see bench/results/optimizer_2core_2026-11.json, and
# what it moves.
ADAMW_PARAMS_PER_CORE_S = 0.9e9
ADAMW_BYTES = 28
# Of NVLink and its like: half of what data sheets call the total of both directions, between all GPUs of a server.
NVLINK_EFFICIENCY = 0.8

_DESKTOP = Host(
    memory_bytes=128 * GIB,
    bytes_per_s=Figure(value=65e9, source="assumed: dual-channel DDR5-5600, 73 % of 89.6 GB/s"),
    cores=16,
    adamw_params_per_s=Figure(value=2.3e9, source="assumed: bound by memory, 28 bytes per parameter"),
)
_SERVER = Host(
    memory_bytes=1024 * GIB,
    bytes_per_s=Figure(value=250e9, source="assumed: eight channels per socket, two sockets"),
    cores=64,
    adamw_params_per_s=Figure(value=8.9e9, source="assumed: bound by memory, 28 bytes per parameter"),
)
_GRACE = Host(
    memory_bytes=480 * GIB,
    bytes_per_s=Figure(
        value=400e9, source="NVIDIA Grace data sheet: LPDDR5X, 500 GB/s; assumed: four fifths"
    ),
    cores=72,
    adamw_params_per_s=Figure(value=14.2e9, source="assumed: bound by memory, 28 bytes per parameter"),
)
NVME = Disk(
    capacity_bytes=2 * 10**12,
    read_bytes_per_s=Figure(value=7e9, source="assumed: one PCIe 4.0 NVMe drive, data sheets"),
    write_bytes_per_s=Figure(value=6e9, source="assumed: one PCIe 4.0 NVMe drive, data sheets"),
)


def pcie_bytes_per_s(generation: int, lanes: int = 16) -> Figure:
    """Return what copies reach over ``lanes`` of a PCIe ``generation``, per direction.

    Raises:
        ConfigError: there is no figure for that generation, or no such width.
    """
    if generation not in PCIE_EFFICIENCY or lanes not in (1, 2, 4, 8, 16):
        raise ConfigError(f"no figure for PCIe {generation}.0 x{lanes}; there are 3 to 5, x1 to x16")
    peak, share = theory_bytes_per_s(generation, lanes), PCIE_EFFICIENCY[generation]
    source = f"PCIe {generation}.0 base specification, x{lanes}; {share.source}"
    return Figure(value=peak * share.value, source=source)


def parse_gpus(text: str, kernels: Kernels = "eager") -> Machine:
    """Return a machine of GPUs such as ``8x4090`` or ``H100``, with a host that is usual for so many.

    Up to two cards of a desktop sit in one, two of them on half the lanes each; anything else is a server with all
    lanes for each.

    Args:
        text: number and name.
        kernels: what computes on them.

    Raises:
        ConfigError: not of this form, or an unknown name.
    """
    count, name = split_count(text)
    return machine_of(find_card(name), count, kernels)


def split_count(text: str) -> tuple[int, str]:
    """Return the number and the name that ``8x4090`` is made of; the number is one where there is none.

    Raises:
        ConfigError: not of this form.
    """
    if known_card(text) is not None:  # 7900 XT is a name, and no number of them
        return 1, text.strip()
    if re.search("[,+]", text):
        raise ConfigError(
            f"{text!r}: the GPUs of a machine are alike; plan with the slowest of them, as in 2x3090"
        )
    behind = re.fullmatch(r"(.*?)\s*[xX*]\s*([0-9]{1,3})\s*", text)
    if behind is not None and known_card(behind[1]) is not None:
        text = f"{behind[2]}x{behind[1]}"
    match = re.fullmatch(r"\s*(?:([0-9]{1,3})\s*[xX*]\s*)?(\S.*?)\s*", text)
    count = int(match[1] or 1) if match else 0
    if match is None or count < 1:
        raise ConfigError(f"not a number of GPUs: {text!r}; write for example 8x4090 or h100")
    return count, match[2]


def machine_of(card: Card, count: int, kernels: Kernels = "eager", *, fp8: bool = False) -> Machine:
    """Return a machine of ``count`` such cards, with a host that is usual for so many; see `parse_gpus`, `Card.gpu`."""
    is_desktop = count <= 2 and card.is_desktop
    if card.peer in ("c2c", "unified"):
        rate = Figure(
            value=card.peer_bytes_per_s * NVLINK_EFFICIENCY, source=f"{card.source}; assumed: four fifths"
        )
    else:
        lanes = min(card.lanes, 8) if is_desktop and count == 2 else card.lanes
        rate = pcie_bytes_per_s(card.pcie_generation, lanes)
    link = Link(up_bytes_per_s=rate, down_bytes_per_s=rate, latency_s=COPY_LATENCY_S)
    gpu, host = (
        card.gpu(kernels, fp8=fp8),
        _GRACE if card.peer == "c2c" else _DESKTOP if is_desktop else _SERVER,
    )
    if card.peer == "unified":
        gpu = replace(gpu, memory_bytes=gpu.memory_bytes // 2)
        host = _sharing(card, host)
    return Machine(
        name=f"{count}x{card.name}",
        gpus=(gpu,) * count,
        links=(link,) * count,
        host=host,
        disk=NVME,
        peers=_peers(card, count),
    )


def _sharing(card: Card, host: Host) -> Host:
    """Return the processor of ``host`` in half of the memory of ``card``."""
    rate = Figure(
        value=card.memory_bytes_per_s * NVLINK_EFFICIENCY,
        source=f"{card.source}; assumed: half of the memory for each, four fifths of its rate",
    )
    stepped = min(host.cores * ADAMW_PARAMS_PER_CORE_S, rate.value / ADAMW_BYTES)
    return Host(
        memory_bytes=card.memory_bytes // 2,
        bytes_per_s=rate,
        cores=host.cores,
        adamw_params_per_s=Figure(value=stepped, source="assumed: bound by memory, 28 bytes per parameter"),
    )


def _peers(card: Card, count: int) -> tuple[Peer, ...]:
    """Return which of ``count`` GPUs copy to each other: all in a server; drivers of GeForce cards switch it off."""
    if card.peer != "nvlink":
        return ()
    rate = Figure(
        value=card.peer_bytes_per_s * NVLINK_EFFICIENCY,
        source=f"{card.source}, per direction; assumed: large copies reach four fifths of it",
    )
    pairs = ((a, b) for a in range(count) for b in range(count) if a != b)
    return tuple(Peer(source=a, target=b, bytes_per_s=rate, own_wire=True) for a, b in pairs)
