"""Ways to feed a device that computes on chunk after chunk: paged in on demand, waited for, two buffers, four buffers.

The comparison of VELOCITY, with the same bytes and the same compute in every way. On a GPU the chunks come from host
memory: pageable and synchronous stands for paging on demand. On a CPU they come from a file: there, paging on demand is
a mapping that the kernel fills while the product reads it, and all other ways are direct reads.
"""

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outsize.accelerators import Devices, module_of
from outsize.errors import StorageError
from outsize.runtime.device.driver import pinner_of
from outsize.storage.ledger import Arena

WAYS = ("demand-paged", "waited for", "two buffers", "four buffers")
_COLUMNS = 1024
_NUM_TOKENS_MAX = 4096
_NUM_TRIALS = 4
_REQUEST_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class _Job:
    """Passes over all chunks by way, and what one computation takes."""

    source: str
    passes: Mapping[str, Callable[[], object]]
    compute: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Fed:
    """Where chunks came from, seconds of one computation, and bytes per second by way; a figure for each pass."""

    source: str
    compute_s: list[float]
    bytes_per_s: dict[str, list[float]]


def measure_feed(
    device: Devices, directory: Path | None, *, chunk_bytes: int, num_chunks: int, passes: int = 1
) -> Fed:
    """Return the bytes per second of each way; on a CPU chunks lie in ``directory``, where nothing stays."""
    opened = (
        _on_gpu(device, chunk_bytes, num_chunks)
        if device.accelerated
        else _on_cpu(directory, chunk_bytes, num_chunks)
    )
    with opened as job, torch.no_grad():
        fed = Fed(job.source, [], {way: [] for way in WAYS})
        for index in range(passes + 1):
            compute_s = _seconds(job.compute)
            seconds = {way: _seconds(job.passes[way]) for way in WAYS}
            if index > 0:  # the first pass warms threads and code
                fed.compute_s.append(compute_s)
                for way in WAYS:
                    fed.bytes_per_s[way].append(chunk_bytes * num_chunks / seconds[way])
        return fed


def feed_through_ring(
    load: Callable[[int, int], object],
    compute: Callable[[int], object],
    *,
    num_chunks: int,
    num_slots: int,
) -> None:
    """Load chunk after chunk into slots that rotate, on a thread, and compute on each in order.

    1. the loader takes a free slot, loads, and hands the slot on;
    2. the caller takes it, computes, and gives it back;
    3. an error of the loader is handed on instead of a slot, and raised here; one of ``compute`` stops the loader.

    Args:
        load: called with the number of the chunk and of the slot.
        compute: called with the number of the slot.
        num_chunks: chunks in all.
        num_slots: one waits for each load; with two, a load goes on beside a computation.
    """
    free, ready = threading.Semaphore(num_slots), threading.Semaphore(0)
    stopped: list[bool] = []

    def work() -> None:
        try:
            for index in range(num_chunks):
                free.acquire()
                if stopped:
                    return
                load(index, index % num_slots)
                ready.release()
        except BaseException:
            stopped.append(True)
            ready.release()
            raise

    with ThreadPoolExecutor(1, "probe-feed") as loader:
        loading = loader.submit(work)
        try:
            for index in range(num_chunks):
                ready.acquire()
                if stopped:
                    break
                compute(index % num_slots)
                free.release()
        finally:
            stopped.append(True)
            free.release()
        loading.result()


@contextmanager
def _on_cpu(directory: Path | None, chunk_bytes: int, num_chunks: int) -> Iterator[_Job]:
    if directory is None:
        raise StorageError("no directory to read from")
    with ExitStack() as stack:
        arena = stack.enter_context(Arena())
        file = stack.enter_context(tempfile.TemporaryFile(dir=directory))
        slots = arena.take_all([chunk_bytes] * 4, "feed buffers")
        slots[0].view(torch.float32).fill_(0.5)
        for _ in range(num_chunks):
            file.write(slots[0].numpy().data)
        file.flush()
        os.fsync(file.fileno())
        read = stack.enter_context(_direct_reader(file.fileno(), slots))
        tokens = _balanced_tokens(chunk_bytes, _least_seconds(lambda: read(0, 0)))
        x = torch.randn(_COLUMNS, tokens)
        out = torch.empty(chunk_bytes // 4 // _COLUMNS, tokens)

        def multiply(chunk: Tensor) -> None:
            torch.mm(chunk.view(torch.float32).view(-1, _COLUMNS), x, out=out)

        def on_demand() -> None:
            # Nothing of the file is in memory when the pass begins.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(
                file.fileno(),
                num_chunks * chunk_bytes,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                flags=mmap.MAP_PRIVATE,
            ) as mapping:
                mapped = torch.frombuffer(mapping, dtype=torch.uint8)
                for index in range(num_chunks):
                    multiply(mapped[index * chunk_bytes : (index + 1) * chunk_bytes])
                del mapped

        def waited_for() -> None:
            for index in range(num_chunks):
                read(index, 0)
                multiply(slots[0])

        def through(num_slots: int) -> Callable[[], None]:
            return lambda: feed_through_ring(
                read, lambda slot: multiply(slots[slot]), num_chunks=num_chunks, num_slots=num_slots
            )

        yield _Job(
            source=f"a file in {directory}",
            passes=dict(zip(WAYS, (on_demand, waited_for, through(2), through(4)), strict=True)),
            compute=lambda: multiply(slots[0]),
        )


@contextmanager
def _direct_reader(descriptor: int, slots: list[Tensor]) -> Iterator[Callable[[int, int], None]]:
    """Yield what reads a chunk into a slot past the page cache, in requests of 2 MiB; buffered where it must be."""
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        direct = os.dup(descriptor)
    chunk_bytes = slots[0].nbytes

    def read(index: int, slot: int) -> None:
        view = slots[slot].numpy().data
        for start in range(0, chunk_bytes, _REQUEST_BYTES):
            part = view[start : start + _REQUEST_BYTES]
            if os.preadv(direct, [part], index * chunk_bytes + start) != len(part):
                raise StorageError("the file of the probe ended early")

    try:
        yield read
    finally:
        os.close(direct)


@contextmanager
def _on_gpu(device: Devices, chunk_bytes: int, num_chunks: int) -> Iterator[_Job]:
    with Arena(pinner=pinner_of(device)) as arena:
        pinned = arena.take(chunk_bytes, "pinned chunk").view(torch.bfloat16).fill_(0.5)
        pageable = torch.full_like(pinned, 0.5)
        slots = [torch.empty_like(pinned, device=device.torch_device) for _ in range(4)]
        torch.accelerator.synchronize(device.torch_device)

        def load() -> None:
            slots[0].copy_(pinned, non_blocking=True)
            torch.accelerator.synchronize(device.torch_device)

        tokens = _balanced_tokens_on_gpu(slots[0], _least_seconds(load), device)
        x = torch.randn(_COLUMNS, tokens, device=device.torch_device, dtype=torch.bfloat16)
        out = torch.empty(
            chunk_bytes // 2 // _COLUMNS, tokens, device=device.torch_device, dtype=torch.bfloat16
        )

        def multiply(slot: int) -> None:
            torch.mm(slots[slot].view(-1, _COLUMNS), x, out=out)

        def one_by_one(source: Tensor) -> Callable[[], None]:
            def run() -> None:
                for _ in range(num_chunks):
                    slots[0].copy_(source)
                    multiply(0)
                    torch.accelerator.synchronize(device.torch_device)

            return run

        def through(num_slots: int) -> Callable[[], None]:
            return lambda: _ring_of_streams(device, pinned, slots[:num_slots], multiply, num_chunks)

        def compute() -> None:
            multiply(0)
            torch.accelerator.synchronize(device.torch_device)

        yield _Job(
            source="host memory",
            passes=dict(
                zip(WAYS, (one_by_one(pageable), one_by_one(pinned), through(2), through(4)), strict=True)
            ),
            compute=compute,
        )


def _ring_of_streams(
    device: Devices, source: Tensor, slots: list[Tensor], multiply: Callable[[int], None], num_chunks: int
) -> None:
    """Copy on one stream and compute on another; a slot is copied into only after what was computed on it."""
    torch_of_device = module_of(device.kind)
    copies, computes = (torch_of_device.Stream(device.torch_device) for _ in range(2))
    loaded, used = ([torch_of_device.Event() for _ in slots] for _ in range(2))
    for index in range(num_chunks):
        slot = index % len(slots)
        with torch_of_device.stream(copies):
            copies.wait_event(used[slot])  # one that was never recorded is not waited for
            slots[slot].copy_(source, non_blocking=True)
            loaded[slot].record(copies)
        with torch_of_device.stream(computes):
            computes.wait_event(loaded[slot])
            multiply(slot)
            used[slot].record(computes)
    torch.accelerator.synchronize(device.torch_device)


def _balanced_tokens(chunk_bytes: int, load_s: float) -> int:
    """Return how many columns a product needs to take about as long as a load: there, buffers matter most."""
    chunk, x = torch.ones(chunk_bytes // 4 // _COLUMNS, _COLUMNS), torch.ones(_COLUMNS, 64)
    return max(8, min(_NUM_TOKENS_MAX, round(64 * load_s / _least_seconds(lambda: torch.mm(chunk, x)))))


def _balanced_tokens_on_gpu(slot: Tensor, load_s: float, device: Devices) -> int:
    x = torch.ones(_COLUMNS, _NUM_TOKENS_MAX, device=device.torch_device, dtype=slot.dtype)

    def product() -> None:
        torch.mm(slot.view(-1, _COLUMNS), x)
        torch.accelerator.synchronize(device.torch_device)

    return max(8, min(16 * _NUM_TOKENS_MAX, round(_NUM_TOKENS_MAX * load_s / _least_seconds(product))))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _least_seconds(work: Callable[[], object]) -> float:
    """Return the seconds of ``work`` where nothing else was in its way: the least of a few, after one that warms up."""
    return min([_seconds(work) for _ in range(_NUM_TRIALS)][1:])
