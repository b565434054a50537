"""Try what a unit does besides returning tensors, and what passes it by way of the model.

* Whether it changes state: buffers, attributes of its modules, what its code and its hooks name.
* Whether its graph reads weights behind autograd's back, as a function does that keeps one on its context. A graph that
  waits for its backward is told where weights lie then (`runtime.forward.saved_tensors`), but only of those that
  autograd saves. So these are replaced by zeros, and what lies in memory by numbers that are none: if those reach a
  gradient, something has read the memory itself.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outsize.compat.torch_private import memory_key, version_of
from outsize.model.split import Split
from outsize.model.walk import UnitCall
from outsize.runtime.forward.outline import outline_of
from outsize.runtime.forward.unit_state import UnitState, random_states, set_random_states, untouched
from outsize.runtime.forward.unit_visit import UnitVisit, is_differentiable, visit_of


@dataclass(frozen=True, slots=True)
class UnitEffects:
    """What one unit does besides returning tensors.

    Attributes:
        state: whether it changes its state.
        outlet: whether it leaves a tensor with a history there.
        stashes: whether its graph reads weights that autograd did not save.
        objects: whether it is given, or returns, lists, dicts or objects that code may write into.
    """

    state: bool = False
    outlet: bool = False
    stashes: bool = False
    objects: bool = False


def effects_of(
    module: nn.Module, forward: Callable[..., Any], call: UnitCall, device: torch.device
) -> UnitEffects:
    """Run a unit that is called with ``call``, and leave everything as it was.

    Args:
        module: the unit, its parameters on weights of a trial.
        forward: its own.
        call: its arguments.
        device: that they are on.
    """
    state = UnitState(module.modules())
    generators = random_states(device)
    with untouched(state, (call.args, tuple(call.kwargs.values()))), torch.enable_grad():
        visit = visit_of(call, state, outlet=True)
        given = visit.given
        visit.track_inputs()
        saving = _Saving(module)
        with saving.hooks():
            returned = visit.run(forward, graph=True)
        effects = UnitEffects(
            state=returned.changed or visit.changes_in_place(given),
            outlet=returned.left,
            objects=bool(visit.arguments.places) or returned.has_objects,
        )
        ends = [leaf for leaf in returned.leaves if is_differentiable(leaf) and leaf.requires_grad]
        stashes = bool(ends) and saving.reads_memory(ends, visit)
    set_random_states(device, generators)
    return UnitEffects(effects.state, effects.outlet, stashes, effects.objects)


class _Saving:
    """Saves what autograd saves of a unit's graph, but of weights only their form."""

    def __init__(self, module: nn.Module) -> None:
        self._weights = [one for one in module.parameters() if one.is_floating_point() and one.numel()]
        self._storages = {memory_key(one) for one in self._weights}
        self._poisoned = False

    def hooks(self) -> Any:
        """A context in which the forward runs."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def reads_memory(self, ends: Sequence[Tensor], visit: UnitVisit) -> bool:
        """Whether a backward from ``ends`` to what was given and to weights reads the weights where they lie."""
        wanted = [one for one in self._weights if one.requires_grad]
        if not wanted and not visit.sources:
            return False
        ones = [torch.ones_like(end) for end in ends]

        def gradients() -> list[Tensor]:
            arrived = visit.arrived.values
            arrived[:] = [None] * len(arrived)
            of_weights = _leaf_gradients(ends, wanted, ones)
            return [*of_weights, *(one for one in arrived if one is not None)]

        with self._poison():
            poisoned = gradients()
        reached = any(bool(one.isnan().any()) for one in poisoned)
        return reached and not any(bool(one.isnan().any()) for one in gradients())

    @contextmanager
    def _poison(self) -> Iterator[None]:
        """Have the first number of each matrix of the weights be none, while the context lasts."""
        firsts = [_firsts_of(one) for one in self._weights]
        saved = [one.clone() for one in firsts]
        try:
            for one in firsts:
                one.fill_(math.nan)
            yield
        finally:
            for one, value in zip(firsts, saved, strict=True):
                one.copy_(value)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout is torch.strided and memory_key(tensor) in self._storages:
            return tensor.shape, tensor.dtype, tensor.device
        return tensor.detach()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        shape, dtype, device = packed
        return torch.zeros(shape, dtype=dtype, device=device)


def _leaf_gradients(
    ends: Sequence[Tensor], leaves: Sequence[Tensor], given: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of all leaves of a graph by a backward that keeps the graph and the leaves' ``grad``.

    `torch.autograd.grad` refuses reentrant activation checkpointing, which a unit may do inside.
    """
    gradients = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(ends, given, retain_graph=True)
        return [leaf.grad for leaf in leaves if leaf.grad is not None]
    finally:
        for leaf, grad in zip(leaves, gradients, strict=True):
            leaf.grad = grad


def _firsts_of(weight: Tensor) -> Tensor:
    """Return the first number of each matrix in ``weight``, in its own memory but with a count of changes apart."""
    shown = torch.empty(0, dtype=weight.dtype, device=weight.device).set_(
        weight.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride()
    )
    if shown.dim() > 1:
        return shown[..., :1, :1]
    return shown[:1] if shown.dim() else shown


class CrossedState:
    """State of the modules outside of units, and of each unit until it is called, from the start of a forward on.

    The model's own code may pass values by a unit: it sets an attribute, pushes onto a list, writes into a buffer, and
    looks there behind the unit. Microbatches take turns at units, so that each would find what another has left. So
    it is with what that code puts on units to come (hooks that hold values of the batch, as PEFT's for aLoRA do).

    What differs at a unit and no longer at the end has crossed it, and so has a tensor with a history. Changes in place
    count as well, but for those of PyTorch's own modules (BatchNorm). What else is there in the end may have been made
    once for all.
    """

    def __init__(self, split: Split) -> None:
        inside = {id(child) for module in split.modules for child in module.modules()}
        outer = [module for module in split.model.modules() if id(module) not in inside]
        states = [UnitState(each) for each in (outer, *(module.modules() for module in split.modules))]
        self._outlines = [outline_of((), state.modules, state.others) for state in states]
        of_torch = [module for module in outer if type(module).__module__.startswith("torch.nn.")]
        counting = {id(buffer) for module in of_torch for buffer in module.buffers(recurse=False)}
        leaves, _ = self._outlines[0]
        self._versions = {at: _version(leaf) for at, leaf in enumerate(leaves) if id(leaf) not in counting}
        self._at_units: dict[int, set[tuple[int, Any]]] = {0: set()}  # by number of the outline
        self._crossed = ""

    def reach_unit(self, unit: int) -> None:
        """Note what is another where ``unit`` is called, on the unit itself the first time."""
        for number in (0,) if unit + 1 in self._at_units else (0, unit + 1):
            leaves, outline = self._outlines[number]
            written = outline.written(leaves)
            self._at_units[number] = self._at_units.get(number, set()) | written.keys()
            keys = (key for key, one in written.items() if isinstance(one, Tensor) and one.requires_grad)
            self._crossed = self._crossed or next((outline.name_of(*key) for key in keys), "")

    def crossing(self) -> str:
        """Return the name of something that has crossed a unit, once the forward has returned; empty for nothing."""
        for at, version in self._versions.items():
            if _version(self._outlines[0][0][at]) != version:
                return self._outlines[0][1].name_of_leaf(at)
        for number, keys in self._at_units.items():
            leaves, outline = self._outlines[number]
            gone = sorted(keys and keys - outline.written(leaves).keys(), key=str)
            self._crossed = self._crossed or next((outline.name_of(*key) for key in gone), "")
        return self._crossed


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)
