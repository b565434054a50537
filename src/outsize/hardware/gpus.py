"""NVIDIA GPUs as the driver describes them, and the inventory of the whole machine.

Any source may be missing: no ``/sys`` in a sandbox, no NVML, a kernel without control groups. Then that one fact is
``not measured`` and says why; nothing here raises.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from outsize.hardware.cgroup import Fact, Record, explain
from outsize.hardware.cpu import Cpu, read_cpu
from outsize.hardware.host_memory import (
    DiskPlace,
    Environment,
    HostMemory,
    read_disk,
    read_environment,
    read_host_memory,
)

# From nvml.h: nvmlClockType_t, nvmlGpuP2PCapsIndex_t, nvmlGpuP2PStatus_t and nvmlClocksEventReasons. Idle clocks are no
# limit, so that reason is left out.
_SM_CLOCK = 1
_P2P_READ = 0
_P2P_NVLINK = 2
# nvmlGpuTopologyLevel_t.
_ANCESTORS = {
    0: "same board",
    10: "one bridge",
    20: "several bridges",
    30: "one host bridge",
    40: "one NUMA node",
    50: "several NUMA nodes",
}
_NVLINKS_MAX = 18
_PEER_STATUS = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "no common topology",
    4: "disabled by a registry key",
    5: "not supported",
}
_CLOCK_LIMITS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class GpuFacts(Record):
    """One GPU.

    Attributes:
        name: as the driver gives it.
        capability: of its architecture, e.g. ``9.0``.
        memory_total_bytes: its memory.
        memory_free_bytes: what no process holds.
        pcie_generation: negotiated now; lower while the GPU is idle.
        pcie_generation_max: that GPU and slot could negotiate.
        pcie_lanes: negotiated now.
        pcie_lanes_max: that GPU and slot could negotiate.
        numa_node: nearest to it.
        driver: version.
        pci_path: bridges and switches from the root of the bus to the GPU, as ``/sys`` names them.
        sm_clock_hz: of its multiprocessors now; low while it is idle.
        sm_clock_max_hz: what they can do.
        clock_limits: what keeps the clock down now, in NVML's words; empty for nothing.
        peers: by index of every other GPU, what the driver says of reading its memory: ``ok`` or why not.
        peer_nvlinks: the same, of reading it over NVLink.
        ancestors: by index of every other GPU, what is nearest above both.
        num_nvlinks: links that are up.
        uuid: what NVML and torch both know it by; each counts GPUs its own way.
    """

    name: Fact
    capability: Fact
    memory_total_bytes: Fact
    memory_free_bytes: Fact
    pcie_generation: Fact
    pcie_generation_max: Fact
    pcie_lanes: Fact
    pcie_lanes_max: Fact
    numa_node: Fact
    driver: Fact
    pci_path: Fact = Fact.unread()
    sm_clock_hz: Fact = Fact.unread()
    sm_clock_max_hz: Fact = Fact.unread()
    clock_limits: Fact = Fact.unread()
    peers: dict[str, Fact] = Field(default_factory=dict)
    peer_nvlinks: dict[str, Fact] = Field(default_factory=dict)
    ancestors: dict[str, Fact] = Field(default_factory=dict)
    num_nvlinks: Fact = Fact.unread()
    uuid: Fact = Fact.unread()


def read_gpus(load_nvml: Callable[[], Any], root: Path = Path("/")) -> tuple[tuple[GpuFacts, ...], Fact]:
    """Return the GPUs, and how many there are or why that is unknown.

    Args:
        load_nvml: returns the module ``pynvml``, or raises ImportError.
        root: where ``sys`` is.
    """
    try:
        nvml = load_nvml()
    except ImportError:
        return (), Fact.absent("nvidia-ml-py is not installed; pip install nvidia-ml-py")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), Fact.absent(f"NVML: {error}")
    try:
        count = nvml.nvmlDeviceGetCount()
        return tuple(_gpu(nvml, index, count, root) for index in range(count)), Fact.read(count, "NVML")
    except nvml.NVMLError as error:
        return (), Fact.absent(f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()


def in_order_of(gpus: Sequence[GpuFacts], uuids: Sequence[str]) -> tuple[GpuFacts, ...]:
    """Return the GPUs in the order of ``uuids``, torch's, and those that it does not see behind them.

    As they are where one is unknown: parts of a GPU, and drivers that do not tell.
    """
    place = {gpu.uuid.value: index for index, gpu in enumerate(gpus)}
    if not all(uuid in place for uuid in uuids):
        return tuple(gpus)
    order = [place[uuid] for uuid in uuids]
    order += [index for index in range(len(gpus)) if index not in order]
    new = {str(old): str(index) for index, old in enumerate(order)}

    def moved(facts: Mapping[str, Fact]) -> dict[str, Fact]:
        return dict(sorted((new[other], fact) for other, fact in facts.items()))

    return tuple(
        gpus[old].model_copy(
            update={name: moved(getattr(gpus[old], name)) for name in ("peers", "peer_nvlinks", "ancestors")}
        )
        for old in order
    )


def import_nvml() -> Any:
    """Return the module ``pynvml``.

    Raises:
        ImportError: not installed.
    """
    import pynvml

    return pynvml


def _gpu(nvml: Any, index: int, count: int, root: Path) -> GpuFacts:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    others = {other: nvml.nvmlDeviceGetHandleByIndex(other) for other in range(count) if other != index}

    def ask(function: str, convert: Callable[[Any], Any] = lambda value: value, *arguments: Any) -> Fact:
        # A driver or a virtual GPU may lack any of them, and an old nvidia-ml-py the function itself.
        try:
            return Fact.read(convert(getattr(nvml, function)(handle, *arguments)), f"NVML {function}")
        except (nvml.NVMLError, AttributeError, OSError) as error:
            return Fact.absent(f"NVML {function}: {error}")

    try:
        driver = Fact.read(_text(nvml.nvmlSystemGetDriverVersion()), "NVML nvmlSystemGetDriverVersion")
    except nvml.NVMLError as error:
        driver = Fact.absent(f"NVML nvmlSystemGetDriverVersion: {error}")
    return GpuFacts(
        name=ask("nvmlDeviceGetName", _text),
        capability=ask("nvmlDeviceGetCudaComputeCapability", lambda pair: f"{pair[0]}.{pair[1]}"),
        memory_total_bytes=ask("nvmlDeviceGetMemoryInfo", lambda memory: memory.total),
        memory_free_bytes=ask("nvmlDeviceGetMemoryInfo", lambda memory: memory.free),
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_lanes=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_lanes_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        numa_node=ask("nvmlDeviceGetNumaNodeId"),
        driver=driver,
        pci_path=ask("nvmlDeviceGetPciInfo", lambda info: _pci_path(root, _text(info.busId))),
        sm_clock_hz=ask("nvmlDeviceGetClockInfo", _hertz, _SM_CLOCK),
        sm_clock_max_hz=ask("nvmlDeviceGetMaxClockInfo", _hertz, _SM_CLOCK),
        clock_limits=ask("nvmlDeviceGetCurrentClocksThrottleReasons", clock_limits),
        peers={
            str(other): ask("nvmlDeviceGetP2PStatus", _peer, handle_of, _P2P_READ)
            for other, handle_of in others.items()
        },
        peer_nvlinks={
            str(other): ask("nvmlDeviceGetP2PStatus", _peer, handle_of, _P2P_NVLINK)
            for other, handle_of in others.items()
        },
        ancestors={
            str(other): ask("nvmlDeviceGetTopologyCommonAncestor", _ancestor, handle_of)
            for other, handle_of in others.items()
        },
        num_nvlinks=_num_nvlinks(nvml, handle),
        uuid=ask("nvmlDeviceGetUUID", _text),
    )


def read_link_under_load(load_nvml: Callable[[], Any], uuid: str) -> tuple[Fact, Fact]:
    """Return PCIe generation and lanes of a GPU as negotiated at this moment: call it while copies are going on."""
    try:
        nvml = load_nvml()
        nvml.nvmlInit()
    except (
        Exception
    ) as error:  # no module, or one of NVML's own errors, whose class is only known by the module
        return Fact.absent(f"NVML: {explain(error)}"), Fact.absent(f"NVML: {explain(error)}")
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        functions = ("nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth")
        generation, lanes = (
            Fact.read(getattr(nvml, name)(handle), f"NVML {name} during copies") for name in functions
        )
    except nvml.NVMLError as error:
        return Fact.absent(f"NVML: {error}"), Fact.absent(f"NVML: {error}")
    else:
        return generation, lanes
    finally:
        nvml.nvmlShutdown()


def _hertz(mhz: int) -> int:
    return mhz * 10**6


def clock_limits(bits: int) -> str:
    """Return what NVML's reasons for a lower clock say, in words; empty for none but idleness."""
    return ", ".join(name for bit, name in _CLOCK_LIMITS.items() if bits & bit)


def _num_nvlinks(nvml: Any, handle: Any) -> Fact:
    """Count the links that are up; a GPU without any answers the first question with an error."""
    count = 0
    try:
        for link in range(_NVLINKS_MAX):
            count += nvml.nvmlDeviceGetNvLinkState(handle, link) == 1
    except (nvml.NVMLError, AttributeError) as error:
        if count == 0:
            return Fact.absent(f"NVML nvmlDeviceGetNvLinkState: {error}")
    return Fact.read(count, "NVML nvmlDeviceGetNvLinkState")


def _ancestor(level: int) -> str:
    return _ANCESTORS.get(level, f"level {level}")


def _peer(status: int) -> str:
    return _PEER_STATUS.get(status, f"status {status}")


def _pci_path(root: Path, bus_id: str) -> str:
    """Return e.g. ``pci0000:00/0000:00:01.0/0000:01:00.0``; NVML writes eight digits of domain, ``/sys`` four."""
    domain, _, rest = bus_id.lower().partition(":")
    device = (root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}").resolve(strict=True)
    parts = device.parts
    return "/".join(parts[parts.index("devices") + 1 :])


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class Inventory(Record):
    """What the machine has.

    Attributes:
        cpu: processor.
        memory: RAM and limits.
        disks: one for each candidate directory.
        num_gpus: how many NVML sees.
        gpus: each of them.
        environment: container, virtual machine, versions.
    """

    cpu: Cpu
    memory: HostMemory
    disks: tuple[DiskPlace, ...]
    num_gpus: Fact
    gpus: tuple[GpuFacts, ...]
    environment: Environment


def take_inventory(
    directories: Sequence[Path],
    *,
    root: Path = Path("/"),
    load_nvml: Callable[[], Any] = import_nvml,
    variables: Mapping[str, str] | None = None,
) -> Inventory:
    """Return what the machine has.

    Args:
        directories: candidates for a home on disk.
        root: where ``proc`` and ``sys`` are.
        load_nvml: returns the module ``pynvml``, or raises ImportError.
        variables: the environment; None for that of the process.
    """
    gpus, num_gpus = read_gpus(load_nvml, root)
    return Inventory(
        cpu=read_cpu(root),
        memory=read_host_memory(root),
        disks=tuple(read_disk(directory, root) for directory in directories),
        num_gpus=num_gpus,
        gpus=gpus,
        environment=read_environment(root, os.environ if variables is None else variables),
    )
