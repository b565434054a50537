"""A training run from its configuration to its result."""

import contextlib
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from outsize.accelerators import check_here, uuids_of
from outsize.checkpoint import run_checkpoint, trainer_checkpoint
from outsize.checkpoint.begun_adapters import with_begun_adapters
from outsize.checkpoint.checkpoint_state import (
    CHECKPOINTS,
    describe,
    latest,
    position_of,
    read_state,
    remove_litter,
)
from outsize.checkpoint.home_file import committed_step, newest_home, start, tell_costs
from outsize.checkpoint.saver import Saver, check_room
from outsize.config import Config, dump_config
from outsize.data.packed_dataset import PackedDataset
from outsize.group.gloo import launched
from outsize.hardware.cpu import Placement
from outsize.hardware.gpus import import_nvml
from outsize.runtime.device.heap import begin_run, set_thresholds
from outsize.session.decide.decide import plan_run
from outsize.session.decide.rates import Rates
from outsize.session.fill import summary
from outsize.session.job.machine import home_file
from outsize.session.job.prepare import Job
from outsize.session.process_settings import borrowed_torch, bound, placement_of
from outsize.session.run_state import Position, changed_settings, check_same_data
from outsize.session.stream import StreamedTrainer
from outsize.storage.directory import removed_if_refused
from outsize.storage.prealloc import storage_errors
from outsize.storage.record import CommitRecord
from outsize.streamed.spec import RunSpec
from outsize.telemetry.counters import GpuSampler
from outsize.telemetry.writers import Writers, open_writers
from outsize.training.defaults import Settled, settle
from outsize.training.evaluation import Aftermath, Evaluations, Interrupt, check_evaluates
from outsize.training.forecast import Forecast, forecast, headline
from outsize.training.loop import Progress, Run
from outsize.training.measures import (
    Accounts,
    Peak,
    about,
    peak_of,
    resident_memory,
    slow_products,
    step_flops,
)
from outsize.training.ranks import Ranks, check_same_run, together
from outsize.training.records import Heartbeat, Telling, TrainResult, write_json, write_whole
from outsize.training.run_data import data_of, notes_of, open_dataset, over, with_tokenizer
from outsize.training.run_dir import PLAN_FILE, as_before, claimed
from outsize.training.watchdog import StepProfiler, Watchdog

Announce = Callable[[str], None]
# Errors of frozen weights that a codec has written, by name.
QUANTISATION = "quantisation.json"


def train(
    config: Config, *, progress: Progress | None = None, announce: Announce = lambda _: None
) -> TrainResult:
    """Train as ``config`` says.

    In a command's process (`outsize.runtime.device.heap.own_process`) this chooses what malloc keeps of freed memory;
    in a process of yours that stays as it is.

    Args:
        config: the run.
        progress: called after each step.
        announce: called with lines for people: what was found, chosen, and fallen back to.

    Raises:
        OutsizeError: the run cannot start, or a step failed. What was saved before stays.
    """
    place = launched()
    with storage_errors(), contextlib.ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt(announce))
        ranks = stack.enter_context(together(config, place, announce))
        if ranks.restarted:
            config = config.model_copy(update={"train": config.train.model_copy(update={"resume": "auto"})})
        if ranks.is_first:
            stack.enter_context(claimed(ranks.run_dir, config))
        ranks.group.barrier()  # who may not write there has ended by now
        return _train(stack, config, ranks, interrupt, progress)


def _train(
    stack: contextlib.ExitStack, config: Config, ranks: Ranks, interrupt: Interrupt, progress: Progress | None
) -> TrainResult:
    """Train in a run directory that is claimed; whatever is opened is entered in ``stack``."""
    run_dir, own_dir, announce = ranks.run_dir, ranks.own_dir, ranks.announce
    stack.enter_context(borrowed_torch(deterministic=config.train.deterministic, devices=ranks.devices))
    set_thresholds(heap=False)
    resumed = run_checkpoint.find(config.train.resume, run_dir)
    interrupt.doing = "the data was read and tokenised"
    if ranks.is_first:  # last on the way out, when no lane can write any more
        stack.callback(remove_litter, run_dir / CHECKPOINTS)
    with removed_if_refused(run_dir / "data", ranks.is_first):
        with ranks.first_goes_first():
            settled = settle(config, run_dir, announce, resumed=resumed, num_ranks=ranks.group.size)
        config = settled.config
        interrupt.doing = "the model was built, measured and planned"
        prepared, rates = _prepared(settled, ranks, resumed)
    record = newest_home(prepared, own_dir, resumed, announce)
    if prepared.config.train.epochs is None and (done := _done(prepared, resumed, announce)) is not None:
        return _nothing_done(prepared, run_dir, done)
    interrupt.doing = "the data was read and tokenised"
    check_evaluates(prepared)
    dataset = _dataset(stack, prepared, ranks, resumed)
    prepared = over(dataset, prepared, announce)
    if (done := _done(prepared, resumed, announce)) is not None:
        return _nothing_done(prepared, run_dir, done)
    _check_goes_on(prepared, dataset, resumed, record, ranks)
    check_room(
        prepared,
        prepared.config.train,
        run_dir,
        home_file(prepared.config.memory, own_dir),
        announce,
        saves=ranks.is_first,
        gather=ranks.group.gather_objects,
    )
    interrupt.doing = "the machine was timed and memory filled with the model's weights"
    expected = forecast(prepared, own_dir, announce, rates)
    if ranks.is_first:
        _say_what_happens(prepared, dataset, expected, (resumed, record), announce)
    run = _open(stack, ranks, prepared, dataset, (resumed, record), expected, progress)
    return run.go(dataset, interrupt)


def _say_what_happens(
    prepared: Job,
    dataset: PackedDataset,
    expected: Forecast | None,
    saved: tuple[Path | None, CommitRecord | None],
    announce: Announce,
) -> None:
    """Say in one line what is about to be trained, for how long, and where its state lies."""
    resumed, record = saved
    done = 0 if resumed is None else run_checkpoint.position_of(resumed).step
    done = done if record is None else max(done, int(record.state["step"]))
    step_s = None if expected is None else expected.step_s
    num_sequences = None if prepared.config.data.window is not None else dataset.num_sequences
    announce(headline(prepared, step_s, num_sequences=num_sequences, done=done))


def _prepared(settled: Settled, ranks: Ranks, resumed: Path | None) -> tuple[Job, Rates | None]:
    """Prepare and plan the run, fresh or ``resumed``; returns rates of lanes as well, where the plan needed any."""
    own_dir, announce, config = ranks.own_dir, ranks.announce, settled.config
    if resumed is not None:
        run_checkpoint.check_holds(resumed, config)
    config, begun = with_begun_adapters(config, resumed, announce if ranks.is_first else lambda _: None)
    if resumed is None or config.train.method == "lora":  # else only the config of the model is read
        run_checkpoint.check_model_files(config.model.path)
    if resumed is None and begun is not None:
        run_checkpoint.check_model_files(begun)
    if resumed is not None:
        run_checkpoint.check_same_method(resumed, config)
    rank_dir = "" if ranks.is_first else own_dir.name
    config = as_before(config, ranks.run_dir, resumed, rank_dir, ranks.group.size, announce)
    run = RunSpec.of(config, own_dir, ranks.group, ranks.devices, ranks.memory)
    run = replace(run, may_unpack=settled.may_unpack)
    if resumed is not None and config.train.method == "full":
        run = replace(run, weights_from=resumed)
    prepared, rates = plan_run(run, announce, adapters_from=begun)
    if ranks.is_first:
        for note in notes_of(config, prepared, ranks.group.size):
            announce(note)
    if resumed is not None:
        prepared = with_tokenizer(prepared)
        run_checkpoint.check_same_run(resumed, prepared.config, prepared)
    return prepared, rates


def _open(
    stack: contextlib.ExitStack,
    ranks: Ranks,
    prepared: Job,
    dataset: PackedDataset,
    saved: tuple[Path | None, CommitRecord | None],
    expected: Forecast | None,
    progress: Progress | None,
) -> Run:
    """Open the trainer and all that watches it, and go on from the checkpoint and home that are ``saved``."""
    check_here(prepared.machine.devices)
    own_dir, announce, (resumed, record) = ranks.own_dir, ranks.announce, saved
    peak, flops = _computing(prepared, announce)
    # Until here nothing was kept: what is measured and tokenised must not leave holes in the heap of the run.
    begin_run(heap=prepared.heap)
    place = launched()
    placement = placement_of(prepared, place.local_size if place is not None else 1)
    stack.enter_context(bound(placement))
    # Entered first, so that it still watches while everything else is given back.
    watchdog = stack.enter_context(_watchdog(prepared, ranks, expected))
    # Entered before what it speaks of, so that it speaks when every lane has ended.
    aftermath = stack.enter_context(Aftermath(own_dir, announce, partial(committed_step, prepared, own_dir)))
    trainer = start(
        stack, prepared, own_dir, record, resumed, announce, data_of(dataset, prepared.config.data)
    )
    if expected is not None:
        expected.weigh(trainer.session.arenas(), prepared, announce)
    tell_costs(prepared, own_dir, announce)
    _write_plan(ranks, prepared, trainer.errors)
    _write_facts(ranks, prepared, (flops, peak), placement)
    heartbeat = stack.enter_context(Heartbeat(own_dir, announce))
    writers = stack.enter_context(_writers(prepared, ranks))
    profiler = stack.enter_context(
        StepProfiler(own_dir, prepared.config.train.profile_steps, trainer.engine.ranges)
    )
    sampler = stack.enter_context(GpuSampler(uuids_of(prepared.machine.devices), import_nvml))
    saver = stack.enter_context(_saver(trainer, ranks, dataset))
    run = Run(
        prepared,
        ranks,
        trainer,
        _accounts(trainer, sampler, flops, peak),
        heartbeat,
        writers,
        profiler,
        watchdog,
        saver,
        aftermath.next_start,
        progress if ranks.is_first else None,
        trainer.position,
        expected,
        _evaluations(stack, trainer, ranks, heartbeat.telling),
    )
    aftermath.begun = True
    # Of several ranks one that fails says so before its lanes end: they may wait for the others, and those for it.
    stack.push(lambda kind, error, trace: ranks.group.close(error) if error is not None else None)
    return run


def _computing(prepared: Job, announce: Announce) -> tuple[Peak, float | None]:
    """Return what the device computes at most, and what a step computes; says so where another dtype is faster."""
    peak = peak_of(prepared.machine.devices, prepared.dtype)
    if slow := slow_products(peak, prepared.dtype):
        announce(slow)
    return peak, step_flops(prepared)


def _writers(prepared: Job, ranks: Ranks) -> Writers:
    """Open the trackers of a run; of several ranks the first one has them."""
    config = prepared.config
    named = open_writers(
        config.telemetry.writers if ranks.is_first else (),
        ranks.run_dir,
        config.telemetry.project,
        config.model_dump(mode="json"),
    )
    return Writers(named, config.telemetry.every, ranks.announce)


def _evaluations(
    stack: contextlib.ExitStack, trainer: StreamedTrainer, ranks: Ranks, telling: Telling
) -> Evaluations | None:
    """Open what the model is measured on; None where it is not."""
    config = trainer.prepared.config
    if not config.eval.on:
        return None
    dataset = stack.enter_context(
        open_dataset(config, trainer.prepared, ranks.run_dir, ranks.announce, measured=True)
    )
    return Evaluations(config, trainer, dataset, ranks.run_dir, trainer.position.step, telling)


def _watchdog(prepared: Job, ranks: Ranks, expected: Forecast | None) -> Watchdog:
    train = prepared.config.train
    return Watchdog(
        ranks.own_dir,
        ranks.announce,
        action=train.on_stall,
        factor=train.stall_factor,
        floor_s=train.stall_floor_s,
        predicted_step_s=expected.step_s if expected is not None else None,
        links_are_disk=prepared.machine.below == "disk",
    )


def _accounts(trainer: StreamedTrainer, sampler: GpuSampler, flops: float | None, peak: Peak) -> Accounts:
    machine, links = trainer.prepared.machine, trainer.engine.moved()
    return Accounts(
        machine.devices, machine.num_workers, links, trainer.ledger, trainer.fallbacks, sampler, flops, peak
    )


def _write_facts(
    ranks: Ranks, prepared: Job, computing: tuple[float | None, Peak], placement: Placement
) -> None:
    """Write what a run is; only now is there one: what could not start leaves nothing but tokenised data."""
    if ranks.is_first:
        write_whole(ranks.run_dir / "config.yaml", dump_config(prepared.config))
    facts = about(prepared, *computing)
    write_json(
        ranks.own_dir / "run.json", {**facts, "num_ranks": ranks.group.size, "numa": placement.to_dict()}
    )


def _write_plan(ranks: Ranks, prepared: Job, errors: dict[str, float]) -> None:
    """Write what a streamed run follows, and what became of frozen weights that a codec has written."""
    write_json(ranks.own_dir / PLAN_FILE, prepared.plan.to_dict())
    if errors:
        ranks.announce(f"frozen weights are encoded: {summary(errors)}")
        write_json(ranks.own_dir / QUANTISATION, errors)


def _dataset(stack: contextlib.ExitStack, prepared: Job, ranks: Ranks, resumed: Path | None) -> PackedDataset:
    """Open the data of whole batches; of several ranks, check that all have read the same."""
    config = prepared.config
    with ranks.first_goes_first():
        dataset = stack.enter_context(open_dataset(config, prepared, ranks.run_dir, ranks.announce))
    if ranks.group.size > 1:
        first = 0 if resumed is None else run_checkpoint.position_of(resumed).step
        check_same_run(prepared, dataset.batch(first, config.sequences_per_step), resumed, ranks.group)
    return dataset


def _done(prepared: Job, resumed: Path | None, announce: Announce) -> Position | None:
    """Return where the run stands that is ``resumed``, if that is its end; said."""
    steps = prepared.config.train.steps
    done = None if resumed is None else run_checkpoint.position_of(resumed)
    if done is None or done.step < steps:
        return None
    announce(f"{resumed} has {done.step} of {steps} steps: nothing is left to do")
    return done


def _check_goes_on(
    prepared: Job, dataset: PackedDataset, resumed: Path | None, record: CommitRecord | None, ranks: Ranks
) -> None:
    """Check that a run goes on with the sequences that it had, and say which settings it goes on with otherwise."""
    config = prepared.config
    if record is not None:
        state, where = record.state, home_file(config.memory, ranks.own_dir)
    elif resumed is not None and not trainer_checkpoint.is_trainers(resumed):
        state, where = read_state(resumed), resumed
    else:
        return
    changed = check_same_data(state, where, data_of(dataset, config.data))
    if ranks.is_first:
        if changed:
            ranks.announce(
                f"note: files of the data have changed, the sequences compared have not: {changed}"
            )
        for line in changed_settings(state, config):
            ranks.announce(line)


def _nothing_done(prepared: Job, run_dir: Path, position: Position) -> TrainResult:
    """The result of a run that was at its end already."""
    return TrainResult(
        steps=position.step,
        loss=position.loss,
        tokens_per_s=0.0,
        peak_rss_bytes=resident_memory()[1],
        budget_bytes=prepared.machine.device_bytes,
        stall_share=0.0,
        bytes_read=0,
        bytes_written=0,
        run_dir=str(run_dir),
        skipped_steps=position.skipped,
        export_dir=str(saved) if (saved := latest(run_dir)) is not None else None,
    )


def _saver(trainer: StreamedTrainer, ranks: Ranks, dataset: PackedDataset) -> Saver:
    """Who writes the checkpoints of a run. One that goes on in its own directory stays the run that it was."""
    run_dir, prepared = ranks.run_dir, trainer.prepared
    config = prepared.config
    newest = latest(run_dir)
    run = uuid.uuid4().hex if newest is None else read_state(newest)["run"]
    scale, dtype, data = trainer.loss_scale, prepared.dtype, data_of(dataset, config.data)
    return Saver(
        trainer,
        run_dir,
        config.train,
        commits=prepared.plan.layout.commits,
        state_of=lambda position: describe(position, config, dtype, scale, data, run),
        announce=ranks.announce,
        decide=ranks.first_decides if ranks.group.size > 1 else None,
        writes=ranks.is_first,
        saved_step=-1 if newest is None else position_of(newest).step,
    )
