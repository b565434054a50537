"""The home that a run has left on disk: whose it is, how far it is, and when it goes.

It belongs to the run directory that it was made for. At any time after the first step it is a checkpoint of its own,
and usually a newer one than the last that was saved; when a run has come to its end and is saved, it has done its
service.
"""

import contextlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from outsize import files
from outsize.checkpoint import run_checkpoint
from outsize.checkpoint.checkpoint_state import position_of
from outsize.choices import Masters
from outsize.config import MemoryConfig
from outsize.detail import Detail
from outsize.errors import CheckpointError, StorageError
from outsize.optim.optimizer_spec import GRADIENT, WEIGHTS, Gradients
from outsize.session import run_state
from outsize.session.job.machine import home_file
from outsize.session.job.prepare import Job
from outsize.session.stream import StreamedTrainer
from outsize.storage.committed import find_record, find_records
from outsize.storage.directory import zram_below
from outsize.storage.home_layout import is_laid_out
from outsize.storage.prealloc import sync_directory
from outsize.storage.record import CommitRecord, has_commit
from outsize.units import format_bytes

Announce = Callable[[str], None]
_ANOTHER = "a model of other parameters, or with others frozen, or the share of a rank"


def newest_home(
    prepared: Job, run_dir: Path, resumed: Path | None, announce: Announce
) -> CommitRecord | None:
    """Return the record of the home that the run goes on from; None where a checkpoint is newer, or there is none.

    Args:
        prepared: the run.
        run_dir: its directory.
        resumed: the newest checkpoint, if any.
        announce: told what is found and not taken.

    Raises:
        ConfigError: the home belongs to a run with another model, seed or dtype.
        StorageError: it cannot be read, is of another format, or does not fit the model.
    """
    config = prepared.config
    path = home_file(config.memory, run_dir)
    if config.train.resume != "auto":
        return None
    spec, share, group = prepared.split.spec, prepared.own, prepared.group
    planes = prepared.plan.state.planes
    if group.size > 1:
        record = _common(path, prepared, resumed, announce)
    else:
        record, wrong = find_record(path, spec, planes)
        if wrong:
            announce(f"{wrong}; {'going on without it' if record is None else 'the one before it is taken'}")
    if record is None:
        return None
    try:
        state = run_state.checked(record.state, path)
    except CheckpointError as error:
        raise StorageError(f"{error}; remove the file to go on without it") from error
    run_state.check_same_method(state, path, config)
    run_state.check_same_run(state, path, config, prepared.dtype)
    if not is_laid_out(record.layout, spec, planes, share, prepared.whole):
        changed = [line.removeprefix("note: ") for line in run_state.changed_settings(state, config)]
        holds = _otherwise(record, prepared) or "; ".join([_ANOTHER, *changed])
        raise StorageError(
            f"{path} holds {holds}; resume with the former settings, or remove the file to go on without it"
        )
    if resumed is not None and position_of(resumed).step > state["step"]:
        announce(f"{path} stands at step {state['step']}, and {resumed.name} is newer")
        return None
    return record


def committed_step(prepared: Job, run_dir: Path) -> tuple[int, str] | None:
    """Return the step that the home of a run holds, and its path; None where it holds none."""
    home = home_file(prepared.config.memory, run_dir)
    record, _ = find_record(
        home, prepared.split.spec, prepared.plan.state.planes, prepared.own, prepared.whole
    )
    return None if record is None else (record.state["step"], str(home))


def _common(path: Path, prepared: Job, resumed: Path | None, announce: Announce) -> CommitRecord | None:
    """Return this rank's record of the last step that all ranks have committed; None where there is none."""
    group, spec, planes = prepared.group, prepared.split.spec, prepared.plan.state.planes
    records, wrong = find_records(path, spec, planes, prepared.own, prepared.whole)
    foreign = not records and has_commit(path)
    record = find_record(path, spec, planes, prepared.own, prepared.whole)[0] if foreign else None
    holds = "" if record is None else _otherwise(record, prepared)
    answers = group.gather_objects([[int(record.state["step"]) for record in records], wrong, foreign, holds])
    for rank, (_, wrong, _, holds) in enumerate(answers):
        if holds:
            raise StorageError(
                f"{path.name} of rank {rank} holds {holds}; resume with the former settings, or remove the file of all "
                "ranks to go on without it"
            )
        if wrong:
            announce(f"rank {rank}: {wrong}")
    common = set.intersection(*(set(steps) for steps, *_ in answers))
    if common:
        return next(record for record in records if record.state["step"] == max(common))
    if any(foreign for _, _, foreign, _ in answers) and resumed is None:
        raise StorageError(
            "homes on disk here are not those of this run's ranks, and there is no checkpoint to go on from; start as "
            f"many ranks as before, or remove {path.name} of all of them to begin anew"
        )
    if any(steps or foreign for steps, _, foreign, _ in answers):
        announce(
            "homes on disk have no committed step that all ranks share: going on from the newest checkpoint"
        )
    return None


def _otherwise(record: CommitRecord, prepared: Job) -> str:
    """What a home of this run's model and rank holds that is laid out otherwise; empty where it is of another."""
    spec, ours = prepared.split.spec, prepared.plan.state
    masters: tuple[Masters, ...] = get_args(Masters) if spec.dtype == "bf16" else ("separate",)
    gradients: tuple[Gradients, ...] = ("fp32", "bf16", "none")
    for masters_form, gradients_form, planes in itertools.product(
        masters, gradients, ((WEIGHTS,), (WEIGHTS, GRADIENT))
    ):
        other = replace(ours, masters=masters_form, gradients=gradients_form)
        if is_laid_out(record.layout, spec, other.planes, prepared.own, planes):
            if prepared.own is not None and planes != prepared.whole:
                rounds = "several rounds" if GRADIENT in planes else "one round"
                return (
                    f"the state of a rank that takes its microbatches in {rounds} (train.round_microbatches)"
                )
            changed = [f"optimizer.masters={masters_form}"] * (masters_form != ours.masters)
            waits = (
                "does not keep gradients (optimizer.clip=unit or none)"
                if gradients_form == "none"
                else f"keeps {gradients_form} gradients"
            )
            return " and ".join(
                [f"the state of a run with {name}" for name in changed] or [f"a state that {waits}"]
            )
    return ""


def start(
    stack: contextlib.ExitStack,
    prepared: Job,
    run_dir: Path,
    record: CommitRecord | None,
    resumed: Path | None,
    announce: Announce,
    data: Mapping[str, Any] | None = None,
) -> StreamedTrainer:
    """Open a trainer, entered in ``stack``, that stands where the run goes on; its `position` says where.

    ``data`` tells the sequences of the run from others, and goes to every commit.

    A home that is damaged is given up for the newest checkpoint, where there is one.

    Raises:
        OutsizeError: neither home nor checkpoint can be read, or the budgets do not hold.
    """
    path = home_file(prepared.config.memory, run_dir)
    if record is not None:
        with contextlib.ExitStack() as attempt:
            failed: StorageError | None = None
            try:
                trainer = attempt.enter_context(_from_home(prepared, run_dir, record, data))
            except StorageError as error:
                failed = error
            messages = [text for text in prepared.group.gather_objects(str(failed or "")) if text]
            if not messages:
                stack.push(attempt.pop_all())
                announce(f"resumed from step {trainer.position.step} in {path}")
                return trainer
            if resumed is None:
                raise failed or StorageError(messages[0])
            announce(f"{messages[0]}; this run goes back to {resumed.name}")
    if resumed is not None:
        run_checkpoint.check_files(resumed)
    trainer = stack.enter_context(StreamedTrainer(prepared, path.parent, home_file=path, data=data))
    trainer.fill()
    if resumed is not None:
        trainer.position = run_checkpoint.restore(trainer, resumed, announce)
    announce(f"resumed from {resumed.name}" if resumed else Detail("starting with step 1"))
    return trainer


def tell_costs(prepared: Job, run_dir: Path, announce: Announce) -> None:
    """Say what a home on zram takes of RAM, now that it is there; nothing of any other."""
    if prepared.machine.home != "disk":
        return
    with contextlib.suppress(StorageError):  # the kernel does not say; the run does without
        below = zram_below(home_file(prepared.config.memory, run_dir))
        if below is not None:
            announce(f"the home lies in RAM, which no budget counts: {below.costs()}")


def remove_home(memory: MemoryConfig, run_dir: Path, saved: Path, announce: Announce) -> None:
    """Remove the home of a run that has come to its end and is ``saved``; one that cannot be removed is told of."""
    path = home_file(memory, run_dir)
    if not path.is_file():
        return
    try:
        size = path.stat().st_size
        files.system().unlink(path)
        sync_directory(path.parent)
    except (OSError, StorageError) as error:
        announce(f"warning: {path} cannot be removed, and {saved.name} holds the end of the run: {error}")
        return
    announce(f"removed {path} ({format_bytes(size)}): {saved.name} holds the end of the run")
    if memory.store_dir is None:
        with contextlib.suppress(OSError):  # something else lies there
            files.system().rmdir(path.parent)


def _from_home(
    prepared: Job, run_dir: Path, record: CommitRecord, data: Mapping[str, Any] | None
) -> StreamedTrainer:
    """Return a trainer that stands where ``record`` says."""
    path, same_kind = home_file(prepared.config.memory, run_dir), prepared.plan.layout.commits
    trainer = StreamedTrainer(
        prepared, path.parent, home_file=path, record=record if same_kind else None, data=data
    )
    try:
        if same_kind:
            trainer.resume(record)
        else:
            trainer.take_over(path, record)
    except BaseException:
        trainer.close()
        raise
    return trainer
