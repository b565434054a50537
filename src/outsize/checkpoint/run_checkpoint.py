"""Checkpoints: weights in Hugging Face layout, optimizer state beside them, and where the run stood.

``checkpoints/step-00000100/`` holds what ``from_pretrained`` reads, ``optimizer/<unit>.<plane>.safetensors`` and
``trainer_state.json``. This is how one is found, checked and brought back; `outsize.checkpoint.saving` writes them,
`outsize.checkpoint.checkpoint_state` says what lies in their directory. Those of the Hugging Face ``Trainer`` are taken
too, see `outsize.checkpoint.trainer_checkpoint`.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from math import isclose
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outsize import files
from outsize.checkpoint import checkpoint_state, trainer_checkpoint
from outsize.checkpoint.checkpoint_state import (
    MASTER_EXCEPTED,
    MASTER_LOW,
    STATE,
    file_of,
    latest,
    plane_of,
    read_state,
    state_planes,
)
from outsize.checkpoint.files.checkpoint_files import ADAPTER_CONFIG, INDEX
from outsize.checkpoint.files.checkpoint_format import (
    FileSum,
    StoredTensor,
    read_header,
    read_tensor,
    sum_of_file,
)
from outsize.checkpoint.files.checkpoint_map import find_plane, pieces, read_plane
from outsize.config import Config
from outsize.errors import CheckpointError, ConfigError
from outsize.model.sizes.model_spec import ModelSpec, UnitSpec
from outsize.optim.optimizer_spec import EXP_AVG, EXP_AVG_SQ, WEIGHTS, Plane
from outsize.optim.split_masters import PIECE_ELEMENTS, join_low
from outsize.session import run_state
from outsize.session.fill import FILL_ELEMENTS, MasterWriter
from outsize.session.job.prepare import Job
from outsize.session.run_state import Position
from outsize.session.steps import LossScale, schedule_of
from outsize.storage.home import Home
from outsize.storage.ledger import Arena
from outsize.units import align_up

_log = logging.getLogger(__name__)

Stored = Mapping[str, StoredTensor]


class Restorable(Protocol):
    """What a checkpoint is brought back into: a `StreamedTrainer`."""

    @property
    def spec(self) -> ModelSpec:
        """The units."""

    @property
    def home(self) -> Home:
        """Where they rest."""

    @property
    def prepared(self) -> Job:
        """The run."""

    @property
    def loss_scale(self) -> LossScale:
        """What losses are multiplied by."""

    @property
    def updates(self) -> dict[str, int]:
        """How often each parameter was stepped."""


def find(resume: str, run_dir: Path) -> Path | None:
    """Return the checkpoint that a run goes on from; None where it begins with the first step.

    Args:
        resume: ``none``; ``auto`` for the newest one in ``run_dir``, if any; or the path of a checkpoint, or of a run
            whose newest one is meant, of ours or of a ``Trainer``.
        run_dir: of the run.

    Raises:
        CheckpointError: there is none at the path, or ``latest`` names one that is not there.
    """
    if resume in ("none", "auto"):
        return latest(run_dir) if resume == "auto" else None
    path = Path(os.path.expanduser(resume))
    foreign = trainer_checkpoint.find(path)
    if foreign is not None or (path / STATE).is_file():
        return foreign or path
    newest = latest(path)
    if newest is None:
        plain = (path / "config.json").is_file()
        remedy = (
            "it is a model without the state of a run: start from its weights with model.path"
            if plain
            else "give a directory checkpoints/step-..., that of a run, or a checkpoint-... of the HF Trainer"
        )
        raise CheckpointError(f"train.resume: {path} holds no checkpoint; {remedy}")
    return newest


def position_of(directory: Path) -> Position:
    """Where the run stood that wrote a checkpoint.

    Raises:
        CheckpointError: its state cannot be read.
    """
    if trainer_checkpoint.is_trainers(directory):
        return trainer_checkpoint.position_of(directory)
    return checkpoint_state.position_of(directory)


def check_holds(directory: Path, config: Config) -> None:
    """Check that a ``Trainer``'s checkpoint holds what ``config`` trains: a model, or adapters.

    Raises:
        ConfigError: it holds the other.
    """
    if not trainer_checkpoint.is_trainers(directory):
        return
    adapters, lora = (directory / ADAPTER_CONFIG).is_file(), config.train.method == "lora"
    if adapters and not lora:
        raise ConfigError(
            f"{directory} is a Trainer's checkpoint of adapters, and train.method is {config.train.method}; resume "
            "with train.method=lora, and the model that they adapt as model.path"
        )
    if lora and not adapters:
        raise ConfigError(
            f"{directory} is a Trainer's checkpoint of a whole model, without adapters; resume with train.method=full, "
            "or begin adapters beside it with model.path"
        )


def check_same_method(directory: Path, config: Config) -> None:
    """Check that ``config`` trains what the run trained that wrote a checkpoint: the model, or adapters.

    Raises:
        CheckpointError: the checkpoint's state cannot be read.
        ConfigError: it trains something else.
    """
    # Of those adapters say what they are, see `begun_adapters`.
    if not trainer_checkpoint.is_trainers(directory):
        run_state.check_same_method(read_state(directory), directory, config)


def check_same_run(directory: Path, config: Config, prepared: Job) -> None:
    """Check that ``config`` goes on with the run that wrote a checkpoint, before anything is done for it.

    A ``Trainer``'s says less of its run than ours: its optimizer has to be one that fits the model.

    Raises:
        CheckpointError: the checkpoint's state cannot be read.
        ConfigError: the run had another model, seed, compute dtype, or other sequences or steps.
    """
    if trainer_checkpoint.is_trainers(directory):
        moments = prepared.plan.state.moments
        if config.optimizer.name != "adamw":
            raise ConfigError(
                f"optimizer.name: {directory} holds the moments of a Trainer's AdamW, not of {config.optimizer.name}; "
                f"resume with optimizer.name=adamw, or start a run from its weights with model.path={directory}"
            )
        if moments != "fp32":
            raise ConfigError(
                f"optimizer.state: {directory} holds moments of a Trainer's AdamW, which are fp32, not {moments}; "
                "resume with optimizer.state=fp32"
            )
        trainer_checkpoint.OptimizerState(directory, prepared.split.model, prepared.split.spec)
    else:
        checkpoint_state.check_same_run(directory, config, prepared.dtype)


def check_files(directory: Path) -> None:
    """Read every file of a checkpoint and hold it against its checksum; of a ``Trainer``'s those that have one.

    Raises:
        CheckpointError: one is missing or not as it was written; names the file and the unit.
    """
    if trainer_checkpoint.is_trainers(directory):
        trainer_checkpoint.check_files(directory)
        return
    for name, expected in read_state(directory)["files"].items():
        check_file(
            directory / name,
            expected,
            "the run cannot be resumed exactly",
            "resume from another checkpoint with --resume PATH",
        )


_OF_WEIGHTS = "take another checkpoint: each directory beside this one is a model as it lies there"
_OF_TEXTS = (
    "put it back as it was, from another checkpoint of the run, say; if it was changed on purpose, this directory is a "
    "model as it lies there: copy it"
)


def check_model_files(directory: str | Path, sums: Mapping[str, FileSum] | None = None) -> None:
    """Look whether a model, without its optimizer's state, is as a run has saved it; one of no run is taken as it is.

    Of a ``Trainer``'s, which notes no checksums, its weights are to be there and to begin as such files do.

    Args:
        directory: of the model.
        sums: of files that were read already, of a model that is copied; None for one that is used, whose files beside
            the weights may have been changed on purpose: a warning names those.

    Raises:
        CheckpointError: a file is missing or not as it was written; names the file.
    """
    directory = Path(os.path.expanduser(directory))
    if not (directory / STATE).is_file():
        return
    if trainer_checkpoint.is_trainers(directory):
        shards = files.json_or_empty(directory / INDEX).get("weight_map", {})
        paths = {directory / name for name in shards.values()} if isinstance(shards, dict) else set()
        for path in sorted(paths | set(directory.glob("*.safetensors"))):
            read_header(path)
        return
    try:
        listed = {n: e for n, e in read_state(directory)["files"].items() if not n.startswith("optimizer/")}
    except CheckpointError as error:
        if sums is not None:
            raise
        _log.warning("%s is not held against its checksums: %s", directory, str(error).partition(";")[0])
        return
    for name, expected in listed.items():
        is_weights = name.endswith(".safetensors")
        try:
            remedy = _OF_WEIGHTS if is_weights else _OF_TEXTS
            check_file(directory / name, expected, "the model is not whole", remedy, (sums or {}).get(name))
        except CheckpointError as error:
            if is_weights or sums is not None:
                raise
            _log.warning("%s", str(error).partition(";")[0])


def check_file(
    path: Path, expected: Mapping[str, Any], lost: str, remedy: str, actual: FileSum | None = None
) -> None:
    """Hold a file against its entry of a checkpoint's state; it is read where ``actual`` does not say what it holds.

    Raises:
        CheckpointError: it is missing, so that ``lost``, or not as it was written; names the file and the unit.
    """
    size = expected["num_bytes"]
    whose = f" (unit {expected['unit']})" if expected.get("unit") else ""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, so {lost}{whose}; {remedy}")
    try:
        actual = actual or sum_of_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}{whose}; {remedy}") from error
    if actual.num_bytes != size:
        wrong = "truncated" if actual.num_bytes < size else "longer than it was"
        raise CheckpointError(f"{path} is {wrong}: {actual.num_bytes} bytes, not {size}{whose}; {remedy}")
    if actual.crc32 != expected["crc32"]:
        raise CheckpointError(f"{path} is damaged: its bytes are not those written{whose}; {remedy}")


def restore(
    trainer: Restorable, directory: Path, announce: Callable[[str], None] = lambda _: None
) -> Position:
    """Bring optimizer state and position back; weights are those of the checkpoint that ``prepared`` reads.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if trainer_checkpoint.is_trainers(directory):
        return _restore_foreign(trainer, directory, announce)
    state: dict[str, Any] = read_state(directory)
    for unit in trainer.spec.units:
        layout = trainer.prepared.plan.state
        for plane, dtype in state_planes(layout, unit).items():
            stored_unit = plane_of(layout, unit, plane)
            stored = find_plane(directory / file_of(unit, plane), stored_unit, dtype)
            with Arena() as arena:
                if plane == MASTER_LOW:
                    excepted = _read_excepted(directory / file_of(unit, MASTER_EXCEPTED))
                    _restore_masters(trainer, unit, stored, excepted, arena)
                else:
                    _restore_plane(trainer, stored_unit, plane, dtype, stored, arena)
    trainer.updates.update(state["updates"])
    trainer.loss_scale.restore(state["loss_scale"])
    return checkpoint_state.position_of(directory)


def _restore_foreign(trainer: Restorable, directory: Path, announce: Callable[[str], None]) -> Position:
    """Bring the moments of a ``Trainer``'s AdamW back, as fp32."""
    state = trainer_checkpoint.OptimizerState(directory, trainer.prepared.split.model, trainer.spec)
    position = trainer_checkpoint.position_of(directory)
    for unit in trainer.spec.units:
        if not unit.trainable:
            continue
        with Arena() as arena:
            for plane in (EXP_AVG, EXP_AVG_SQ):
                moments = {t.name: state.moment(t.name, plane) for t in unit.tensors if t.trainable}
                _fill_plane(
                    trainer, unit, plane, {name: m for name, m in moments.items() if m is not None}, arena
                )
    trained = (t.name for unit in trainer.spec.units for t in unit.tensors if t.trainable)
    trainer.updates.update({name: state.updates(name) for name in trained})
    for line in state.other_settings(trainer.prepared.config.optimizer):
        announce(f"note: {directory.name}: {line}")
    ours = schedule_of(trainer.prepared.config).learning_rate(position.step)
    if state.learning_rate is not None and not isclose(state.learning_rate, ours, rel_tol=1e-6):
        announce(
            f"note: {directory.name} would go on with a learning rate of {state.learning_rate:g}, this run does with "
            f"{ours:g}: optimizer.* and train.steps say so"
        )
    return position


def _fill_plane(
    trainer: Restorable, unit: UnitSpec, plane: str, tensors: Mapping[str, Tensor], arena: Arena
) -> None:
    """Write a plane of a unit from flat tensors by name, piece by piece; what has none is zero."""
    size = min(FILL_ELEMENTS, unit.numel)
    values = arena.take(4 * size, "restore").view(torch.float32)
    for start, length in _held(trainer, unit, size):
        chunk = values[:length].zero_()
        for name, first, piece in pieces(unit.tensors, start, chunk):
            if name in tensors:
                piece.copy_(tensors[name][first : first + piece.numel()])
                _require_numbers(piece, plane, f"{plane} of {name}")
        trainer.home.write(unit.index, plane, start, chunk)


def _restore_plane(
    trainer: Restorable, unit: UnitSpec, plane: str, dtype: torch.dtype, stored: Stored, arena: Arena
) -> None:
    """Bring a plane back, as far as the home holds it; ``unit`` is the unit as the plane sees it."""
    target = trainer.prepared.plan.state.planes.get(plane, Plane("fp32"))
    size = min(FILL_ELEMENTS, align_up(unit.numel, target.sector_items))
    values = arena.take(dtype.itemsize * size, "restore").view(dtype)
    share = trainer.prepared.own
    first, last = 0, unit.numel
    if share is not None:  # shares end with whole items
        first, last = share[unit.index].start // target.group, share[unit.index].stop // target.group
    for start in range(first, last, size):
        length = min(size, last - start)
        chunk = values[: align_up(length, target.sector_items)].zero_()
        read_plane(stored, unit, start, chunk[:length])
        _require_numbers(chunk[:length], plane, f"{plane} of {unit.name}")
        trainer.home.write(unit.index, plane, start * target.group, chunk)


def _require_numbers(values: Tensor, plane: str, what: str) -> None:
    """Refuse what no step leaves, and the next one would bring to the weights: NaN, or squares below zero."""
    if not values.dtype.is_floating_point:
        return
    if values.isnan().any() or (plane == EXP_AVG_SQ and (values < 0).any()):
        raise CheckpointError(
            f"{what} holds what is no number, or squares below zero; resume from another checkpoint with --resume PATH"
        )


def _restore_masters(
    trainer: Restorable, unit: UnitSpec, stored: Stored, excepted: tuple[Tensor, Tensor], arena: Arena
) -> None:
    """Join masters of the weights, which are at home already, and what the checkpoint holds beyond them."""
    size = min(PIECE_ELEMENTS, unit.numel)
    low = arena.take(2 * size, "lower halves").view(torch.int16)
    weights = arena.take(2 * size, "weights").view(torch.bfloat16)
    master = arena.take(4 * size, "masters").view(torch.float32)
    writer = MasterWriter(trainer.home, trainer.prepared.plan.state, arena, size, trainer.prepared.own)
    positions, bits = excepted
    for start, length in _held(trainer, unit, size):
        read_plane(stored, unit, start, low[:length])
        trainer.home.read(unit.index, WEIGHTS, start, weights[:length])
        master[:length].copy_(join_low(weights[:length], low[:length]))
        here = (positions >= start) & (positions < start + length)
        master.view(torch.int32)[positions[here] - start] = bits[here]
        writer.write(unit.index, start, master[:length])


def _held(trainer: Restorable, unit: UnitSpec, size: int) -> Iterator[tuple[int, int]]:
    """Yield ``(first element, elements)`` of pieces of a plane of the optimizer's state that the home holds."""
    share = trainer.prepared.own
    held = range(unit.numel) if share is None else share[unit.index]
    return ((start, min(size, held.stop - start)) for start in range(held.start, held.stop, size))


def _read_excepted(path: Path) -> tuple[Tensor, Tensor]:
    """Positions and bits of the masters that are kept whole."""
    stored = read_header(path)
    if stored.keys() != {"positions", "bits"} or stored["positions"].shape != stored["bits"].shape:
        raise CheckpointError(f"{path} does not hold positions and bits")
    return read_tensor(stored["positions"]), read_tensor(stored["bits"])
