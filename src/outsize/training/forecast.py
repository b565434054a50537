"""Forecast a run before it starts: plan, step time, data, disk; compare it with the measured steps later.

Before the first step, lanes and units are timed for a moment and the plan is simulated with what they reach. After the
first steps the trace of the run takes the place of those figures: `Forecast.step_s` is then what the trace says, and
the directory of the run holds two files:

- ``prediction.json``: predicted and measured step, taken apart in the same way, and what is expected from now on;
- ``machine.json``: the rates of the lanes, for the next run here and for ``outsize plan --machine``.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outsize.checkpoint import run_checkpoint
from outsize.checkpoint.begun_adapters import with_begun_adapters
from outsize.checkpoint.saver import checkpoint_bytes
from outsize.config import Config, DataConfig
from outsize.data.prefetch import enough_workers, sweep_loader
from outsize.detail import Detail
from outsize.errors import DataError, OutsizeError
from outsize.planner.predict.decision import PlannedStep
from outsize.planner.program.program import COMPUTE_KINDS, lane_named
from outsize.planner.search.step_plan import Plan
from outsize.planner.simulate.comparison import Comparison, StepParts, Steps, compare, take_apart
from outsize.planner.simulate.costs import UnitTimes
from outsize.planner.simulate.gpu_times import crowded, read_trace
from outsize.planner.simulate.simulator import CostModel, Timeline
from outsize.planner.simulate.stalls import Window
from outsize.runtime.device.heap import trim
from outsize.session.decide.decide import plan_run
from outsize.session.decide.lane_rates import (
    MACHINE_FILE,
    codec_rates,
    crossing_rates,
    partly_pinned,
    with_rates,
)
from outsize.session.decide.rates import Rates, measure_exchange, measure_rates, of_slowest
from outsize.session.job.demand import kept_bytes
from outsize.session.job.machine import home_file
from outsize.session.job.prepare import Job
from outsize.session.process_settings import borrowed_torch
from outsize.storage.directory import temporary_directory
from outsize.storage.ledger import ArenaStatistics
from outsize.streamed.spec import RunSpec
from outsize.training.defaults import Settled, settle
from outsize.training.records import write_json, write_whole
from outsize.training.run_data import files_of, notes_of, open_dataset
from outsize.training.run_dir import as_before, choose_run_dir
from outsize.units import format_bytes, format_count, format_seconds

PREDICTION_FILE = "prediction.json"
# Steps that are measured: not the first, in which kernels and caches are cold.
FIRST_MEASURED, NUM_MEASURED = 1, 2
Announce = Callable[[str], None]


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
        self._beside = self._beside_lanes(prepared, rates, alone)
        self._predict()
        self.comparison: Comparison | None = None
        self._num_seen = 0
        self._windows: list[Window] = []
        self._events: list[Any] = []

    def _predict(self) -> None:
        costs = self.planned.costs(self._machine, self._beside)
        self.predicted: StepParts = take_apart(self.planned.expect(costs))
        self.step_s = self.predicted.step_s

    def weigh(self, arenas: Sequence[ArenaStatistics], prepared: Job, announce: Announce) -> None:
        """Expect copies at the rates of what the driver has pinned of host memory and of what it has not."""
        pageable = sum(arena.pageable_bytes for arena in arenas)
        share = 1 - pageable / max(pageable + sum(arena.pinned_bytes for arena in arenas), 1)
        machine, before_s = self._machine, self.step_s
        if pageable and (partly := partly_pinned(machine, prepared.machine.devices, share)) != machine:
            self._machine = partly
            self._predict()
            tokens = prepared.config.sequences_per_step * prepared.config.data.seq_len
            announce(
                f"{format_bytes(pageable)} of the memory that crosses the link stay pageable ({share:.0%} is pinned): "
                f"about {tokens / self.step_s:.3g} tokens/s are expected, not {tokens / before_s:.3g}"
            )

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


def forecast(prepared: Job, run_dir: Path, announce: Announce, rates: Rates | None = None) -> Forecast | None:
    """Return what the steps of a run will take; None, said aloud, where that could not be found out."""
    net = measure_exchange(prepared.group)  # first of all: what fails below may fail on one rank only
    try:
        measured = _measured_here(prepared, run_dir) if rates is None else rates
        prediction = Forecast(prepared, of_slowest(prepared.group, measured, net))
    except (OutsizeError, RuntimeError) as error:
        announce(f"no prediction of step times: {error}")
        return None
    finally:
        trim()
    announce(Detail(f"a step is predicted to take {format_seconds(prediction.step_s)}"))
    return prediction


def _measured_here(prepared: Job, run_dir: Path) -> Rates:
    """Measure, and where that fails tell the other ranks, who ask in `of_slowest`."""
    try:
        return measure_rates(prepared, run_dir)
    except (OutsizeError, RuntimeError):
        prepared.group.gather_objects(None)
        raise


def plan(config: Config) -> Plan:
    """Return the plan of a run without starting it: nothing stays on disk.

    Raises:
        OutsizeError: what would keep the run from starting.
    """
    return foresee(config, predict=False).plan


class Foreseen(NamedTuple):
    """A run that was planned and not started.

    Attributes:
        plan: of its steps.
        forecast: of what a step takes; None where nothing was timed.
        config: with what was chosen.
        headline: what the run would do, in a line.
    """

    plan: Plan
    forecast: Forecast | None
    config: Config
    headline: str


def foresee(config: Config, *, predict: bool = True, announce: Announce = lambda _: None) -> Foreseen:
    """Return the plan of a run, and what its steps are predicted to take, without starting it.

    Data are read where the run is counted in epochs; their tokens are not kept.

    Args:
        config: the run.
        predict: whether lanes and units are timed.
        announce: told which settings have no effect, and what was chosen.

    Raises:
        OutsizeError: what would keep the run from starting.
    """
    run_dir = choose_run_dir(config.train.run_dir)
    run = RunSpec.of(config, run_dir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(borrowed_torch(deterministic=config.train.deterministic, devices=run.devices))
        resumed = run_checkpoint.find(config.train.resume, run_dir)
        has_tokens = (run_dir / "data").is_dir()
        place = run_dir if has_tokens else stack.enter_context(temporary_directory())
        settled, missing = Settled(config), None
        try:
            settled = settle(config, run_dir, announce, resumed=resumed, tokens_in=place)
        except DataError as error:  # a plan can do without
            missing = error
            announce(f"note: planned without the data: {error}")
        config = as_before(settled.config, run_dir, resumed, announce=announce)
        config, begun = with_begun_adapters(config, resumed, announce)
        run = replace(run, config=config, may_unpack=settled.may_unpack)
        prepared, rates = plan_run(run, announce, adapters_from=begun, announce_choice=lambda _: None)
        for note in notes_of(config, prepared):
            announce(note)
        num_sequences = None
        if config.train.epochs is not None and missing is None:
            with open_dataset(prepared.config, prepared, place, announce) as dataset:
                num_sequences = dataset.num_sequences
            prepared = replace(prepared, run=prepared.run.over(num_sequences))
        expected = forecast(prepared, run_dir, lambda _: None, rates) if predict else None
        step_s = None if expected is None else expected.step_s
        line = headline(prepared, step_s, num_sequences=num_sequences)
        return Foreseen(prepared.plan, expected, prepared.config, line)


def preview(config: Config, announce: Announce) -> dict[str, Any]:
    """Return what a run would train on, tokenised into its run directory if it has one; reads no weights.

    Args:
        config: of the run.
        announce: told what the data were taken for.

    Returns:
        What the data hold and lose, and how fast batches come with one, two and four `data.workers`.

    Raises:
        OutsizeError: what would keep the data from being used.
    """
    config, begun = with_begun_adapters(config)
    config = config.model_copy(update={"data": config.data.model_copy(update={"window": None})})
    files = files_of(config, begun)
    with contextlib.ExitStack() as stack:
        run_dir = config.train.run_dir
        directory = Path(run_dir) if run_dir else stack.enter_context(temporary_directory())
        config = settle(config, directory, announce).config
        dataset = stack.enter_context(open_dataset(config, files, directory, announce))
        left, per_step = dataset.kept(), config.sequences_per_step
        steps = config.over(dataset.num_sequences).train.steps
        rates = sweep_loader(dataset, per_step, dataset.seq_len, steps, config.data.prefetch)
        return {
            "sources": [source.to_json() for source in dataset.found],
            "seq_len": dataset.seq_len,
            "num_sequences": dataset.num_sequences,
            "steps_per_epoch": dataset.num_sequences / per_step,
            "epochs": steps * per_step / dataset.num_sequences,
            "kept": asdict(left),
            "lengths": [bucket._asdict() for bucket in dataset.lengths()],
            "loader": [rate.to_dict() for rate in rates],
            "enough_workers": enough_workers(rates),
        }


_UNITS = {"stream": "sequences", "documents": "sequences of whole documents", "none": "documents"}


def headline(prepared: Job, step_s: float | None, *, num_sequences: int | None = None, done: int = 0) -> str:
    """Return what is about to happen.

    Args:
        prepared: the run, with its steps.
        step_s: seconds that a step is predicted to take; None where nobody knows.
        num_sequences: of the data; None where they are not read.
        done: steps that the run has behind it.
    """
    config = prepared.config
    left = config.train.steps - done
    parts = [
        f"{_model(prepared)} on {_data(config.data, num_sequences)}",
        _length(config.train.steps, config.sequences_per_step, num_sequences, done),
        f"training state {_place(prepared)}",
        *([] if step_s is None else [f"about {format_seconds(left * step_s)}"]),
        f"about {format_bytes(written_bytes(prepared, left))} written to disk",
    ]
    return "; ".join(parts)


def written_bytes(prepared: Job, steps: int) -> int:
    """Return the bytes that so many steps and their checkpoints by number of steps write, as they are planned."""
    every = prepared.config.train.save_every
    saves = 1 + (steps - 1) // every if every else 1
    return prepared.plan.traffic.disk_written * steps + saves * checkpoint_bytes(prepared)


def _model(prepared: Job) -> str:
    spec, config = prepared.split.spec, prepared.config
    name = (
        f"{Path(config.model.path).name} ({format_count(spec.num_parameters)} parameters, {prepared.dtype})"
    )
    if prepared.adapters is not None:
        trained = format_count(spec.num_trainable)
        return f"train adapters of rank {config.lora.r} ({trained} parameters) beside {name}"
    if spec.num_trainable < spec.num_parameters:
        return f"train {format_count(spec.num_trainable)} parameters of {name}"
    return f"train all of {name}"


def _data(data: DataConfig, num_sequences: int | None) -> str:
    more = f" and {len(data.more)} more" if data.more else ""
    name = f"{Path(data.path).name}{more}"
    if num_sequences is None:
        return name
    return f"{name} ({num_sequences:,} {_UNITS[data.pack]}, up to {data.seq_len:,} tokens each)"


def _length(steps: int, size: int, num_sequences: int | None, done: int) -> str:
    passes = "" if not num_sequences else _epochs(steps * size / num_sequences)
    begun = f" from step {done + 1} on" if done else ""
    return f"{passes}{_counted(steps, 'step')} of {_counted(size, 'sequence')}{begun}"


def _epochs(epochs: float) -> str:
    exact = abs(epochs - round(epochs)) < 0.05 * epochs and round(epochs) > 0
    return f"{_counted(round(epochs), 'epoch')}, " if exact else f"{epochs:.2g} epochs, "


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _place(prepared: Job) -> str:
    if prepared.plan.home == "disk":
        return f"on disk ({home_file(prepared.config.memory, prepared.run_dir)})"
    layout = prepared.plan.layout
    resident, trained = len(layout.resident), len(layout.step_order)
    here = "" if resident == trained else "in host memory, and "
    return f"{here}on the device ({resident} of {trained} units)" if resident else "in host memory"
