"""Parts of a trial: one unit by itself, its weights, its loss, and what it takes compiled."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from outsize.compat import torch_private
from outsize.compat.torch_private import allocations, has_memory, memory_key, parameters_of, weak_storage
from outsize.model.sizes.model_spec import ITEMSIZE, ModelSpec
from outsize.model.split import Split
from outsize.model.tiled import loss_of, shift_labels
from outsize.model.walk import UnitCall
from outsize.optim.optimizer_spec import WEIGHTS
from outsize.runtime.forward.binding import TORCH_DTYPE, Binder, glue_places
from outsize.runtime.forward.microbatch import MicrobatchRun
from outsize.runtime.forward.staged_run import READ_NO_VALUE
from outsize.runtime.forward.unit_visit import (
    Gradients,
    UnitVisit,
    box_of,
    hand_out,
    is_differentiable,
    versions_of,
    visit_of,
)
from outsize.runtime.ops.compute_ops import seed_of
from outsize.runtime.trial.measured import Trace


class OneUnit(MicrobatchRun):
    """Passages through one unit: it is called as ``call`` says, and what it returns goes nowhere."""

    def __init__(self, model: nn.Module, call: UnitCall, num_units: int) -> None:
        def reseed(unit: int, glue: bool) -> None:
            torch.default_generator.manual_seed(seed_of(0, 0, unit, 0, glue))

        super().__init__(model, {}, (True,) * num_units, reseed)
        self._call = call

    def arrive(self, unit: int) -> UnitVisit:
        """Begin a visit of the unit by the call of this trial."""
        visit = self._visits[unit] = visit_of(self._call)
        return visit

    def hand_out(self) -> Any:
        """Return what the unit returned last, with gradients that go nowhere."""
        assert self._returned is not None
        return self._returned.build(hand_out(self._waiting, Gradients(self._waiting)))

    @property
    def meets_objects(self) -> bool:
        """Whether the unit is given or returns what code may write into."""
        assert self._returned is not None
        return bool(self._returned.outline.places)

    def bring_gradients(self, unit: int) -> None:
        """Have gradients of all outputs, zeros, arrive at the unit."""
        values = [torch.zeros_like(leaf) if is_differentiable(leaf) else None for leaf in self._waiting]
        self._visits[unit].box.values = values


# Random numbers of a trial's weights, which then begin again: no row of a matrix has as many.
PERIOD = 2**20 - 3


def bind_trial_weights(
    binder: Binder, spec: ModelSpec, device: torch.device | None = None, deviation: float = 0.02
) -> Tensor:
    """Bind every unit to the same small random numbers, as many as the largest unit has; returns their memory.

    Args:
        binder: of the model.
        spec: its units.
        device: where the numbers lie; None for the CPU.
        deviation: standard deviation of the numbers.
    """
    kinds = {WEIGHTS: (spec.dtype, max(unit.numel for unit in spec.units))}
    for part in (part for unit in spec.units for part in unit.frozen):
        kinds[part.plane] = part.dtype, max(part.numel, kinds.get(part.plane, ("", 0))[1])
    memory = torch.empty(sum(numel * ITEMSIZE[dtype] for dtype, numel in kinds.values()), dtype=torch.uint8)
    end = 0
    spans = {}
    for name, (dtype, numel) in kinds.items():
        start, end = end, end + numel * ITEMSIZE[dtype]
        spans[name] = (start, end, TORCH_DTYPE[dtype])
        values = memory[start:end].view(TORCH_DTYPE[dtype])
        drawn = values[:PERIOD].normal_(0.0, deviation, generator=torch.Generator().manual_seed(0))
        for begin in range(PERIOD, numel, PERIOD):
            values[begin : begin + PERIOD] = drawn[: numel - begin]
    memory = memory.to(device)
    planes = {name: memory[start:end].view(dtype) for name, (start, end, dtype) in spans.items()}
    for unit in spec.units:
        parts = [planes[part.plane][: part.numel] for part in unit.frozen]
        binder.bind(unit, planes[WEIGHTS][: unit.numel], *parts)
    return memory


def is_plain(head_output: Any, output: Any, labels: Tensor | None) -> bool:
    """Whether nothing but a shifted mean cross-entropy follows the head, judged on made-up logits."""
    logits = getattr(output, "logits", None)
    if not isinstance(head_output, Tensor) or not isinstance(logits, Tensor) or labels is None:
        return False
    if logits.shape[:-1] != labels.shape or labels.dim() < 2:  # a label for each row, say
        return False
    if logits.shape != head_output.shape or not torch.equal(logits, head_output):
        return False
    ours = _cross_entropy(logits, shift_labels(labels))
    return bool(torch.isclose(ours, loss_of(output).float(), rtol=1e-4, atol=1e-5))


def is_shifted(output: Any, labels: Tensor | None) -> bool:
    """Whether the loss is nearer to that of the next token than to that of the token in its place.

    Where virtual tokens stand before the others, the first label follows one of them and is a target, shifted or not.
    """
    logits = getattr(output, "logits", None)
    if labels is None or not isinstance(logits, Tensor) or labels.dim() < 2:
        return True
    if logits.shape[:-1] != labels.shape:
        return logits.dim() < 3 or logits.shape[1] <= labels.shape[1]
    loss = loss_of(output).float()
    here, following = _cross_entropy(logits, labels), _cross_entropy(logits, shift_labels(labels))
    return bool((loss - following).abs() <= (loss - here).abs())


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1)
    )


class SharedInputs:
    """Inputs of units that something else uses as well: another unit, code behind the unit, the caller of the model.

    Attributes:
        used_later: whether code outside of units uses one that its unit has taken: it must be there still.
        changed: unit and position of each that such code has changed in place since.
    """

    def __init__(self) -> None:
        self.used_later = False
        self.changed: set[tuple[int, int]] = set()
        self._places: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        # As long as they are there, no other memory has the same key.
        self._memories: dict[int, object] = {}
        self._sizes: dict[int, int] = {}
        self._shared: set[int] = set()
        self._used: set[int] = set()
        self._hidden: set[int] = set()  # inputs that are no ids: those never leave the device

    def receive(self, unit: int, given: Sequence[Tensor]) -> None:
        """Note what ``unit`` is called with, by position."""
        for position, leaf in enumerate(given):
            if not has_memory(leaf):
                continue
            key = self._known(leaf)
            # What a unit has returned moves on as it is: code between may have saved it for its own backward.
            used = key in self._used and box_of(leaf) is not None
            if used or any(other != unit for other, _ in self._places[key]):
                self._shared.add(key)
            self._places[key].add((unit, position))
            if leaf.is_floating_point():
                self._hidden.add(key)
            if leaf.requires_grad:
                self._sizes[key] = leaf.untyped_storage().nbytes()

    def use(self, tensors: Iterable[Tensor]) -> None:
        """Note what code outside of units computes with, or the model returns."""
        keys = {self._known(tensor) for tensor in tensors if has_memory(tensor)}
        self.used_later = self.used_later or not keys.isdisjoint(self._hidden)
        self._used |= keys
        self._shared |= self._used & self._places.keys()

    def change(self, tensors: Iterable[Tensor]) -> None:
        """Note what code outside of units has changed in place."""
        for tensor in tensors:
            if has_memory(tensor):
                self.changed |= self._places.get(memory_key(tensor), set())

    def _known(self, tensor: Tensor) -> int:
        """Return the key of the memory of ``tensor``, which no other memory has from now on."""
        key = memory_key(tensor)
        if key not in self._memories:
            self._memories[key] = weak_storage(tensor.untyped_storage())
        return key

    @property
    def places(self) -> frozenset[tuple[int, int]]:
        """Unit and position of each input that is shared."""
        return frozenset().union(*(self._places[key] for key in self._shared))

    @property
    def num_bytes(self) -> int:
        """Bytes of shared inputs that carry gradients, each memory once."""
        return sum(self._sizes.get(key, 0) for key in self._shared)


class OuterUses(TorchFunctionMode):
    """While entered, notes for `unit` that code on the way to it uses a trained parameter of the rest.

    What lies in a unit is only where it should be while that unit runs: code that computes with it outside is noted by
    the names of such parameters.

    Args:
        split: a model whose parameters are in place.
        shared: is told of what that code computes with.

    Attributes:
        unit: that the model is on its way to.
        found: units on the way to which one was used.
        names: parameters of units that were computed with outside of them.
    """

    def __init__(self, split: Split, shared: SharedInputs) -> None:
        super().__init__()
        self._shared = shared
        rest = [tensor for unit in split.spec.units if unit.kind == "rest" for tensor in unit.tensors]
        self._watched = {
            id(parameters_of(module)[name])
            for tensor in rest
            if tensor.trainable
            for module, name in glue_places(split, tensor.name)
        }
        self._inside = {
            id(parameters_of(module)[attribute]): tensor.name
            for unit in split.spec.units
            if unit.kind != "rest"
            for tensor in unit.all_tensors
            for module, attribute in split.owners[tensor.name]
        }
        self.unit = 0
        self.found: set[int] = set()
        self.names: set[str] = set()

    def give(self, unit: int, given: Sequence[Tensor]) -> None:
        """Note that code outside gives ``unit`` trained parameters of the rest as arguments."""
        if any(id(leaf) in self._watched for leaf in given):
            self.found.add(unit)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in torch_private.leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = versions_of(tensors)
        result = func(*args, **(kwargs or {}))
        both = zip(tensors, versions, versions_of(tensors), strict=True)
        self._shared.change(tensor for tensor, before, after in both if before != after)
        if func.__name__ not in READ_NO_VALUE:
            self._shared.use(tensors)
        given = [leaf for leaf in tensors if isinstance(leaf, nn.Parameter)]
        if any(id(leaf) in self._watched for leaf in given):
            self.found.add(self.unit)
        names = {self._inside[id(leaf)] for leaf in given if id(leaf) in self._inside}
        if names and any(isinstance(leaf, Tensor) for leaf in torch_private.leaves_of(result)):
            self.names |= names  # not its form or place: its values
        return result


def units_that_share(split: Split) -> set[int]:
    """Units that hold a trained parameter of the rest themselves, such as a tied table."""
    rest = [tensor for unit in split.spec.units if unit.kind == "rest" for tensor in unit.tensors]
    places = {id(module) for tensor in rest if tensor.trainable for module, _ in split.owners[tensor.name]}
    return {
        index
        for index, unit in enumerate(split.modules)
        if any(id(module) in places for module in unit.modules())
    }


T = TypeVar("T")


class Taken(NamedTuple):
    """What one forward of a unit and its backward take.

    Attributes:
        forward: bytes alive in a forward that makes a graph.
        backward: the same through a backward behind it.
        saved: bytes that the forward leaves alive besides its outputs.
        num_saved: tensors that it saves.
        outputs: what it returned.
    """

    forward: Trace
    backward: Trace
    saved: int
    num_saved: int
    outputs: Any


def measure_compiled(call: Callable[[], Any]) -> Taken:
    """Measure what ``call``, the forward of a unit on arguments that are leaves, takes; it has run before."""
    saved: list[None] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(None)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs, forward = _allocated(call)
    tensors = [leaf for leaf in torch_private.leaves_of(outputs) if isinstance(leaf, Tensor)]
    made_bytes = {memory_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    roots = [tensor for tensor in tensors if tensor.requires_grad]

    def back() -> None:
        if roots:
            torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])

    alive = forward[-1] if forward else 0
    _, behind = _allocated(back)
    backward = (*forward, *(alive + num_bytes for num_bytes in behind))
    return Taken(forward, backward, max(alive - sum(made_bytes.values()), 0), len(saved), outputs)


def _allocated(work: Callable[[], T]) -> tuple[T, Trace]:
    """Return what ``work`` returns, and the bytes alive after each allocation and release in it."""
    result, changes = allocations(work)
    return result, tuple(accumulate(changes))
