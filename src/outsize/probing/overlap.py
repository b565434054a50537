"""Does a copy hide behind compute? A product and copies of about its length, each alone and both at once."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext

import torch

from outsize.accelerators import Devices, module_of
from outsize.errors import StorageError
from outsize.hardware.readings import Measurement, explain
from outsize.hardware.streaming import Overlap
from outsize.probing.compute import finisher
from outsize.probing.effort import Effort
from outsize.runtime.device.driver import pinner_of
from outsize.storage.arena import Arena

# Of square products, and how many times as large where a sample has the time: a fast device mostly launches small ones.
_SIDE, _LARGER = 1024, 4
_COPY_BYTES = 16 * 2**20
_NUM_TRIALS = 4

Timed = Callable[[], float]
"""Does its work and returns the seconds that it took."""


def measure_overlap(device: Devices, effort: Effort) -> Overlap:
    """Return the times of products and copies towards ``device``; on a CPU both are the work of the same cores."""
    try:
        with Arena(pinner=pinner_of(device)) as arena, ExitStack() as stack:
            return _measure(device, arena, stack, effort)
    except (StorageError, RuntimeError) as error:
        absent = Measurement.absent(explain(error))
        return Overlap(
            what=f"products and copies on {device}",
            matmul_s=absent,
            copy_s=absent,
            both_s=absent,
            matmul_beside_s=absent,
            copy_beside_s=absent,
        )


@torch.no_grad()
def _measure(device: Devices, arena: Arena, stack: ExitStack, effort: Effort) -> Overlap:
    on_gpu = device.accelerated
    dtype = torch.bfloat16 if on_gpu else torch.float32
    num_bytes, sample_s = min(_COPY_BYTES, effort.copy_bytes_max), effort.overlap_s / effort.num_samples_min
    side, multiply = _SIDE, _product(_SIDE, dtype, device)
    if _LARGER**3 * _least_seconds(multiply, device) <= sample_s:
        side, multiply = _LARGER * _SIDE, _product(_LARGER * _SIDE, dtype, device)
    source = arena.take(num_bytes, "source of copies").fill_(1)
    target = (
        torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        if on_gpu
        else arena.take(num_bytes, "target")
    )

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    matmul_s, copy_s = (_least_seconds(work, device) for work in (multiply, copy))
    num_products = max(1, round(sample_s / matmul_s))
    num_copies = max(1, round(num_products * matmul_s / copy_s))
    sides = [_timed(work, count, device) for work, count in ((multiply, num_products), (copy, num_copies))]
    threads = stack.enter_context(ThreadPoolExecutor(2, "probe-overlap"))
    alone: tuple[list[float], list[float]] = ([], [])
    beside: tuple[list[float], list[float]] = ([], [])
    both: list[float] = []
    for index in range(effort.num_samples_min + 1):
        if index > 1 and time.perf_counter() >= effort.until_s:
            break
        samples = [list(threads.map(lambda timed: timed(), [timed])) for timed in sides]
        started = time.perf_counter()
        together = list(threads.map(lambda timed: timed(), sides))
        both_s = time.perf_counter() - started
        if index == 0:
            continue  # the threads of both pools of kernels exist now
        both.append(both_s)
        for kept, (seconds,) in zip(alone, samples, strict=True):
            kept.append(seconds)
        for kept, seconds in zip(beside, together, strict=True):
            kept.append(seconds)
    products = f"{num_products} products of {side}, {str(dtype).removeprefix('torch.')}"
    copies = f"{num_copies} copies of {num_bytes // 2**20} MiB to {device}"
    return Overlap(
        what=f"{products}; {copies}",
        matmul_s=Measurement.of(alone[0], products),
        copy_s=Measurement.of(alone[1], copies),
        both_s=Measurement.of(both, "begun together, until the later has ended"),
        matmul_beside_s=Measurement.of(beside[0], f"{products}, beside {copies}"),
        copy_beside_s=Measurement.of(beside[1], f"{copies}, beside {products}"),
    )


def _product(side: int, dtype: torch.dtype, device: Devices) -> Callable[[], None]:
    a, b = (torch.randn(side, side, device=device.torch_device).to(dtype) for _ in "ab")
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    return multiply


def _least_seconds(work: Callable[[], None], device: Devices) -> float:
    """Return the seconds of ``work`` where nothing else was in its way: the least of a few, after one that warms up."""
    finish = finisher(device)
    times = []
    for _ in range(_NUM_TRIALS):
        started = time.perf_counter()
        work()
        finish()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _timed(work: Callable[[], None], count: int, device: Devices) -> Timed:
    """Return what does ``work`` so often on a stream of its own, waits for that stream only, and tells the seconds."""
    stream = module_of(device.kind).Stream(device.torch_device) if device.accelerated else None

    def timed() -> float:
        started = time.perf_counter()
        with torch.no_grad(), module_of(device.kind).stream(stream) if stream is not None else nullcontext():
            for _ in range(count):
                work()
        if stream is not None:
            stream.synchronize()
        return time.perf_counter() - started

    return timed
