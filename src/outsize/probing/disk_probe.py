"""Direct reads and writes of a directory's disk by queue depth, through the engine's own file and pool."""

import statistics
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from outsize.errors import StorageError
from outsize.hardware.machine_file import DepthRates, DiskRates
from outsize.hardware.readings import Fact, Measurement, explain
from outsize.probing.effort import Effort
from outsize.storage.arena import Arena
from outsize.storage.disk_file import DEFAULT_REQUEST_BYTES, DirectFile
from outsize.storage.pool import IOPool

# Samples of the writes without a pause.
_NUM_SUSTAINED = 12


def measure_disk(directory: Path, effort: Effort) -> DiskRates:
    """Return the rates of the disk under ``directory``; where it cannot be written, why.

    The file has no name while it is used, so that nothing stays behind, however the process ends.
    """
    path = directory / f".outsize-probe-{uuid.uuid4().hex}"
    # One sample moves a whole buffer, which has room for all requests that are in flight.
    num_requests = max(1, effort.disk_buffer_bytes // DEFAULT_REQUEST_BYTES)
    sample_bytes = num_requests * DEFAULT_REQUEST_BYTES
    num_bytes = max(sample_bytes, effort.disk_bytes // sample_bytes * sample_bytes)
    queue_depths = list(dict.fromkeys(min(depth, num_requests) for depth in effort.queue_depths))
    depths: list[DepthRates] = []
    direct = Fact.absent("nothing was measured")
    sustained = Measurement.absent("a quick probe is too short for it: outsize probe --full")
    try:
        with Arena() as arena:
            buffer = arena.take(sample_bytes, "disk buffer")
            # Not zeros: a drive or a file system may leave those out.
            buffer.random_(0, 256)
            for depth in queue_depths:
                if depths and time.perf_counter() >= effort.until_s:
                    break
                with (
                    IOPool(max(1, depth - 1), name="probe-io") as pool,
                    DirectFile(path, num_bytes, pool=pool, temporary=True) as file,
                ):
                    depths.append(_measure_depth(file, buffer, depth, effort))
                    if depth == max(queue_depths) and effort.sustained_s > 0:
                        sustained = _sustained(file, buffer, effort)
                    buffered = file.is_refused
                    direct = Fact.read(not buffered, "O_DIRECT on the file system")
    except (StorageError, OSError) as error:
        why = explain(error)
        if not depths:
            direct = Fact.absent(why)
            absent = sustained = Measurement.absent(why)
            depths = [
                DepthRates(queue_depth=depth, read_bytes_per_s=absent, write_bytes_per_s=absent)
                for depth in queue_depths
            ]
    return DiskRates(
        directory=str(directory.resolve()),
        direct=direct,
        request_bytes=DEFAULT_REQUEST_BYTES,
        depths=tuple(depths),
        sustained_write_bytes_per_s=sustained,
    )


def _measure_depth(file: DirectFile, buffer: Tensor, depth: int, effort: Effort) -> DepthRates:
    how = f"{depth} x {DEFAULT_REQUEST_BYTES // 2**20} MiB in flight"
    # Blocks that were never written read as zeros without a disk, and their first write costs more than a later one.
    once = _rates(file.write_from, buffer, depth, file.num_bytes, seconds=effort.disk_s, passes=1)
    region = len(once) * buffer.nbytes
    writes = _rates(file.write_from, buffer, depth, region, seconds=effort.disk_s)
    reads = _rates(file.read_into, buffer, depth, region, seconds=effort.disk_s)
    return DepthRates(
        queue_depth=depth,
        write_bytes_per_s=Measurement.of(writes, f"sequential writes, {how}"),
        read_bytes_per_s=Measurement.of(reads, f"sequential reads, {how}"),
    )


def _sustained(file: DirectFile, buffer: Tensor, effort: Effort) -> Measurement:
    """Write without a pause; each sample is a good part of a second, so that what drives buffer does not show."""
    rates = _rates(file.write_from, buffer, 0, file.num_bytes, seconds=effort.sustained_s)
    together = max(1, len(rates) // _NUM_SUSTAINED)
    samples = [
        statistics.harmonic_mean(rates[start : start + together])
        for start in range(0, len(rates) - together + 1, together)
    ]
    seconds = len(rates) * buffer.nbytes / statistics.harmonic_mean(rates)
    how = f"{len(rates)} x {buffer.nbytes // 2**20} MiB without a pause, {seconds:.1f} s"
    return Measurement.of(samples, how)


def _rates(
    move: Callable[[Tensor, int], None],
    buffer: Tensor,
    depth: int,
    region: int,
    *,
    seconds: float,
    passes: int | None = None,
) -> list[float]:
    """Return bytes per second of one buffer after the other, round and round the first ``region`` bytes of the file.

    Ends after ``seconds``, or after ``passes`` rounds; a slow disk has moved one buffer by then.
    """
    # The pool's caller works too, so one call of one request is all that is in flight at depth 1.
    pieces = torch.split(buffer, DEFAULT_REQUEST_BYTES) if depth == 1 else (buffer,)
    most = None if passes is None else passes * region // buffer.nbytes
    rates: list[float] = []
    stop = time.perf_counter() + seconds
    while not rates or (time.perf_counter() < stop and len(rates) != most):
        offset = len(rates) * buffer.nbytes % region
        started = time.perf_counter()
        for index, piece in enumerate(pieces):
            move(piece, offset + index * DEFAULT_REQUEST_BYTES)
        rates.append(buffer.nbytes / (time.perf_counter() - started))
    return rates
