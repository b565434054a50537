"""Directories of checkpoints and the state beside weights.

``trainer_state.json``: where a run stood, what it was, and the checksums of the checkpoint's files.

Randomness needs no state of its own: the order of the data, dropout and fresh weights are functions of the seed and the
position, see `docs/exactness.md`.

The directory of a run's checkpoints: what lies in it, what is removed, and when.

::

    checkpoints/
    ├── latest                    the name of the newest complete checkpoint
    ├── best                      the name of the one with the least loss, where a run is evaluated
    ├── step-00000100/            complete: it got this name after all its files were on the disk
    ├── checkpoint-150/           of the Hugging Face ``Trainer``, where that trains
    └── step-00000200.partial/    on its way in, or on its way out; whoever comes next removes it

A checkpoint counts once ``latest`` names it, and ``latest`` is written when nothing of it can be lost any more. One is
removed only after that, and by renaming it first, so that what has a checkpoint's name is whole.
"""

import contextlib
import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from outsize import __version__, files
from outsize.checkpoint.files.checkpoint_format import FileSum
from outsize.config import Config
from outsize.errors import CheckpointError, ConfigError
from outsize.model.sizes.model_spec import TensorSpec, UnitSpec
from outsize.optim.optimizer_names import factored
from outsize.optim.optimizer_spec import MASTER, Plane, State, layout_of
from outsize.session import run_state
from outsize.session.run_state import Position
from outsize.session.steps import LossScale
from outsize.storage.home_layout import ITEM_DTYPE

CHECKPOINTS = "checkpoints"
STATE = "trainer_state.json"
LATEST, BEST = "latest", "best"

_NAME = re.compile(r"step-(\d{8,})|checkpoint-(\d+)")
_SHOWN_CHARS = 80
# What a process that was killed may leave; nothing else is ever removed as litter.
_LITTER = re.compile(r"\.?step-\d{8,}\.partial.*|latest\.partial")


def name_of(step: int) -> str:
    """Name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def latest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, None where there is none.

    Where nothing says which that is, it is the last one that has a name: a checkpoint gets it when it is whole.

    Raises:
        CheckpointError: ``latest`` cannot be read, or names one that is not there.
    """
    pointer = run_dir / CHECKPOINTS / LATEST
    if not pointer.exists():
        paths = [path.parent for path in (run_dir / CHECKPOINTS).glob(f"step-*/{STATE}")]
        # One on its way in or out bears another name.
        return max((path for path in paths if _step(path) >= 0), key=_step, default=None)
    try:
        name = files.read_text(pointer).strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{pointer} cannot be read: {error}; correct or remove it") from error
    directory = pointer.parent / name
    if not _NAME.fullmatch(name) or not (directory / STATE).is_file():
        raise CheckpointError(
            f"{pointer} names {name[:_SHOWN_CHARS]!r}, which is not a checkpoint, with a file {STATE}; "
            "correct or remove it"
        )
    return directory


def best(run_dir: Path) -> Path | None:
    """The checkpoint with the least loss of those that were evaluated, None where there is none."""
    try:
        name = files.read_text(run_dir / CHECKPOINTS / BEST).strip()
    except (OSError, ValueError):
        return None
    directory = run_dir / CHECKPOINTS / name
    return directory if _NAME.fullmatch(name) and (directory / STATE).is_file() else None


def exported(run_dir: Path) -> Path:
    """Return the checkpoint of a run that all commands take which read its model: its best, else the newest.

    Raises:
        CheckpointError: it has none.
    """
    source = best(run_dir) or latest(run_dir)
    if source is None:
        raise CheckpointError(
            f"{run_dir} holds no checkpoint: a run has one once it has saved, as Ctrl-C does after a step, and as "
            "train.save_every and save_minutes say; name a run that has saved"
        )
    return source


def set_latest(directory: Path) -> None:
    """Name a checkpoint the newest complete one: all of its files are on the disk by then.

    Raises:
        OSError: as the system says.
    """
    files.write_whole(directory.parent / LATEST, directory.name + "\n")


def check_outside(path: Path, key: str) -> None:
    """Check that ``path`` lies among the checkpoints of no run, which removes old ones with all in them.

    Raises:
        ConfigError: it does; ``key`` says what it was to be.
    """
    place = Path(os.path.realpath(path))  # `resolve` raises of a link to itself
    for directory in (place, *place.parents):
        if directory.name == CHECKPOINTS and (directory / LATEST).exists():
            raise ConfigError(
                f"{path} ({key}) lies among the checkpoints of the run {directory.parent}, which removes old ones with "
                "all in them; choose a directory outside of it"
            )


def set_best(run_dir: Path, name: str) -> None:
    """Name a checkpoint the best one; it may still be on its way.

    Raises:
        OSError: as the system says.
    """
    make_durable(run_dir / CHECKPOINTS)
    files.write_whole(run_dir / CHECKPOINTS / BEST, name + "\n")


def make_durable(path: Path) -> None:
    """Make a directory and its parents, each entered in the one above for good.

    Raises:
        OSError: as the system says.
    """
    if not path.is_dir():
        make_durable(path.parent)
        files.make_directories(path)
        files.sync(path.parent)


def take_place(staging: Path, directory: Path) -> None:
    """Give a complete checkpoint its name, durably; one that bears it already and that nobody trusts makes room.

    Raises:
        OSError: as the system says.
    """
    if directory.exists():
        _remove(directory)
    files.system().rename(staging, directory)
    files.sync(directory.parent)


def remove_litter(checkpoints: Path) -> None:
    """Remove what a process left that was killed while it saved or removed a checkpoint; an empty directory too."""
    with contextlib.suppress(OSError):  # what cannot be removed stays, and hides no error
        for path in list(checkpoints.iterdir()):
            if _LITTER.fullmatch(path.name) and not path.is_symlink():
                if path.is_dir():
                    files.system().remove_tree(path)
                else:
                    with contextlib.suppress(OSError):
                        files.system().unlink(path)
        files.system().rmdir(checkpoints)


def remove_old(checkpoints: Path, newest: Path, limit: int, run: str) -> None:
    """Keep ``newest``, the ``limit - 1`` before it and the best; remove the others that ``run`` has made.

    What cannot be removed stays, and is tried again after the next checkpoint.

    Args:
        checkpoints: the directory.
        newest: the checkpoint that ``latest`` names, durably.
        limit: checkpoints to keep, at least one.
        run: id of the run; checkpoints of any other are not touched.
    """
    spared = (newest, best(checkpoints.parent))
    others = [p for p in checkpoints.iterdir() if p not in spared and _made_by(run, p)]
    # A later one never became the latest: the process died before it could say so.
    before = sorted((p for p in others if _step(p) < _step(newest)), key=_step)
    recent = set(before[len(before) - limit + 1 :]) if limit > 1 else set()
    for path in others:
        if path not in recent:
            with contextlib.suppress(OSError):
                _remove(path)


def _remove(directory: Path) -> None:
    doomed = directory.with_name(directory.name + files.PARTIAL + "-removed")
    files.system().remove_tree(doomed)
    files.system().rename(directory, doomed)
    files.system().remove_tree(doomed)


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1] or match[2]) if match else -1


def _made_by(run: str, path: Path) -> bool:
    """Whether a directory is a checkpoint that ``run`` has made."""
    if _step(path) < 0 or path.is_symlink():
        return False
    with contextlib.suppress(OSError):
        return bool(files.json_or_empty(path / STATE).get("run") == run)
    return False


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
    versions = {"outsize": __version__, **{name: version(name) for name in ("torch", "transformers")}}
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
    remedy = "resume from another checkpoint with --resume PATH"
    state = dict(run_state.checked(files.read_json(path, CheckpointError, remedy), path))
    if state.pop("crc32", None) != _crc32(state) or not _files_in(state):
        raise CheckpointError(f"{path} is not as it was written; {remedy}")
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
    listed = state.get("files")
    if not isinstance(listed, dict) or not listed or not isinstance(state.get("run"), str):
        return False
    return all(_is_below(name) and _is_sum(file_sum) for name, file_sum in listed.items())


def _is_below(name: str) -> bool:
    """Whether a name stays within its directory."""
    return bool(name) and "\0" not in name and not name.startswith("/") and ".." not in Path(name).parts


def _is_sum(value: Any) -> bool:
    return isinstance(value, dict) and all(type(value.get(key)) is int for key in ("num_bytes", "crc32"))
