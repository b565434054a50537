"""A probe from start to end: inventory first, then everything that can be timed, one thing at a time."""

import datetime
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from outsize.hardware.inventory import Inventory, take_inventory
from outsize.hardware.machine_file import DeviceRates, DiskRates, HostRates, MachineFile
from outsize.hardware.readings import Fact
from outsize.probe.compute import DTYPES, measure_attention, measure_device_memory, measure_matmul
from outsize.probe.disk import measure_disk
from outsize.probe.effort import Effort, within_memory
from outsize.probe.host import measure_host
from outsize.probe.link import measure_links

Announce = Callable[[str, int, int], None]
"""Called before each part with its name, its index and the number of parts."""


def probe(
    effort: Effort,
    directories: Sequence[Path],
    *,
    announce: Announce = lambda name, index, total: None,
    root: Path = Path("/"),
) -> MachineFile:
    """Return what the machine has and does.

    Args:
        effort: how long and how large.
        directories: whose disks are timed; each is written to, and nothing stays there.
        announce: told what begins.
        root: where ``proc`` and ``sys`` are.
    """
    started = time.perf_counter()
    created_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    inventory = take_inventory(directories, root=root)
    effort = within_memory(effort, inventory.memory.free_bytes())
    names = _devices()
    total = 1 + len(directories) + 2 * len(names)

    announce("host memory and optimizer", 0, total)
    host = measure_host(effort)
    disks: list[DiskRates] = []
    for directory in directories:
        announce(f"disk of {directory}", 1 + len(disks), total)
        disks.append(measure_disk(directory, effort))
    devices: list[DeviceRates] = []
    for name in names:
        done = 1 + len(disks) + 2 * len(devices)
        devices.append(
            _measure_device(name, effort, inventory, host, partial(_announce_from, announce, done, total))
        )
    return MachineFile(
        created_at=created_at,
        mode=effort.mode,
        duration_s=time.perf_counter() - started,
        inventory=inventory,
        host=host,
        disks=tuple(disks),
        devices=tuple(devices),
    )


def _announce_from(announce: Announce, first: int, total: int, name: str, index: int) -> None:
    announce(name, first + index, total)


def _devices() -> list[str]:
    """Return the GPUs; the CPU is a device of its own where there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"cuda:{index}" for index in range(count)] or ["cpu"]


def _measure_device(
    device: str, effort: Effort, inventory: Inventory, host: HostRates, announce: Callable[[str, int], None]
) -> DeviceRates:
    name, num_sms, memory_bytes = _describe(device, inventory)
    announce(f"compute of {device}", 0)
    triad = host.dram_triad_bytes_per_s if device == "cpu" else measure_device_memory(device, effort)
    matmul = {dtype: measure_matmul(device, dtype, effort) for dtype in DTYPES}
    attention = {dtype: measure_attention(device, dtype, effort) for dtype in DTYPES}
    announce(f"link of {device}", 1)
    return DeviceRates(
        device=device,
        name=name,
        num_sms=num_sms,
        memory_bytes=memory_bytes,
        memory_triad_bytes_per_s=triad,
        matmul_flops_per_s=matmul,
        attention_flops_per_s=attention,
        links=tuple(measure_links(device, effort)),
    )


def _describe(device: str, inventory: Inventory) -> tuple[str, Fact, Fact]:
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        how = "torch.cuda.get_device_properties"
        return (
            properties.name,
            Fact.read(properties.multi_processor_count, how),
            Fact.read(properties.total_memory, how),
        )
    usable = inventory.memory.usable_bytes()
    memory = Fact.absent("neither RAM nor a limit is known")
    if usable is not None:
        memory = Fact.read(usable, "the least of RAM and the limit of the control group")
    return str(inventory.cpu.model.value or "CPU"), Fact.read(None, "a CPU has none"), memory
