"""``trainer_state.json``: where a run stood, what it was, and the checksums of the checkpoint's files.

Randomness needs no state of its own: the order of the data, dropout and fresh weights are functions of the seed and the
position, see `docs/exactness.md`.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from outsize import files
from outsize.checkpoint.checkpoint_dir import STATE, latest
from outsize.checkpoint.files.checkpoint_format import FileSum
from outsize.config import Config
from outsize.errors import CheckpointError
from outsize.model.sizes.model_spec import TensorSpec, UnitSpec
from outsize.optim.factors import factored
from outsize.optim.optimizer_spec import MASTER, Plane, State, layout_of
from outsize.session import run_state
from outsize.session.run_state import Position
from outsize.session.steps import LossScale
from outsize.storage.home_layout import ITEM_DTYPE

OPTIMIZER = "optimizer"
MASTER_LOW, MASTER_EXCEPTED = "master_low", "master_excepted"
FORMAT = 2  # raised whenever the files of a checkpoint, or the meaning of a key, change


def describe(
    position: Position,
    config: Config,
    dtype: str,
    loss_scale: LossScale,
    data: Mapping[str, Any],
    run: str,
) -> dict[str, Any]:
    """Return what a checkpoint says of a position, besides updates and files.

    Args:
        position: where the run stands.
        config: as the user gave it; a run that goes on from here must be the same one, see `check_same_run`.
        dtype: compute dtype.
        loss_scale: as it is for the next step.
        data: what tells the sequences of the run from others, see `PackedDataset.identity`.
        run: id of the run.
    """
    state = run_state.state_of(position, {}, loss_scale, config, dtype, data)
    state["data"] |= {"path": config.data.path}
    state["schedule"] = {
        "kind": config.optimizer.schedule,
        "lr": config.optimizer.lr,
        "warmup_steps": config.warmup_steps,
        "steps": config.train.steps,
    }
    versions = {name: version(name) for name in ("outsize", "torch", "transformers")}
    return {"format": FORMAT, "run": run, "versions": versions, **state}


def render_state(state: dict[str, Any]) -> str:
    """Return the text of a state, with a checksum of its own."""
    return json.dumps({**state, "crc32": _crc32(state)}, indent=1) + "\n"


def read_state(directory: Path) -> dict[str, Any]:
    """Return the state of a checkpoint.

    Raises:
        CheckpointError: it cannot be read, or is not as it was written.
    """
    path = directory / STATE
    try:
        found = json.loads(files.read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
    state = dict(run_state.checked(found, path))
    if state.pop("crc32", None) != _crc32(state) or not _files_in(state):
        raise CheckpointError(
            f"{path} is not as it was written; resume from another checkpoint with --resume PATH"
        )
    return state


def position_of(directory: Path) -> Position:
    """Where the run stood that wrote a checkpoint.

    Raises:
        CheckpointError: its state cannot be read.
    """
    return run_state.position_in(read_state(directory))


def check_same_run(directory: Path, config: Config, dtype: str) -> None:
    """Check that ``config`` goes on with the run that wrote a checkpoint.

    Raises:
        CheckpointError: the checkpoint's state cannot be read.
        ConfigError: the run had another model, seed, compute dtype, or other sequences or steps.
    """
    run_state.check_same_run(read_state(directory), directory, config, dtype)


def state_planes(state: State, unit: UnitSpec) -> dict[str, torch.dtype]:
    """The planes of a unit that a checkpoint keeps besides its weights, and their dtypes.

    Beside bf16 weights the lower halves of the masters suffice, see `outsize.optim.split_masters`, however they lie
    at home: checkpoints of split masters and of others are the same.
    """
    if not unit.trainable:
        return {}
    layout = layout_of(state)
    moments = {
        name: ITEM_DTYPE[plane.item]
        for name, plane in layout.state_planes.items()
        if plane.factor is None or factored(unit, plane.factor).tensors
    }
    if layout.dtype == "bf16":
        return {**moments, MASTER_LOW: torch.int16}
    return {MASTER: torch.float32, **moments} if layout.dtype == "fp16" else moments


def plane_of(state: State, unit: UnitSpec, name: str) -> UnitSpec:
    """The unit as a plane sees it: each tensor as its items, where an item stands for a group of elements."""
    plane = layout_of(state).planes.get(name, Plane("fp32"))
    if plane.factor is not None:
        unit = factored(unit, plane.factor)
    if plane.group == 1:
        return unit
    tensors = tuple(
        TensorSpec(name=t.name, shape=(-(-t.numel // plane.group),), offset=t.offset // plane.group)
        for t in unit.tensors
    )
    return replace(unit, tensors=tensors, numel=plane.items(unit.numel))


def file_of(unit: UnitSpec, plane: str) -> str:
    """The file, within a checkpoint, of a plane of a unit."""
    return f"{OPTIMIZER}/{unit.name}.{plane}.safetensors"


def known_files(run_dir: Path, run: str) -> tuple[Path, dict[str, FileSum]] | None:
    """The newest checkpoint of ``run_dir`` and its files; None where there is none that ``run`` has made."""
    try:
        directory = latest(run_dir)
        state = read_state(directory) if directory is not None else {}
        files = {n: FileSum(f["num_bytes"], f["crc32"]) for n, f in state.get("files", {}).items()}
    except (CheckpointError, OSError, KeyError, TypeError, AttributeError):
        return None
    return (directory, files) if directory is not None and state["run"] == run else None


def _crc32(state: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def _files_in(state: dict[str, Any]) -> bool:
    """Whether a state lists files and the run that made them."""
    listed = state.get("files")
    if not isinstance(listed, dict) or not listed or not isinstance(state.get("run"), str):
        return False
    return all(_is_below(name) and _is_sum(known) for name, known in listed.items())


def _is_below(name: str) -> bool:
    """Whether a name stays within its directory."""
    return bool(name) and "\0" not in name and not name.startswith("/") and ".." not in Path(name).parts


def _is_sum(known: Any) -> bool:
    return isinstance(known, dict) and all(type(known.get(key)) is int for key in ("num_bytes", "crc32"))
