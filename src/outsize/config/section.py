"""Sections of the configuration: their rules, kinds of values, and facts of keys that stand beside their types.

Facts of keys that stand beside their types: when one has no effect, and marks of what else is asked of keys.

A section's key says ``Annotated[int, Idle((reason, condition))]``. What the configuration leaves open, such as which
home ``auto`` is, comes from `Surroundings`; where nobody knows it yet, nothing is said that depends on it.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from outsize.accelerators import check_device_name
from outsize.choices import OBJECTIVES_OF, WITH_MIN_LR
from outsize.units import parse_bytes

if TYPE_CHECKING:
    from pydantic import BaseModel

    from outsize.config.messages import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What decides over a setting and is not in the configuration; None where it is not known.

    Attributes:
        num_processes: that train together.
        num_numa_nodes: of the machine.
        device: that ``memory.device`` comes to.
        home: that ``memory.home`` comes to.
        dtype: that ``model.dtype`` comes to.
        chunks_loss: whether head and loss are computed in chunks.
        container: kind of the data's files: ``text``, ``json``, ``csv``, ``tsv``, ``parquet`` or ``tokens``.
        one_file: whether the data is a file and not a directory.
        masks: whether the model is a masked language model.
        by_trainer: whether a trainer of another library trains, as it does for each `train.objective` but sft.
    """

    num_processes: int = 1
    num_numa_nodes: int | None = None
    device: str | None = None
    home: str | None = None
    dtype: str | None = None
    chunks_loss: bool | None = None
    container: str | None = None
    one_file: bool | None = None
    masks: bool | None = None
    by_trainer: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """What the conditions below are asked of."""

    config: "Config"
    around: Surroundings

    @property
    def device(self) -> str:
        """Device that computes, as far as it is known."""
        return self.around.device or self.config.memory.device

    @property
    def home(self) -> str:
        """Where the training state lies, as far as it is known."""
        return self.around.home or self.config.memory.home

    def is_emulated(self) -> bool:
        """Return whether devices are emulated."""
        return self.device.startswith("emulated")

    def has_several_workers(self) -> bool:
        """Return whether one process computes on several devices."""
        several = self.is_emulated() and self.device not in ("emulated", "emulated:1")
        return several or self.device.endswith(":all") or "," in self.device

    def is_alone(self) -> bool:
        """Return whether a single process trains."""
        return self.around.num_processes == 1

    def has_global_norm(self) -> bool:
        """Return whether gradients are clipped to a norm over all of them."""
        return self.config.optimizer.clip == "global" and bool(self.config.optimizer.max_grad_norm)

    def gradients_wait(self) -> bool:
        """For the norm of all, for a step that may be skipped, or to be decoded."""
        skips = self.config.train.on_nonfinite == "skip" or "fp16" in (self.dtype, self.config.model.dtype)
        return self.has_global_norm() or skips or self.config.transport.gradients not in ("raw", "auto")

    @property
    def dtype(self) -> str:
        """Compute dtype, as far as it is known."""
        return self.around.dtype or self.config.model.dtype

    @property
    def schedule(self) -> str:
        """Schedule of the learning rate."""
        return self.config.optimizer.schedule

    def has_no_min_lr(self) -> bool:
        """Return whether the schedule falls to zero or not at all."""
        return self.schedule not in WITH_MIN_LR

    def learns(self, *objectives: str) -> bool:
        """Return whether the objective is one of these."""
        return self.config.train.objective in objectives

    def by_trainer(self) -> bool:
        """Return whether a trainer of another library trains."""
        return self.around.by_trainer or not self.learns("sft")

    def saves_once(self) -> bool:
        """Whether the checkpoint at the end is the only one; a run that goes on may find others."""
        train = self.config.train
        commits = self.home == "disk" and self.config.memory.commits == "step"
        by_clock = not commits if train.save_minutes is None else train.save_minutes > 0
        return not 0 < train.save_every < train.steps and not by_clock and train.resume == "none"


Row = tuple[tuple[str, Callable[[Case], bool]], ...]
"""Reasons for which a key has no effect, and when each holds."""


class Idle:
    """When a key has no effect: the first reason that holds is said.

    Attributes:
        row: reasons, with what holds of a run where they do.
    """

    def __init__(self, *row: tuple[str, Callable[[Case], bool]]) -> None:
        self.row = row


class Mark(Enum):
    """What is asked of a key besides."""

    OF_A_RANK = "ranks of a run may differ in it: paths, and what is of their machines"
    TOLD_ON_RESUME = "a run that goes on with another value says so"


OF_A_RANK, TOLD_ON_RESUME = Mark.OF_A_RANK, Mark.TOLD_ON_RESUME

# Reasons of several keys. FIELDS: records with fields of their own are read by trainers of other libraries.
ALONE: Final[Row] = (("a single process trains", Case.is_alone),)
MASKS: Final[Row] = (
    ("the model predicts the next token and not hidden ones", lambda case: case.around.masks is False),
    ("train.objective predicts no hidden tokens", lambda case: not case.learns("sft")),
)
NO_STALL: Final[Row] = (("train.on_stall is ignore", lambda case: case.config.train.on_stall == "ignore"),)
STAGES: Final[Row] = (
    ("several workers have slots for their stages, and hand inputs over", Case.has_several_workers),
)
HOST_HOME: Final[Row] = (("the home is in host memory", lambda case: case.home == "host"),)
NO_EVALUATION: Final[Row] = (
    ("neither eval.data nor eval.split says what on", lambda case: not case.config.eval.on),
)
NO_RECORDS: Final[Row] = (
    (
        "files of this kind hold no records",
        lambda case: case.around.container in ("text", "tokens") and not case.config.data.more,
    ),
)
TRAINERS: Final[Row] = (("a trainer of another library trains", Case.by_trainer),)
FIELDS: Final[Row] = (
    (
        "records have fields of their own",
        lambda case: case.by_trainer() and not case.learns(*OBJECTIVES_OF["teacher"]),
    ),
)
NO_WRITERS: Final[Row] = (("telemetry.writers is empty", lambda case: not case.config.telemetry.writers),)


def marked(section: type["BaseModel"], mark: Mark) -> frozenset[str]:
    """Return the keys of a section that have a mark."""
    return frozenset(key for key, field in section.model_fields.items() if mark in field.metadata)


def idle_rows(config: type["BaseModel"]) -> Iterator[tuple[str, Row]]:
    """Yield each key, dotted, with the reasons for which it may have no effect."""
    for name, section in config.model_fields.items():
        kind: Any = section.annotation
        for key, field in kind.model_fields.items():
            rows = (each.row for each in field.metadata if isinstance(each, Idle))
            yield f"{name}.{key}", (*kind.idle.row, *(reason for row in rows for reason in row))


def settings_without_effect(config: "Config", around: Surroundings) -> list[str]:
    """Return one sentence per setting that differs from its default and changes nothing in this run."""
    case = Case(config, around)
    notes = []
    for key, row in idle_rows(type(config)):
        why = next((reason for reason, holds in row if holds(case)), None)
        section, _, name = key.partition(".")
        if why is not None and _is_set(getattr(config, section), name):
            notes.append(f"{key} has no effect: {why}")
    return notes


def _is_set(section: "Section", key: str) -> bool:
    return bool(getattr(section, key) != type(section).model_fields[key].default)


def _size(value: Any) -> Any:
    """Accept ``"64MiB"`` and whole numbers of bytes; anything else fails as a size, in words."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("not a size; write a number and a unit, e.g. 64MiB, 20GiB or 24GB")
    num_bytes = parse_bytes(value)
    if num_bytes <= 0:
        raise ValueError("a size must be above zero")
    if isinstance(value, str) and num_bytes < 2**20 and value.strip().isdigit():
        raise ValueError(f"{value} without a unit is {value} bytes; write {value}MiB or {value}GiB")
    return num_bytes


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _modules(value: Any) -> Any:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    raise ValueError("must be a text, or a list of names of modules")


Size = Annotated[int, BeforeValidator(_size)]
PathText = Annotated[str, BeforeValidator(_path), Field(min_length=1)]
Device = Annotated[str, AfterValidator(check_device_name)]
# Whole ones stay whole, so that they are written as they were.
Positive = Annotated[
    float, Field(gt=0), AfterValidator(lambda value: int(value) if value % 1 == 0 else value)
]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Modules = Annotated[str | tuple[str, ...], BeforeValidator(_modules)]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion from one type to another.

    A key is described by its `Field`, and by what stands beside its type: when it has no effect (`Idle`), whether the
    ranks of a run may differ in it, and whether a run that goes on says that it was another (`Mark`).

    Attributes:
        idle: when no key of the section has an effect.
    """

    idle: ClassVar[Idle] = Idle()

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
