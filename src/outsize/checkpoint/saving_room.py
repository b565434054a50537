"""What a run will write to its disks, looked at before the run begins that ends with a checkpoint."""

import shutil
from collections.abc import Callable
from pathlib import Path

from outsize.checkpoint.checkpoint_state import plane_of, state_planes
from outsize.config.train_section import TrainConfig
from outsize.errors import StorageError
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.session.job.machine import existing
from outsize.session.job.prepare import Job
from outsize.units import format_bytes

_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's are


def checkpoint_bytes(prepared: Job) -> int:
    """Return the bytes of a checkpoint's weights and optimizer state; its other files are small beside them."""
    spec, state = prepared.split.spec, prepared.plan.state
    adapters = prepared.adapters is not None
    weight_bytes = 4 if adapters else TORCH_DTYPE[spec.dtype].itemsize
    total = 0
    for unit in spec.units:
        weights = unit.tensors if adapters else unit.all_tensors
        total += weight_bytes * sum(tensor.numel for tensor in weights if tensor.trainable or not adapters)
        for plane, dtype in state_planes(state, unit).items():
            total += dtype.itemsize * sum(tensor.numel for tensor in plane_of(state, unit, plane).tensors)
    return total


def check_room(
    prepared: Job, train: TrainConfig, run_dir: Path, home: Path, announce: Callable[[str], None]
) -> None:
    """Refuse a run that writes more than there is room for, on each file system: its home, its scratch, a checkpoint.

    Args:
        prepared: the model, and how its state is kept.
        train: when checkpoints are written, and how many are kept.
        run_dir: of the run; is there.
        home: the file that a home on disk is; it may be there already, and then takes its room no second time.
        announce: told where one checkpoint fits, and not the next beside it.

    Raises:
        StorageError: a disk has too little free for all that the run writes there.
    """
    saved, below = checkpoint_bytes(prepared), _home_bytes(prepared, home)
    free = shutil.disk_usage(run_dir).free
    beside = below if existing(home).stat().st_dev == run_dir.stat().st_dev else 0
    if saved + beside > free:
        with_home = (
            f", and its home and activations, which come before it, {format_bytes(beside)}" if beside else ""
        )
        raise StorageError(
            f"a checkpoint of this run takes {format_bytes(saved)}{with_home}, and {run_dir} has {format_bytes(free)} "
            "free: the run could not save what it trains. Free some, or choose a train.run_dir"
            f"{' or memory.store_dir' if beside else ''} on another disk"
        )
    saves_more = 0 < train.save_every < train.steps or train.save_minutes != 0
    if saves_more and 2 * saved + beside > free:
        announce(
            f"note: a checkpoint takes {format_bytes(saved)}, and {run_dir} has {format_bytes(free - beside)} free for "
            "them: a second one does not fit beside the first, and one that cannot be written is given up"
        )


def _home_bytes(prepared: Job, home: Path) -> int:
    """Return what a run will still take of the disk of its home; opening it refuses what does not fit alone."""
    held = home.stat().st_blocks * _BLOCK_BYTES if home.is_file() else 0
    return max(0, prepared.plan.total_bytes("disk") - held)
