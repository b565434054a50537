"""Modules of the units for each worker: two workers may run the same unit at once, with weights in slots of their own.

A replica has no weights: parameters are bound to slots as in the model itself. Buffers are copied to the worker's
device; what a unit writes into them stays with that worker.
"""

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from outsize.compat.torch_private import buffers_of
from outsize.errors import ModelError
from outsize.model.split import Split
from outsize.model.walk import Boundaries, recording


@dataclass(frozen=True, slots=True)
class ModuleReplica:
    """The units of a model for one worker.

    Attributes:
        split: as that of the model, its modules and owners those of the replica.
        forwards: the units' own forwards.
    """

    split: Split
    forwards: tuple[Callable[..., Any], ...]


def replicate(split: Split, boundaries: Boundaries, device: torch.device) -> ModuleReplica:
    """Return a replica of the units of ``split`` whose buffers lie on ``device``.

    Raises:
        ModelError: a unit cannot be copied, or its forward is not a method of it.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in split.model.parameters()}
    try:
        copies = tuple(copy.deepcopy(list(split.modules), memo))
    except Exception as error:
        raise ModelError(
            f"units of {type(split.model).__name__} cannot be copied for several workers: {error}; use one device"
        ) from error
    reals = zip(boundaries.reals, copies, strict=True)
    forwards = tuple(recording(_own(real, module)) for real, module in reals)
    for module in copies:
        vars(module).pop("forward", None)  # the boundary of the model itself
        for child in module.modules():
            for name, buffer in buffers_of(child).items():
                if buffer is not None:
                    buffers_of(child)[name] = buffer.to(device)
    owners = {
        name: tuple((memo[id(module)], attribute) for module, attribute in places if id(module) in memo)
        for name, places in split.owners.items()
    }
    return ModuleReplica(replace(split, modules=copies, owners=owners), forwards)


def glue_places(split: Split, name: str) -> tuple[tuple[nn.Module, str], ...]:
    """Where the parameter ``name`` is held outside all units."""
    inside = {id(child) for module in split.modules for child in module.modules()}
    return tuple((module, attribute) for module, attribute in split.owners[name] if id(module) not in inside)


def _own(real: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    if not isinstance(real, types.MethodType) or not isinstance(real.__self__, nn.Module):
        raise ModelError(
            f"{type(module).__name__} has a forward that was put in from outside, which several workers cannot run "
            "at once; use one device"
        )
    return types.MethodType(real.__func__, module)
