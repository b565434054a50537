"""Write checkpoints beside training, and check before a run that its disks have room for them."""

import os
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from outsize import files
from outsize.checkpoint.checkpoint_state import MASTER_LOW, name_of, plane_of, state_planes
from outsize.checkpoint.files.checkpoint_files import (
    GENERATION,
    Beside,
    read_beside,
    read_generation_config,
    stop_at,
)
from outsize.checkpoint.saving import Saving
from outsize.checkpoint.tokenizer_files import load_tokenizer
from outsize.config import TrainConfig
from outsize.detail import Detail
from outsize.errors import OutsizeError, StalledError, StorageError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.optim.optimizer_spec import MASTER, State
from outsize.runtime.engine.engine import StoreHandle
from outsize.runtime.engine.executor import LaneTask
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.session.job.machine import existing
from outsize.session.job.prepare import Job
from outsize.session.run_state import Position
from outsize.units import format_bytes

# A home that does not commit is lost in a crash, and with it the work since the last checkpoint. At 1 GB/s a model of 4
# billion parameters takes 48 s to save: in half an hour 2.7 %, were nothing computed beside.
DEFAULT_MINUTES = 30.0
# The first one comes sooner: what begins may be watched, and be cut off, and is to have something to go on from.
FIRST_MINUTES = 5.0


class Stores(Protocol):
    """What is asked of an engine."""

    def store(self, saving: Saving) -> StoreHandle:
        """Begin a checkpoint of the state after the steps so far."""

    def store_rest(self, handle: StoreHandle) -> None:
        """Complete a checkpoint after an op has failed, where that can be done."""

    def wait(self, tasks: Iterable[LaneTask]) -> None:
        """Return when ``tasks`` are done."""

    def note_progress(self) -> None:
        """Say that an op which takes long is getting on."""


class Stored(Protocol):
    """Whose state is written."""

    @property
    def prepared(self) -> Job:
        """The run."""

    @property
    def engine(self) -> Stores:
        """Hands out its units."""


class Saver:
    """Starts checkpoints of a run when they are due, one at a time, and says what became of them.

    A step counts as saved once its checkpoint is whole on the disk, and not before.

    Args:
        trainer: the run.
        run_dir: its directory.
        config: how often, and how many are kept.
        commits: whether the home keeps every step by itself, so that no checkpoint is due by the clock.
        state_of: what ``trainer_state.json`` says of a position, besides what is found out on the way.
        announce: called with lines for people.
        saved_step: steps of the newest checkpoint there is already; -1 where there is none.
        clock: seconds.
        decide: of several ranks, given whether this one would save, returns what the first one does; called on all of
            them in the same order.
        writes: whether this rank writes; others send it what they hold.

    Raises:
        CheckpointError: a file beside the weights of the model cannot be read.

    Attributes:
        num_failed: checkpoints that were due and could not be written.
    """

    def __init__(
        self,
        trainer: Stored,
        run_dir: Path,
        config: TrainConfig,
        *,
        commits: bool,
        state_of: Callable[[Position], dict[str, Any]],
        announce: Callable[[str], None],
        saved_step: int = -1,
        clock: Callable[[], float] = time.monotonic,
        decide: Callable[[bool], bool] | None = None,
        writes: bool = True,
    ) -> None:
        self.num_failed = 0
        self._decide = decide
        self._writes = writes
        self._trainer = trainer
        self._beside = _beside(trainer.prepared, announce) if writes else {}
        self._run_dir = run_dir
        self._config = config
        minutes = config.save_minutes
        if minutes is None:
            minutes = 0.0 if commits else DEFAULT_MINUTES
        self._interval_s = minutes * 60 or float("inf")
        by_default = config.save_minutes is None and not commits and saved_step < 0
        self._next_s = FIRST_MINUTES * 60 if by_default else self._interval_s
        self._state_of = state_of
        self._announce = announce
        self._saved_step = saved_step
        self._clock = clock
        self._started_s = clock()
        self._under_way: tuple[Saving, StoreHandle] | None = None

    @property
    def has_saved(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return self._saved_step >= 0

    def between_steps(self, position: Position, wanted: bool = False) -> None:
        """Report a checkpoint that is complete, and start one that is due, or ``wanted``.

        Raises:
            OutsizeError: an op failed.
        """
        self._report_if_complete()
        every = self._config.save_every
        counted = bool(every) and position.step % every == 0
        due = (
            wanted or counted or (self._under_way is None and self._clock() - self._started_s >= self._next_s)
        )
        if self._is_due(due):
            # One that is still under way has had the time of all the steps since: the disk is slower than they.
            self._report(self._collect())
            self._start(position)
            self._report_if_complete()

    def finish(self, position: Position) -> None:
        """Return when the state after the last step is saved.

        Raises:
            StorageError: it cannot be; the checkpoint before is untouched.
        """
        self._report(self._collect())
        if self._is_due(self._saved_step != position.step):
            self._start(position)
            saving = self._collect()
            if saving is not None and saving.error is not None:
                raise saving.error
            self._report(saving)

    def cancel(self) -> None:
        """Have a checkpoint that is under way given up."""
        if self._under_way is not None:
            self._under_way[0].cancelled = True

    def rescue(self) -> None:
        """After an op of a later step has failed: complete the checkpoint that is under way, where that can be done.

        What was to be saved is still there, and it may be the only copy of the last steps. Of several ranks, others may
        not be there to give what they hold.
        """
        if self._under_way is None or self._decide is not None:
            return
        engine = self._trainer.engine
        saving, handle = self._under_way
        try:
            try:
                engine.wait(handle.tasks)
            except OutsizeError:  # what the run ends with, if it was an op that failed
                engine.store_rest(handle)
        except OutsizeError:
            return
        self._under_way = None
        self._report(saving)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        # Who stops at once does not want to wait; a lane that hangs cannot be waited for.
        if kind is not None and issubclass(kind, Exception) and not issubclass(kind, StalledError):
            self.rescue()
        self.cancel()

    def _is_due(self, due: bool) -> bool:
        """Whether a checkpoint is begun now, where this rank would begin one if ``due``: the first one decides."""
        return due if self._decide is None else self._decide(due)

    def _start(self, position: Position) -> None:
        self._started_s, self._next_s = self._clock(), self._interval_s
        state, limit = self._state_of(position), self._config.save_total_limit
        engine = self._trainer.engine
        prepared, beside = self._trainer.prepared, self._beside
        saving = Saving(prepared, self._run_dir, state, beside, position.step, limit, engine.note_progress)
        self._under_way = saving, engine.store(saving)

    def _collect(self) -> Saving | None:
        if self._under_way is None:
            return None
        saving, handle = self._under_way
        self._trainer.engine.wait(handle.tasks)
        self._under_way = None
        return saving

    def _report_if_complete(self) -> None:
        if self._under_way is not None and all(task.passed() for task in self._under_way[1].tasks):
            self._report(self._collect())

    def _report(self, saving: Saving | None) -> None:
        if saving is None or not self._writes:
            return
        if saving.path is not None:
            self._saved_step = saving.step
            self._announce(Detail(f"saved {saving.path}"))
        elif saving.error is not None:
            self.num_failed += 1
            stands = (
                f"the newest checkpoint is still {name_of(self._saved_step)}"
                if self._saved_step >= 0
                else "there is no checkpoint yet"
            )
            self._announce(f"warning: {saving.error}; the run goes on, {stands}")


def _beside(prepared: Job, announce: Callable[[str], None]) -> Beside:
    """Return the files beside the weights of a run's model, as they are when the run begins."""
    from transformers import GenerationConfig

    given = read_generation_config(prepared.directory)  # or nothing reads what is saved with a copy of it
    with_code = prepared.adapters is None and bool(getattr(prepared.hf_config, "auto_map", None))
    beside = read_beside(prepared.directory, with_code=with_code, template=prepared.template)
    if not prepared.reply_end:
        return beside
    config = given or GenerationConfig.from_model_config(prepared.hf_config)
    tokenizer = load_tokenizer(prepared.directory, trust_remote_code=prepared.config.model.trust_remote_code)
    if stop_at(prepared.reply_end, tokenizer, config, announce):
        beside = {**beside, GENERATION: zlib.compress(config.to_json_string(use_diff=True).encode(), 1)}
    return beside


_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's are
# What every rank hands to every other: of one process, its own.
Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class _Writing:
    """Bytes that a process will write to a file system.

    Attributes:
        host: name of the machine.
        device: number of the file system there.
        path: a directory on it.
        free_bytes: of the file system.
        saved_bytes: of a checkpoint.
        home_bytes: of a home and of activations, which come before it.
    """

    host: str
    device: int
    path: str
    free_bytes: int
    saved_bytes: int
    home_bytes: int

    @classmethod
    def to(cls, path: Path, *, saved: int = 0, home: int = 0) -> Self:
        """Return what goes to the file system of ``path``, which need not be there yet."""
        place = existing(path)
        free = files.free_bytes(place)
        return cls(os.uname().nodename, place.stat().st_dev, str(place), free, saved, home)


def checkpoint_bytes(prepared: Job) -> int:
    """Return the bytes of a checkpoint's weights and optimizer state; its other files are small beside them."""
    spec, state = prepared.split.spec, prepared.plan.state
    return weight_bytes(spec, adapters=prepared.adapters is not None) + state_bytes(spec, state)


def weight_bytes(spec: ModelSpec, *, adapters: bool) -> int:
    """Return the bytes of the weights in a checkpoint; of adapters what trains, in fp32."""
    item_bytes = 4 if adapters else TORCH_DTYPE[spec.dtype].itemsize
    return item_bytes * sum(
        tensor.numel
        for unit in spec.units
        for tensor in (unit.tensors if adapters else unit.all_tensors)
        if tensor.trainable or not adapters
    )


def state_bytes(spec: ModelSpec, state: State, *, masters: bool = True) -> int:
    """Return the bytes of the optimizer's state in a checkpoint, with or without what masters hold."""
    return sum(
        dtype.itemsize * sum(tensor.numel for tensor in plane_of(state, unit, plane).tensors)
        for unit in spec.units
        for plane, dtype in state_planes(state, unit).items()
        if masters or plane not in (MASTER, MASTER_LOW)
    )


def check_room(
    prepared: Job,
    train: TrainConfig,
    run_dir: Path,
    home: Path,
    announce: Callable[[str], None],
    *,
    saves: bool = True,
    gather: Gather = lambda value: [value],
) -> None:
    """Refuse a run that writes more than there is room for, on each file system: homes, scratch, a checkpoint.

    Args:
        prepared: the model, and how its state is kept.
        train: when checkpoints are written, and how many are kept.
        run_dir: of the run; is there.
        home: the file that a home on disk is; it may be there already, and then takes its room no second time.
        announce: told where one checkpoint fits, and not the next beside it.
        saves: whether this process writes the checkpoints; of several ranks the first one does.
        gather: see `Gather`; what ranks of one machine write to one file system is added up.

    Raises:
        StorageError: a disk has too little free for all that the run writes there; all ranks raise it.
    """
    saved = checkpoint_bytes(prepared) if saves else 0
    ours = (_Writing.to(run_dir, saved=saved), _Writing.to(home, home=_home_bytes(prepared, home)))
    writings = [_Writing(*each) for rank in gather([astuple(each) for each in ours]) for each in rank]
    for disk in {(each.host, each.device) for each in writings}:
        _check_disk([each for each in writings if (each.host, each.device) == disk])
    if saves:
        beside = sum(
            each.home_bytes for each in writings if (each.host, each.device) == (ours[0].host, ours[0].device)
        )
        _tell_of_second(train, run_dir, saved, ours[0].free_bytes - beside, announce)


def check_saves(saved: int, train: TrainConfig, run_dir: Path, announce: Callable[[str], None]) -> None:
    """Refuse a run whose checkpoints of ``saved`` bytes find no room beside what it has written already.

    Raises:
        StorageError: they do not.
    """
    there = _Writing.to(run_dir, saved=saved)
    _check_disk([there])
    _tell_of_second(train, run_dir, saved, there.free_bytes, announce)


def _check_disk(writings: list[_Writing]) -> None:
    """Refuse what all processes together write to one file system, where it has no room for it."""
    saved, homes = sum(each.saved_bytes for each in writings), [each for each in writings if each.home_bytes]
    beside, free = sum(each.home_bytes for each in homes), min(each.free_bytes for each in writings)
    if saved + beside <= free:
        return
    path = next((each.path for each in writings if each.saved_bytes), writings[0].path)
    of_homes = (
        "its home and activations" if len(homes) < 2 else f"homes and activations of {len(homes)} ranks"
    )
    if not saved:
        raise StorageError(
            f"{of_homes} take {format_bytes(beside)}, and {path} has {format_bytes(free)} free; free some, or choose "
            "a memory.store_dir on another disk"
        )
    with_home = f", and {of_homes}, which come before it, {format_bytes(beside)}" if beside else ""
    raise StorageError(
        f"a checkpoint of this run takes {format_bytes(saved)}{with_home}, and {path} has {format_bytes(free)} "
        "free: the run could not save what it trains. Free some, or choose a train.run_dir"
        f"{' or memory.store_dir' if beside else ''} on another disk"
    )


def _tell_of_second(
    train: TrainConfig, run_dir: Path, saved: int, free: int, announce: Callable[[str], None]
) -> None:
    saves_more = 0 < train.save_every < train.steps or train.save_minutes != 0
    if saves_more and 2 * saved > free:
        announce(
            f"note: a checkpoint takes {format_bytes(saved)}, and {run_dir} has {format_bytes(free)} free for "
            "them: a second one does not fit beside the first, and one that cannot be written is given up"
        )


def _home_bytes(prepared: Job, home: Path) -> int:
    """Return what a run will still take of the disk of its home; opening it refuses what does not fit alone."""
    held = home.stat().st_blocks * _BLOCK_BYTES if home.is_file() else 0
    return max(0, prepared.plan.total_bytes("disk") - held)
