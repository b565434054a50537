"""What the machine has, before anything is timed: read from the kernel and the drivers, never guessed.

Any source may be missing: no ``/sys`` in a sandbox, no NVML, a kernel without control groups. Then that one fact is
``not measured`` and says why; nothing here raises.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outsize.hardware.cgroup import Fact, Record
from outsize.hardware.cpu import Cpu, read_cpu
from outsize.hardware.gpus import GpuFacts, import_nvml, read_gpus
from outsize.hardware.host_memory import (
    DiskPlace,
    Environment,
    HostMemory,
    read_disk,
    read_environment,
    read_host_memory,
)


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
