"""The processor: model, cores, caches, SIMD, NUMA nodes, as the kernel describes them."""

import platform
import re
from pathlib import Path

from outsize.hardware import cgroup
from outsize.hardware.readings import Fact, Record

# Instruction sets that decide what matrix products and AdamW reach, as /proc/cpuinfo spells them (x86, then Arm).
_SIMD = (
    *(
        "sse4_2",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
    ),
    *(
        "avx_vnni",
        "amx_tile",
        "amx_bf16",
        "amx_int8",
        "asimd",
        "asimdhp",
        "sve",
        "sve2",
        "bf16",
        "i8mm",
        "sme",
    ),
)


class NumaNode(Record):
    """Processors and memory that are near each other.

    Attributes:
        index: of the node.
        cpus: logical processors, as the kernel writes lists: ``0-3,8``.
        memory_bytes: memory of the node.
    """

    index: int
    cpus: Fact
    memory_bytes: Fact


class Cpu(Record):
    """The processor.

    Attributes:
        model: as it names itself.
        num_physical_cores: cores of all sockets.
        num_usable_cpus: logical processors that this process may run on.
        quota_cores: cores' worth of time that the control group grants; None for all.
        simd: instruction sets that matter here.
        last_level_cache_bytes: of one socket's largest cache.
        numa_nodes: none where the kernel shows none.
        usable_cpus: logical processors that this process may run on, as the kernel writes lists.
        load_average: tasks that ran or wanted to, mean of the last minute, before anything was timed.
        clock_governor: who chooses the clock: driver and governor, e.g. ``acpi-cpufreq powersave``.
        clock_floor_hz: the least clock that the governor may choose.
        clock_limit_hz: the highest one that it may choose.
        clock_max_hz: what the processor can do.
    """

    model: Fact
    num_physical_cores: Fact
    num_usable_cpus: Fact
    quota_cores: Fact
    simd: Fact
    last_level_cache_bytes: Fact
    numa_nodes: tuple[NumaNode, ...]
    usable_cpus: Fact = Fact.unread()
    load_average: Fact = Fact.unread()
    clock_governor: Fact = Fact.unread()
    clock_floor_hz: Fact = Fact.unread()
    clock_limit_hz: Fact = Fact.unread()
    clock_max_hz: Fact = Fact.unread()


def read_cpu(root: Path) -> Cpu:
    """Return the processor that ``root/proc`` and ``root/sys`` describe."""
    info, status, load = root / "proc/cpuinfo", root / "proc/self/status", root / "proc/loadavg"
    clock = root / "sys/devices/system/cpu/cpu0/cpufreq"

    def hertz(name: str) -> Fact:
        return Fact.of(clock / name, lambda: int((clock / name).read_text()) * 1000)

    return Cpu(
        model=Fact.of(info, lambda: _field(info, "model name", "Model", "Hardware", "CPU part")),
        num_physical_cores=Fact.of(info, lambda: _num_physical_cores(root)),
        num_usable_cpus=Fact.of(status, lambda: len(listed(_field(status, "Cpus_allowed_list")))),
        quota_cores=cgroup.cpu_quota_cores(root),
        simd=Fact.of(info, lambda: _simd(_field(info, "flags", "Features"))),
        last_level_cache_bytes=Fact.of("sys/devices/system/cpu/cpu0/cache", lambda: _cache_bytes(root)),
        numa_nodes=_numa_nodes(root),
        usable_cpus=Fact.of(status, lambda: _field(status, "Cpus_allowed_list")),
        load_average=Fact.of(load, lambda: float(load.read_text().split()[0])),
        clock_governor=Fact.of(
            clock,
            lambda: " ".join(
                (clock / f"scaling_{name}").read_text().strip() for name in ("driver", "governor")
            ),
        ),
        clock_floor_hz=hertz("scaling_min_freq"),
        clock_limit_hz=hertz("scaling_max_freq"),
        clock_max_hz=hertz("cpuinfo_max_freq"),
    )


def _field(path: Path, *names: str) -> str:
    """Return the first value of the first of ``names`` that a file of ``name : value`` lines has."""
    pairs = [line.partition(":") for line in path.read_text(errors="replace").splitlines()]
    for name in names:
        for key, _, value in pairs:
            if key.strip() == name:
                return value.strip()
    raise ValueError(f"has no {names[0]!r} on {platform.machine()}")


def _num_physical_cores(root: Path) -> int:
    """Count pairs of socket and core; a hyper-thread shares its pair with another."""
    cores: set[tuple[str, ...]] = set()
    for topology in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology"):
        names = ("physical_package_id", "core_id")
        cores.add(tuple((topology / name).read_text().strip() for name in names))
    if cores:
        return len(cores)
    blocks = (root / "proc/cpuinfo").read_text(errors="replace").strip().split("\n\n")
    for block in blocks:
        fields = dict(re.findall(r"^(physical id|core id)\s*:\s*(\d+)", block, re.MULTILINE))
        if fields:
            cores.add(tuple(sorted(fields.items())))  # type: ignore[arg-type]
    if not cores:
        raise ValueError("neither names cores, nor does sys/devices/system/cpu")
    return len(cores)


def listed(text: str) -> set[int]:
    """Return the numbers of a list such as ``0-3,8``, as the kernel writes processors."""
    ends = [part.partition("-") for part in text.split(",") if part]
    return {index for first, _, last in ends for index in range(int(first), int(last or first) + 1)}


def _simd(flags: str) -> str:
    present = set(flags.split())
    return " ".join(name for name in _SIMD if name in present)


def _cache_bytes(root: Path) -> int:
    sizes = {}
    for index in (root / "sys/devices/system/cpu/cpu0/cache").glob("index[0-9]*"):
        text = (index / "size").read_text().strip()
        factor = {"K": 2**10, "M": 2**20}.get(text[-1:], 1)
        sizes[int((index / "level").read_text())] = int(text.rstrip("KM")) * factor
    if not sizes:
        raise ValueError("shows no cache")
    return sizes[max(sizes)]


def _numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    nodes = []
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus, memory = path / "cpulist", path / "meminfo"
        nodes.append(
            NumaNode(
                index=int(path.name.removeprefix("node")),
                cpus=Fact.of(cpus, lambda file=cpus: file.read_text().strip()),  # type: ignore[misc]
                memory_bytes=Fact.of(memory, lambda file=memory: _node_bytes(file)),  # type: ignore[misc]
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.index))


def _node_bytes(meminfo: Path) -> int:
    match = re.search(r"MemTotal:\s*(\d+) kB", meminfo.read_text())
    if match is None:
        raise ValueError("has no MemTotal")
    return int(match[1]) * 1024
