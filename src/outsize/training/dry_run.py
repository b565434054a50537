"""Foresee a run without starting it: plan, time of steps, data, and the opening line."""

import contextlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from outsize.checkpoint import run_checkpoint
from outsize.checkpoint.begun_adapters import with_begun_adapters
from outsize.checkpoint.saving_room import checkpoint_bytes
from outsize.config import Config
from outsize.data.prefetch import enough_workers, sweep_loader
from outsize.errors import DataError
from outsize.planner.search.step_plan import Plan
from outsize.session.decide.decide import plan_run
from outsize.session.job.machine import home_file
from outsize.session.job.prepare import Job
from outsize.session.process_settings import borrowed_torch
from outsize.storage.directory import temporary_directory
from outsize.streamed.spec import RunSpec
from outsize.training.defaults import Settled, settle
from outsize.training.forecast import Forecast, forecast
from outsize.training.run_data import files_of, notes_of, open_dataset
from outsize.training.run_dir import as_before, choose_run_dir
from outsize.units import format_bytes, format_count, format_seconds

Announce = Callable[[str], None]


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
    run_dir = choose_run_dir(config)
    run = RunSpec.of(config, run_dir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(borrowed_torch(deterministic=False, devices=run.devices))
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
        prepared, rates = plan_run(run, announce, adapters_from=begun, said=lambda _: None)
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


def preview(config: Config, announce: Callable[[str], None]) -> dict[str, Any]:
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
        kept, per_step = dataset.kept(), config.sequences_per_step
        steps = config.over(dataset.num_sequences).train.steps
        rates = sweep_loader(dataset, per_step, dataset.seq_len, steps, config.data.prefetch)
        return {
            "sources": [found.to_json() for found in dataset.found],
            "seq_len": dataset.seq_len,
            "num_sequences": dataset.num_sequences,
            "steps_per_epoch": dataset.num_sequences / per_step,
            "epochs": steps * per_step / dataset.num_sequences,
            "kept": asdict(kept),
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
        f"{_model(config, prepared)} on {_data(config, num_sequences)}",
        _length(config, num_sequences, done),
        f"training state {_place(config, prepared)}",
        *([] if step_s is None else [f"about {format_seconds(left * step_s)}"]),
        f"about {format_bytes(written_bytes(config, prepared, left))} written to disk",
    ]
    return "; ".join(parts)


def written_bytes(config: Config, prepared: Job, steps: int) -> int:
    """Return the bytes that so many steps and their checkpoints by number of steps write, as they are planned."""
    every = config.train.save_every
    saves = 1 + (steps - 1) // every if every else 1
    return prepared.plan.traffic.disk_written * steps + saves * checkpoint_bytes(prepared)


def _model(config: Config, prepared: Job) -> str:
    spec = prepared.split.spec
    name = (
        f"{Path(config.model.path).name} ({format_count(spec.num_parameters)} parameters, {prepared.dtype})"
    )
    if prepared.adapters is not None:
        trained = format_count(spec.num_trainable)
        return f"train adapters of rank {config.lora.r} ({trained} parameters) beside {name}"
    if spec.num_trainable < spec.num_parameters:
        return f"train {format_count(spec.num_trainable)} parameters of {name}"
    return f"train all of {name}"


def _data(config: Config, num_sequences: int | None) -> str:
    more = f" and {len(config.data.more)} more" if config.data.more else ""
    name = f"{Path(config.data.path).name}{more}"
    if num_sequences is None:
        return name
    return f"{name} ({num_sequences:,} {_UNITS[config.data.pack]}, up to {config.data.seq_len:,} tokens each)"


def _length(config: Config, num_sequences: int | None, done: int) -> str:
    steps, size = config.train.steps, config.sequences_per_step
    passes = "" if not num_sequences else _epochs(steps * size / num_sequences)
    begun = f" from step {done + 1} on" if done else ""
    return f"{passes}{_counted(steps, 'step')} of {_counted(size, 'sequence')}{begun}"


def _epochs(epochs: float) -> str:
    exact = abs(epochs - round(epochs)) < 0.05 * epochs and round(epochs) > 0
    return f"{_counted(round(epochs), 'epoch')}, " if exact else f"{epochs:.2g} epochs, "


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _place(config: Config, prepared: Job) -> str:
    if prepared.plan.home == "disk":
        return f"on disk ({home_file(config.memory, prepared.run_dir)})"
    layout = prepared.plan.layout
    resident, trained = len(layout.resident), len(layout.step_order)
    here = "" if resident == trained else "in host memory, and "
    return f"{here}on the device ({resident} of {trained} units)" if resident else "in host memory"
