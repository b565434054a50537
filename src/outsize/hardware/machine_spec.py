"""Describe a machine in numbers: devices, links, host and disks. No torch.

Every figure carries its source and whether it was measured on the machine at hand. Rates are bytes, operations
or parameters per second; a link's rates are per direction.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from outsize.errors import ConfigError

# Shares of what is free that a budget takes where the user names none: the rest is for the process itself, for what
# kernels allocate inside themselves, and for other programs.
DEVICE_SHARE = 0.9
HOST_SHARE = 0.8
DISK_SHARE = 0.9
# cuBLAS keeps a workspace for each stream and thread: for the compute lane's, and autograd's that works for it.
STREAM_BYTES = 32 * 2**20
CUBLAS_BYTES = 2 * STREAM_BYTES
# What a core multiplies in bf16 where nobody has measured it: with AVX-512 alone, 39 GFLOP/s. Instructions for bf16
# make 110 of them, AMX 1,150 (a Xeon of 2.6 GHz, matrices of 1,024 and 2,048 squared, oneDNN held to each).
PRODUCTS_OF_A_CORE = 40e9


class _Described:
    """Base of what a description may hold: pydantic reads it, and refuses what is unknown."""

    __slots__ = ()
    __pydantic_config__: ClassVar = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure(_Described):
    """A number and where it comes from.

    Attributes:
        value: in the unit that the field's name says.
        source: data sheet, or how it was measured or assumed.
        measured: whether it was measured on the machine that it stands for.
        within: half of the interval that it lies in, a share of it; 0 where nobody has said.
    """

    value: float
    source: str
    measured: bool = False
    within: float = 0.0

    def __post_init__(self) -> None:
        if not self.value > 0:
            raise ValueError(f"a figure is positive, not {self.value} ({self.source})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(_Described):
    """One compute device.

    Attributes:
        name: as people write it, e.g. ``"4090"``.
        memory_bytes: its memory.
        peak_flops_per_s: dense matrix multiplications by compute dtype; ``fp16acc`` is fp16 summed in fp16.
        efficiency: share of the peak that large matrix multiplications of a model reach.
        memory_bytes_per_s: bandwidth of its own memory.
        pcie_generation: of its connector; a slot may give less.
        is_host: whether it is the host's own processor, which then is device and host in one.
        products_per_s: FLOPs of products of bf16 matrices as Muon has them; None where nobody has measured that.
        fused: whether what lies between products of a model runs in kernels made for it.
        fp8_gain: how many times as fast linear layers of blocks multiply in fp8, where they do; None where they do not.
    """

    name: str
    memory_bytes: int
    peak_flops_per_s: Mapping[str, Figure]
    efficiency: Figure
    memory_bytes_per_s: Figure
    pcie_generation: int
    is_host: bool = False
    products_per_s: Figure | None = None
    fused: bool = False
    fp8_gain: Figure | None = None

    @property
    def products(self) -> Figure:
        """FLOPs of products of bf16 matrices per second, as measured or else as models reach them.

        Of a device without a figure for bf16 the least that there is, since it emulates that in another dtype.
        """
        if self.products_per_s is not None:
            return self.products_per_s
        peaks = self.peak_flops_per_s
        peak = peaks["bf16"] if "bf16" in peaks else min(peaks.values(), key=lambda figure: figure.value)
        value, measured = peak.value * self.efficiency.value, peak.measured and self.efficiency.measured
        source = peak.source if self.efficiency.value == 1.0 else f"{peak.source}; {self.efficiency.source}"
        return Figure(value=value, source=source, measured=measured)

    def flops_per_s(self, dtype: str) -> float:
        """Return the rate that a model's matrix multiplications reach in ``dtype``.

        Raises:
            ConfigError: there is no figure for that dtype.
        """
        if dtype not in self.peak_flops_per_s:
            dtypes = " or ".join(name for name in ("bf16", "fp16", "fp32") if name in self.peak_flops_per_s)
            raise ConfigError(f"no rate for {dtype} on {self.name}; try {dtypes} (--dtype of `outsize plan`)")
        return self.peak_flops_per_s[dtype].value * self.efficiency.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(_Described):
    """The way between host memory and one device.

    Attributes:
        up_bytes_per_s: towards the device.
        down_bytes_per_s: away from it.
        latency_s: fixed cost of a copy.
        switch: name of the switch whose uplink it shares; empty for none.
    """

    up_bytes_per_s: Figure
    down_bytes_per_s: Figure
    latency_s: Figure
    switch: str = ""

    def partly_pinned(self, share: float, up: float, down: float, source: str, measured: bool) -> "Link":
        """Return the link where a ``share`` of what crosses is pinned, and the rest goes at ``up`` and ``down``."""
        pairs = (self.up_bytes_per_s.value, up), (self.down_bytes_per_s.value, down)
        rates = [1 / (share / pinned + (1 - share) / min(pinned, other)) for pinned, other in pairs]
        new_up, new_down = (Figure(value=rate, source=source, measured=measured) for rate in rates)
        return replace(self, up_bytes_per_s=new_up, down_bytes_per_s=new_down)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer(_Described):
    """Copies from one device's memory to another's that do not pass through host memory.

    Attributes:
        source: number of the device that they leave.
        target: of the one that they go to.
        bytes_per_s: rate of large ones.
        own_wire: whether they go over a wire of their own (NVLink), not over the two links to the host.
    """

    source: int
    target: int
    bytes_per_s: Figure
    own_wire: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(_Described):
    """Processor and memory.

    Attributes:
        memory_bytes: RAM.
        bytes_per_s: its bandwidth, reads and writes together.
        cores: physical cores.
        adamw_params_per_s: parameters that a fused AdamW steps per second with nothing else going on.
        flops_per_s: of products of bf16 matrices; None where nobody has measured it.
        pinned_bytes: most that its driver pins, as under WSL2; None for all that is asked for.
    """

    memory_bytes: int
    bytes_per_s: Figure
    cores: int
    adamw_params_per_s: Figure
    flops_per_s: Figure | None = None
    pinned_bytes: int | None = None

    @property
    def products(self) -> Figure:
        """FLOPs of products of bf16 matrices per second, as measured or else by its cores."""
        source = f"assumed: {PRODUCTS_OF_A_CORE / 1e9:.0f} GFLOP/s per core, as without instructions for bf16"
        return self.flops_per_s or Figure(value=self.cores * PRODUCTS_OF_A_CORE, source=source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk(_Described):
    """A disk, or several as one.

    Attributes:
        capacity_bytes: free space.
        read_bytes_per_s: sequential direct reads.
        write_bytes_per_s: sustained direct writes.
    """

    capacity_bytes: int
    read_bytes_per_s: Figure
    write_bytes_per_s: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(_Described):
    """One box.

    Attributes:
        name: what to call it.
        gpus: its devices.
        links: one for each device.
        host: processor and memory.
        disk: None where there is none to use.
        uplinks: bytes per second and direction that the devices behind a switch share, by its name.
        peers: which devices copy to which by themselves; empty where all goes by way of host memory.
    """

    name: str
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    host: Host
    disk: Disk | None = None
    uplinks: Mapping[str, Figure] = field(default_factory=dict)
    peers: tuple[Peer, ...] = ()

    def __post_init__(self) -> None:
        if not self.gpus or len(self.gpus) != len(self.links):
            raise ConfigError(f"{self.name}: a machine has GPUs, and a link for each of them")
        missing = {link.switch for link in self.links if link.switch} - set(self.uplinks)
        if missing:
            raise ConfigError(f"{self.name}: links name switches without an uplink: {sorted(missing)}")
        pairs, gpus = [(peer.source, peer.target) for peer in self.peers], range(len(self.gpus))
        if len(set(pairs)) < len(pairs) or any(a == b or a not in gpus or b not in gpus for a, b in pairs):
            raise ConfigError(f"{self.name}: peers are two of {len(self.gpus)} GPUs, each pair named once")

    def peer(self, source: int, target: int) -> Peer | None:
        """Return how GPU number ``source`` copies to ``target`` by itself; None where it does not."""
        return next((each for each in self.peers if (each.source, each.target) == (source, target)), None)

    def up_bytes_per_s(self, gpu: int) -> float:
        """Return at which bytes come to GPU number ``gpu`` while no other asks for any, through its switch too."""
        link = self.links[gpu]
        return min(link.up_bytes_per_s.value, self.uplinks.get(link.switch, link.up_bytes_per_s).value)

    def with_more_gpus(self, count: int) -> "Machine":
        """Return the machine with ``count`` more GPUs like the last; they copy to others if all of it do so already."""
        gpus, before = (*self.gpus, *[self.gpus[-1]] * count), len(self.gpus)
        peers = self.peers
        if before > 1 and len(peers) == before * (before - 1):
            pairs = [
                (a, b) for a in range(len(gpus)) for b in range(len(gpus)) if a != b and max(a, b) >= before
            ]
            peers += tuple(replace(peers[-1], source=a, target=b) for a, b in pairs)
        return replace(self, gpus=gpus, links=(*self.links, *[self.links[-1]] * count), peers=peers)

    def of_each_gpu(self) -> "Machine":
        """Return what a process has that has one of the GPUs, all alike, and its share of everything else."""
        count, link, disk = len(self.gpus), self.links[0], self.disk
        behind = sum(each.switch == link.switch for each in self.links)
        memory, cores = self.host.memory_bytes // count, max(1, self.host.cores // count)
        pinned = self.host.pinned_bytes and self.host.pinned_bytes // count
        return Machine(
            name=f"a GPU and 1/{count} of {self.name}",
            gpus=self.gpus[:1],
            links=(link,),
            host=replace(_share(self.host, count), memory_bytes=memory, cores=cores, pinned_bytes=pinned),
            disk=disk and replace(_share(disk, count), capacity_bytes=disk.capacity_bytes // count),
            uplinks={name: _part(rate, behind) for name, rate in self.uplinks.items() if name == link.switch},
        )

    def to_json(self) -> str:
        """Return the machine as JSON that `from_json` reads back without loss."""
        return json.dumps(asdict(self), indent=1)


def _part(figure: Figure, count: int) -> Figure:
    return replace(figure, value=figure.value / count, source=f"{figure.source}; shared by {count}")


def _share(part: Any, count: int) -> Any:
    """Return what has one of ``count`` equal parts of each rate."""
    rates = {name: getattr(part, name) for name in type(part).__annotations__}
    return replace(
        part, **{name: _part(rate, count) for name, rate in rates.items() if isinstance(rate, Figure)}
    )


def from_json(text: str) -> Machine:
    """Return the machine that ``text`` describes.

    Raises:
        ConfigError: not JSON, or fields are missing, unknown or of the wrong kind.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(Machine).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ConfigError(f"not the description of a machine: {place}: {first['msg']}") from error
