"""What a checkpoint will take of the disk, looked at before the run begins that ends with writing it."""

import shutil
from collections.abc import Callable
from pathlib import Path

from outsize.checkpoint.checkpoint_state import plane_of, state_planes
from outsize.config.train_section import TrainConfig
from outsize.errors import StorageError
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.session.job.prepare import Job
from outsize.units import format_bytes


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


def check_room(prepared: Job, train: TrainConfig, run_dir: Path, announce: Callable[[str], None]) -> None:
    """Refuse a run whose checkpoint does not fit the disk of its directory.

    Args:
        prepared: the model, and how its state is kept.
        train: when checkpoints are written, and how many are kept.
        run_dir: of the run; is there.
        announce: told where one checkpoint fits, and not the next beside it.

    Raises:
        StorageError: not even one fits.
    """
    needed, free = checkpoint_bytes(prepared), shutil.disk_usage(run_dir).free
    if needed > free:
        raise StorageError(
            f"a checkpoint of this run takes {format_bytes(needed)}, and {run_dir} has {format_bytes(free)} free: the "
            "run could not save what it trains. Free some, or choose a train.run_dir on another disk"
        )
    saves_more = 0 < train.save_every < train.steps or train.save_minutes != 0
    if saves_more and 2 * needed > free:
        announce(
            f"note: a checkpoint takes {format_bytes(needed)}, and {run_dir} has {format_bytes(free)} free: a second "
            "one does not fit beside the first, and one that cannot be written is given up"
        )
