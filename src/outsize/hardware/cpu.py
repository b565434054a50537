"""The processor: model, caches, SIMD, NUMA nodes, and the node to bind a process to.

The processor: model, cores, caches, SIMD, NUMA nodes, as the kernel describes them.

Whether a process that trains is best bound to the NUMA node of its device, and which processors those are.

Bound threads find the memory that they first write on their own node: the kernel puts a page near whoever touches it.
So a GPU copies from memory on its own side, and the optimizer steps there. What does not fit one node is better left to
all of them: an optimizer is bound by memory, and two nodes have twice the memory channels of one.
"""

import platform
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outsize.hardware import cgroup
from outsize.hardware.cgroup import Fact, Record
from outsize.hardware.machine_spec import HOST_SHARE
from outsize.units import format_bytes

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the threads of a process may run.

    Attributes:
        node: to which they are bound; None where they stay as they are.
        cpus: logical processors of the node that the process may use; empty where there is no node.
        reason: for people.
    """

    node: int | None
    cpus: frozenset[int] = frozenset()
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are written to JSON."""
        return {"node": self.node, "num_cpus": len(self.cpus), "reason": self.reason}


def left_alone(reason: str) -> Placement:
    """Return that nothing is bound."""
    return Placement(node=None, reason=reason)


def node_of_pci(root: Path, address: str) -> int | None:
    """Return the NUMA node of a device, by its address on the bus such as ``0000:41:00.0``; None where none is told."""
    try:
        node = int((root / "sys/bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def place(
    nodes: Collection[NumaNode],
    usable: Iterable[int],
    of_devices: Collection[int | None],
    *,
    host_bytes: int,
    num_threads: int,
    local_processes: int = 1,
) -> Placement:
    """Decide where a process runs.

    Args:
        nodes: of the machine.
        usable: logical processors that the process may run on.
        of_devices: NUMA node of each device that it computes on, None where it is not known; none of a CPU.
        host_bytes: what it is going to take of host memory.
        num_threads: threads that compute together.
        local_processes: processes on this machine that train together, each as large, spread over the nodes.
    """
    if len(nodes) < 2:
        return left_alone("the machine has one NUMA node")
    if not of_devices:
        return left_alone("the CPU computes, with the memory of all nodes")
    wanted = set(of_devices)
    if len(wanted) > 1:
        return left_alone("its devices hang on several nodes")
    near = next((node for node in nodes if node.index == next(iter(wanted))), None)
    memory_bytes = near.memory_bytes.number() if near is not None else None
    if near is None or near.cpus.value is None or memory_bytes is None:
        return left_alone("the node of its device is not known")
    allowed = frozenset(usable)
    cpus = allowed & listed(str(near.cpus.value))
    if not cpus:
        return left_alone(f"it may not run on node {near.index}, on which its device hangs")
    if any(allowed <= listed(str(node.cpus.value or "")) for node in nodes):
        return left_alone(f"it is bound to node {near.index} already")
    if num_threads > len(cpus):
        return left_alone(
            f"its {num_threads} threads want more than the {len(cpus)} processors of node {near.index}"
        )
    room = int(memory_bytes * HOST_SHARE)
    needed = host_bytes * -(-local_processes // len(nodes))
    if needed > room:
        return left_alone(
            f"node {near.index} has room for {format_bytes(room)}, and {format_bytes(needed)} are wanted there"
        )
    return Placement(node=near.index, cpus=cpus, reason=f"its device hangs on node {near.index}")
