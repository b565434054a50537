"""Host memory and the optimizer that it bounds: copy, triad, AdamW parameters per second.

What host memory costs beside its rates: locking it, and reaching it from another NUMA node.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from outsize.accelerators import Devices, vendor_of
from outsize.errors import StorageError
from outsize.hardware.cgroup import Fact, Measurement, explain
from outsize.hardware.cpu import NumaNode, listed
from outsize.hardware.machine_file import HostRates
from outsize.hardware.topology import NumaRates, PinCost, PinWay
from outsize.model.sizes.model_spec import UnitSpec
from outsize.probing.compute import finisher, measure_adamw
from outsize.probing.effort import Effort, sample
from outsize.probing.link import why_pageable
from outsize.runtime.device.allocator import resident_bytes
from outsize.runtime.device.driver import pinner_of
from outsize.storage.ledger import Arena
from outsize.units import format_bytes

_SCALAR = 3.0  # of STREAM's triad
_BESIDE_BYTES = 16 * 2**20


def measure_dram(effort: Effort) -> tuple[Measurement, Measurement]:
    """Return what ``a = b`` and ``a = b + s * c`` move in host memory, bytes per second, reads and writes together.

    As in STREAM (McCalpin) the write-allocate read of ``a`` is not counted, and the numbers are fp64.
    """
    with Arena() as arena:
        a, b, c = (arena.take(effort.array_bytes, "DRAM array").view(torch.float64).fill_(1.0) for _ in "abc")
        how = f"fp64 arrays of {format_bytes(effort.array_bytes)}, {torch.get_num_threads()} threads"
        copies = sample(
            lambda: a.copy_(b),
            **effort.sampling(),
        )
        triads = sample(
            lambda: torch.add(b, c, alpha=_SCALAR, out=a),
            **effort.sampling(),
        )
        return (
            Measurement.of((2 * effort.array_bytes / s for s in copies), f"torch copy_, {how}"),
            Measurement.of((3 * effort.array_bytes / s for s in triads), f"torch.add with alpha, {how}"),
        )


def measure_adamw_beside(device: Devices, effort: Effort) -> tuple[Measurement, Measurement]:
    """Return the parameters per second of the fp32 step while copies go both ways, and the bytes per second of those.

    Args:
        device: whose link the copies take; on a CPU they are copies from memory to memory.
        effort: how long.
    """
    copied, num_bytes = 0, min(_BESIDE_BYTES, effort.copy_bytes_max)
    stop = threading.Event()

    def copy_on() -> float:
        """Copy until told to stop; return the seconds."""
        nonlocal copied
        with Arena(pinner=pinner_of(device)) as arena:
            host, back = (arena.take(num_bytes, "copies beside the optimizer").fill_(1) for _ in range(2))
            other = torch.empty_like(host, device=device.torch_device).fill_(1)
            finish = finisher(device)
            finish()
            started = time.perf_counter()
            while not stop.is_set():
                other.copy_(host, non_blocking=True)
                back.copy_(other, non_blocking=True)
                finish()
                copied += 2 * num_bytes
            return time.perf_counter() - started

    with ThreadPoolExecutor(1, "probe-beside") as thread:
        copying = thread.submit(copy_on)
        try:
            rate = measure_adamw(effort, "fp32")
        finally:
            stop.set()
        seconds = copying.result()
    how = f"copies of {format_bytes(num_bytes)} up to {device} and down again"
    beside = rate.model_copy(update={"source": f"{rate.source}, beside {how}"})
    if copied == 0:
        return beside, Measurement.absent("no copy ended beside the optimizer")
    return beside, Measurement.of([copied / seconds], f"{how}, both directions added")


def measure_host(effort: Effort, units: Sequence[UnitSpec] = ()) -> HostRates:
    """Return the rates of processor and host memory; what is timed beside copies comes later, or not at all.

    Args:
        effort: how long and how large.
        units: of a model, for the optimizer; see `measure_adamw`.
    """
    copy, triad = measure_dram(effort)
    later = Measurement.absent("left out: the time did not suffice")
    return HostRates(
        adamw_beside_copies_params_per_s=later,
        copies_beside_adamw_bytes_per_s=later,
        dram_copy_bytes_per_s=copy,
        dram_triad_bytes_per_s=triad,
        adamw_params_per_s={dtype: measure_adamw(effort, dtype, units) for dtype in ("fp32", "bf16")},
    )


# Above a power of two, so that rounding up to the next one shows: 1.25 of one becomes 2.
_ABOVE = 1.25
T = TypeVar("T")


def measure_pinning(effort: Effort, *, device: Devices | None) -> tuple[PinCost, ...]:
    """Return what locking takes: by the kernel, and where there is a GPU by its driver and by torch."""
    requested_bytes = int(_ABOVE * effort.pin_bytes)
    costs = [_pin_cost("mlock", requested_bytes, effort, _mlock)]
    if device is not None:
        costs += [
            _pin_cost("cudaHostRegister", requested_bytes, effort, partial(_register, device)),
            # Once: what torch has pinned it keeps, and hands out again.
            _pin_cost(
                "torch pin_memory",
                requested_bytes,
                replace(effort, num_samples_min=1),
                partial(_torch_pin, device),
            ),
        ]
    return tuple(costs)


def _pin_cost(
    way: PinWay,
    requested_bytes: int,
    effort: Effort,
    pin: Callable[[int], tuple[float, int]],
) -> PinCost:
    """Call ``pin`` several times: it returns seconds, and by how many bytes the process grew."""
    try:
        results = [pin(requested_bytes) for _ in range(effort.num_samples_min)]
    except (OSError, RuntimeError, StorageError) as error:
        why = explain(error)
        return PinCost(
            way=way,
            asked_bytes=requested_bytes,
            taken_bytes=Fact.absent(why),
            pin_s_per_gb=Measurement.absent(why),
        )
    how = (
        "torch's host_memory_stats"
        if way == "torch pin_memory"
        else "growth of the process, /proc/self/statm"
    )
    return PinCost(
        way=way,
        asked_bytes=requested_bytes,
        taken_bytes=Fact.read(max(grown for _, grown in results), how),
        pin_s_per_gb=Measurement.of(
            (seconds / requested_bytes * 1e9 for seconds, _ in results), f"{way}, pages touched"
        ),
    )


def _mlock(num_bytes: int) -> tuple[float, int]:
    libc = ctypes.CDLL(None, use_errno=True)
    with Arena() as arena:
        before = resident_bytes()
        memory = arena.take(num_bytes, "memory to lock")
        started = time.perf_counter()
        address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(num_bytes)
        if libc.mlock(address, size) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        seconds = time.perf_counter() - started
        grown = resident_bytes() - before
        libc.munlock(address, size)
    return seconds, grown


def _register(device: Devices, num_bytes: int) -> tuple[float, int]:
    before, started = resident_bytes(), time.perf_counter()
    with Arena(pinner=pinner_of(device)) as arena:
        arena.take(num_bytes, "memory to pin")
        seconds = time.perf_counter() - started
        if arena.statistics().num_pageable_fallbacks:
            raise StorageError(why_pageable(device))
        return seconds, resident_bytes() - before


def _torch_pin(device: Devices, num_bytes: int) -> tuple[float, int]:
    """Pin as torch does; what it took is what its allocator says, since a driver's pages need not count as resident."""
    before, started = vendor_of(device.kind).pinned_bytes(), time.perf_counter()
    memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    seconds = time.perf_counter() - started
    grown = vendor_of(device.kind).pinned_bytes() - before
    del memory
    return seconds, grown


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
        seconds = _on(
            by,
            lambda: sample(
                lambda: np.copyto(target, source),
                **effort.sampling(),
            ),
        )
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
