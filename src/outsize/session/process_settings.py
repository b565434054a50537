"""Settings of the whole process that a run borrows: torch's random state and algorithms, processors of its threads."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import deterministic as uninitialised

from outsize.accelerators import CPU, Devices, count_of, kind_here, module_of
from outsize.errors import ConfigError
from outsize.hardware.cpu import Placement, left_alone, node_of_pci, place, read_cpu
from outsize.session.job.prepare import Job


@contextmanager
def borrowed_torch(*, deterministic: bool, devices: Devices = CPU) -> Iterator[None]:
    """Give torch's random state and its choice of algorithms back when the context ends.

    Args:
        deterministic: whether only deterministic kernels are used meanwhile. On a GPU an operation without one raises:
            if it may pass with a warning, attention takes the faster backward as well, which is not deterministic.
        devices: that compute.
    """
    kind = kind_here()
    in_use = kind is not None and module_of(kind).is_initialized()
    drawn_from = range(count_of(kind)) if kind is not None and in_use else ()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=drawn_from, device_type=kind or "cpu"))
        if deterministic:
            stack.enter_context(_deterministic(devices))
        yield


@contextmanager
def _deterministic(devices: Devices) -> Iterator[None]:
    was = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = uninitialised.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.use_deterministic_algorithms(True, warn_only=not devices.accelerated)
        # Nothing here reads memory that nobody wrote; to fill all of it costs a pass over activations.
        uninitialised.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if devices.accelerated and devices.index < count_of(devices.kind):
            _check_products_repeat(devices.torch_device)
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned_only)
        uninitialised.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def _check_products_repeat(device: torch.device) -> None:
    """Check that cuBLAS repeats its bits: torch looks at the environment at the first product alone."""
    try:
        torch.mm(torch.ones(1, 1, device=device), torch.ones(1, 1, device=device))
    except RuntimeError as error:
        if "CUBLAS_WORKSPACE_CONFIG" not in str(error):
            raise
        raise ConfigError(
            "train.deterministic: cuBLAS was used in this process before outsize was imported, or "
            "CUBLAS_WORKSPACE_CONFIG is set otherwise, so that products would not repeat their bits: set "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 before Python starts, import outsize first, or set "
            "train.deterministic=false"
        ) from error


ROOT = Path("/")
_TASKS = Path("/proc/self/task")


def placement_of(prepared: Job, local_processes: int, root: Path = ROOT) -> Placement:
    """Return where the threads of a run go that is about to take its memory."""
    if prepared.config.memory.numa == "off":
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
    before = _affinities()
    processors = os.sched_getaffinity(0)
    try:
        _bind({task: set(placement.cpus) for task in before})
        yield
    finally:
        _bind({task: before.get(task, processors) for task in _tasks()})


def _tasks() -> list[int]:
    return [int(path.name) for path in _TASKS.iterdir()]


def _affinities() -> dict[int, set[int]]:
    """Where each thread may run; not of one that ends meanwhile."""
    affinities = {}
    for task in _tasks():
        with contextlib.suppress(OSError):
            affinities[task] = os.sched_getaffinity(task)
    return affinities


def _bind(wanted: dict[int, set[int]]) -> None:
    for task, cpus in wanted.items():
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(task, cpus)


def address_of(properties: Any) -> str:
    """Return the place on the bus that torch's properties of a device name, as `/sys` writes it."""
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
