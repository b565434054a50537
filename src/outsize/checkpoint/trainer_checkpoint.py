"""A checkpoint of the Hugging Face ``Trainer``: weights, AdamW's moments, and how many steps there were.

``checkpoint-500/`` holds a model that any reader of ours takes, and beside it ``optimizer.pt``, ``scheduler.pt`` and
``trainer_state.json``. The optimizer's parameters have numbers, not names: first those that decay, then the others,
each in the order of ``model.named_parameters()`` and only those that train, as the ``Trainer`` makes its groups, so
numbers become names again.

Files of torch are read with ``weights_only``: tensors and plain values, never code. They are mapped, not loaded: what
of them is resident the system may drop at any time.

What the ``Trainer`` keeps of random numbers and of its data loader stays behind: here both follow from the seed and the
step.
"""

import pickle
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outsize import files
from outsize.config import OptimizerConfig
from outsize.errors import CheckpointError
from outsize.model.sizes.model_spec import ModelSpec, TensorSpec
from outsize.optim.optimizer_spec import EXP_AVG, EXP_AVG_SQ
from outsize.optim.rate_groups import decay_parameter_names
from outsize.session.run_state import Position

OPTIMIZER, SCHEDULER, STATE = "optimizer.pt", "scheduler.pt", "trainer_state.json"
# All that such a checkpoint holds besides the model.
KEPT = (OPTIMIZER, SCHEDULER, STATE, "rng_state.pth", "training_args.bin")
STEP = "step"
_NAME = re.compile(r"checkpoint-(\d+)")
_MOMENTS = (EXP_AVG, EXP_AVG_SQ)


def find(path: Path) -> Path | None:
    """Return ``path`` if it is a checkpoint of a ``Trainer``, the newest one in it if it is an output directory.

    None where it is neither. One that lacks a file is found all the same: reading it says which.
    """
    if is_trainers(path):
        return path
    numbered = ((int(match[1]), p) for p in path.glob("checkpoint-*") if (match := _NAME.fullmatch(p.name)))
    return next((p for _, p in sorted(numbered, reverse=True) if is_trainers(p)), None)


def is_trainers(path: Path) -> bool:
    """Whether a directory holds the state of a ``Trainer``: it counts global steps and lists no files."""
    state = files.json_or_empty(path / STATE)
    return "global_step" in state and "files" not in state


def position_of(directory: Path) -> Position:
    """Where the ``Trainer`` stood.

    Raises:
        CheckpointError: its state cannot be read.
    """
    path = directory / STATE
    state = files.read_json(path, CheckpointError, "take another checkpoint")
    try:
        step, tokens = state["global_step"], state.get("num_input_tokens_seen", 0)
        logged = [line["loss"] for line in state.get("log_history", ()) if "loss" in line]
        if type(step) is not int or step < 1 or type(tokens) is not int or tokens < 0:
            raise ValueError("global_step and num_input_tokens_seen are to be whole numbers")
        loss = float(logged[-1]) if logged else float("nan")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
    return Position(step, tokens, 0, loss)


def check_files(directory: Path) -> None:
    """Read the files of torch and hold them against the checksums that such an archive has of its members.

    Raises:
        CheckpointError: one is not as it was written.
    """
    for name in (OPTIMIZER, SCHEDULER):
        path = directory / name
        try:
            with files.open_binary(path, "r") as file, zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()
        except (
            OSError,
            ValueError,
            NotImplementedError,
            RuntimeError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; it is damaged") from error
        if damaged is not None:
            raise CheckpointError(
                f"{path} is damaged: {damaged} is not as it was written; take another checkpoint"
            )


class OptimizerState:
    """The moments of a ``Trainer``'s AdamW, by parameter.

    Args:
        directory: the checkpoint.
        model: its skeleton; parameters may be on meta.
        spec: its units, which say what trains.

    Raises:
        CheckpointError: a file is missing, holds code, or is of another optimizer or model; says what to do.
    """

    def __init__(self, directory: Path, model: nn.Module, spec: ModelSpec) -> None:
        self._path = directory / OPTIMIZER
        loaded = _load(self._path)
        groups, self._state = _parts(loaded, self._path)
        for group in groups:
            self._check_group(group)
        self._groups = groups
        self.learning_rate = _last_rate(directory / SCHEDULER, position_of(directory).step)
        numbers = [number for group in groups for number in group["params"]]
        specs = {tensor.name: tensor for unit in spec.units for tensor in unit.tensors if tensor.trainable}
        names = _in_order(model, specs)
        if len(numbers) != len(names) or len(set(numbers)) != len(numbers):
            raise CheckpointError(
                f"{self._path} is of {len(numbers)} trained parameters, and this run trains {len(names)}; set "
                "model.freeze so that it trains the same ones"
            )
        self._number_of = dict(zip(names, numbers, strict=True))
        for name, tensor in specs.items():
            self._check(name, tensor)

    def other_settings(self, config: OptimizerConfig) -> list[str]:
        """Say which settings of AdamW are others than those of ``config``, one line each."""
        decays = [group["weight_decay"] for group in self._groups if "weight_decay" in group]
        theirs = {key: self._groups[0].get(key) for key in ("betas", "eps")}
        theirs["weight_decay"] = max(decays, default=None)  # the group of biases and norms has none
        theirs["betas"] = tuple(theirs["betas"])
        ours = {key: getattr(config, key) for key in theirs}
        return [
            f"{key} was {value}, and is {ours[key]} from here on: optimizer.{key}"
            for key, value in theirs.items()
            if value is not None and value != ours[key]
        ]

    def updates(self, name: str) -> int:
        """How often a parameter was stepped; 0 for one that never got a gradient."""
        entry = self._state.get(self._number_of[name])
        return 0 if entry is None else int(entry[STEP])

    def moment(self, name: str, plane: str) -> Tensor | None:
        """``exp_avg`` or ``exp_avg_sq`` of a parameter, flat, in the dtype that it has there; None for zeros."""
        entry = self._state.get(self._number_of[name])
        return None if entry is None else entry[plane].reshape(-1)

    def _check_group(self, group: Any) -> None:
        """Only AdamW continues as AdamW."""
        numbers = group.get("params") if isinstance(group, dict) else None
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise CheckpointError(
                f"{self._path} has no list of parameters in its groups: no optimizer of torch"
            )
        if group.get("amsgrad") or "betas" not in group or group.get("decoupled_weight_decay") is False:
            raise CheckpointError(self._other("its settings are not AdamW's"))

    def _check(self, name: str, tensor: TensorSpec) -> None:
        entry = self._state.get(self._number_of[name])
        if entry is None:
            return
        if not isinstance(entry, dict) or entry.keys() != {STEP, *_MOMENTS}:
            held = ", ".join(map(str, entry)) if isinstance(entry, dict) else type(entry).__name__
            raise CheckpointError(self._other(f"it keeps {held[:80]} for {name}"))
        for plane in _MOMENTS:
            in_file = entry[plane]
            if (
                not isinstance(in_file, Tensor)
                or not in_file.dtype.is_floating_point
                or in_file.layout != torch.strided
            ):
                raise CheckpointError(self._other(f"{plane} of {name} is no plain tensor"))
            if tuple(in_file.shape) != tensor.shape:
                raise CheckpointError(
                    f"{self._path}: {plane} of {name} is {tuple(in_file.shape)}, not {tensor.shape}; it is of "
                    "another model, or other parameters were trained: set model.freeze so that this run trains the same"
                )
        step = entry[STEP]
        number = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
        if type(number) not in (int, float) or not 0 <= number < 2**53 or number != int(number):
            raise CheckpointError(f"{self._path}: the step of {name} is {str(step)[:40]}, not a whole number")

    def _other(self, why: str) -> str:
        return (
            f"{self._path} is not AdamW's: {why}. To go on with AdamW from these weights alone, start a run with "
            f"model.path={self._path.parent}"
        )


def _in_order(model: nn.Module, specs: Mapping[str, TensorSpec]) -> list[str]:
    """Names of what trains, in the order of the numbers: what decays first."""
    decaying = decay_parameter_names(model)
    names = [name for name, _ in model.named_parameters() if name in specs]
    return [n for n in names if n in decaying] + [n for n in names if n not in decaying]


def _parts(loaded: Any, path: Path) -> tuple[list[Any], Mapping[Any, Any]]:
    if isinstance(loaded, dict):
        groups, state = loaded.get("param_groups"), loaded.get("state")
        if isinstance(groups, list) and groups and isinstance(state, dict) and state:
            return groups, state
    raise CheckpointError(f"{path} does not hold the state of an optimizer of torch")


def _last_rate(path: Path, step: int) -> float | None:
    """The learning rate that the scheduler has for the next step; None where it says none."""
    scheduler = _load(path)
    if not isinstance(scheduler, dict) or scheduler.get("last_epoch", step) != step:
        raise CheckpointError(
            f"{path} is not a scheduler's after step {step}; take a checkpoint that is whole"
        )
    rates = scheduler.get("_last_lr")
    return float(rates[0]) if isinstance(rates, list) and rates and type(rates[0]) is float else None


def _load(path: Path) -> Any:
    """Read a file of ``torch.save`` without running anything that it says."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing, so the run cannot be resumed exactly. The Trainer writes it unless save_only_model is "
            "set, or DeepSpeed or FSDP keep the state elsewhere; to start from the weights alone, set "
            f"model.path={path.parent}"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and numbers, which only running its code could read; refused"
        ) from error
    except Exception as error:  # whatever a damaged archive makes of the reader
        first_line = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read: {first_line[:200]}; it is damaged or not torch's"
        ) from error
