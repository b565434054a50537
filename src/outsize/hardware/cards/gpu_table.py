"""The GPUs that people have, read from ``gpu_table.csv``: their figures, and what people call them.

A row says: name, other names, class, memory in GiB, bandwidth of that memory in GB/s, dense peaks in TFLOP/s by dtype
(``fp16acc`` is fp16 summed in fp16), PCIe generation and lanes, how it copies to others, and the source. Peaks are
those of data sheets, without sparsity. How it copies: ``none`` (the driver switches it off), ``pcie``, ``nvlink:R`` at
R GB/s per direction to each other GPU of a server, ``c2c:R``, a link of that rate to the host's memory, not PCIe, or
``unified:R``, the same where both have one memory.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from outsize.errors import ConfigError
from outsize.hardware.cards.product_rates import Kernels, fp8_gain, share_of_peak
from outsize.hardware.machine_spec import Figure, Gpu

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

    @property
    def is_desktop(self) -> bool:
        """Whether a usual host of one or two is a desktop."""
        return not self.kind.startswith("server")

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
    found = known_card(name)
    if found is not None:
        return found
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
    """Return the card that is called ``name`` exactly, spelling apart; None where none is."""
    return _by_key().get(_key(name))


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
