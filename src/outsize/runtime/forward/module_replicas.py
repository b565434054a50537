"""Modules of the units for each worker: two workers may run the same unit at once, with weights in slots of their own.

A replica has no weights: parameters are bound to slots as in the model itself. Buffers are copied to the worker's
device; what a unit writes into them stays with that worker. Attributes that the program changes in the model later
(adapters that it turns off, a scale) are copied again before the next forward or backward; other modules or hooks put
into a unit are refused.
"""

import copy
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from outsize.compat.torch_private import buffers_of, hooks_of, version_of
from outsize.errors import ModelError
from outsize.model.split import Split
from outsize.model.walk import Boundaries, recording
from outsize.runtime.forward.outline import outline_of
from outsize.runtime.forward.places import MODULE


@dataclass(frozen=True, slots=True)
class ModuleReplica:
    """The units of a model for one worker.

    Attributes:
        split: as that of the model, its modules and owners those of the replica.
        forwards: the units' own forwards.
    """

    split: Split
    forwards: tuple[Callable[..., Any], ...]


class Originals:
    """The units of a model while workers run replicas of them.

    Args:
        split: the model and its units.

    Attributes:
        modules: all modules of units, in the order of those of a replica.
        version: counts the changes of their attributes and buffers that `look` has seen.
    """

    def __init__(self, split: Split) -> None:
        self._units = split.modules
        self.modules = [one for unit in split.modules for one in unit.modules()]
        self._structure = self._structure_now()
        self.version = 0
        self._note()

    def look(self) -> int:
        """Look for changes, and return ``version``.

        Raises:
            ModelError: a unit has got another module, class, hook or forward inside.
        """
        for module, former, now in zip(self.modules, self._structure, self._structure_now(), strict=True):
            if former != now:
                raise ModelError(
                    f"{type(module).__name__} in a layer was given another module, hook, forward or class, and each "
                    "of several devices has a copy: do so before outsize.wrap, wrap the model anew, or use one device"
                )
        versions = [0 if leaf.is_inference() else version_of(leaf) for leaf in self._leaves]
        if versions != self._versions or self._outline.written(self._leaves):
            self._note()
            self.version += 1
        return self.version

    def _note(self) -> None:
        self._leaves, self._outline = outline_of((), self.modules)
        self._versions = [0 if leaf.is_inference() else version_of(leaf) for leaf in self._leaves]

    def _structure_now(self) -> list[tuple[Any, ...]]:
        units = set(map(id, self._units))
        return [
            (
                type(module),
                *module.children(),
                *(() if id(module) in units else (*_hooks_of(module), vars(module).get("forward"))),
            )
            for module in self.modules
        ]

    def refresh(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        """Give ``modules``, those of a replica on ``device``, the attributes and buffers of now.

        Raises:
            ModelError: one of them cannot be copied.
        """
        memo: dict[int, Any] = {id(one): copied for one, copied in zip(self.modules, modules, strict=True)}
        memo |= {id(one): one for module in self.modules for one in module.parameters(recurse=False)}
        for module, replica in zip(self.modules, modules, strict=True):
            present = {name: value for name, value in MODULE.read(module) if "_forward_" not in name}
            buffers = present.pop("_buffers")
            try:
                vars(replica).update({name: copy.deepcopy(value, memo) for name, value in present.items()})
            except Exception as error:
                raise ModelError(
                    f"{type(module).__name__} in a layer cannot be copied for several workers ({error}): use one device"
                ) from error
            for name, _ in MODULE.read(replica):
                if name != "_buffers" and "_forward_" not in name and name not in present:
                    del vars(replica)[name]
            for name, buffer in buffers.items():
                buffers_of(replica)[name] = None if buffer is None else buffer.detach().clone().to(device)


def _hooks_of(module: nn.Module) -> tuple[Any, ...]:
    return tuple(hook for hooks in hooks_of(module) for hook in hooks.values())


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
            f"units of {type(split.model).__name__} cannot be copied for several workers ({error}): use one device"
        ) from error
    reals = zip(boundaries.reals, copies, strict=True)
    forwards = tuple(recording(_own(real, module)) for real, module in reals)
    for module, original in zip(copies, split.modules, strict=True):
        vars(module).pop("forward", None)  # the boundary of the model itself
        for child, inner in zip(module.modules(), original.modules(), strict=True):
            if inner is not original and "forward" in vars(inner):
                _own(vars(inner)["forward"], inner)
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
