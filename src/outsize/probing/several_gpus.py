"""Measure several devices: copies of all at once over their links, from one to another, and sums of processes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from outsize.accelerators import CPU, VENDORS, Devices, kind_here, synchronize, uuids_of, vendor_of
from outsize.errors import StorageError
from outsize.hardware.cgroup import Fact, Measurement, explain
from outsize.hardware.gpus import GpuFacts, import_nvml, read_link_under_load
from outsize.hardware.link_fit import AllReduceRates, summarize
from outsize.hardware.machine_file import DeviceRates
from outsize.hardware.topology import PeerLink, TogetherRates, kind_by_rate, kind_by_topology
from outsize.probing.compute import finisher
from outsize.probing.effort import Effort, sample
from outsize.runtime.device.driver import pinner_of
from outsize.storage.directory import temporary_directory
from outsize.storage.ledger import Arena
from outsize.units import format_bytes

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


_SMALLEST_BYTES = 2**10
_NUM_SAMPLES = 7
# Ranks that hang are ended after this; on a machine that is busy with other things, starting them alone took 2 minutes.
_START_S = 600.0
_END_S = 45.0
# An interpreter that has imported torch, with room for other builds of it: 240 MiB were seen.
_PROCESS_BYTES = 400 * 2**20


def ranks_and_backend(num_ranks: int | None, num_devices: int, num_cpus: int) -> tuple[int, str]:
    """Return how many processes of this machine sum, and through what: that of the devices where each can have one.

    Args:
        num_ranks: as asked for; None for one on each device, or on each of up to four processors.
        num_devices: accelerators that may be used.
        num_cpus: processors that may be used.
    """
    ranks = num_ranks or (num_devices if num_devices > 1 else min(4, num_cpus))
    return ranks, (device_backend() if ranks <= num_devices else "") or "gloo"


def device_backend() -> str:
    """Return what sums over the accelerators of this machine; empty where there is none that torch names."""
    kind = kind_here()
    return "" if kind is None else VENDORS[kind].backend


def measure_all_reduce(
    num_ranks: int, bytes_max: int, *, backend: str = "gloo", free_bytes: int | None = None
) -> AllReduceRates:
    """Return the times of sums over ``num_ranks`` processes of this machine.

    The ranks are started on this machine by torchrun, each of them ``outsize all-reduce``, which over several machines
    torchrun starts on each.

    Args:
        num_ranks: processes; any backend but gloo needs a device for each.
        bytes_max: the largest sum, on each rank; 0 measures nothing.
        backend: ``gloo``, or that of the devices: ``nccl``, ``xccl``, ``hccl``.
        free_bytes: memory that the processes may take together; None where it is not known.
    """
    if bytes_max < _SMALLEST_BYTES:
        return _nothing(backend, num_ranks, "a quick probe starts no processes: outsize all-reduce")
    if num_ranks < 2:
        return _nothing(backend, num_ranks, "a sum over ranks needs two of them: one GPU, or one processor")
    needed = num_ranks * (_PROCESS_BYTES + 2 * bytes_max)
    if free_bytes is not None and free_bytes < needed:
        return _nothing(
            backend, num_ranks, f"{num_ranks} processes need {format_bytes(needed)} of free memory"
        )
    try:
        with temporary_directory() as directory:
            output = directory / "out.json"
            done = _launch(backend, num_ranks, bytes_max, output)
            result = json.loads(output.read_text(encoding="utf-8")) if output.exists() else None
    except (OSError, StorageError, ValueError, subprocess.TimeoutExpired) as error:
        return _nothing(backend, num_ranks, f"torchrun: {error}")
    if result is None:
        lines = done.stderr.strip().splitlines()
        return _nothing(backend, num_ranks, f"torchrun: {lines[-1] if lines else 'no rank answered'}")
    return AllReduceRates.model_validate(result)


def _launch(backend: str, num_ranks: int, bytes_max: int, output: Path) -> "subprocess.CompletedProcess[str]":
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"),
        *("-m", "outsize", "all-reduce", "--backend", backend, "--output", str(output)),
        *("--bytes-max", f"{bytes_max}B"),
    ]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as torchrun:
        try:
            stdout, stderr = torchrun.communicate(timeout=_START_S)
        except BaseException:
            _end(torchrun)
            raise
    return subprocess.CompletedProcess(command, torchrun.returncode, stdout, stderr)


def _end(torchrun: "subprocess.Popen[str]") -> None:
    """Terminate torchrun with its ranks; a kill would leave ranks waiting for each other."""
    torchrun.terminate()
    try:
        torchrun.wait(_END_S)
    except subprocess.TimeoutExpired:
        torchrun.kill()


def _nothing(backend: str, num_ranks: int, why: str) -> AllReduceRates:
    return AllReduceRates(backend=backend, num_ranks=num_ranks, points=(), fit=None, note=why)


def time_as_rank(backend: str, bytes_max: int) -> AllReduceRates:
    """Time sums from 1 KiB to ``bytes_max`` with the other ranks that torchrun has started.

    Every round goes through all sizes, and the slowest rank counts.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    try:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        chosen = CPU if backend == "gloo" else Devices(kind_here() or "cpu", (local,))
        device = chosen.torch_device
        if chosen.accelerated:
            torch.accelerator.set_device_index(device)
        sizes = [_SMALLEST_BYTES << power for power in range((bytes_max // _SMALLEST_BYTES).bit_length())]
        values = torch.ones(bytes_max // 4, device=device)
        samples: dict[int, list[float]] = {size: [] for size in sizes}
        for index in range(_NUM_SAMPLES + 1):
            for size in sizes:
                part = values[: size // 4].fill_(1.0)
                count = 8 if size <= 2**16 else 1
                dist.barrier()
                started = time.perf_counter()
                for _ in range(count):
                    dist.all_reduce(part)
                synchronize(device)
                took = torch.tensor((time.perf_counter() - started) / count, device=device)
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                if index > 0:
                    samples[size].append(float(took))
        return summarize(
            {size: tuple(times) for size, times in samples.items()},
            backend=backend,
            num_ranks=dist.get_world_size(),
            note=f"torchrun, fp32, {_NUM_SAMPLES} samples of each size, the slowest rank of each",
        )
    finally:
        dist.destroy_process_group()
