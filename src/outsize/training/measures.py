"""Figures of a run and of its steps: FLOPs, seconds by lane, memory by tier, facts of model and machine."""

import contextlib
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from outsize import __version__
from outsize.accelerators import Devices, module_of
from outsize.hardware.gpus import take_inventory
from outsize.hardware.topology import slower_than_fp32
from outsize.model.sizes.model_spec import ModelSpec
from outsize.planner.program.program import COMPUTE_KINDS, Lane, Op, lane_named
from outsize.planner.program.table import Price
from outsize.planner.simulate.simulator import Event, Timeline, idle_s
from outsize.planner.simulate.stalls import Waits, Window
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.runtime.ops.context import Moved
from outsize.session.job.machine import RunMachine, preset_of
from outsize.session.job.prepare import Job
from outsize.session.steps import StepOutcome
from outsize.storage.ledger import Ledger
from outsize.telemetry.counters import GpuSampler, HostSampler
from outsize.training.records import StepRecord

# A square product of this size takes a core some milliseconds and its operands fit into caches.
_SIDE, _REPEATS = 512, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What the devices of a run compute at most.

    Attributes:
        flops_per_s: of all of them together; None where it is not known.
        source: whose figure that is.
        fp32_flops_per_s: what a CPU computes in fp32, measured where a run takes another dtype; None elsewhere.
    """

    flops_per_s: float | None
    source: str
    fp32_flops_per_s: float | None = None

    def slower_than_fp32(self) -> float | None:
        """Return how often as long as in fp32 products of the run take; None where they are faster, or not known."""
        return slower_than_fp32(self.flops_per_s, self.fp32_flops_per_s)


def step_flops(prepared: Job) -> float | None:
    """Return the FLOPs of forward and backward of a step, without recompute; None where they are not counted.

    That is where a trial sees no operations, and where steps differ in length.

    A backward computes the gradients of inputs, as many FLOPs as the forward, and those of trained weights, as many
    again: three forwards where all weights train, two where nearly all are frozen.
    """
    config, spec = prepared.config, prepared.split.spec
    if config.data.is_grouped:
        return None
    forward = sum(
        one.forward for one in prepared.measured.flops.of(prepared.num_sequences, config.data.seq_len)
    )
    if not forward:
        return None
    return (2 + spec.num_trainable / spec.num_parameters) * forward


def peak_of(devices: Devices, dtype: str) -> Peak:
    """Return what ``devices`` compute at most: by the data sheet of a GPU, measured on a CPU."""
    if devices.accelerated:
        return promised(devices.titles, dtype)
    return Peak(
        flops_per_s=_measured(TORCH_DTYPE[dtype], torch.get_num_threads()),
        source=f"measured: the best of {_REPEATS} products of {_SIDE} x {_SIDE} in {dtype} on all threads",
        fp32_flops_per_s=None if dtype == "fp32" else _measured(torch.float32, torch.get_num_threads()),
    )


def slow_products(peak: Peak, dtype: str) -> str:
    """Return what to say of a processor that multiplies faster in fp32 than in ``dtype``; empty where none does."""
    times = peak.slower_than_fp32()
    if times is None:
        return ""
    return (
        f"model.dtype: products in {dtype} take {times:.1f} times as long as in fp32 on this processor (measured now); "
        "fp32 computes a step faster, with twice the bytes of each weight"
    )


def promised(names: Sequence[str], dtype: str) -> Peak:
    """Return what the data sheets of GPUs, called as the driver calls them, promise together."""
    gpus = [preset_of(name) for name in names]
    figures = [gpu.peak_flops_per_s.get(dtype) for gpu in gpus if gpu is not None]
    present_figures = [figure for figure in figures if figure is not None]
    if len(present_figures) < len(names):
        return Peak(flops_per_s=None, source=f"no figure for {dtype} on {', '.join(dict.fromkeys(names))}")
    return Peak(flops_per_s=sum(figure.value for figure in present_figures), source=present_figures[0].source)


@cache
def _measured(dtype: torch.dtype, threads: int) -> float:
    """Return the FLOPs per second of products on as many ``threads`` as torch has; measured once in a process."""
    left, right = torch.ones(_SIDE, _SIDE, dtype=dtype), torch.ones(_SIDE, _SIDE, dtype=dtype)
    out = left @ right
    samples = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        torch.mm(left, right, out=out)
        samples.append(time.perf_counter() - began)
    return 2.0 * _SIDE**3 / min(samples)  # other work only takes from it


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTimes:
    """Seconds of one step; ops are counted in the step in whose time they ended.

    Attributes:
        busy_s: that each lane spent on ops, by lane.
        stall_s: that a compute lane stood still, by the lane that it waited for, longest first; of the worker that
            stood still longest.
        forward_s: in forwards, less that of the last unit.
        backward_s: in backwards, with recompute, and with the forward of the last unit.
        update_s: in the optimizer.
    """

    busy_s: dict[str, float]
    stall_s: dict[str, float]
    forward_s: float
    backward_s: float
    update_s: float


def lane_times(timeline: Timeline) -> LaneTimes:
    """Add up the events of ``timeline``."""
    by_price: defaultdict[Price, float] = defaultdict(float)
    for event in timeline.events:
        by_price["free" if event.row is None else event.row.price] += event.end_s - event.start_s
    stalls = (timeline.stall_s_by_owner(lane) for lane in timeline.compute_lanes)
    return LaneTimes(
        busy_s={lane: timeline.busy_s(lane) for lane in timeline.lanes},
        stall_s=max(stalls, key=lambda owners: sum(owners.values()), default={}),
        forward_s=by_price["forward"],
        backward_s=by_price["turn"] + by_price["recompute"] + by_price["backward"],
        update_s=by_price["step"] + by_price["update"],
    )


_READ, _WRITTEN = "disk:read", "disk:write"
# Waits are followed to their causes in the first steps and then in one of so many: it takes a third of the calls of a
# step, and steps of a run wait alike. What lanes idle is known of every step.
BOOKED_FIRST, BOOKED_EVERY = 3, 4


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
        self._num_recorded = 0
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
        events, window = self._events_of(timeline, outcome.window), outcome.window
        booked = self._num_recorded < BOOKED_FIRST or self._num_recorded % BOOKED_EVERY == 0
        self._num_recorded += 1
        waits = Waits(events, replace(window, saving_s=self._saving_s)) if booked else None
        before, self._cpu_s = self._cpu_s, time.process_time()
        host, (rss_bytes, peak_bytes) = self._host.sample(), resident_memory()
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
            rss_bytes=rss_bytes,
            peak_rss_bytes=peak_bytes,
            data_s=outcome.data_s,
            between_s=outcome.between_s,
            cpu_s=self._cpu_s - before,
            idle_s={lane: idle_s(events, lane, window.began_s, window.ended_s) for lane in self._lanes},
            waits_s={} if waits is None else {lane: waits.of(lane) for lane in self._lanes},
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

    def _events_of(self, timeline: Timeline, window: Window) -> tuple[Event, ...]:
        """Return what went on in a step; ops that went on when it was known belong to the next one, too."""
        events = (*self._overhang, *timeline.events)
        self._overhang = tuple(event for event in events if event.end_s > window.ended_s)
        return events

    def _mfu(self, seconds: float) -> float | None:
        if self._flops is None or self._peak.flops_per_s is None:
            return None
        return self._flops / self._peak.flops_per_s / seconds

    def _fallbacks(self, failed: Mapping[str, int]) -> dict[str, int]:
        """What did not go as asked; names of zero are left out."""
        counts = {**self._fallen_back(), **failed}
        return {name: count for name, count in counts.items() if count}


def resident_memory() -> tuple[int, int]:
    """Return the resident memory of the process now and at most, in bytes (Linux counts it in KiB).

    The kernel's high-water mark, where it tells: what `getrusage` says begins with that of the process's parent.
    """
    sizes: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        sizes = {name: size.split()[0] for name, size in (line.split(":") for line in status if "kB" in line)}
    peak = sizes.get("VmHWM", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return int(sizes.get("VmRSS", 0)) * 1024, int(peak) * 1024


def stall_share(stall_s: Mapping[str, float], seconds: float) -> float:
    """Return the share of ``seconds``, 0 to 1, that compute waited, by lane that it waited for.

    Waits of consecutive steps may overlap, so that their sum may be more than the time.
    """
    return min(sum(stall_s.values()) / seconds, 1.0) if seconds else 0.0


SCHEMA_VERSION = 1


def about(prepared: Job, flops: float | None, peak: Peak) -> dict[str, Any]:
    """Return what JSON knows of a run that begins or goes on now.

    Args:
        prepared: the run.
        flops: of forward and backward of a step; None where they are not known.
        peak: of all devices.
    """
    config = prepared.config
    return {
        **describe(prepared.split.model, prepared.split.spec, prepared.machine, prepared.dtype, flops, peak),
        "steps": config.train.steps,
        "plan_id": prepared.plan.plan_id,
        "tokens_per_step": config.tokens_per_step,
        "tokens_per_microbatch": -(-prepared.num_sequences // config.microbatches) * config.data.seq_len,
    }


def describe(
    model: nn.Module, spec: ModelSpec, machine: RunMachine, dtype: str, flops: float | None, peak: Peak
) -> dict[str, Any]:
    """Return what JSON knows of a model that is trained from now on, whoever writes the loop.

    Args:
        model: the model.
        spec: its units.
        machine: device and budgets.
        dtype: in which the model computes.
        flops: of forward and backward of a step; None where they are not known.
        peak: of all devices.
    """
    return {
        "schema": SCHEMA_VERSION,
        "started": time.time(),
        "outsize": __version__,
        "model": type(model).__name__,
        "num_parameters": spec.num_parameters,
        "num_trainable": spec.num_trainable,
        "dtype": dtype,
        "units": [
            {"index": u.index, "name": u.name, "kind": u.kind, "weight_bytes": u.weight_bytes(spec.dtype)}
            for u in spec.units
        ],
        "device": str(machine.devices),
        "device_names": list(dict.fromkeys(machine.devices.titles)) or list(machine.devices.names),
        "num_workers": machine.num_workers,
        "flops_per_step": flops,
        "peak_flops_per_s": peak.flops_per_s,
        "peak_source": peak.source,
        "fp32_flops_per_s": peak.fp32_flops_per_s,
        "num_threads": torch.get_num_threads(),
        "machine": take_inventory([]).model_dump(mode="json"),
    }
