"""Measure the link between host and device: copies by size, and whether compute hides them.

Where the CPU is the device, its link is DRAM: loads and gradients are copies from memory to memory. Both ends then move
on from copy to copy, through more memory than any cache holds, because a streamed unit is never warm.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor

from outsize.accelerators import Devices, module_of, title_of, vendor_of
from outsize.errors import StorageError
from outsize.hardware.cgroup import Measurement, explain
from outsize.hardware.host_memory import refused_pin
from outsize.hardware.link_fit import fit_link
from outsize.hardware.machine_file import Direction, LinkPoint, LinkRates
from outsize.hardware.topology import Overlap
from outsize.probing.compute import finisher
from outsize.probing.effort import Effort
from outsize.runtime.device.driver import pinner_of
from outsize.storage.ledger import Arena

SMALLEST_BYTES = 2**10
# Short copies are timed together until they take this long, or are so many.
_REPETITION_S = 1e-3
_NUM_COPIES_MAX = 1000
# One call costs what it costs, one thread copies what is small, all of them what is large.
_NUM_PIECES_MAX = 3
# Of the sizes, one in so many where the time of the part is up before a direction begins.
_LATE = 3
PathKind = Literal["pinned", "pageable", "dram copy"]


def sizes(copy_bytes_max: int) -> tuple[tuple[int, bool], ...]:
    """Return the sizes of copies, from 1 KiB, and whether each is held out: powers of two, and halfway to the next."""
    pairs: list[tuple[int, bool]] = []
    for power in range((copy_bytes_max // SMALLEST_BYTES).bit_length()):
        pairs += [(SMALLEST_BYTES << power, False), (SMALLEST_BYTES * 3 << power >> 1, True)]
    return tuple((size, held_out) for size, held_out in pairs if size <= copy_bytes_max)


def measure_links(device: Devices, effort: Effort, *paths: PathKind) -> Iterator[LinkRates]:
    """Yield the links of ``device``: DRAM for ``cpu``; for ``cuda:i`` pinned and pageable memory, or those named."""
    for path in paths or (("pinned", "pageable") if device.accelerated else ("dram copy",)):
        try:
            with Arena(pinner=pinner_of(device) if path == "pinned" else None) as arena:
                up, down = (_ends(arena, device, effort, up=up) for up in (True, False))
                if arena.statistics().num_pageable_fallbacks:
                    raise StorageError(why_pageable(device))
                for direction, ends in (("up", [up]), ("down", [down]), ("both", [up, down])):
                    yield _measure_link(device, path, cast(Direction, direction), ends, effort)
        except (StorageError, RuntimeError) as error:
            for direction in ("up", "down", "both"):
                yield LinkRates(
                    path=path, direction=cast(Direction, direction), points=(), fit=None, note=explain(error)
                )


def why_pageable(device: Devices) -> str:
    """Return why memory for copies to ``device`` was not pinned, and what to try where something can be."""
    if vendor_of(device.kind).register is None:
        return f"torch pins no memory that it has not allocated for {title_of(device.kind)}"
    return refused_pin(Path("/"))


def _measure_link(
    device: Devices, path: PathKind, direction: Direction, ends: list[tuple[Tensor, Tensor]], effort: Effort
) -> LinkRates:
    with ExitStack() as stack:
        copier = _Copier(device, ends, stack)
        chosen = sizes(effort.copy_bytes_max)
        if time.perf_counter() >= effort.until_s:
            chosen = chosen[::_LATE]
        copy_s = copier.measure([size for size, _ in chosen], effort)
        points = [
            LinkPoint(num_bytes=size, held_out=held_out, copy_s=copy_s[size]) for size, held_out in chosen
        ]
    times = {point.num_bytes: point.copy_s.median or 0.0 for point in points if not point.held_out}
    unseen = {point.num_bytes: point.copy_s.median or 0.0 for point in points if point.held_out}
    note = "host memory to host memory, the link of a CPU" if path == "dram copy" else f"host and {device}"
    try:
        fit = fit_link(times, unseen, num_pieces_max=_NUM_PIECES_MAX)
    except ValueError as error:
        fit, note = None, f"{note}; no fit: {error}"
    return LinkRates(path=path, direction=direction, points=tuple(points), fit=fit, note=note)


def _ends(arena: Arena, device: Devices, effort: Effort, *, up: bool) -> tuple[Tensor, Tensor]:
    """Return source and target of one direction, every page touched."""

    def take(what: str) -> Tensor:
        return arena.take(effort.copy_bytes_max, what).view(torch.float32).fill_(1.0)

    host = take("host end of the link")
    other = host.to(device.torch_device) if device.accelerated else take("device end of the link")
    return (host, other) if up else (other, host)


class _Copier:
    """Copies pieces of its ends, each copy further on; several directions go at once.

    Args:
        device: one.
        ends: source and target of each direction.
        stack: closes the threads.
    """

    def __init__(self, device: Devices, ends: list[tuple[Tensor, Tensor]], stack: ExitStack) -> None:
        self._ends = ends
        self._has_streams = device.accelerated
        self._device = device
        self._streams = []
        if self._has_streams:
            self._streams = [module_of(device.kind).Stream(device.torch_device) for _ in ends]
        self._threads = (
            stack.enter_context(ThreadPoolExecutor(len(ends), "probe-copy")) if len(ends) > 1 else None
        )
        self._offset = 0

    def measure(self, copy_sizes: Sequence[int], effort: Effort) -> dict[int, Measurement]:
        """Return the seconds of one copy of each size, in each direction.

        Every round goes through all sizes: what else the machine does, now more and now less, then meets all of them
        alike, instead of bending the line.
        """
        num_copies = {size: self._num_copies(size) for size in copy_sizes}
        samples: dict[int, list[float]] = {size: [] for size in copy_sizes}
        stop = time.perf_counter() + effort.copy_s
        for index in range(effort.num_copy_rounds):
            if index >= effort.num_samples_min and time.perf_counter() >= stop:
                break
            for size, count in num_copies.items():
                if index and time.perf_counter() >= effort.until_s:
                    break
                samples[size].append(self._seconds(size, count) / count)
        return {
            size: Measurement.of(samples[size], f"mean of {count} copies")
            for size, count in num_copies.items()
        }

    def _num_copies(self, num_bytes: int) -> int:
        """Return how many copies are long enough for the clock."""
        num_trials = 8 if num_bytes < 2**20 else 1
        self._seconds(num_bytes, num_trials)
        trial_s = self._seconds(num_bytes, num_trials) / num_trials
        return max(1, min(_NUM_COPIES_MAX, int(_REPETITION_S / trial_s)))

    def _seconds(self, num_bytes: int, num_copies: int) -> float:
        started = time.perf_counter()
        self._copy(num_bytes, num_copies)
        return time.perf_counter() - started

    def _copy(self, num_bytes: int, num_copies: int) -> None:
        """Copy in all directions, ``num_copies`` each, and wait for the last."""
        num_places = self._ends[0][0].nbytes // num_bytes
        first = self._offset // num_bytes
        offsets = [(first + i) % num_places * num_bytes for i in range(num_copies)]
        self._offset = (first + num_copies) % num_places * num_bytes
        works = [self._work(index, num_bytes, offsets) for index in range(len(self._ends))]
        if self._threads is None or self._has_streams:
            for work in works:
                work()
        else:
            list(self._threads.map(lambda work: work(), works))
        if self._has_streams:
            torch.accelerator.synchronize(self._device.torch_device)

    def _work(self, index: int, num_bytes: int, offsets: list[int]) -> Callable[[], None]:
        source, target = self._ends[index]
        count = num_bytes // source.itemsize
        starts = [offset // source.itemsize for offset in offsets]

        def work() -> None:
            for start in starts:
                target[start : start + count].copy_(source[start : start + count], non_blocking=True)

        def work_on_stream() -> None:
            with module_of(self._device.kind).stream(self._streams[index]):
                work()

        return work_on_stream if self._has_streams else work


# Of square products, and how many times as large where a sample has the time: a fast device mostly launches small ones.
_SIDE, _LARGER = 1024, 4
_COPY_BYTES = 16 * 2**20
_NUM_TRIALS = 4

Timed = Callable[[], float]
"""Does its work and returns the seconds that it took."""


def measure_overlap(device: Devices, effort: Effort) -> Overlap:
    """Return the times of products and copies towards ``device``; on a CPU both are the work of the same cores.

    A product and copies of about its length are timed, each alone and both at once.
    """
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
    threads = stack.enter_context(ThreadPoolExecutor(2, "probe-overlap", partial(_enter, device)))
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
        for times, (seconds,) in zip(alone, samples, strict=True):
            times.append(seconds)
        for times, seconds in zip(beside, together, strict=True):
            times.append(seconds)
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


def _enter(device: Devices) -> None:
    """Launch a kernel: the CUDA driver then knows the calling thread, which a product of matrices alone warns of."""
    if device.accelerated:
        torch.zeros(1, device=device.torch_device)


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
