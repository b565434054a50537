"""``trainer_state.json``: where a run stood, what it was, and the checksums of the checkpoint's files.

Randomness needs no state of its own: the order of the data, dropout and fresh weights are functions of the seed and the
position, see `docs/exactness.md`.
"""

import json
import math
import zlib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from outsize.config import Config
from outsize.errors import CheckpointError, ConfigError
from outsize.model.checkpoint_format import FileSum
from outsize.model.spec import UnitSpec
from outsize.optim.spec import GRADIENT, MASTER, WEIGHTS, planes_for
from outsize.train.checkpoint_dir import STATE, latest

OPTIMIZER = "optimizer"
MASTER_LOW, MASTER_EXCEPTED = "master_low", "master_excepted"
FORMAT = 2  # raised whenever the files of a checkpoint, or the meaning of a key, change
_KEYS = (
    "step",
    "tokens",
    "skipped",
    "loss",
    "updates",
    "loss_scale",
    "model",
    "seed",
    "dtype",
    "run",
    "files",
)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands.

    Attributes:
        step: steps done.
        tokens: tokens trained so far.
        skipped: steps that changed no weight.
        loss: of the last step; NaN before the first.
    """

    step: int
    tokens: int
    skipped: int
    loss: float = float("nan")


def describe(
    position: Position, config: Config, dtype: str, loss_scale: dict[str, float], num_sequences: int, run: str
) -> dict[str, Any]:
    """Return what a checkpoint says of a position, besides updates and files.

    Args:
        position: where the run stands.
        config: as the user gave it; a run that goes on from here must be the same one, see `check_same_run`.
        dtype: compute dtype.
        loss_scale: of the next step.
        num_sequences: sequences per epoch of the data.
        run: id of the run.
    """
    return {
        "format": FORMAT,
        "run": run,
        "step": position.step,
        "tokens": position.tokens,
        "skipped": position.skipped,
        "loss": position.loss if math.isfinite(position.loss) else None,
        "loss_scale": loss_scale,
        "model": _name_of(config.model.path),
        "seed": config.train.seed,
        "dtype": dtype,
        "data": {
            "path": config.data.path,
            "seq_len": config.data.seq_len,
            "pack": config.data.pack,
            "tokens_per_step": config.tokens_per_step,
            "next_sequence": position.step * config.sequences_per_step,
            "sequences_per_epoch": num_sequences,
        },
        "schedule": {
            "kind": config.optimizer.schedule,
            "lr": config.optimizer.lr,
            "warmup_steps": config.warmup_steps,
            "steps": config.train.steps,
        },
        "versions": {name: version(name) for name in ("outsize", "torch", "transformers")},
    }


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
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for key in (*_KEYS, "data", "crc32"):
            state[key]
        known = state.pop("crc32")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
    if known != _crc32(state):
        raise CheckpointError(
            f"{path} is not as it was written; resume from another checkpoint with --resume PATH"
        )
    return state


def position_of(directory: Path) -> Position:
    """Where the run stood that wrote a checkpoint.

    Raises:
        CheckpointError: its state cannot be read.
    """
    state = read_state(directory)
    loss = state["loss"]
    return Position(
        step=state["step"],
        tokens=state["tokens"],
        skipped=state["skipped"],
        loss=float("nan") if loss is None else loss,
    )


def check_same_run(directory: Path, config: Config, dtype: str) -> None:
    """Check that ``config`` goes on with the run that wrote a checkpoint.

    Raises:
        CheckpointError: the checkpoint's state cannot be read.
        ConfigError: the run had another model, seed, compute dtype, or other sequences or steps.
    """
    state = read_state(directory)
    name, data = _name_of(config.model.path), state["data"]
    model = name if _has_moved(state["model"], name) else state["model"]
    settings = (
        ("model.path", model, name),
        ("train.seed", state["seed"], config.train.seed),
        ("model.dtype", state["dtype"], dtype),
        ("data.seq_len", data["seq_len"], config.data.seq_len),
        ("data.pack", data["pack"], config.data.pack),
        ("train.tokens_per_step", data["tokens_per_step"], config.tokens_per_step),
    )
    for key, former, given in settings:
        if former != given:
            raise ConfigError(
                f"{directory} belongs to a run with {key}={former}, not {given}; resume with the former, or choose "
                "another train.run_dir to start a new run"
            )


def state_planes(dtype: str, unit: UnitSpec) -> dict[str, torch.dtype]:
    """The planes of a unit that a checkpoint keeps besides its weights, and their dtypes.

    Beside bf16 weights the lower halves of the masters suffice, see `outsize.optim.halves`.
    """
    if not unit.trainable:
        return {}
    planes = {plane: torch.float32 for plane in planes_for(dtype) if plane not in (WEIGHTS, GRADIENT)}
    if dtype == "bf16":
        del planes[MASTER]
        planes[MASTER_LOW] = torch.int16
    return planes


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


def _name_of(model: str) -> str:
    """A model's directory, absolute, or its id on the hub."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def _has_moved(former: str, model: str) -> bool:
    """Whether the model's directory may have been moved since."""
    return Path(former).is_absolute() and not Path(former).exists() and Path(model).exists()
