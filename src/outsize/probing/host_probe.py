"""Host memory and the optimizer that it bounds: copy, triad, AdamW parameters per second.

What it takes to reach memory of another NUMA node.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from outsize.accelerators import Devices
from outsize.errors import StorageError
from outsize.hardware.cgroup import Measurement, explain
from outsize.hardware.cpu import NumaNode, listed
from outsize.hardware.machine_file import HostRates
from outsize.hardware.topology import NumaRates
from outsize.probing.compute import measure_adamw
from outsize.probing.effort import Effort, sample
from outsize.runtime.device.driver import pinner_of
from outsize.storage.ledger import Arena
from outsize.units import format_bytes

_SCALAR = 3.0  # of STREAM's triad


def measure_dram(effort: Effort) -> tuple[Measurement, Measurement]:
    """Return what ``a = b`` and ``a = b + s * c`` move in host memory, bytes per second, reads and writes together.

    As in STREAM (McCalpin) the write-allocate read of ``a`` is not counted, and the numbers are fp64.
    """
    with Arena() as arena:
        a, b, c = (arena.take(effort.array_bytes, "DRAM array").view(torch.float64).fill_(1.0) for _ in "abc")
        how = f"fp64 arrays of {format_bytes(effort.array_bytes)}, {torch.get_num_threads()} threads"
        copies = sample(lambda: a.copy_(b), **effort.sampling())
        triads = sample(lambda: torch.add(b, c, alpha=_SCALAR, out=a), **effort.sampling())
        return (
            Measurement.of((2 * effort.array_bytes / s for s in copies), f"torch copy_, {how}"),
            Measurement.of((3 * effort.array_bytes / s for s in triads), f"torch.add with alpha, {how}"),
        )


def measure_host(effort: Effort) -> HostRates:
    """Return the rates of processor and host memory."""
    copy, triad = measure_dram(effort)
    return HostRates(
        dram_copy_bytes_per_s=copy,
        dram_triad_bytes_per_s=triad,
        adamw_params_per_s={dtype: measure_adamw(effort, dtype) for dtype in ("fp32", "bf16")},
    )


T = TypeVar("T")


def measure_numa(
    nodes: Sequence[NumaNode],
    effort: Effort,
    *,
    device: Devices | None = None,
    device_node: int | None = None,
) -> tuple[NumaRates, ...]:
    """Return the rates of copies of memory on each node, by the processors of each node or by a GPU.

    Pages lie where they are first written, so a thread that may only run on a node writes them there, and another one
    copies. One thread each: the share is what counts.

    Args:
        nodes: of the machine; with fewer than two there is nothing to compare.
        effort: how long.
        device: a GPU that copies instead of processors.
        device_node: its node, where it is known.
    """
    if len(nodes) < 2:
        return ()
    rates = []
    for node in nodes:
        if device is not None:
            local = None if device_node is None else node.index == device_node
            rates.append(
                _numa_rate(node, str(device), local, lambda at=node: _copied_by_device(at, device, effort))  # type: ignore[misc]
            )
            continue
        rates += [
            _numa_rate(
                node,
                f"node {other.index}",
                other.index == node.index,
                lambda at=node, by=other: _copied_by_node(at, by, effort),  # type: ignore[misc]
            )
            for other in nodes
        ]
    return tuple(rates)


def _numa_rate(node: NumaNode, by: str, local: bool | None, measure: Callable[[], Measurement]) -> NumaRates:
    try:
        rate = measure()
    except (OSError, RuntimeError, ValueError, StorageError) as error:
        rate = Measurement.absent(explain(error))
    return NumaRates(memory_node=node.index, by=by, local=local, copy_bytes_per_s=rate)


def _copied_by_node(node: NumaNode, by: NumaNode, effort: Effort) -> Measurement:
    size = effort.array_bytes
    with Arena() as arena:
        source, target = (arena.take(size, "NUMA array").numpy() for _ in range(2))
        for array in (source, target):
            _on(node, partial(array.fill, 1))
        seconds = _on(by, lambda: sample(lambda: np.copyto(target, source), **effort.sampling()))
    return Measurement.of((2 * size / s for s in seconds), "one thread, bytes read and written")


def _copied_by_device(node: NumaNode, device: Devices, effort: Effort) -> Measurement:
    size = effort.array_bytes
    with Arena(pinner=pinner_of(device)) as arena:
        host = _on(node, lambda: arena.take(size, "NUMA array"))
        target = torch.empty(size, dtype=torch.uint8, device=device.torch_device)

        def copy() -> None:
            target.copy_(host, non_blocking=True)
            torch.accelerator.synchronize(device.torch_device)

        seconds = sample(copy, **effort.sampling())
    return Measurement.of((size / s for s in seconds), f"pinned memory to {device}")


def _on(node: NumaNode, work: Callable[[], T]) -> T:
    """Do ``work`` on a thread that may only run on the processors of ``node``."""
    cpus = listed(str(node.cpus.value or "")) & os.sched_getaffinity(0)
    if not cpus:
        raise ValueError(f"this process may not run on node {node.index}")

    def bound() -> T:
        os.sched_setaffinity(0, cpus)  # of the calling thread alone
        return work()

    with ThreadPoolExecutor(1, "probe-numa") as thread:
        return thread.submit(bound).result()
