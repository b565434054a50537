"""A unit that the model has called: where the graph is cut, what came in and out, how it runs again.

A unit may do more than return tensors. It writes into a dict or a cache that it is given, returns an object of some
class, leaves a tensor on itself for the model's own code to find, counts in a buffer. So

* tensors are taken out of whatever holds them (`outline`), cut from their history, and gradients of all of them,
  returned or left, find back;
* what runs again runs on what there was at first, in copies, and leaves nothing.

A unit runs apart from the code around it. What it returns goes on into that code as fresh tensors; `hand_out` makes
them, and when a backward pass reaches them their gradients are kept in a `Gradients` box instead of travelling on.
The box holds no activation: what the surrounding code does not need is free at once.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from outsize.compat import torch_private
from outsize.compat.torch_private import memory_key, version_of, wants_gradient
from outsize.errors import ModelError
from outsize.model.walk import UnitCall
from outsize.runtime.forward.outline import Outline, outline_of
from outsize.runtime.forward.saved_tensors import SavedTensors, Selected
from outsize.runtime.forward.unit_state import UnitState, same_values

_log = logging.getLogger(__name__)
Forward = Callable[..., Any]
Roots = list[GradientEdge | None]


class Gate:
    """Whether gradients may arrive: only while their own microbatch goes backward."""

    __slots__ = ("is_open",)

    def __init__(self, *, is_open: bool = True) -> None:
        self.is_open = is_open

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let gradients arrive while the context lasts."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False


class Gradients:
    """Gradients of the tensors that one unit handed out, by position; None where none has arrived.

    Args:
        outputs: the tensors, in any nesting.
        gate: of the microbatch; None where it stays open.
    """

    def __init__(self, outputs: Any, gate: Gate | None = None) -> None:
        self.values: list[Tensor | None] = [None] * len(torch_private.leaves_of(outputs))
        self.gate = gate or Gate()

    def add(self, position: int, gradient: Tensor) -> None:
        """Add what one backward pass brings; a tensor used by several units collects several."""
        held = self.values[position]
        self.values[position] = gradient if held is None else held.to(gradient.device) + gradient


class _Boundary(torch.autograd.Function):
    """Gives a tensor to surrounding code; its gradient ends in a box.

    The tensor comes inside a tuple, where autograd does not see it, so the result is a fresh tensor rather than a view,
    and surrounding code may change it in place as it may in an uncut graph.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, box: Gradients, position: int, hidden: tuple[Tensor]) -> Tensor:
        ctx.box, ctx.position = box, position
        ctx.set_materialize_grads(False)
        return hidden[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None, None, None]:
        if gradient is None:  # it waits for the code that the tensor was handed to
            return None, None, None, None
        if not ctx.box.gate.is_open:
            raise ModelError(
                "a loss depends on a tensor that a layer left on itself, or in a list, and that the model's forward "
                "did not return, or that is of another microbatch; its gradient would not reach the layer. Have the "
                "layer and the model return it, or set microbatches=1"
            )
        ctx.box.add(ctx.position, gradient)
        return None, None, None, None


def box_of(tensor: Tensor | GradientEdge) -> tuple[Gradients, int] | None:
    """The box and the position in it where a gradient of ``tensor`` ends; None where other code comes before."""
    node = tensor.grad_fn if isinstance(tensor, Tensor) else tensor.node
    box = getattr(node, "box", None)
    return (box, node.position) if isinstance(box, Gradients) else None  # type: ignore[union-attr]


def is_differentiable(value: object) -> bool:
    """Whether ``value`` is a tensor that can carry a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def cut(outputs: Any) -> Any:
    """Return ``outputs``, any nesting of tensors and other values, without their history."""
    return torch_private.map_leaves(lambda leaf: leaf.detach() if is_differentiable(leaf) else leaf, outputs)


def hand_out(outputs: Any, box: Gradients, constants: Collection[int] = ()) -> Any:
    """Return ``outputs`` cut from their history; gradients end in ``box``, but for ``constants``, which have none.

    Autograd sums gradients of one tensor on the stream that is current now: that of the lane which reads the sum.
    """
    leaves, structure = torch_private.flatten(outputs)
    positions = [at for at, leaf in enumerate(leaves) if is_differentiable(leaf) and at not in constants]
    return torch_private.unflatten(cut_at(leaves, positions, box), structure)


def cut_at(leaves: Sequence[Any], positions: Iterable[int], box: Gradients) -> list[Any]:
    """Return ``leaves``, those at ``positions`` cut from their history; their gradients end in ``box``.

    There they arrive as they come. A leaf of a graph would give its gradient the strides that it has itself, and sums
    over a tensor that lies in another order are rounded otherwise.
    """
    cut_off = list(leaves)
    anchor = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        for position in positions:
            hidden = (cut_off[position].detach(),)
            cut_off[position] = _Boundary.apply(anchor, box, position, hidden)  # type: ignore[no-untyped-call]
    return cut_off


def constants_of(leaves: Sequence[Any]) -> set[int]:
    """Return the positions of tensors that could have a gradient and have none; nothing where no graph was made."""
    could = {at for at, leaf in enumerate(leaves) if is_differentiable(leaf)}
    constants = {at for at in could if not leaves[at].requires_grad}
    return set() if constants == could else constants


def roots_of(leaves: Sequence[Tensor]) -> Roots:
    """Where the graph of ``leaves`` begins, by position; unlike the tensors themselves it holds no memory of them."""
    return [get_gradient_edge(leaf) if leaf.requires_grad else None for leaf in leaves]


@dataclass(slots=True)
class Returned:
    """What a unit has returned and left.

    Attributes:
        leaves: its tensors, with their history.
        outline: how they hang together.
        changed: whether the state of the unit is another than before.
        left: whether a tensor with a history lies in that state.
    """

    leaves: list[Tensor]
    outline: Outline
    changed: bool = False
    left: bool = False

    @property
    def has_objects(self) -> bool:
        """Whether what was returned holds something that code may write into."""
        return self.outline.holds_places

    def build(self, leaves: list[Tensor]) -> Any:
        """Return what the unit returned, and have what it left lie there, with ``leaves`` for its tensors."""
        return self.outline.build(leaves)[0][0]


class GivenTensor(NamedTuple):
    """A tensor that a unit is given, and what made it, which is something else once code has changed it in place."""

    tensor: Tensor
    edge: GradientEdge


@dataclass(slots=True)
class UnitVisit:
    """A unit called by the model: its arguments, and the gradients of what it returned.

    Attributes:
        leaves: the tensors in its arguments, and then those of its state; differentiable ones cut from their history.
        given: the same as they were given, until it has run.
        names: of its keyword arguments, which come last.
        arguments: how the arguments hang together.
        sources: position in ``leaves`` → where the same tensor comes from, where it has a history.
        box: gradients of the outputs, filled as later units and glue run backward.
        arrived: gradients of ``leaves``, by position there, once the unit has run backward.
        num_arguments: leaves that are not of its state.
        where: its state; None of a unit that changes none.
        state: what it held.
        outlet: whether what it leaves in its state has a history that others go on from.
        roots: where the graph of the unit begins, for each of its outputs; None where there is no graph yet.
        held: memory of what its forward kept, which may leave the device; None where it kept nothing.
        selected: results that a recompute need not compute; None where there are none.
        versions: tensors in its arguments, and how often they had been changed in place when it had run.
    """

    leaves: list[Tensor]
    given: list[Tensor]
    names: tuple[str, ...]
    arguments: Outline
    sources: dict[int, GivenTensor]
    box: Gradients
    num_arguments: int
    where: UnitState | None = None
    state: Outline | None = None
    outlet: bool = False
    arrived: Gradients = field(default_factory=lambda: Gradients(()))
    roots: Roots | None = None
    held: SavedTensors | None = None
    selected: Selected | None = None
    versions: list[tuple[Tensor, int]] = field(default_factory=list)

    def run(self, forward: Forward, *, graph: bool) -> Returned:
        """Run the unit for the first time: what it writes stays.

        Args:
            forward: its own.
            graph: whether a graph is made that may need what the unit changes in place as it was meanwhile.
        """
        leaves, given = list(self.leaves), self.given
        if self.state is not None:
            for position in self._own():
                self.leaves[position] = given[position].detach().clone()
                leaves[position] = given[position].detach().clone() if graph else given[position]
            self.state.restore(leaves[self.num_arguments :])
        returned = self._called(forward, leaves, fresh=False)
        if graph and self.state is not None:
            with torch.no_grad():
                for position in self._own():
                    if not same_values(given[position], leaves[position]):  # outer code may have saved it
                        given[position].copy_(leaves[position])
        if returned.outline.places:
            returned.outline.restore([leaf.detach() for leaf in returned.leaves])
        self.given = []
        return returned

    def repeat(self, forward: Forward) -> list[Tensor]:
        """Run the unit again, on what there was at first, and return the leaves of `run`; nothing it writes stays."""
        if self.state is None or self.where is None:
            return self._called(forward, self.leaves, fresh=True).leaves
        leaves = list(self.leaves)
        for position in self._own():
            leaves[position] = leaves[position].clone()
        now, state = outline_of((), self.where.modules, self.where.others)
        try:
            self.state.restore(leaves[self.num_arguments :])
            return self._called(forward, leaves, fresh=True).leaves
        finally:
            state.restore(now)

    def changes_in_place(self, given: list[Tensor]) -> bool:
        """Whether the run has changed tensors of the state: ``given`` is what `given` was before it."""
        return not all(same_values(self.leaves[position], given[position]) for position in self._own())

    def _called(self, forward: Forward, leaves: list[Tensor], *, fresh: bool) -> Returned:
        arguments, num = self.arguments, self.num_arguments
        (args, values), targets = arguments.build(leaves, fresh=fresh)
        outputs = forward(*args, **dict(zip(self.names, values, strict=True)))
        if not targets and self.where is None:
            return Returned(*outline_of((outputs,)))
        if not fresh:
            arguments.note_written(leaves)
        changed = self.state is not None and self.state.note_written(leaves[num:])
        where = self.where or UnitState(())
        tensors, outline = outline_of((outputs, *targets), where.modules, where.others)
        returned_until, left_from = outline.ends[0], outline.ends[-1]
        passed = {id(leaf): position for position, leaf in enumerate(leaves)}
        constants: dict[int, Tensor] = {}
        for index in range(returned_until, len(tensors)):
            position = passed.get(id(tensors[index]))
            if position is not None:
                constants[index] = self.given[position] if self.given else tensors[index]
            elif index >= left_from and not self.outlet:
                constants[index] = tensors[index].detach()
        left = any(leaf.requires_grad for leaf in tensors[left_from:] if id(leaf) not in passed)
        others = outline.settle(constants, len(tensors))
        return Returned([tensors[index] for index in others], outline, changed, left)

    def _own(self) -> list[int]:
        """Positions of the tensors of the state that the unit may change in place."""
        return [p for p in range(self.num_arguments, len(self.leaves)) if p not in self.sources]

    def let_go(self) -> None:
        """Look no longer after what the forward kept: it goes as the backward uses it up."""
        if self.held is not None:
            self.held.clear()
        self.held = None

    def note_versions(self, versions: list[int], returned: list[Tensor]) -> None:
        """Note how often arguments have been changed in place, but for those that the unit passes on as they are."""
        passed = {memory_key(leaf) for leaf in returned}
        given = zip(self.leaves, versions, strict=False)  # those of its state come last
        self.versions = [(_counter(leaf), count) for leaf, count in given if memory_key(leaf) not in passed]

    def check_unchanged(self, unit: int) -> None:
        """Check that no argument has been changed in place since the unit, ``unit``, has run.

        Raises:
            ModelError: one has, so that the unit cannot be run again.
        """
        versions, self.versions = self.versions, []
        if [version for _, version in versions] != versions_of([leaf for leaf, _ in versions]):
            raise ModelError(
                f"a tensor that unit {unit} was given has been changed in place since, so that it cannot be run again "
                "from it: write `x = x + y` instead of `x += y` between layers, or set activations=keep"
            )

    def track_inputs(self) -> None:
        """Begin a graph at the arguments that carry gradients, which arrive in ``arrived``."""
        self.arrived = Gradients(self.leaves)
        self.leaves = cut_at(self.leaves, self.sources, self.arrived)


def visit_of(
    call: UnitCall,
    where: UnitState | None = None,
    *,
    outlet: bool = False,
    changed: Collection[tuple[int, int]] = (),
) -> UnitVisit:
    """Return a unit that is called with these arguments, each differentiable one cut from its history.

    Args:
        call: of the unit.
        where: its state, if it changes any.
        outlet: whether what it leaves there has a history that others go on from.
        changed: unit and position of tensors that code changes in place behind the unit, which is given copies.
    """
    given, arguments = outline_of((call.args, tuple(call.kwargs.values())))
    num_arguments, state = len(given), None
    if where is not None:
        lying, state = outline_of((), where.modules, where.others)
        given = given + lying
    leaves, sources = list(given), dict[int, GivenTensor]()
    for position, leaf in enumerate(given):
        if is_differentiable(leaf) and (position < num_arguments or leaf.requires_grad):
            if leaf.requires_grad:
                if wants_gradient(leaf) and box_of(leaf) is not None:
                    _say_hooked()
                sources[position] = GivenTensor(leaf, get_gradient_edge(leaf))
            leaves[position] = leaf.detach()
        if (call.unit, position) in changed:
            leaves[position] = leaves[position].clone()
    return UnitVisit(
        leaves,
        given,
        tuple(call.kwargs),
        arguments,
        sources,
        Gradients(()),
        num_arguments,
        where,
        state,
        outlet,
    )


@cache
def _say_hooked() -> None:
    _log.warning(
        "retain_grad() or a hook that a forward hook puts on what a layer returns has no effect there"
    )


def _counter(tensor: Tensor) -> Tensor:
    """Return a tensor without elements that counts the changes of ``tensor`` and of whatever shares its memory.

    What it counts may move to other memory, or be let go of.
    """
    if tensor.is_inference() or type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return tensor
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often tensors have been changed in place; those made under inference mode count nothing."""
    return [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors]
