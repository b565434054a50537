"""The step time of a run before it starts, and what became of it: prediction, measurement, and the difference.

Before the first step, lanes and units are timed for a moment and the plan is simulated with what they reach. After the
first steps the trace of the run takes the place of those figures: `Forecast.step_s` is then what the trace says, and
the directory of the run holds two files:

- ``prediction.json``: predicted and measured step, taken apart in the same way, and what is expected from now on;
- ``machine.json``: the rates of the lanes, for the next run here and for ``outsize plan --machine``.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outsize.errors import ConfigError, ModelError, OutsizeError
from outsize.group.group import Group
from outsize.hardware.spec import Figure, Machine
from outsize.model.spec_from_config import forward_flops
from outsize.model.walk import Boundaries
from outsize.planner.choice import Extent
from outsize.planner.comparison import Comparison, Steps, compare
from outsize.planner.costs import ADAMW_BYTES, UnitTimes
from outsize.planner.expectation import PlannedStep
from outsize.planner.idle import Window
from outsize.planner.recalibrate import Trace, read_trace
from outsize.planner.timeline import Timeline
from outsize.runtime.allocator import trim
from outsize.runtime.unit_clock import time_units
from outsize.train.codec_rates import codec_rates, crossing_rates
from outsize.train.heartbeat import write_json, write_whole
from outsize.train.lane_rates import MACHINE_FILE, kept_rates, lane_rates
from outsize.train.machine import home_file
from outsize.train.model_inputs import made_up_inputs
from outsize.train.prepare import Prepared
from outsize.train.unit_times import kept_bytes, recompute_shares, selections, shape_of
from outsize.units import format_seconds

PREDICTION_FILE = "prediction.json"
# Units are timed on at most so many tokens, which fill a device; more take as much longer as they have operations.
TIMED_TOKENS = {"cpu": 512, "cuda": 8192}
# Steps that are measured: not the first, in which kernels and caches are cold.
FIRST_MEASURED, NUM_MEASURED = 1, 2
# Exchanged by all ranks together, to know how fast that goes.
SAMPLE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Rates:
    """What a run reaches.

    Attributes:
        machine: rates of its lanes.
        times: of its units, for one of its microbatches.
        net_bytes_per_s: of several ranks, what each sends while all do.
    """

    machine: Machine
    times: UnitTimes
    net_bytes_per_s: float = 0.0


class Forecast:
    """What a run's steps are expected to take.

    Args:
        prepared: the run.
        rates: that it reaches.

    Attributes:
        planned: the step, as the simulator takes it.
        step_s: seconds of a step: predicted before the run, from its own trace as soon as there is one.
        comparison: of prediction and measurement, as soon as there is one.
    """

    def __init__(self, prepared: Prepared, rates: Rates) -> None:
        self._machine, self._times = rates.machine, rates.times
        self.planned = PlannedStep(
            plan=prepared.plan,
            model=prepared.split.spec,
            boundary_bytes=prepared.measured.boundary_bytes,
            codec_rates=codec_rates(prepared, prepared.plan.transport),
            crossing_rates=crossing_rates(prepared, prepared.plan.transport),
            kept_bytes=kept_bytes(prepared.measured),
            net_bytes_per_s=rates.net_bytes_per_s,
        )
        self.predicted: Steps = self.planned.expect(self.planned.costs(self._machine, self._times))
        self.step_s = self.predicted.step_s
        self.comparison: Comparison | None = None
        self._num_seen = 0
        self._windows: list[Window] = []
        self._events: list[Any] = []

    def step_ended(self, window: Window, timeline: Timeline) -> bool:
        """Take note of a step; returns whether it was the last that is compared.

        Args:
            window: of the step.
            timeline: what lanes did since the step before.
        """
        self._num_seen += 1
        if self.comparison is not None or self._num_seen <= FIRST_MEASURED:
            return False
        self._windows.append(window)
        self._events += timeline.events
        if len(self._windows) < NUM_MEASURED:
            return False
        self.compare()
        return True

    def compare(self) -> None:
        """Compare what was measured so far, which is a step at least, and expect what the trace says from now on."""
        measured = Timeline(tuple(self._events))
        trace = read_trace(measured, self.planned.costs(self._machine, self._times, coarse=False))
        costs = trace.costs(self.planned.costs(self._machine, self._times))
        self.step_s = self.planned.expect(costs).step_s
        self._machine = with_rates(self._machine, trace)
        first, last = self._windows[0], self._windows[-1]
        steps = Steps(
            timeline=measured, began_s=first.began_s, ended_s=last.ended_s, count=len(self._windows)
        )
        self.comparison = compare(self.predicted, steps, self.step_s)
        self._events.clear()

    def write(self, run_dir: Path) -> None:
        """Write what was compared, and the rates, into ``run_dir``.

        Raises:
            StorageError: it cannot be written.
        """
        assert self.comparison is not None
        write_json(run_dir / PREDICTION_FILE, self.comparison.to_dict())
        write_whole(run_dir / MACHINE_FILE, self._machine.to_json() + "\n")


def measure_rates(prepared: Prepared, run_dir: Path) -> Rates:
    """Time the units of a run, and its lanes where a run before it has not left their rates in ``run_dir``.

    Raises:
        OutsizeError: something could not be measured.
        RuntimeError: the same, said by torch.
    """
    times, flops = _times(prepared)
    home = home_file(prepared.config.memory, run_dir).parent
    return Rates(kept_rates(run_dir, prepared) or lane_rates(prepared, home, times, flops), times)


def forecast(
    prepared: Prepared, run_dir: Path, announce: Callable[[str], None], rates: Rates | None = None
) -> Forecast | None:
    """Return what the steps of a run will take; None, said aloud, where that could not be found out.

    Args:
        prepared: the run.
        run_dir: its directory, which may hold rates.
        announce: called with lines for people.
        rates: that were measured already.
    """
    net = measure_exchange(prepared.group)  # first of all: what fails below may fail on one rank only
    try:
        measured = _measured_here(prepared, run_dir) if rates is None else rates
        found = Forecast(prepared, of_slowest(prepared.group, measured, net))
    except (OutsizeError, RuntimeError) as error:
        announce(f"no prediction of step times: {error}")
        return None
    finally:
        trim()
    announce(f"a step is predicted to take {format_seconds(found.step_s)}")
    return found


def with_rates(machine: Machine, trace: Trace) -> Machine:
    """Return ``machine`` with the rates that its lanes had in ``trace``; others stay."""

    def rate(name: str, former: Figure, unit: float = 1.0) -> Figure:
        value = trace.rates.get(name)
        return former if value is None else _traced(value / unit)

    def computed(peak: Figure) -> Figure:
        return _traced(peak.value / trace.compute_share)

    links = tuple(
        replace(
            link,
            up_bytes_per_s=rate(f"up:w{worker}", link.up_bytes_per_s),
            down_bytes_per_s=rate(f"down:w{worker}", link.down_bytes_per_s),
        )
        for worker, link in enumerate(machine.links)
    )
    gpus = tuple(
        replace(gpu, peak_flops_per_s={d: computed(peak) for d, peak in gpu.peak_flops_per_s.items()})
        for gpu in machine.gpus
    )
    host = machine.host
    host = replace(host, adamw_params_per_s=rate("optimizer", host.adamw_params_per_s, ADAMW_BYTES))
    disk = machine.disk
    if disk is not None:
        disk = replace(
            disk,
            read_bytes_per_s=rate("disk read", disk.read_bytes_per_s),
            write_bytes_per_s=rate("disk write", disk.write_bytes_per_s),
        )
    return replace(machine, gpus=gpus, links=links, host=host, disk=disk)


def _traced(value: float) -> Figure:
    return Figure(value=value, source="the first steps of a run", measured=True)


def _times(prepared: Prepared) -> tuple[UnitTimes, tuple[float, ...]]:
    """Return the times of units in a microbatch of the run, and the operations of their forwards."""
    config = prepared.config
    if _is_cuda(prepared) and not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device here to time anything on")
    rows, length = -(-prepared.num_sequences // config.microbatches), config.data.seq_len
    device = torch.device(prepared.machine.device.partition(",")[0] if _is_cuda(prepared) else "cpu")
    few_rows, short = _timed_size(rows, length, TIMED_TOKENS[device.type])
    inputs = made_up_inputs(config, prepared.hf_config, few_rows, short)
    with Boundaries(prepared.split.modules) as boundaries:
        prepared.split.model.train()
        times = time_units(
            prepared.split, boundaries.forwards, inputs, chunk_tokens=prepared.chunk_tokens, device=device
        )
    flops, timed = _flops(prepared, rows, length), _flops(prepared, few_rows, short)
    tokens = rows * length / (few_rows * short)
    shares = [work / fewer if fewer else tokens for work, fewer in zip(flops, timed, strict=True)]
    found = _less_recompute(_scaled(times, shares), recompute_shares(prepared.split, prepared.measured))
    return replace(found, spared_s=_spared_s(prepared, found.forward_s, flops)), flops


def _scaled(times: UnitTimes, shares: Sequence[float]) -> UnitTimes:
    """Return ``times`` of microbatches with ``shares`` as many operations, by unit."""
    forward_s, backward_s = (
        tuple(s * share for s, share in zip(found, shares, strict=True))
        for found in (times.forward_s, times.backward_s)
    )
    return UnitTimes(forward_s=forward_s, backward_s=backward_s)


def _less_recompute(times: UnitTimes, shares: Sequence[float]) -> UnitTimes:
    """Return ``times``, taken with whole recomputes, of a run whose recomputes are ``shares`` of a forward."""
    recompute_s = tuple(s * share for s, share in zip(times.forward_s, shares, strict=True))
    spared_s = (whole - part for whole, part in zip(times.forward_s, recompute_s, strict=True))
    backward_s = (max(0.0, s - spared) for s, spared in zip(times.backward_s, spared_s, strict=True))
    return UnitTimes(forward_s=times.forward_s, backward_s=tuple(backward_s), recompute_s=recompute_s)


def _spared_s(
    prepared: Prepared, forward_s: tuple[float, ...], flops: tuple[float, ...]
) -> dict[Extent, tuple[float, ...]]:
    """Return what of a forward is spared where attention, or products, are kept: their share of its operations."""
    return {
        extent: tuple(
            seconds * min(1.0, spared / work) if work else 0.0
            for seconds, spared, work in zip(forward_s, spared_by_unit, flops, strict=True)
        )
        for extent, spared_by_unit in selections(prepared.measured).get("selected_s", {}).items()
    }


def _is_cuda(prepared: Prepared) -> bool:
    return prepared.machine.device.startswith("cuda")


def _timed_size(rows: int, length: int, most: int) -> tuple[int, int]:
    """Return sequences and tokens of each that are timed: fewer sequences before shorter ones."""
    return max(1, min(rows, most // length)), min(length, most)


def _flops(prepared: Prepared, rows: int, length: int) -> tuple[float, ...]:
    """Return the operations of each unit's forward: from the config, or two for each parameter and token."""
    spec = prepared.split.spec
    with contextlib.suppress(ModelError, AttributeError):
        flops = forward_flops(shape_of(prepared.split), rows, length)
        if len(flops) == spec.num_streamed:
            return flops
    numel = [0 if unit.kind == "embedding" else unit.numel for unit in spec.units[: spec.num_streamed]]
    return tuple(2.0 * rows * length * size for size in numel)


def _measured_here(prepared: Prepared, run_dir: Path) -> Rates:
    """Measure, and where that fails tell the other ranks, who ask in `of_slowest`."""
    try:
        return measure_rates(prepared, run_dir)
    except (OutsizeError, RuntimeError):
        prepared.group.gather_objects(None)
        raise


def of_slowest(group: Group, rates: Rates, net_bytes_per_s: float) -> Rates:
    """Return ``rates`` with what all ranks wait for: the compute of the slowest, and the network of the slowest."""
    own_s = sum((*rates.times.forward_s, *rates.times.backward_s))
    told = [found for found in group.gather_objects([own_s, net_bytes_per_s]) if found is not None]
    compute_s, slowest_net = max(s for s, _ in told), min(net for _, net in told)
    times = _slower(rates.times, compute_s / own_s) if own_s else rates.times
    return replace(rates, times=times, net_bytes_per_s=slowest_net)


def _slower(times: UnitTimes, factor: float) -> UnitTimes:
    def each(seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(s * factor for s in seconds)

    return UnitTimes(
        forward_s=each(times.forward_s),
        backward_s=each(times.backward_s),
        recompute_s=each(times.recompute_s),
        spared_s={extent: each(seconds) for extent, seconds in times.spared_s.items()},
    )


def measure_exchange(group: Group) -> float:
    """Return the bytes per second that this rank sends while all send to all; 0 of a single process."""
    if group.size == 1:
        return 0.0
    channel = group.channel("rate")
    part = SAMPLE_BYTES // group.size
    ranges = [range(rank * part, (rank + 1) * part) for rank in range(group.size)]
    sample = torch.zeros(part * group.size, dtype=torch.uint8)
    channel.all_gather(sample, ranges)  # connections are made, and buffers of the kernel grow
    channel.barrier()
    began_s = time.perf_counter()
    channel.all_gather(sample, ranges)
    return part * (group.size - 1) / (time.perf_counter() - began_s)
