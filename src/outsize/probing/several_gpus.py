"""Copies of several GPUs: all at once over their links, and from one to another."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Literal

import torch
from torch import Tensor

from outsize.accelerators import Devices, uuids_of, vendor_of
from outsize.errors import StorageError
from outsize.hardware.gpus import GpuFacts, import_nvml, read_link_under_load
from outsize.hardware.machine_file import DeviceRates
from outsize.hardware.readings import Fact, Measurement, explain
from outsize.hardware.streaming import TogetherRates
from outsize.hardware.topology import PeerLink, kind_by_rate, kind_by_topology
from outsize.probing.compute import finisher
from outsize.probing.effort import Effort, sample
from outsize.runtime.device.driver import pinner_of
from outsize.storage.arena import Arena

_NUM_COPIES = 4


def measure_together(devices: Sequence[Devices], effort: Effort) -> tuple[TogetherRates, ...]:
    """Return the rates of each device alone and of all at once, up and down; with one device there is nothing to tell.

    Every device has a thread, which copies several times and waits for its own copies only.
    """
    if len(devices) < 2:
        return ()
    rates: list[TogetherRates] = []
    directions: tuple[Literal["up", "down"], ...] = ("up", "down")
    for direction in directions:
        try:
            rates += _one_direction(devices, direction, effort)
        except (StorageError, RuntimeError) as error:
            absent = Measurement.absent(explain(error))
            rates += [
                TogetherRates(
                    device=str(name),
                    direction=direction,
                    alone_bytes_per_s=absent,
                    together_bytes_per_s=absent,
                )
                for name in devices
            ]
    return tuple(rates)


def _one_direction(
    devices: Sequence[Devices], direction: Literal["up", "down"], effort: Effort
) -> list[TogetherRates]:
    num_bytes = min(effort.peer_bytes, effort.copy_bytes_max)
    with ExitStack() as stack:
        works = [_copies(name, direction, num_bytes, stack) for name in devices]
        threads = stack.enter_context(ThreadPoolExecutor(len(devices), "probe-copy"))
        alone: list[list[float]] = [[] for _ in devices]
        together: list[list[float]] = [[] for _ in devices]
        for index in range(effort.num_samples_min + 1):
            apart = [work() for work in works]
            at_once = list(threads.map(lambda work: work(), works))
            if index == 0:
                continue
            for times, seconds in zip((*alone, *together), (*apart, *at_once), strict=True):
                times.append(_NUM_COPIES * num_bytes / seconds)
    how = f"{_NUM_COPIES} copies of {num_bytes // 2**20} MiB"
    return [
        TogetherRates(
            device=str(name),
            direction=direction,
            alone_bytes_per_s=Measurement.of(alone[index], f"{how}, by itself"),
            together_bytes_per_s=Measurement.of(
                together[index], f"{how}, beside those of {len(devices) - 1} more"
            ),
        )
        for index, name in enumerate(devices)
    ]


def _copies(
    device: Devices, direction: Literal["up", "down"], num_bytes: int, stack: ExitStack
) -> Callable[[], float]:
    """Return what makes the copies of one device and tells their seconds."""
    arena = stack.enter_context(Arena(pinner=pinner_of(device)))
    host = arena.take(num_bytes, "host end").fill_(1)
    other = torch.empty_like(host, device=device.torch_device).fill_(1)
    source, target = (host, other) if direction == "up" else (other, host)
    finish = finisher(device)
    finish()

    def work() -> float:
        started = time.perf_counter()
        for _ in range(_NUM_COPIES):
            target.copy_(source, non_blocking=True)
        finish()
        return time.perf_counter() - started

    return work


def measure_peers(
    devices: Sequence[DeviceRates], gpus: Sequence[GpuFacts], effort: Effort
) -> tuple[PeerLink, ...]:
    """Return copies between every ordered pair of GPUs, classified by driver and by rate."""
    names = [device.device for device in devices]
    return tuple(
        _peer(devices, gpus, source, target, effort)
        for target in range(len(names))
        for source in range(len(names))
        if source != target
    )


def _peer(
    devices: Sequence[DeviceRates], gpus: Sequence[GpuFacts], source: int, target: int, effort: Effort
) -> PeerLink:
    here, there = (Devices.parse(devices[index].device) for index in (target, source))
    try:
        copy = _copy_rate(there, here, effort)
    except RuntimeError as error:
        copy = Measurement.absent(explain(error))
    is_listed = max(source, target) < len(gpus)
    pinned = [_pinned(devices[index]) for index in (source, target)]
    return PeerLink(
        source=str(there),
        target=str(here),
        by_topology=kind_by_topology(gpus[target], source) if is_listed else _kind_by_torch(there, here),
        by_rate=kind_by_rate(
            copy,
            _slower_link(gpus[source], gpus[target]) if is_listed else None,
            min((rate for rate in pinned if rate is not None), default=None),
        ),
        copy_bytes_per_s=copy,
    )


def _kind_by_torch(source: Devices, target: Devices) -> Fact:
    """Return what torch says of peer access, where NVML says nothing; it does not tell NVLink from PCIe."""
    how = f"torch.{target.kind}.can_device_access_peer, which does not tell NVLink from PCIe"
    try:
        reached = vendor_of(target.kind).reaches(target.index, source.index)
        kind = "PCIe peer" if reached else "host-staged"
    except (RuntimeError, AssertionError) as error:
        return Fact.absent(f"{how}: {explain(error)}")
    return Fact.read(kind, how)


def _copy_rate(source: Devices, target: Devices, effort: Effort) -> Measurement:
    num_bytes = effort.peer_bytes
    here: Tensor = torch.ones(num_bytes, dtype=torch.uint8, device=target.torch_device)
    there: Tensor = torch.ones(num_bytes, dtype=torch.uint8, device=source.torch_device)

    def finish() -> None:
        for device in (source, target):
            finisher(device)()

    finish()
    seconds = sample(
        lambda: here.copy_(there, non_blocking=True),
        seconds=0.0,
        num_min=effort.num_samples_min,
        until_s=effort.until_s,
        finish=finish,
    )
    return Measurement.of((num_bytes / s for s in seconds), f"copies of {num_bytes // 2**20} MiB")


def _pinned(device: DeviceRates) -> float | None:
    """Return the slower direction of a device's pinned copies."""
    rates = [link.fit.bytes_per_s for link in device.links if link.path == "pinned" and link.fit is not None]
    return min(rates, default=None)


def _slower_link(*gpus: GpuFacts) -> tuple[int, int] | None:
    links = [(gpu.pcie_generation_max.number(), gpu.pcie_lanes.number()) for gpu in gpus]
    rates = [
        (int(generation), int(lanes))
        for generation, lanes in links
        if generation is not None and lanes is not None
    ]
    return min(rates, key=lambda link: 2 ** link[0] * link[1]) if len(rates) == len(links) else None


def read_loaded_link(device: Devices, effort: Effort) -> tuple[Fact, Fact]:
    """Return PCIe generation and lanes of a GPU as NVML tells them while copies are under way; a CPU has none."""
    if not device.accelerated:
        none = Fact.read(None, "the link of a CPU is its memory")
        return none, none
    (uuid,) = uuids_of(device).values()
    try:
        with Arena(pinner=pinner_of(device)) as arena:
            host = arena.take(effort.peer_bytes, "host end").fill_(1)
            other = torch.empty_like(host, device=device.torch_device)
            # Asked once before, so that the question that counts waits for neither library nor driver.
            read_link_under_load(import_nvml, uuid)
            for _ in range(16 * _NUM_COPIES):  # under way for as long as that takes
                other.copy_(host, non_blocking=True)
            loaded = read_link_under_load(import_nvml, uuid)
            torch.accelerator.synchronize(device.torch_device)
            return loaded
    except (StorageError, RuntimeError) as error:
        return Fact.absent(explain(error)), Fact.absent(explain(error))
