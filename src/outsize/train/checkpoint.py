"""Checkpoints: weights in Hugging Face layout, optimizer state beside them, and where the run stood.

``checkpoints/step-00000100/`` holds what ``from_pretrained`` reads, ``optimizer/<unit>.<plane>.safetensors`` and
``trainer_state.json``. It is written under another name and renamed when complete; ``checkpoints/latest`` is a text
file that names it. Everything goes unit by unit and plane by plane, so memory stays within that of one unit.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from outsize import files
from outsize.config import Config
from outsize.errors import CheckpointError
from outsize.model.checkpoint_format import read_header, read_tensor, write_file
from outsize.model.checkpoint_writer import write_checkpoint
from outsize.model.spec import UnitSpec
from outsize.optim.spec import GRADIENT, WEIGHTS, planes_for
from outsize.storage.directory import needed_directory
from outsize.storage.prealloc import explain
from outsize.train import standing
from outsize.train.heartbeat import write_json, write_whole
from outsize.train.standing import Position, position_in
from outsize.train.stream import StreamedTrainer

CHECKPOINTS = "checkpoints"
STATE = "trainer_state.json"
OPTIMIZER = "optimizer"
LATEST = "latest"
_STEP = re.compile(r"step-\d{8,}")
_SHOWN_CHARS = 80


def save(trainer: StreamedTrainer, run_dir: Path, position: Position, config: Config) -> Path:
    """Write a checkpoint of a settled trainer and point ``latest`` to it.

    Args:
        trainer: the run.
        run_dir: its directory.
        position: where it stands.
        config: as the user gave it; a run that goes on from here must be the same one, see `check_same_run`.

    Raises:
        StorageError: the disk is full or not writable; the checkpoint before is untouched.
    """
    directory = run_dir / CHECKPOINTS / f"step-{position.step:08d}"
    staging = directory.with_name(directory.name + ".partial")
    with needed_directory(directory.parent, "train.run_dir"):
        for abandoned in directory.parent.glob("*.partial*"):  # by a process that was killed while it saved
            files.system().remove_tree(abandoned)
        try:
            _write(trainer, staging)
            write_json(staging / STATE, _state(trainer, position, config))
            for path in (*staging.rglob("*"), staging):
                files.sync(path)
            files.system().remove_tree(directory)
            files.system().rename(staging, directory)
            files.sync(directory.parent)
            files.sync(run_dir)
        except OSError as error:
            raise explain(error, f"write the checkpoint {directory}") from error
        finally:
            files.system().remove_tree(staging)
        write_whole(directory.parent / LATEST, directory.name + "\n", durable=True)
    return directory


def latest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, None where there is none.

    Raises:
        CheckpointError: ``latest`` cannot be read, or names one that is not there.
    """
    pointer = run_dir / CHECKPOINTS / LATEST
    if not pointer.exists():
        return None
    try:
        name = files.read_text(pointer).strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{pointer} cannot be read: {error}; correct or remove it") from error
    directory = pointer.parent / name
    if not _STEP.fullmatch(name) or not (directory / STATE).is_file():
        raise CheckpointError(
            f"{pointer} names {name[:_SHOWN_CHARS]!r}, which is not a checkpoint; correct or remove it"
        )
    return directory


def restore(trainer: StreamedTrainer, directory: Path) -> Position:
    """Bring optimizer state and position back; weights are those of the checkpoint that ``prepared`` reads.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    state = _read_state(directory)
    for unit in trainer.spec.units:
        for plane in _state_planes(trainer, unit):
            trainer.write_unit(unit, plane, _read_file(directory / OPTIMIZER / _file(unit, plane), unit))
    trainer.engine.optimizer.updates.update(state["updates"])
    trainer.loss_scale.restore(state["loss_scale"])
    return position_of(directory)


def position_of(directory: Path) -> Position:
    """Where the run stood that wrote a checkpoint.

    Raises:
        CheckpointError: its state cannot be read.
    """
    return position_in(_read_state(directory))


def check_same_run(directory: Path, config: Config, dtype: str) -> None:
    """Check that ``config`` goes on with the run that wrote a checkpoint.

    Raises:
        CheckpointError: the checkpoint's state cannot be read.
        ConfigError: the run had another model, seed or compute dtype.
    """
    standing.check_same_run(_read_state(directory), directory, config, dtype)


def _write(trainer: StreamedTrainer, staging: Path) -> None:
    """Write weights and optimizer state."""
    prepared = trainer.prepared
    write_checkpoint(
        staging,
        prepared.split.model,
        prepared.hf_config,
        trainer.spec.units,
        trainer.read_unit,
        tokenizer_source=prepared.directory,
    )
    files.system().mkdir(staging / OPTIMIZER)
    for unit in trainer.spec.units:
        for plane in _state_planes(trainer, unit):
            write_file(staging / OPTIMIZER / _file(unit, plane), trainer.read_unit(unit, plane))


def _state(trainer: StreamedTrainer, position: Position, config: Config) -> dict[str, Any]:
    updates = trainer.engine.optimizer.updates
    return standing.state_of(position, updates, trainer.loss_scale, config, trainer.spec.dtype)


def _state_planes(trainer: StreamedTrainer, unit: UnitSpec) -> list[str]:
    if not unit.trainable:
        return []
    return [plane for plane in planes_for(trainer.spec.dtype) if plane not in (WEIGHTS, GRADIENT)]


def _file(unit: UnitSpec, plane: str) -> str:
    return f"{unit.name}.{plane}.safetensors"


def _read_file(path: Path, unit: UnitSpec) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, so the run cannot be resumed exactly")
    stored = read_header(path)
    tensors = {}
    for tensor in unit.tensors:
        if tensor.name not in stored or tuple(stored[tensor.name].shape) != tensor.shape:
            raise CheckpointError(f"{path} does not hold {tensor.name} of shape {tensor.shape}")
        tensors[tensor.name] = read_tensor(stored[tensor.name])
    return tensors


def _read_state(directory: Path) -> Mapping[str, Any]:
    try:
        state = json.loads(files.read_text(directory / STATE))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{directory / STATE} cannot be read: {error!r}") from error
    return standing.checked(state, directory / STATE)
