"""What each step cost, read off the trainer when the step is known: time by cause, bytes by lane, memory by tier."""

import contextlib
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace

from outsize.accelerators import Devices, module_of
from outsize.planner.program.lanes import Lane, lane_named
from outsize.planner.program.ops import COMPUTE_KINDS, Op
from outsize.planner.simulate.stalls import Waits, Window
from outsize.planner.simulate.timeline import Event, Timeline
from outsize.runtime.device.allocator import resident_bytes
from outsize.runtime.device.moved_bytes import Moved
from outsize.session.steps import StepOutcome
from outsize.storage.ledger import Ledger
from outsize.telemetry.counters import GpuSampler, HostSampler
from outsize.training.metrics.flops import Peak
from outsize.training.metrics.lane_times import lane_times
from outsize.training.metrics.run_records import StepRecord

_READ, _WRITTEN = "disk:read", "disk:write"


class Accounts:
    """Keeps the counters of a run, and makes the record of a step out of how far they came.

    Args:
        device: name of what computes.
        num_workers: how many of it.
        links: lanes whose bytes are counted.
        ledger: what of every budget is used.
        fallbacks: asks what could not be had as asked so far, and how often.
        sampler: of the GPUs.
        flops: of a step; None where they are not known.
        peak: of the devices.
    """

    def __init__(
        self,
        devices: Devices,
        num_workers: int,
        links: Iterable[str],
        ledger: Ledger,
        fallbacks: Callable[[], Mapping[str, int]],
        sampler: GpuSampler,
        flops: float | None,
        peak: Peak,
    ) -> None:
        self._ledger, self._fallen_back = ledger, fallbacks
        self._sampler = sampler
        self._host = HostSampler()
        self._flops = flops
        self._peak = peak
        self._lanes = [Lane("compute", worker) for worker in range(num_workers)]
        self._gpus = tuple(dict.fromkeys(devices.names)) if devices.accelerated else ()
        self._crossings = (*links, _READ, _WRITTEN)
        self._cpu_s = time.process_time()
        self._overhang: tuple[Event, ...] = ()
        self._saving_s = 0.0
        self.stalled_s: dict[str, float] = {}

    def record(
        self, outcome: StepOutcome, timeline: Timeline, skipped_steps: int, failed: Mapping[str, int]
    ) -> StepRecord:
        """Return the record of a step that has just become known, from what the lanes did since the one before.

        Some of its bytes are still to move, see `counted`.
        """
        times = lane_times(timeline)
        for lane, seconds in times.stall_s.items():
            self.stalled_s[lane] = self.stalled_s.get(lane, 0.0) + seconds
        waits = self._waits(timeline, outcome.window)
        before, self._cpu_s = self._cpu_s, time.process_time()
        host = self._host.sample()
        record = StepRecord(
            step=outcome.number + 1,
            loss=outcome.loss,
            lr=outcome.learning_rate,
            grad_norm=outcome.gradient_norm,
            tokens=outcome.tokens,
            seconds=outcome.seconds,
            stall_share=stall_share(times.stall_s, outcome.seconds),
            stall_owner=next(iter(times.stall_s), None),
            skipped=outcome.skipped,
            skipped_steps=skipped_steps,
            busy_s=times.busy_s,
            stall_s=times.stall_s,
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            update_s=times.update_s,
            rss_bytes=resident_bytes(),
            peak_rss_bytes=peak_rss_bytes(),
            data_s=outcome.data_s,
            between_s=outcome.between_s,
            cpu_s=self._cpu_s - before,
            idle_s={lane: waits.idle_s(lane) for lane in self._lanes},
            waits_s={lane: waits.of(lane) for lane in self._lanes},
            num_compute_ops=sum(isinstance(e.op, Op) and e.op.kind in COMPUTE_KINDS for e in timeline.events),
            mfu=self._mfu(outcome.seconds),
            tiers={name: asdict(tier) for name, tier in self._ledger.statistics().items()},
            device_bytes={name: module_of(name).memory_reserved(name) for name in self._gpus},
            gpus=tuple(sample.model_dump() for sample in self._sampler.sample()),
            host=None if host is None else host.model_dump(),
            fallbacks=self._fallbacks(failed),
        )
        return self.counted(record, outcome)

    def counted(self, record: StepRecord, outcome: StepOutcome) -> StepRecord:
        """Return the record with the bytes that the step's own ops have moved by now."""
        moved = {**dict.fromkeys(self._crossings, Moved()), **outcome.moved()}
        wire = {lane: size.wire for lane, size in moved.items()}
        return replace(
            record,
            bytes_up=sum(size for lane, size in wire.items() if lane_named(lane).family == "up"),
            bytes_down=sum(size for lane, size in wire.items() if lane_named(lane).family == "down"),
            bytes_read=wire[_READ],
            bytes_written=wire[_WRITTEN],
            wire_bytes=wire,
            logical_bytes={lane: size.logical for lane, size in moved.items()},
        )

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Take the time of the block for checkpoints; nothing may come between it and asking for the next batch."""
        began = time.perf_counter()
        yield
        self._saving_s = time.perf_counter() - began

    def _waits(self, timeline: Timeline, window: Window) -> Waits:
        """What the step waited for. Ops that went on when it was known belong to the next one, too."""
        events = (*self._overhang, *timeline.events)
        self._overhang = tuple(event for event in events if event.end_s > window.ended_s)
        return Waits(events, replace(window, saving_s=self._saving_s))

    def _mfu(self, seconds: float) -> float | None:
        if self._flops is None or self._peak.flops_per_s is None:
            return None
        return self._flops / self._peak.flops_per_s / seconds

    def _fallbacks(self, failed: Mapping[str, int]) -> dict[str, int]:
        """What did not go as asked; names of zero are left out."""
        found = {**self._fallen_back(), **failed}
        return {name: count for name, count in found.items() if count}


def peak_rss_bytes() -> int:
    """Largest resident memory of the process so far, in bytes (Linux counts it in KiB).

    The kernel's high-water mark, where it tells: what `getrusage` says begins with that of the process's parent.
    """
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def stall_share(stall_s: Mapping[str, float], seconds: float) -> float:
    """Return the share of ``seconds``, 0 to 1, that compute waited, by lane that it waited for.

    Waits of consecutive steps may overlap, so that their sum may be more than the time.
    """
    return min(sum(stall_s.values()) / seconds, 1.0) if seconds else 0.0
