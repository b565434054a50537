"""What a run will write to its disks, looked at before the run begins that ends with a checkpoint."""

import os
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self

from outsize import files
from outsize.checkpoint.checkpoint_state import MASTER_LOW, plane_of, state_planes
from outsize.config.train_section import TrainConfig
from outsize.errors import StorageError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.optim.optimizer_spec import MASTER, State
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.session.job.machine import existing
from outsize.session.job.prepare import Job
from outsize.units import format_bytes

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
    told = [_Writing(*each) for rank in gather([astuple(each) for each in ours]) for each in rank]
    for disk in {(each.host, each.device) for each in told}:
        _check_disk([each for each in told if (each.host, each.device) == disk])
    if saves:
        beside = sum(
            each.home_bytes for each in told if (each.host, each.device) == (ours[0].host, ours[0].device)
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


def _check_disk(told: list[_Writing]) -> None:
    """Refuse what all processes together write to one file system, where it has no room for it."""
    saved, homes = sum(each.saved_bytes for each in told), [each for each in told if each.home_bytes]
    beside, free = sum(each.home_bytes for each in homes), min(each.free_bytes for each in told)
    if saved + beside <= free:
        return
    path = next((each.path for each in told if each.saved_bytes), told[0].path)
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
