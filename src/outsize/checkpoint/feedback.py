"""What error feedback remembers of gradients between ranks, in a checkpoint: a file for each unit and each rank.

Where gradients are written by a codec with error feedback (``parallel.gradients=int8-ef``), every rank keeps what its
encodings have lost, of all elements that it sends to others, and adds it to the gradient of the next step. A run that
is to go on bit for bit needs that as it needs the moments. It belongs to the number of ranks: each has lost something
else of each element. Another number of ranks begins without, as does a run whose home on disk is newer than its last
checkpoint; both say so.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from outsize.checkpoint import trainer_checkpoint
from outsize.checkpoint.checkpoint_state import OPTIMIZER, position_of, read_state
from outsize.checkpoint.files.checkpoint_format import (
    FileSum,
    Moved,
    TensorWriter,
    bytes_of,
    read_elements,
    read_header,
    sum_of_file,
)
from outsize.errors import CheckpointError
from outsize.model.sizes.model_spec import UnitSpec
from outsize.optim.shares import shares
from outsize.runtime.ops.checkpoint_ops import UnitAtRest
from outsize.runtime.ops.exchange_ops import Residuals
from outsize.session.job.prepare import Job
from outsize.session.stream import StreamedTrainer

# In the state of a checkpoint: how many ranks remember something, where any do.
RANKS = "feedback_ranks"
_NAME = "residual"


def state_of(prepared: Job) -> dict[str, int]:
    """Return what the state of a checkpoint says of error feedback; nothing where there is none."""
    size = _num_ranks(prepared)
    return {RANKS: size} if size else {}


def files_of(prepared: Job, unit: UnitSpec) -> dict[int, str]:
    """The files, within a checkpoint, of what ranks remember of a unit, by rank; none of one that sends nothing."""
    if not unit.trainable or not _num_ranks(prepared):
        return {}
    share = shares(prepared.split.spec, prepared.group.size)[unit.index]
    return {
        rank: f"{OPTIMIZER}/{unit.name}.{_NAME}-{rank:03}.safetensors"
        for rank, part in enumerate(share)
        if len(part) < unit.numel
    }


def write(prepared: Job, resting: UnitAtRest, directory: Path, moved: Moved) -> dict[str, FileSum]:
    """Write what all ranks remember of a unit; returns the files that were written.

    Args:
        prepared: the run.
        resting: the unit.
        directory: of the checkpoint.
        moved: called after every piece.

    Raises:
        OSError: as the system says.
    """
    unit, sums = resting.unit, {}
    for rank, name in files_of(prepared, unit).items():
        share = shares(prepared.split.spec, prepared.group.size)[unit.index][rank]
        entry = (_NAME, torch.bfloat16, (unit.numel - len(share),))
        with TensorWriter(directory / name, [entry], moved) as file:
            for piece in resting.residual(rank):
                file.write(bytes_of(piece))
            sums[name] = file.sync()
    return sums


def restore(trainer: StreamedTrainer, directory: Path | None, announce: Callable[[str], None]) -> None:
    """Bring back what this rank remembered; where that cannot be had, say so and begin without.

    Args:
        trainer: that goes on, its position set.
        directory: the newest checkpoint; None where there is none.
        announce: told what is not exact, and why.

    Raises:
        CheckpointError: the checkpoint that the run goes on from is damaged.
    """
    prepared, exchange = trainer.prepared, trainer.engine.exchange
    residuals = None if exchange is None else exchange.residuals
    if residuals is None:
        _say_dropped(directory, announce)
        return
    if not trainer.position.step:
        return
    why, state = _missing(trainer, directory)
    if why or directory is None:
        announce(
            f"parallel.gradients={prepared.plan.wire.gradients}: {why}; the first step adds nothing of what was lost "
            "before, so this run is not bit for bit the one that was stopped"
        )
        return
    for unit in prepared.split.spec.units:
        name = files_of(prepared, unit).get(prepared.group.rank)
        if name is not None:
            _fill(residuals, unit, directory / name, state["files"].get(name))


def _say_dropped(directory: Path | None, announce: Callable[[str], None]) -> None:
    """Say where a run that encodes nothing goes on from one that did."""
    if directory is None or trainer_checkpoint.is_trainers(directory):
        return
    size = read_state(directory).get(RANKS, 0)
    if size:
        announce(
            f"{directory.name} holds what the encodings of {size} ranks have lost of gradients; nothing encodes them "
            "here, so it is dropped, and this run is not bit for bit the one that was stopped"
        )


def _missing(trainer: StreamedTrainer, directory: Path | None) -> tuple[str, Mapping[str, Any]]:
    """Return why nothing can be brought back, empty where it can, and the state of the checkpoint."""
    if directory is None:
        return "a home on disk does not hold what encodings have lost, and there is no checkpoint", {}
    if trainer_checkpoint.is_trainers(directory):
        return f"{directory.name} is of a Trainer, which encodes nothing", {}
    if position_of(directory).step != trainer.position.step:
        return f"what encodings have lost is in checkpoints, and the home is newer than {directory.name}", {}
    state = read_state(directory)
    size = state.get(RANKS, 0)
    if size != trainer.prepared.group.size:
        whose = f"that of {size} ranks" if size else "nothing"
        return f"{directory.name} holds {whose} of what encodings have lost", {}
    return "", state


def _fill(residuals: Residuals, unit: UnitSpec, path: Path, expected: Mapping[str, Any] | None) -> None:
    """Read a file into the memory of a unit's residuals."""
    plane = residuals.plane(unit.index)
    assert plane is not None
    stored = read_header(path).get(_NAME)
    if stored is None or stored.numel != plane.numel() or stored.dtype != plane.dtype or expected is None:
        raise CheckpointError(f"{path} does not hold {plane.numel()} residuals in {plane.dtype}")
    if sum_of_file(path) != FileSum(expected["num_bytes"], expected["crc32"]):
        raise CheckpointError(
            f"{path} is damaged (unit {unit.name}); resume from another checkpoint with --resume PATH"
        )
    read_elements(stored, 0, stored.numel, plane)


def _num_ranks(prepared: Job) -> int:
    """Ranks whose encodings of gradients remember what they lose; 0 where none do."""
    return prepared.group.size if prepared.group.size > 1 and prepared.plan.wire.feedback else 0
