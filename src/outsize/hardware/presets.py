"""Figures of common parts, each with its source, and machines made of them.

Peaks are dense rates of the vendor's data sheets (no sparsity). What a program reaches of them is an
assumption until a probe replaces it, and says so.
"""

import re
from difflib import get_close_matches

from outsize.errors import ConfigError
from outsize.hardware.machine_spec import Disk, Figure, Gpu, Host, Link, Machine, Peer
from outsize.hardware.pcie import theory_bytes_per_s

GIB = 2**30

# What pinned copies of 64 MiB and more reach of it: 12.3 of 15.8, 25 of 31.5 and 55 of 63 GB/s.
PCIE_EFFICIENCY = {
    3: Figure(value=0.78, source="assumed: 12.3 GB/s are common on x16"),
    4: Figure(value=0.79, source="assumed: 25 GB/s are common on x16"),
    5: Figure(value=0.87, source="assumed: 55 GB/s are common on x16"),
}
COPY_LATENCY_S = Figure(value=6e-6, source="assumed: an asynchronous copy costs 5 to 7 us")

_ADA = "NVIDIA Ada GPU architecture white paper, appendix"
_AMPERE = "NVIDIA Ampere GA102 GPU architecture white paper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper"
_EFFICIENCY_GEFORCE = Figure(value=0.75, source="assumed: large bf16 matrix products within a model")
_EFFICIENCY_SERVER = Figure(value=0.65, source="assumed: large bf16 matrix products within a model")


def _gpu(
    name: str,
    memory_gib: int,
    teraflops: dict[str, float],
    gigabytes_per_s: float,
    generation: int,
    source: str,
    efficiency: Figure,
) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=memory_gib * GIB,
        peak_flops_per_s={
            dtype: Figure(value=rate * 1e12, source=source) for dtype, rate in teraflops.items()
        },
        efficiency=efficiency,
        memory_bytes_per_s=Figure(value=gigabytes_per_s * 1e9, source=source),
        pcie_generation=generation,
    )


def _geforce(name: str, memory_gib: int, fp32: float, gigabytes: float, generation: int, source: str) -> Gpu:
    """Return a GeForce: half-precision products run at 2x the fp32 rate summed in fp32, at 4x summed in fp16."""
    rates = {"fp32": fp32, "bf16": 2 * fp32, "fp16": 2 * fp32, "fp16acc": 4 * fp32}
    return _gpu(name, memory_gib, rates, gigabytes, generation, source, _EFFICIENCY_GEFORCE)


def _server(
    name: str, memory_gib: int, half: float, fp32: float, gigabytes: float, generation: int, source: str
) -> Gpu:
    rates = {"fp32": fp32, "tf32": half / 2, "bf16": half, "fp16": half, "fp16acc": half}
    return _gpu(name, memory_gib, rates, gigabytes, generation, source, _EFFICIENCY_SERVER)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _geforce("3090", 24, 35.6, 936, 4, _AMPERE),
        _geforce("4070ti", 12, 40.1, 504, 4, _ADA),
        _geforce("4080", 16, 48.7, 717, 4, _ADA),
        _geforce("4090", 24, 82.6, 1008, 4, _ADA),
        _geforce("5090", 32, 104.8, 1792, 5, _BLACKWELL),
        _server("a100", 80, 312, 19.5, 2039, 4, "NVIDIA A100 80GB SXM data sheet"),
        _server("a800", 80, 312, 19.5, 2039, 4, "NVIDIA A800 80GB SXM data sheet"),
        _server("h100", 80, 989, 66.9, 3350, 5, "NVIDIA H100 SXM data sheet"),
        _server("h200", 141, 989, 66.9, 4800, 5, "NVIDIA H200 SXM data sheet"),
    )
}

# NVLink of servers with a switch between all GPUs: half of what data sheets call the total of both directions.
NVLINK_EFFICIENCY = 0.8
NVLINK_BYTES_PER_S: dict[str, float] = {"a100": 300e9, "a800": 200e9, "h100": 450e9, "h200": 450e9}

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


def find_gpu(name: str) -> Gpu:
    """Return the preset called ``name``, however it is spelt: ``RTX 4090``, ``rtx4090``, ``4090``.

    Raises:
        ConfigError: unknown; suggests the nearest names.
    """
    key = re.sub(r"[\s_-]", "", name.lower())
    key = re.sub(r"^(nvidia|geforce|rtx|tesla)+", "", key)
    if key not in GPUS:
        near = get_close_matches(key, GPUS, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(GPUS)}"
        raise ConfigError(f"unknown GPU {name!r}; {hint}")
    return GPUS[key]


def parse_gpus(text: str) -> Machine:
    """Return a machine of GPUs such as ``8x4090`` or ``H100``, with a host that is usual for so many.

    Up to two GeForce cards sit in a desktop, two of them on half the lanes each; anything else is a server with
    16 lanes for each.

    Raises:
        ConfigError: not of this form, or an unknown name.
    """
    match = re.fullmatch(r"\s*(?:([0-9]+)\s*[xX*]\s*)?(\S.*?)\s*", text)
    count = int(match[1] or 1) if match else 0
    if match is None or count < 1:
        raise ConfigError(f"not a number of GPUs: {text!r}; write for example 8x4090 or h100")
    gpu = find_gpu(match[2])
    is_desktop = count <= 2 and gpu.efficiency is _EFFICIENCY_GEFORCE
    rate = pcie_bytes_per_s(gpu.pcie_generation, 8 if is_desktop and count == 2 else 16)
    link = Link(up_bytes_per_s=rate, down_bytes_per_s=rate, latency_s=COPY_LATENCY_S)
    return Machine(
        name=f"{count}x{gpu.name}",
        gpus=(gpu,) * count,
        links=(link,) * count,
        host=_DESKTOP if is_desktop else _SERVER,
        disk=NVME,
        peers=_peers(gpu, count),
    )


def _peers(gpu: Gpu, count: int) -> tuple[Peer, ...]:
    """Return which of ``count`` GPUs copy to each other: all in a server; drivers of GeForce cards switch it off."""
    if gpu.name not in NVLINK_BYTES_PER_S:
        return ()
    rate = Figure(
        value=NVLINK_BYTES_PER_S[gpu.name] * NVLINK_EFFICIENCY,
        source="NVLink per direction of the SXM data sheet; assumed: large copies reach four fifths of it",
    )
    pairs = ((a, b) for a in range(count) for b in range(count) if a != b)
    return tuple(Peer(source=a, target=b, bytes_per_s=rate, own_wire=True) for a, b in pairs)
