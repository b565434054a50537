"""Binds the threads of a run to the NUMA node of its device, where `outsize.hardware.cpu` says so."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from outsize.config import Config
from outsize.hardware.cpu import Placement, left_alone, node_of_pci, place, read_cpu
from outsize.session.job.prepare import Job

ROOT = Path("/")
_TASKS = Path("/proc/self/task")


def placement_of(config: Config, prepared: Job, local_processes: int, root: Path = ROOT) -> Placement:
    """Return where the threads of a run go that is about to take its memory."""
    if config.memory.numa == "off":
        return left_alone("memory.numa is off")
    return place(
        read_cpu(root).numa_nodes,
        os.sched_getaffinity(0),
        [node_of_pci(root, address) for address in map(address_of, prepared.machine.devices.properties)],
        host_bytes=sum(prepared.plan.memory.get("host", {}).values()),
        num_threads=torch.get_num_threads(),
        local_processes=local_processes,
    )


@contextlib.contextmanager
def bound(placement: Placement) -> Iterator[None]:
    """Have all threads of the process run where ``placement`` says, and those that they start; and then as before.

    Pools of threads that are kept, of torch and of the kernels in C, were perhaps started long ago. A thread that was
    started meanwhile goes where this one was before.
    """
    if placement.node is None:
        yield
        return
    former = _affinities()
    own = os.sched_getaffinity(0)
    try:
        _bind({task: set(placement.cpus) for task in former})
        yield
    finally:
        _bind({task: former.get(task, own) for task in _tasks()})


def _tasks() -> list[int]:
    return [int(path.name) for path in _TASKS.iterdir()]


def _affinities() -> dict[int, set[int]]:
    """Where each thread may run; not of one that ends meanwhile."""
    found = {}
    for task in _tasks():
        with contextlib.suppress(OSError):
            found[task] = os.sched_getaffinity(task)
    return found


def _bind(wanted: dict[int, set[int]]) -> None:
    for task, cpus in wanted.items():
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(task, cpus)


def address_of(properties: Any) -> str:
    """Return the place on the bus that torch's properties of a device name, as `/sys` writes it."""
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
