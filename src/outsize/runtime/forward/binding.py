"""Parameters of a unit as views of a slot, and the modules of each worker that hold them.

A replica has no weights: parameters are bound to slots as in the model itself. Buffers are copied to the worker's
device; what a unit writes into them stays with that worker. Attributes that the program changes in the model later
(adapters that it turns off, a scale) are copied again before the next forward or backward; other modules or hooks put
into a unit are refused.
"""

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outsize.accelerators import catch_up
from outsize.compat.torch_private import buffers_of, hooks_of, parameters_of, version_of
from outsize.compat.transformers_private import put_output_hooks
from outsize.errors import ModelError
from outsize.model.sizes.model_spec import ITEMSIZE, UnitSpec
from outsize.model.split import Split
from outsize.model.walk import Boundaries, recording
from outsize.runtime.device.driver import last_calls
from outsize.runtime.forward.outline import outline_of
from outsize.runtime.forward.places import MODULE

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def tensor_views(unit: UnitSpec, plane: Tensor) -> list[Tensor]:
    """Views of ``plane`` [unit.numel], one per tensor of ``unit.tensors``, in its shape."""
    return [plane[t.offset : t.offset + t.numel].view(t.shape) for t in unit.tensors]


def weight_planes(unit: UnitSpec, dtype: str, memory: Tensor) -> tuple[Tensor, ...]:
    """Cut the weights of ``unit`` as they lie on a device, bytes, into its plane and those of its frozen parts."""
    planes, end = [], 0
    kinds = [(unit.numel, dtype), *((part.numel, part.dtype) for part in unit.frozen)]
    for numel, kind in kinds:
        start, end = end, end + numel * ITEMSIZE[kind]
        planes.append(memory[start:end].view(TORCH_DTYPE[kind]))
    return tuple(planes)


def weight_views(unit: UnitSpec, planes: Sequence[Tensor]) -> list[Tensor]:
    """Views of `weight_planes`, one per tensor of ``unit.all_tensors``, in its shape."""
    members = [unit.tensors, *(part.tensors for part in unit.frozen)]
    return [
        plane[t.offset : t.offset + t.numel].view(t.shape)
        for plane, tensors in zip(planes, members, strict=True)
        for t in tensors
    ]


@contextmanager
def buffers_on(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Have the buffers of ``model`` (rotary frequencies, masks) on ``device`` for as long as the context lasts.

    One that is replaced meanwhile stays replaced.
    """
    places = [
        (buffers_of(module), name, buffer)
        for module in model.modules()
        for name, buffer in buffers_of(module).items()
        if buffer is not None
    ]
    moved = {id(buffer): buffer.to(device) for _, _, buffer in places}  # shared ones stay shared
    try:
        for buffers, name, buffer in places:
            buffers[name] = moved[id(buffer)]
        yield
    finally:
        with last_calls(device):
            for buffers, name, buffer in places:
                shown = moved[id(buffer)]
                if shown is buffer or buffers.get(name) is not shown:
                    continue
                buffers[name] = buffer
                if buffer.shape == shown.shape:
                    buffer.copy_(shown)
                else:  # `data =` of another shape
                    buffer.data = shown.data.to(buffer.device)


@dataclass(slots=True)
class _Accumulator:
    views: list[Tensor]
    touched: set[int]
    keeps_first: bool
    first: dict[int, Tensor] = field(default_factory=dict)


class GradientSink(Protocol):
    """What becomes of fresh gradients."""

    def hook(self, unit: int, position: int) -> Callable[[Tensor], None]:
        """The hook that takes one parameter's gradient as soon as autograd has it."""


class GradientSums:
    """fp32 sums of gradients over microbatches, per unit, added as soon as autograd has one.

    The first gradient of a parameter is copied and later ones are added, so no plane is ever zeroed, and a parameter
    that gets none in a step is known by name. The first may be kept as it is until the second comes, or until the sum
    is to be read (`settle`): then no copy is made.
    """

    def __init__(self) -> None:
        self._of: dict[int, _Accumulator] = {}

    def open(
        self,
        unit: UnitSpec,
        plane: Tensor,
        touched: AbstractSet[int] = frozenset(),
        *,
        keeps_first: bool = False,
    ) -> None:
        """Sum the gradients of ``unit`` in ``plane``, fp32 [unit.numel], from now on.

        Args:
            unit: the unit.
            plane: where.
            touched: positions of the tensors of which ``plane`` holds a sum already.
            keeps_first: whether there is room for first gradients beside it.
        """
        self._of[unit.index] = _Accumulator(tensor_views(unit, plane), set(touched), keeps_first)

    def is_open(self, unit: int) -> bool:
        """Whether gradients of ``unit`` are being summed."""
        return unit in self._of

    def close(self, unit: int) -> frozenset[int]:
        """Stop, and return the positions of the tensors that received a gradient."""
        self.settle(unit)
        return frozenset(self._of.pop(unit).touched)

    def settle(self, unit: int) -> None:
        """Put first gradients that are still kept into the plane: from now on it holds the sums so far."""
        held = self._of[unit]
        while held.first:
            position, gradient = held.first.popitem()
            held.views[position].copy_(gradient)

    def touched(self, unit: int) -> frozenset[int]:
        """Positions of the tensors that have received a gradient so far."""
        return frozenset(self._of[unit].touched)

    def hook(self, unit: int, position: int) -> Callable[[Tensor], None]:
        """The hook that moves one parameter's fresh gradient into its sum."""

        def add(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                return
            held = self._of[unit]
            view = held.views[position]
            first = held.first.pop(position, None)
            if first is not None:
                torch.add(first, gradient, out=view)
            elif position in held.touched:
                view.add_(gradient.to(view.device))  # of the rest it may come from another worker's device
            elif held.keeps_first and gradient.dtype is view.dtype and _lies_alone(gradient):
                held.first[position] = gradient
            else:
                view.copy_(gradient)
            held.touched.add(position)

        return add


def _lies_alone(gradient: Tensor) -> bool:
    """Whether to keep it keeps no other memory: it may be a part of the gradient of something larger."""
    return gradient.untyped_storage().nbytes() == gradient.nbytes


class Binder:
    """Puts parameters that live in slots into the modules of a model, and takes them out again."""

    def __init__(self, split: Split, sums: GradientSink) -> None:
        self._split = split
        self._sums = sums
        self._made: dict[tuple[int, int], list[nn.Parameter]] = {}
        self._former = {
            (id(module), name): parameter
            for places in split.owners.values()
            for module, name in places
            for parameter in (parameters_of(module)[name],)
        }

    def bind(self, unit: UnitSpec, *planes: Tensor) -> None:
        """Make the parameters of ``unit`` views of ``planes``: its own, [unit.numel], and those of its frozen parts."""
        key = (unit.index, next((plane.data_ptr() for plane in planes if plane.numel()), 0))
        if key not in self._made:
            self._made[key] = self._parameters(unit, planes)
        for tensor, parameter in zip(unit.all_tensors, self._made[key], strict=True):
            for module, name in self._split.owners[tensor.name]:
                parameters_of(module)[name] = parameter

    def unbind(self, unit: UnitSpec) -> None:
        """Give the modules of ``unit`` back the parameters that they had before."""
        for tensor in unit.all_tensors:
            for module, name in self._split.owners[tensor.name]:
                parameters_of(module)[name] = self._former[id(module), name]

    def close(self) -> None:
        """Unbind every unit and forget the views."""
        for unit in self._split.spec.units:
            self.unbind(unit)
        self._made.clear()

    def _parameters(self, unit: UnitSpec, planes: Sequence[Tensor]) -> list[nn.Parameter]:
        parameters = []
        views = weight_views(unit, planes)
        for position, (tensor, view) in enumerate(zip(unit.all_tensors, views, strict=True)):
            # With a count of changes of its own, as parameters have: PEFT's experts are set anew in their forward, the
            # same bytes, and what others of the unit have saved for a backward is as good as before.
            parameter = nn.Parameter(view.data, requires_grad=tensor.trainable)
            if tensor.trainable:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._sums.hook(unit.index, position)
                )
            parameters.append(parameter)
        return parameters


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

    Attributes:
        modules: all modules of units, in the order of those of a replica.
        version: counts the changes of their attributes and buffers that `look` has seen.
    """

    def __init__(self, split: Split) -> None:
        put_output_hooks(split.model)  # later ones would reach no replica
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
        for module, before, now in zip(self.modules, self._structure, self._structure_now(), strict=True):
            if before != now:
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
        catch_up(device)


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
