"""GPUs by name, common hosts, links and disks, with the source of each figure.

What is no data sheet's is an assumption until a probe replaces it, and says so. A row of ``gpu_table.csv`` says: name,
other names, class, memory in GiB, bandwidth of that memory in GB/s, dense peaks in TFLOP/s by dtype (``fp16acc`` is
fp16 summed in fp16), PCIe generation and lanes, how it copies to others, and the source. Peaks are those of data
sheets, without sparsity. How it copies: ``none`` (the driver switches it off), ``pcie``, ``nvlink:R`` at R GB/s per
direction to each other GPU of a server, ``c2c:R``, a link of that rate to the host's memory, not PCIe, or
``unified:R``, the same where both have one memory.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Literal

from outsize.errors import ConfigError
from outsize.hardware.machine_spec import Disk, Figure, Gpu, Host, Link, Machine, Peer
from outsize.hardware.topology import theory_bytes_per_s

Kernels = Literal["eager", "fused", "liger", "compiled"]

# Fused kernels gain about a fifth over eager blocks (Liger kernels; LLMQ's repository prints LLaMA-Factory beside its
# own runs of Qwen2.5 0.5B and 1.5B on one 4090: 0.76 and 0.67 of its rate).
_EAGER = 1 / 1.2
# How the source of their rate begins; `bench/results/published_2026-11.json` has those runs.
LIGER = "Liger's, as fused kernels, which meets LLaMA-Factory's runs with Liger on a 4090 within 7 %"
_FUSED = {"fused": "fused kernels", "liger": LIGER}
# The same of compiled blocks, and of which class of devices somebody has published what they gain.
COMPILED = (
    "compiled blocks, 1.157 times eager ones: torchtitan's Llama 3.1 8B on 8 H100, 6,667 tokens/s for 5,762 "
    "(benchmarks/llama3_h100_202412_torchtitan.md)"
)
_COMPILED_CLASS, _COMPILED_GAIN = "server-hopper", 6667 / 5762
# Whatever was not read off published runs.
_ASSUMED_WITHIN = 0.25


@dataclass(frozen=True, slots=True)
class _Share:
    """A share of the peak.

    Attributes:
        prefix: of the classes that it is of; the longest that fits counts.
        fused: with fused kernels.
        within: half of its interval, a share of it.
        source: where it comes from.
    """

    prefix: str
    fused: float
    within: float
    source: str


_LLMQ = "LLMQ's benchmarks (arXiv 2512.15306)"
_SHARES = (
    _Share("", 0.60, _ASSUMED_WITHIN, "assumed: nobody has published runs of this class"),
    _Share("geforce", 0.80, _ASSUMED_WITHIN, "assumed: as newer cards of the kind"),
    _Share("geforce-ada", 0.84, 0.08, f"{_LLMQ}: 0.79 to 0.89 on a 4090, 0.5B to 14B"),
    _Share("geforce-blackwell", 0.88, 0.08, f"{_LLMQ}: 0.85 to 0.95 on a 5060 Ti, 0.5B to 7B"),
    _Share("workstation-blackwell", 0.68, 0.08, f"{_LLMQ}: 0.61 to 0.69 on an RTX PRO 6000, 1.5B to 14B"),
    _Share("server-ada-l40s", 0.37, 0.1, f"{_LLMQ}: 1,500 tokens/s of 14B on an L40S, 350 W for its peak"),
    _Share("server-ampere", 0.65, 0.15, "assumed: large models on A100 servers train at 0.55 to 0.70"),
    _Share("server-hopper", 0.59, 0.08, f"{_LLMQ}: 0.57 to 0.62 on an H100, 1.5B to 14B"),
    _Share("server-cdna", 0.45, _ASSUMED_WITHIN, "assumed: published training on MI300X, 0.35 to 0.50"),
    _Share("radeon", 0.50, _ASSUMED_WITHIN, "assumed: products of hipBLASLt on RDNA 3"),
)

# How many times as fast products of linear layers in blocks are in fp8 as in bf16, with casts in kernels of their own:
# read off runs of models from 1.5B on in both, whose attention and head stay in bf16. Smaller ones gain less.
_FP8_GAINS = (
    _Share("", 1.45, 0.15, "assumed: as of server and workstation GPUs that are published"),
    _Share("geforce-ada", 1.6, 0.06, f"{_LLMQ}: 1.54 to 1.65 on a 4090, runs 1.45 to 1.56"),
    _Share("geforce-blackwell", 1.7, 0.06, f"{_LLMQ}: 1.65 to 1.74 on a 5060 Ti, runs 1.48 to 1.64"),
    _Share(
        "workstation-blackwell", 1.45, 0.1, f"{_LLMQ}: 1.31 to 1.55 on an RTX PRO 6000, runs 1.24 to 1.49"
    ),
    _Share("server-ada-l40s", 1.2, 0.1, f"{_LLMQ}: runs of 14B in both on an L40S, 1.13"),
    _Share("server-hopper", 1.4, 0.1, f"{_LLMQ}: 1.29 to 1.53 on an H100, runs 1.23 to 1.48"),
)


def _nearest(kind: str, shares: tuple[_Share, ...]) -> _Share:
    return max((one for one in shares if kind.startswith(one.prefix)), key=lambda one: len(one.prefix))


def fp8_gain(kind: str) -> Figure:
    """Return how many times as fast a device of class ``kind`` multiplies in fp8 within blocks."""
    gain = _nearest(kind, _FP8_GAINS)
    return Figure(value=gain.fused, source=gain.source, within=gain.within)


def share_of_peak(kind: str, kernels: Kernels) -> Figure:
    """Return the share of the peak that a device of class ``kind`` reaches with such kernels.

    ``fused`` are systems with kernels of their own for what lies between products; ``eager`` are blocks of transformers
    as they are, with one kernel for attention. Shares are read off published runs, as the FLOPs that those computed,
    recompute included, over time and peak; they are of no run of this project. Each has an interval, a share of itself.
    Those of `model.kernels` have the rate of one of the two, and so have compiled blocks but of the class of which a
    gain is known.
    """
    share = _nearest(kind, _SHARES)
    if kernels in _FUSED:
        return Figure(value=share.fused, source=f"{_FUSED[kernels]}; {share.source}", within=share.within)
    gain, what = 1.0, "eager blocks, a sixth less than fused kernels"
    if kernels == "compiled" and kind.startswith(_COMPILED_CLASS):
        gain, what = _COMPILED_GAIN, COMPILED
    return Figure(
        value=share.fused * _EAGER * gain, source=f"{what}; {share.source}", within=share.within + 0.06
    )


GIB = 2**30
_DTYPES = ("fp32", "bf16", "fp16", "fp16acc", "fp8")
# Words that say nothing where a name is looked up, in the order in which they are taken away.
_NOISE = re.compile(
    r"\((?:r|tm)\)|nvidia|geforce|tesla|quadro|amd|radeon|instinct|intel|\barc\b|\brtx|\bgtx|\brx\b|\bpro\b(?= *w)"
    r"|generation|edition|graphics|\bgpu\b"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU and how it is connected.

    Attributes:
        name: as people write it.
        aliases: what else they write.
        kind: its class: the market that it is sold to, and its architecture.
        memory_bytes: its memory.
        memory_bytes_per_s: of that memory.
        peaks: dense FLOP/s, by dtype.
        pcie_generation: of its connector.
        lanes: of its connector.
        peer: how it copies to others: ``none``, ``pcie``, ``nvlink``, ``c2c`` or ``unified``.
        peer_bytes_per_s: per direction, of ``nvlink`` to another GPU, of ``c2c`` and ``unified`` to the host; 0 else.
        source: of its figures.
        rented: whether it is asked for as a part of a cloud's machine.
    """

    name: str
    aliases: tuple[str, ...]
    kind: str
    memory_bytes: int
    memory_bytes_per_s: float
    peaks: Mapping[str, float]
    pcie_generation: int
    lanes: int
    peer: str
    peer_bytes_per_s: float
    source: str
    rented: bool = False

    @property
    def is_desktop(self) -> bool:
        """Whether a usual host of one or two is a desktop."""
        return not (self.rented or self.kind.startswith("server"))

    def gpu(self, kernels: Kernels = "eager", *, fp8: bool = False) -> Gpu:
        """Return it as a device that runs such kernels, and with ``fp8`` products of linear layers in that.

        Raises:
            ConfigError: it has no products in fp8.
        """
        if fp8 and "fp8" not in self.peaks:
            raise ConfigError(
                f"--products fp8: {self.name} has none by its data sheet; GPUs from Ada on have, and AMD's MI300"
            )
        return Gpu(
            name=self.name,
            memory_bytes=self.memory_bytes,
            peak_flops_per_s={
                dtype: Figure(value=rate, source=self.source) for dtype, rate in self.peaks.items()
            },
            efficiency=share_of_peak(self.kind, kernels),
            memory_bytes_per_s=Figure(value=self.memory_bytes_per_s, source=self.source),
            pcie_generation=self.pcie_generation,
            fused=kernels != "eager",
            fp8_gain=fp8_gain(self.kind) if fp8 else None,
        )


@cache
def cards() -> Mapping[str, Card]:
    """Return all of them, by name."""
    with Path(__file__).with_name("gpu_table.csv").open(encoding="utf-8", newline="") as file:
        return {row["name"]: _card(row) for row in csv.DictReader(file)}


def find_card(name: str) -> Card:
    """Return the card called ``name``, however it is spelt: ``RTX 4090``, ``rtx4090``, ``NVIDIA GeForce RTX 4090``.

    Raises:
        ConfigError: unknown; tells the nearest names.
    """
    card = known_card(name)
    if card is not None:
        return card
    key = _key(name)
    # Of names that are as near, those of the same letters are the nearest: digits are easily swapped.
    near = sorted(
        get_close_matches(key, _by_key(), n=4, cutoff=0.55), key=lambda one: sorted(one) != sorted(key)
    )
    names = list(dict.fromkeys(_by_key()[key].name for key in near))
    hint = f"did you mean {' or '.join(names)}?" if names else f"there are {', '.join(cards())}."
    raise ConfigError(
        f"unknown GPU {name!r}; {hint} Any other: --gpu-spec memory=24GB,tflops=165,gbps=1008 of `outsize plan`"
    )


def known_card(name: str) -> Card | None:
    """Return the card that is called ``name`` exactly, spelling apart; None where none is.

    ``h200-cloud`` is an H200 with the virtual cores and the memory that clouds rent out beside one.
    """
    card = _by_key().get(key := _key(name))
    if card is None and (card := _by_key().get(key.removesuffix("cloud"))) is not None:
        return replace(card, name=f"{card.name}-cloud", rented=True)
    return card


@cache
def _by_key() -> Mapping[str, Card]:
    return {_key(word): card for card in cards().values() for word in (card.name, *card.aliases)}


def _key(name: str) -> str:
    """Return what tells names apart: ``NVIDIA A100-SXM4-80GB`` and ``a100 sxm4 80gb`` are the same."""
    words = _NOISE.sub(" ", re.sub(r"[_-]", " ", name.lower()))
    return re.sub(r"\s", "", words)


def _card(row: Mapping[str, str]) -> Card:
    peer, _, rate = row["p2p"].partition(":")
    return Card(
        name=row["name"],
        aliases=tuple(row["aliases"].split()),
        kind=row["class"],
        memory_bytes=round(float(row["memory_gib"]) * GIB),
        memory_bytes_per_s=float(row["memory_gb_per_s"]) * 1e9,
        peaks={dtype: float(row[dtype]) * 1e12 for dtype in _DTYPES if row[dtype]},
        pcie_generation=int(row["pcie"]),
        lanes=int(row["lanes"]),
        peer=peer,
        peer_bytes_per_s=float(rate or 0) * 1e9,
        source=row["source"],
    )


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
    adamw_params_per_s=Figure(
        value=8.9e9,
        source="assumed: bound by memory, 28 bytes per parameter; a cloud VM of 16 virtual cores stepped 4.4e9",
    ),
)
_GRACE = Host(
    memory_bytes=480 * GIB,
    bytes_per_s=Figure(
        value=400e9, source="NVIDIA Grace data sheet: LPDDR5X, 500 GB/s; assumed: four fifths"
    ),
    cores=72,
    adamw_params_per_s=Figure(value=14.2e9, source="assumed: bound by memory, 28 bytes per parameter"),
)
_CLOUD = "one rented machine with an H200, 16 virtual cores and 125 GiB (bench/results/gpu_h200_2026-11.json)"
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


def parse_gpus(text: str) -> Machine:
    """Return a machine of GPUs such as ``8x4090`` or ``H100``, with a host that is usual for so many.

    Up to two cards of a desktop sit in one, two of them on half the lanes each; anything else is a server with all
    lanes for each.

    Raises:
        ConfigError: not of this form, or an unknown name.
    """
    count, name = split_count(text)
    return machine_of(find_card(name), count)


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
        source = f"{card.source}; assumed: four fifths"
        rate = Figure(value=card.peer_bytes_per_s * NVLINK_EFFICIENCY, source=source)
    else:
        lanes = min(card.lanes, 8) if is_desktop and count == 2 else card.lanes
        rate = pcie_bytes_per_s(card.pcie_generation, lanes)
    link = Link(up_bytes_per_s=rate, down_bytes_per_s=rate, latency_s=COPY_LATENCY_S)
    usual = _rented(count) if card.rented else _DESKTOP if is_desktop else _SERVER
    gpu, host = card.gpu(kernels, fp8=fp8), _GRACE if card.peer == "c2c" else usual
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


def _rented(count: int) -> Host:
    """Return what clouds rent out beside ``count`` GPUs: so many times what was measured beside one."""
    adamw = Figure(value=count * 4.4e9, source=_CLOUD)
    rate = Figure(value=adamw.value * ADAMW_BYTES, source=f"what AdamW moved on {_CLOUD}")
    return Host(memory_bytes=count * 125 * GIB, bytes_per_s=rate, cores=count * 16, adamw_params_per_s=adamw)


def _sharing(card: Card, host: Host) -> Host:
    """Return the processor of ``host`` in half of the memory of ``card``."""
    source = f"{card.source}; assumed: half of the memory for each, four fifths of its rate"
    rate = Figure(value=card.memory_bytes_per_s * NVLINK_EFFICIENCY, source=source)
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
    source = f"{card.source}, per direction; assumed: large copies reach four fifths of it"
    rate = Figure(value=card.peer_bytes_per_s * NVLINK_EFFICIENCY, source=source)
    pairs = ((a, b) for a in range(count) for b in range(count) if a != b)
    return tuple(Peer(source=a, target=b, bytes_per_s=rate, own_wire=True) for a, b in pairs)
