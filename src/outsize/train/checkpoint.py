"""Checkpoints: weights in Hugging Face layout, optimizer state beside them, and where the run stood.

``checkpoints/step-00000100/`` holds what ``from_pretrained`` reads, ``optimizer/<unit>.<plane>.safetensors`` and
``trainer_state.json``. It is written under another name and renamed when complete; ``checkpoints/latest`` is a text
file that names it. Everything goes unit by unit and plane by plane, so memory stays within that of one unit.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from outsize.errors import CheckpointError, StorageError
from outsize.model.checkpoint_format import read_header, read_tensor, write_file
from outsize.model.checkpoint_writer import write_checkpoint
from outsize.model.spec import UnitSpec
from outsize.optim.spec import GRADIENT, WEIGHTS, planes_for
from outsize.train.heartbeat import write_json
from outsize.train.stream import StreamedTrainer

STATE = "trainer_state.json"
OPTIMIZER = "optimizer"
LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands.

    Attributes:
        step: steps done.
        tokens: tokens trained so far.
        skipped: steps that changed no weight.
    """

    step: int
    tokens: int
    skipped: int


def save(trainer: StreamedTrainer, run_dir: Path, position: Position) -> Path:
    """Write a checkpoint of a settled trainer and point ``latest`` to it.

    Raises:
        StorageError: the disk is full or not writable; the checkpoint before is untouched.
    """
    prepared = trainer.prepared
    directory = run_dir / "checkpoints" / f"step-{position.step:08d}"
    staging = directory.with_name(directory.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        write_checkpoint(
            staging,
            prepared.split.model,
            prepared.hf_config,
            trainer.spec.units,
            trainer.read_unit,
            tokenizer_source=prepared.directory,
        )
        (staging / OPTIMIZER).mkdir()
        for unit in trainer.spec.units:
            for plane in _state_planes(trainer, unit):
                write_file(staging / OPTIMIZER / _file(unit, plane), trainer.read_unit(unit, plane))
        state = {
            "step": position.step,
            "tokens": position.tokens,
            "skipped": position.skipped,
            "updates": trainer.engine.optimizer.updates,
            "loss_scale": trainer.loss_scale.state(),
            "seed": prepared.config.train.seed,
            "dtype": trainer.spec.dtype,
        }
        write_json(staging / STATE, state)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(staging, directory)
        latest = directory.parent / LATEST
        partial = latest.with_suffix(".partial")
        partial.write_text(directory.name + "\n", encoding="utf-8")
        os.replace(partial, latest)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise StorageError(f"cannot write the checkpoint {directory}: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return directory


def latest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, None where there is none.

    Raises:
        CheckpointError: ``latest`` names one that is not there.
    """
    pointer = run_dir / "checkpoints" / LATEST
    if not pointer.exists():
        return None
    directory = pointer.parent / pointer.read_text(encoding="utf-8").strip()
    if directory.parent != pointer.parent or not (directory / STATE).is_file():
        raise CheckpointError(
            f"{pointer} names {directory.name}, which is not a checkpoint; correct or remove it"
        )
    return directory


def restore(trainer: StreamedTrainer, directory: Path) -> Position:
    """Bring optimizer state and position back; weights are those of the checkpoint that ``prepared`` reads.

    Raises:
        CheckpointError: a file is missing or damaged, or the state is of another compute dtype.
    """
    state = _read_state(directory)
    if state["dtype"] != trainer.spec.dtype:
        raise CheckpointError(
            f"{directory} holds the state of a {state['dtype']} run, this one computes in {trainer.spec.dtype}; "
            "set model.dtype to the former, or start from the weights alone with train.resume=none"
        )
    for unit in trainer.spec.units:
        for plane in _state_planes(trainer, unit):
            trainer.write_unit(unit, plane, _read_file(directory / OPTIMIZER / _file(unit, plane), unit))
    trainer.engine.optimizer.updates.update(state["updates"])
    trainer.loss_scale.restore(state["loss_scale"])
    return Position(step=state["step"], tokens=state["tokens"], skipped=state["skipped"])


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


def _read_state(directory: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((directory / STATE).read_text(encoding="utf-8"))
        for key in ("step", "tokens", "skipped", "updates", "loss_scale", "dtype"):
            state[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / STATE} cannot be read: {error!r}") from error
    return state
