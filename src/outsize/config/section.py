"""What all sections share: the rules of a section, and the kinds of values that several of them hold."""

import os
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from outsize.accelerators import check_device_name
from outsize.config.without_effect import Idle
from outsize.units import parse_bytes


def _size(value: Any) -> Any:
    """Accept ``"64MiB"`` and whole numbers of bytes; anything else fails as a size, in words."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("not a size; write a number and a unit, e.g. 64MiB, 20GiB or 24GB")
    num_bytes = parse_bytes(value)
    if num_bytes <= 0:
        raise ValueError("a size must be above zero")
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
