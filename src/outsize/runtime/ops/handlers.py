"""Which method runs an op: the one that is marked with its verb. `planner.program.table` has the ops."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from outsize.errors import ModelError, OutsizeError
from outsize.planner.program.program import Kind, Op
from outsize.planner.program.table import ROWS

# By the verb, and whether the op is about a tile.
HandlerKey = tuple[Kind, bool]
HandlerTable = dict[HandlerKey, Callable[[Op, Any], None]]
_Method = TypeVar("_Method", bound=Callable[..., None])
# By class, as it is imported: its methods that run ops.
_HANDLERS: defaultdict[str, dict[HandlerKey, str]] = defaultdict(dict)


def handles(kind: Kind, *, tile: bool = False) -> Callable[[_Method], _Method]:
    """Register a method as the handler of ops of ``kind``; an override in a subclass replaces the handler.

    Args:
        kind: the verb.
        tile: whether it runs those of a tile, or those that are not.
    """

    def mark(method: _Method) -> _Method:
        owner, _, name = f"{method.__module__}.{method.__qualname__}".rpartition(".")
        _HANDLERS[owner][kind, tile] = name
        return method

    return mark


def handled_by(cls: type) -> dict[HandlerKey, str]:
    """Return the names of the methods of ``cls`` that run ops."""
    owners = (f"{parent.__module__}.{parent.__qualname__}" for parent in cls.__mro__)
    return {key: name for owner in owners for key, name in _HANDLERS.get(owner, {}).items()}


def handlers_in(parts: Iterable[object]) -> HandlerTable:
    """Return which method of ``parts`` runs an op."""
    return {key: getattr(part, name) for part in parts for key, name in handled_by(type(part)).items()}


def check_complete(classes: Iterable[type]) -> None:
    """Check that every op has a handler among the methods of ``classes``.

    Raises:
        TypeError: none says that it runs an op.
    """
    handled = {key for cls in classes for key in handled_by(cls)}
    missing = [row.text for row in ROWS if (row.kind, "tile" in row.fields) not in handled]
    if missing:
        raise TypeError(f"no method is marked as the one that runs {', '.join(missing)}")


# What a device raises under whatever code runs there: the machine's, not the model's.
_OF_DEVICES = (torch.AcceleratorError, torch.OutOfMemoryError)


class Naming:
    """Says in which op and unit the model's own code raised."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, (OutsizeError, *_OF_DEVICES)):
            advice = "; set train.deterministic=false" if "deterministic implementation" in str(error) else ""
            raise ModelError(
                f"the model raised in {self._where}: {type(error).__name__}: {error}{advice}"
            ) from error
