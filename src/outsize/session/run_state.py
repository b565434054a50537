"""State of a run in checkpoints and commits, and the kinds of its values."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outsize.config import Config
from outsize.config.data_section import packing_of
from outsize.config.model_section import OptimizerConfig
from outsize.config.section import Mark, marked
from outsize.errors import CheckpointError, ConfigError
from outsize.optim.optimizer_names import ADAMW, named
from outsize.optim.torch_trial import torch_class
from outsize.runtime.ops.context import StepContext
from outsize.session.steps import LossScale, changed_files

# A seed has 64 bits, and nothing is counted so far.
_MOST_COUNTED = 2**64
# Of these, states of older versions say nothing; whether the first is there tells them apart.
_NEWER = ("train.microbatches", "model.attention", "transport.")


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


def state_of(
    position: Position,
    updates: Mapping[str, int],
    loss_scale: LossScale,
    config: Config,
    dtype: str,
    data: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return all of a run's state that is not in its planes, JSON; the data order follows from seed and step.

    Args:
        position: where it stands.
        updates: how often each parameter has been stepped.
        loss_scale: as it is for the next step.
        config: as the user gave it; a run that goes on from here must be the same one, see `check_same_run`.
        dtype: compute dtype.
        data: what tells the sequences of the run from others; None where nobody goes on from the state.
    """
    return {
        "step": position.step,
        "tokens": position.tokens,
        "skipped": position.skipped,
        "loss": position.loss if math.isfinite(position.loss) else None,
        "updates": dict(updates),
        "loss_scale": loss_scale.state(),
        "model": name_of(config.model.path),
        "seed": config.train.seed,
        "dtype": dtype,
        **({"lora": _lora(config)} if config.train.method == "lora" else {}),
        **_optimizer(config.optimizer),
        "data": {
            "seq_len": config.data.seq_len,
            "pack": config.data.pack,
            "group_by_length": config.data.group_by_length,
            "tokens_per_step": config.tokens_per_step,
            "next_sequence": position.step * config.sequences_per_step,
            **(data or {}),
        },
        "settings": settings_of(config),
    }


def checked(state: Any, where: object) -> Mapping[str, Any]:
    """Return ``state`` after checking that it says what a resume needs.

    Raises:
        CheckpointError: it does not; ``where`` is named.
    """
    try:
        check_kinds(state)
    except ValueError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    values: Mapping[str, Any] = state
    return values


def position_in(state: Mapping[str, Any]) -> Position:
    """Where the run stood that wrote ``state``."""
    loss = state["loss"]
    return Position(
        step=state["step"],
        tokens=state["tokens"],
        skipped=state["skipped"],
        loss=float("nan") if loss is None else loss,
    )


def check_same_run(state: Mapping[str, Any], where: object, config: Config, dtype: str) -> None:
    """Check that ``config`` goes on with the run that wrote ``state``.

    Raises:
        ConfigError: the run had another model, seed, compute dtype, or other sequences or steps; ``where`` is named.
    """
    name, data = name_of(config.model.path), state["data"]
    is_read = config.train.method == "lora" or bool(config.model.freeze) or config.train.objective != "sft"
    model = name if _has_moved(state["model"], name, is_read) else state["model"]
    optimizers = (state, _optimizer(config.optimizer))
    settings = (
        ("model.path", model, name),
        ("train.seed", state["seed"], config.train.seed),
        ("model.dtype", state["dtype"], dtype),
        (
            "optimizer.name",
            state.get("optimizer", ADAMW),
            optimizers[1].get("optimizer", ADAMW),
        ),
        (
            "the state that optimizer.args want",
            *(", ".join(each.get("kept", ())) or "nothing" for each in optimizers),
        ),
        ("optimizer.state", state.get("moments", "fp32"), config.optimizer.state),
        ("optimizer.masters", *_rounded_masters(state, config.optimizer.masters)),
        ("data.seq_len", data["seq_len"], config.data.seq_len),
        ("data.pack", packing_of(data["pack"]), config.data.pack),
        ("data.group_by_length", data.get("group_by_length", False), config.data.group_by_length),
        ("train.tokens_per_step", data["tokens_per_step"], config.tokens_per_step),
    )
    for key, recorded, given in settings:
        if recorded != given:
            raise ConfigError(
                f"{where} belongs to a run with {key}={recorded}, not {given}; resume with the former, or choose "
                "another train.run_dir to start a new run"
            )


def check_same_data(state: Mapping[str, Any], where: object, data: Mapping[str, Any]) -> str:
    """Check that the sequences that a run goes on with are those of the run that wrote ``state``.

    Returns:
        Which files have changed nevertheless, in words; empty for none.

    Args:
        state: of the run before.
        where: the state was found, for the message.
        data: what tells sequences from others, see `PackedDataset.identity`, and their ``files``, see `list_files`.

    Raises:
        ConfigError: they are others; ``where`` and the files that have changed are named.
    """
    recorded = state["data"]
    changed = changed_files(recorded.get("files"), data.get("files", {}))
    if all(recorded.get(key, value) == value for key, value in data.items() if key != "files"):
        return changed
    raise ConfigError(
        f"{where} belongs to a run over other data: {_extent(recorded)}, and here {_extent(data)}, or others in them "
        f"(data.*{f'; {changed}' if changed else ''}); resume with the former data.*, or start a run from these "
        "weights: model.path with a checkpoint of the run, and another train.run_dir"
    )


def _extent(data: Mapping[str, Any]) -> str:
    window = data.get("sequences_per_window")
    return f"data.window={window}" if window else f"{data.get('sequences_per_epoch')} sequences per epoch"


def changed_settings(state: Mapping[str, Any], config: Config) -> list[str]:
    """Return a line for each setting that a run goes on with otherwise than the run that wrote ``state`` had it."""
    recorded, given = state.get("settings"), settings_of(config)
    if not isinstance(recorded, Mapping):
        return []
    if _NEWER[0] not in recorded:
        given = {key: value for key, value in given.items() if not key.startswith(_NEWER)}
    return [
        f"note: the run goes on with {key}={given.get(key, _default(key))}, and had {recorded.get(key, _default(key))}"
        for key in sorted(recorded.keys() | given.keys())
        if recorded.get(key) != given.get(key)
    ]


def settings_of(config: Config) -> dict[str, Any]:
    """Return what may change on a resume and then trains otherwise, by key, as far as it is not the default.

    How masters lie at home changes no bit, or is another run.
    """
    sections = {
        "optimizer": config.optimizer,
        "model": config.model,
        "train": config.train,
        "data": config.data,
        "transport": config.transport,
    }
    return {
        f"{name}.{key}": value
        for name, section in sections.items()
        for key, value in section.model_dump(mode="json", exclude_defaults=name != "train").items()
        if (key in marked(type(section), Mark.TOLD_ON_RESUME) and value is not None)
        or name == "transport"
        or (name == "optimizer" and key != "masters")
    }


def _default(key: str) -> Any:
    name, _, entry = key.partition(".")
    section: Any = Config.model_fields[name].annotation
    default = section.model_fields[entry].default if entry in section.model_fields else None
    return "nothing" if default in (None, ()) else default


def _optimizer(optimizer: OptimizerConfig) -> dict[str, Any]:
    """What a state says of an optimizer, where that is not AdamW with moments and masters in fp32."""
    settings: dict[str, Any] = {}
    if named(optimizer.name) is None:
        about = torch_class(optimizer.name, optimizer.args)
        settings["optimizer"] = about.path
        settings["kept"] = [entry.key for entry in about.entries]
    elif optimizer.name != ADAMW:
        settings["optimizer"] = optimizer.name
    if optimizer.state != "fp32":
        settings["moments"] = optimizer.state
    if optimizer.masters == "split24":
        settings["masters"] = optimizer.masters
    return settings


def _rounded_masters(state: Mapping[str, Any], given: str) -> tuple[str, str]:
    """How masters were kept and are; those that keep 32 bits are all the same."""
    return state.get("masters", "auto" if given == "split24" else given), given


def check_same_method(state: Mapping[str, Any], where: object, config: Config) -> None:
    """Check that ``config`` trains what the run trained that wrote ``state``.

    Raises:
        ConfigError: it trains adapters or the model where the run did not, or other adapters; ``where`` is named.
    """
    recorded, given = state.get("lora"), _lora(config)
    keys = ["train.method"] if (recorded is None) != (given is None) else []
    if recorded is not None and given is not None:
        keys = [f"lora.{key}" for key in given if recorded.get(key) != given[key]]
    if keys:
        raise ConfigError(
            f"{where} belongs to a run with another {keys[0]}; resume with the former, or choose another "
            "train.run_dir to start a new run"
        )


def _lora(config: Config) -> dict[str, Any] | None:
    return config.lora.model_dump(mode="json", exclude={"from"}) if config.train.method == "lora" else None


def name_of(model: str) -> str:
    """A model's directory, absolute, or its id on the hub."""
    path = Path(os.path.expanduser(model))
    return str(path.resolve()) if path.exists() else model


def _has_moved(recorded: str, model: str, is_read: bool) -> bool:
    """Whether the model's directory may have been moved since; of weights that are read no other checkpoint will do."""
    old, new = Path(recorded).parts, Path(model).parts
    run = old[: old.index("checkpoints") + 1] if "checkpoints" in old else None
    if is_read and run is not None and new[: len(run)] == run:
        return False
    return Path(recorded).is_absolute() and not Path(recorded).exists() and Path(model).exists()


class Standing:
    """What commits say of a run, kept by the lane that commits: the loop over steps may be ahead or behind by one.

    Args:
        position: before the first step that is committed.
        loss_scale: for that step; a copy is kept.
        updates: how often each parameter has been stepped; stands still while a step is committed.
        state_at: makes the state of a position, by what is said of updates and the loss scale; see `state_of`.
    """

    def __init__(
        self,
        position: Position,
        loss_scale: LossScale,
        updates: Mapping[str, int],
        state_at: Callable[[Position, Mapping[str, int], LossScale], dict[str, Any]],
    ) -> None:
        self._position = position
        self._loss_scale = LossScale(loss_scale.enabled)
        self._loss_scale.restore(loss_scale.state())
        self._updates = updates
        self._state_at = state_at

    def after(self, context: StepContext) -> Mapping[str, Any]:
        """Return the state after the step of ``context``, which is the next one."""
        before = self._position
        self._position = Position(
            before.step + 1, before.tokens + context.tokens, before.skipped + context.skipped, context.loss()
        )
        self._loss_scale.update(context.skipped)
        return self._state_at(self._position, self._updates, self._loss_scale)


def check_kinds(state: Any) -> None:
    """Check the entries that a resume needs.

    Raises:
        ValueError: one is missing, of another kind, or a number that nothing is counted to; says which.
    """
    if not isinstance(state, dict):
        raise ValueError("not an object")
    wrong = [
        key
        for key, is_right in (
            *((key, _counts(state.get(key))) for key in ("step", "tokens", "skipped", "seed")),
            *((key, isinstance(state.get(key), str)) for key in ("model", "dtype")),
            ("loss", "loss" in state and (state["loss"] is None or _is_number(state["loss"]))),
            ("updates", _is_map(state.get("updates")) and all(map(_counts, state["updates"].values()))),
            ("loss_scale", _is_loss_scale(state.get("loss_scale"))),
            ("data", _is_data(state.get("data"))),
        )
        if not is_right
    ]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: missing, or of the wrong kind")


def _counts(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_COUNTED


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def _is_data(value: Any) -> bool:
    if not _is_map(value) or not isinstance(value.get("pack"), str | bool):
        return False
    return _counts(value.get("seq_len")) and _counts(value.get("tokens_per_step"))


def _is_loss_scale(value: Any) -> bool:
    if not _is_map(value) or not _is_number(value.get("value")) or not _is_number(value.get("good")):
        return False
    return math.isfinite(value["value"]) and value["value"] > 0 and math.isfinite(value["good"])
