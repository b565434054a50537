"""How long a probe tries: seconds per measurement and sizes, for ``--quick`` and ``--full``.

Repeating work for a while and timing each repetition.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypedDict

from outsize.hardware.machine_file import Mode

MIB = 2**20


class Sampling(TypedDict):
    """How long a measurement is repeated, see `outsize.probing.effort.sample`."""

    seconds: float
    num_min: int
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much of everything.

    Attributes:
        mode: its name.
        sample_s: seconds of samples per measurement.
        num_samples_min: samples of each measurement, however long they take.
        array_bytes: of each array of the DRAM loops: three, and larger than any cache.
        plane_bytes: of each fp32 plane of AdamW: four.
        disk_bytes: size of the file that the disk is timed with.
        disk_buffer_bytes: what the disk is read into and written from; no more requests are in flight than it holds.
        disk_s: seconds per queue depth and direction.
        queue_depths: requests in flight.
        copy_bytes_max: largest copy over a link.
        num_copy_rounds: samples of each size of copy.
        copy_s: seconds after which no further round begins, beyond ``num_samples_min`` of them.
        matmul_s: how long one matrix product may take, which sets its size.
        sustained_s: seconds of writes without a pause; 0 leaves them out.
        overlap_s: seconds of products, and of copies, over all samples of each.
        peer_bytes: of each copy between GPUs, and of those at once.
        data_chars: text that is tokenised, per thread.
        loader_tokens: tokens of the array that the loader reads.
        all_reduce_bytes_max: largest sum over ranks, a power of two; 0 leaves the sums out.
        limit_s: seconds for the whole probe; the parts that plans need come first, and share it.
        until_s: of `time.perf_counter`, when the time of the part under way is up; it then repeats nothing more.
    """

    mode: Mode
    sample_s: float
    num_samples_min: int
    array_bytes: int
    plane_bytes: int
    disk_bytes: int
    disk_buffer_bytes: int
    disk_s: float
    queue_depths: tuple[int, ...]
    copy_bytes_max: int
    num_copy_rounds: int
    copy_s: float
    matmul_s: float
    sustained_s: float
    overlap_s: float
    peer_bytes: int
    data_chars: int
    loader_tokens: int
    all_reduce_bytes_max: int
    limit_s: float
    until_s: float = math.inf

    def sampling(self) -> Sampling:
        """Return how long `outsize.probing.effort.sample` goes on."""
        return {"seconds": self.sample_s, "num_min": self.num_samples_min, "until_s": self.until_s}


QUICK = Effort(
    mode="quick",
    sample_s=0.08,
    num_samples_min=3,
    array_bytes=128 * MIB,
    plane_bytes=64 * MIB,
    disk_bytes=128 * MIB,
    disk_buffer_bytes=64 * MIB,
    disk_s=0.12,
    queue_depths=(1, 4, 16),
    copy_bytes_max=128 * MIB,
    num_copy_rounds=11,
    copy_s=0.6,
    matmul_s=0.02,
    sustained_s=0.0,
    overlap_s=0.1,
    peer_bytes=32 * MIB,
    data_chars=100_000,
    loader_tokens=2**21,
    all_reduce_bytes_max=0,
    limit_s=15.0,
)
FULL = Effort(
    mode="full",
    sample_s=3.0,
    num_samples_min=5,
    array_bytes=256 * MIB,
    plane_bytes=256 * MIB,
    disk_bytes=2048 * MIB,
    disk_buffer_bytes=64 * MIB,
    disk_s=2.5,
    queue_depths=(1, 2, 4, 8, 16),
    copy_bytes_max=1024 * MIB,
    num_copy_rounds=25,
    copy_s=12.0,
    matmul_s=0.5,
    sustained_s=8.0,
    overlap_s=1.5,
    peer_bytes=256 * MIB,
    data_chars=1_000_000,
    loader_tokens=2**24,
    all_reduce_bytes_max=64 * MIB,
    limit_s=180.0,
)
# Of free memory, the share that one buffer may take: AdamW holds five at once, copies both ways four.
_SHARE = 0.1
_LEAST_BYTES = MIB
# One request of a disk.
_LEAST_DISK_BYTES = 4 * MIB


def within_memory(effort: Effort, free_bytes: int | None) -> Effort:
    """Return ``effort`` with sizes that leave a machine of ``free_bytes`` enough to live; None changes nothing.

    Below four times the last-level cache the DRAM figures are too good; what they were measured with is in
    their source.
    """
    if free_bytes is None:
        return effort
    most = max(_LEAST_BYTES, 1 << max(0, int(free_bytes * _SHARE).bit_length() - 1))
    names = ("array_bytes", "plane_bytes", "copy_bytes_max", "peer_bytes", "all_reduce_bytes_max")
    return replace(
        effort,
        disk_buffer_bytes=min(effort.disk_buffer_bytes, max(_LEAST_DISK_BYTES, most)),
        loader_tokens=min(effort.loader_tokens, max(2**16, most // 16)),
        **{name: min(getattr(effort, name), most) for name in names},
    )


def shared(effort: Effort, num_devices: int) -> Effort:
    """Return ``effort`` with the time of what is done to each device divided, so that eight take as long as one."""
    names = ("sample_s", "copy_s", "overlap_s")
    return replace(effort, **{name: getattr(effort, name) / max(1, num_devices) for name in names})


def sample(
    work: Callable[[], object],
    *,
    seconds: float,
    num_min: int,
    until_s: float = math.inf,
    finish: Callable[[], object] = lambda: None,
) -> list[float]:
    """Return the seconds that ``work()`` took, again and again, after one repetition that does not count.

    Args:
        work: what is timed.
        seconds: no repetition starts later than this, beyond ``num_min`` of them.
        num_min: repetitions at least.
        until_s: of `time.perf_counter`, when the time of the whole part is up: no repetition starts later, beyond one.
        finish: waits for work that was only queued, e.g. ``torch.accelerator.synchronize``.
    """
    work()
    finish()
    samples: list[float] = []
    stop = time.perf_counter() + seconds
    while not samples or ((now := time.perf_counter()) < until_s and (len(samples) < num_min or now < stop)):
        started = time.perf_counter()
        work()
        finish()
        samples.append(time.perf_counter() - started)
    return samples
