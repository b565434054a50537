"""The step time of a run before it starts, and what became of it: prediction, measurement, and the difference.

Before the first step, lanes and units are timed for a moment and the plan is simulated with what they reach. After the
first steps the trace of the run takes the place of those figures: `Forecast.step_s` is then what the trace says, and
the directory of the run holds two files:

- ``prediction.json``: predicted and measured step, taken apart in the same way, and what is expected from now on;
- ``machine.json``: the rates of the lanes, for the next run here and for ``outsize plan --machine``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outsize.detail import Detail
from outsize.errors import OutsizeError
from outsize.hardware.machine_spec import Figure, Machine
from outsize.planner.predict.decision import PlannedStep
from outsize.planner.program.program import COMPUTE_KINDS, Lane, lane_named
from outsize.planner.simulate.comparison import Comparison, StepParts, Steps, compare, take_apart
from outsize.planner.simulate.costs import ADAMW_BYTES, UnitTimes
from outsize.planner.simulate.gpu_times import Trace, crowded, read_trace
from outsize.planner.simulate.simulator import CostModel
from outsize.planner.simulate.stalls import Window
from outsize.planner.simulate.timeline import Timeline
from outsize.runtime.device.heap import trim
from outsize.session.decide.lane_rates import MACHINE_FILE, codec_rates, crossing_rates
from outsize.session.decide.rates import Rates, measure_exchange, measure_rates, of_slowest
from outsize.session.job.demand import kept_bytes
from outsize.session.job.prepare import Job
from outsize.training.records import write_json, write_whole
from outsize.units import format_seconds

PREDICTION_FILE = "prediction.json"
# Steps that are measured: not the first, in which kernels and caches are cold.
FIRST_MEASURED, NUM_MEASURED = 1, 2


class Forecast:
    """What a run's steps are expected to take.

    Attributes:
        planned: the step, as the simulator takes it.
        step_s: seconds of a step: predicted before the run, from its own trace as soon as there is one.
        alone_s: seconds that compute lanes take in a step where nothing runs beside them, as units were timed.
        comparison: of prediction and measurement, as soon as there is one.
    """

    def __init__(self, prepared: Job, rates: Rates) -> None:
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
        alone = self.planned.costs(self._machine, rates.times, coarse=False)
        compute = (op for op in prepared.plan.program if op.kind in COMPUTE_KINDS)
        self.alone_s = sum(alone.cost_of(op).seconds for op in compute)
        beside_lanes = self._beside_lanes(prepared, rates, alone)
        costs = self.planned.costs(self._machine, beside_lanes)
        self.predicted: StepParts = take_apart(self.planned.expect(costs))
        self.step_s = self.predicted.step_s
        self.comparison: Comparison | None = None
        self._num_seen = 0
        self._windows: list[Window] = []
        self._events: list[Any] = []

    def _beside_lanes(self, prepared: Job, rates: Rates, alone: CostModel) -> UnitTimes:
        """Return what units take while lanes compute beside them, where those are threads of the same cores."""
        if not math.isfinite(rates.cores):
            return rates.times
        return crowded(
            rates.times,
            prepared.plan.program,
            alone,
            cores=rates.cores,
            threads=torch.get_num_threads(),
            core_s_per_byte=rates.core_s_per_byte,
        )

    def slowed_s(self, busy_s: Mapping[str, float]) -> float:
        """Return by how many seconds compute lanes, busy for ``busy_s``, took longer than their units took alone."""
        computed_s = sum(seconds for lane, seconds in busy_s.items() if lane_named(lane).kind == "compute")
        return max(0.0, computed_s - self.alone_s)

    def step_ended(self, window: Window, timeline: Timeline) -> bool:
        """Take note of a step; returns whether it was the last that is compared."""
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
        self.step_s = self.planned.step_s(costs)
        self._machine = with_rates(self._machine, trace)
        first, last = self._windows[0], self._windows[-1]
        steps = Steps(
            timeline=measured, began_s=first.began_s, ended_s=last.ended_s, count=len(self._windows)
        )
        self.comparison = compare(self.predicted, take_apart(steps), self.step_s)
        self._events.clear()

    def write(self, run_dir: Path) -> None:
        """Write what was compared, and the rates, into ``run_dir``.

        Raises:
            StorageError: it cannot be written.
        """
        assert self.comparison is not None
        write_json(run_dir / PREDICTION_FILE, self.comparison.to_dict())
        write_whole(run_dir / MACHINE_FILE, self._machine.to_json() + "\n")


def forecast(
    prepared: Job, run_dir: Path, announce: Callable[[str], None], rates: Rates | None = None
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
    announce(Detail(f"a step is predicted to take {format_seconds(found.step_s)}"))
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
            up_bytes_per_s=rate(Lane("up", worker), link.up_bytes_per_s),
            down_bytes_per_s=rate(Lane("down", worker), link.down_bytes_per_s),
        )
        for worker, link in enumerate(machine.links)
    )
    gpus = tuple(
        replace(gpu, peak_flops_per_s={d: computed(peak) for d, peak in gpu.peak_flops_per_s.items()})
        for gpu in machine.gpus
    )
    peers = tuple(
        replace(peer, bytes_per_s=rate(Lane("peer", peer.source, peer.target), peer.bytes_per_s))
        for peer in machine.peers
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
    return replace(machine, gpus=gpus, links=links, peers=peers, host=host, disk=disk)


def _traced(value: float) -> Figure:
    return Figure(value=value, source="the first steps of a run", measured=True)


def _measured_here(prepared: Job, run_dir: Path) -> Rates:
    """Measure, and where that fails tell the other ranks, who ask in `of_slowest`."""
    try:
        return measure_rates(prepared, run_dir)
    except (OutsizeError, RuntimeError):
        prepared.group.gather_objects(None)
        raise
