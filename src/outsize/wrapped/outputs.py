"""What the model returned for each microbatch, joined to what it would have returned for the batch.

Tensors are joined leaf by leaf, as soon as each microbatch has them, so that logits lie in one place only, of several
devices on that which comes first:

* a number (the loss, an auxiliary loss): weighted as in `wrapped.batching` and added;
* a tensor whose first dimension is the rows of its microbatch, or a multiple of them (router logits, one per token):
  concatenated, in the order of the batch;
* anything else: kept where all microbatches returned the same, else None (a cache of keys and values, say).

With one microbatch everything is returned as it is. Of graphs only the edges are kept, not the tensors of microbatches;
and not even these where the backward runs the forward of a microbatch again.

What a wrapped model returns has one node for its history. When the caller's backward reaches it, the gradients of the
outputs are dealt out to the microbatches and the backward program runs; gradients of parameters come home by
themselves. Nothing but this node holds the activations of a forward: if it goes, because no backward follows or an
error is in the air, they go.
"""

import copy
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outsize.compat import torch_private
from outsize.compat.torch_private import wants_gradient, will_run
from outsize.errors import ConfigError, ModelError
from outsize.wrapped.batching import InputGradients

# Where the backward of a microbatch begins: edges of its graph, and their gradients.
MicrobatchRoots = tuple[list[Any], list[Tensor]]


class _Leaf:
    """A leaf of the output: its value for each microbatch, without history, and where its graphs begin.

    Attributes:
        edges: by microbatch; none where there is no history, or its forward is run again.
        tracked: whether a gradient of the joined value has somewhere to go.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._values: dict[int, Any] = {}
        self._room: Tensor | None = (
            None  # for the rows of all microbatches, as long as they are in proportion
        )
        self._lengths: list[int] | None = None
        self.edges: dict[int, Any] = {}
        self._differs = False
        self.tracked = False

    def add(self, microbatch: int, value: Any, *, again: bool) -> None:
        """Take the value of a microbatch, whose forward may be run ``again``."""
        edge = _edge_of(value)
        self._differs = self._differs or edge is not None
        if edge is not None and not again:
            self.edges[microbatch] = edge
        if isinstance(value, Tensor):
            before = next(iter(self._values.values()), value)
            value = value.detach().to(before.device if isinstance(before, Tensor) else value.device)
        if not self._values:
            self._room = self._make_room(microbatch, value)
        place = self._place_of(microbatch, value)
        if place is None:
            self._room = None
        self._values[microbatch] = value if place is None else place.copy_(value)

    def join(self, divisors: tuple[float, ...], take: Callable[[Any], None]) -> Any:
        """Return what the batch has here, and forget what microbatches had, of which `take` is told first."""
        values, room = [self._values[microbatch] for microbatch in range(len(self._sizes))], self._room
        for value in values:
            take(value)
        first = values[0]
        self._values, self._room = {}, None
        if room is not None or len(values) == 1:
            has_rows = isinstance(first, Tensor) and first.dim() > 0
            self._lengths = [len(value) for value in values] if has_rows else None
            self.tracked = self._differs
            return first if room is None else room
        if not all(isinstance(value, Tensor) for value in values):
            return first if all(_same(value, first) for value in values) else None
        if first.dim():
            alike = (value.shape == first.shape and torch.equal(value, first) for value in values)
            return first if all(alike) else None
        self.tracked = self._differs
        shares = [v / divisor for v, divisor in zip(values, divisors, strict=True) if not math.isinf(divisor)]
        return sum(shares[1:], shares[0]) if first.is_floating_point() else first

    def deal(self, gradient: Tensor, divisors: tuple[float, ...]) -> list[Tensor | None]:
        """Return the part of a gradient of the joined value that each microbatch's own has."""
        if self._lengths is not None:
            return list(torch.split(gradient, self._lengths)) if len(self._lengths) > 1 else [gradient]
        return [None if math.isinf(divisor) else gradient / divisor for divisor in divisors]

    def _make_room(self, microbatch: int, value: Any) -> Tensor | None:
        if len(self._sizes) == 1 or not isinstance(value, Tensor) or not value.dim():
            return None
        multiple, remainder = divmod(len(value), self._sizes[microbatch])
        return None if remainder else value.new_empty((multiple * sum(self._sizes), *value.shape[1:]))

    def _place_of(self, microbatch: int, value: Any) -> Tensor | None:
        """The rows of a microbatch, where ``value`` is as many as it should be."""
        room = self._room
        if room is None or not isinstance(value, Tensor) or not value.dim():
            return None
        multiple = len(room) // sum(self._sizes)
        start = multiple * sum(self._sizes[:microbatch])
        place = room[start : start + multiple * self._sizes[microbatch]]
        return place if (place.shape, place.dtype) == (value.shape, value.dtype) else None


class Joined:
    """The output of a batch; `add` what the model returned for each microbatch, then `end`.

    Attributes:
        leaves: its flattened values, without history, when it has ended.
    """

    def __init__(self, sizes: Sequence[int], divisors: tuple[float, ...]) -> None:
        self._sizes = tuple(sizes)
        self._divisors = divisors
        self._namespace: Any = None
        self._structure: Any = None
        self._columns: list[_Leaf] = []
        self._tracked: dict[int, _Leaf] = {}
        self.leaves: list[Any] = []
        self._adding = threading.Lock()

    def add(self, microbatch: int, output: Any, *, again: bool = False) -> None:
        """Take what the model returned for a microbatch, whose forward may be run ``again`` for its backward.

        Several threads may do so at a time.

        Raises:
            ModelError: it has another form than that of the one before.
        """
        leaves, structure = _flat(output)
        with self._adding:
            if self._structure is None:
                self._namespace = _shell(output) if _is_namespace(output) else None
                self._structure = structure
                self._columns = [_Leaf(self._sizes) for _ in leaves]
            if structure != self._structure:
                raise ModelError(
                    "the model returned outputs of another form for each microbatch; set microbatches=1"
                )
            for column, leaf in zip(self._columns, leaves, strict=True):
                column.add(microbatch, leaf, again=again)

    def end(self, take: Callable[[Any], None]) -> None:
        """Join what all microbatches have.

        Args:
            take: called with each value of a microbatch before anything is done with it here: it was made elsewhere.
        """
        self.leaves = [column.join(self._divisors, take) for column in self._columns]
        self._tracked = {position: column for position, column in enumerate(self._columns) if column.tracked}
        self._columns.clear()

    @property
    def differentiable(self) -> list[int]:
        """Positions of the leaves that have a history."""
        return list(self._tracked)

    def build(self, replaced: dict[int, Tensor]) -> Any:
        """Return the output, with the leaves at some positions replaced."""
        leaves = [replaced.get(position, leaf) for position, leaf in enumerate(self.leaves)]
        built = torch_private.unflatten(leaves, self._structure)
        if self._namespace is None:
            return built
        output = copy.copy(self._namespace)
        vars(output).update(built)
        return output

    def forget_values(self) -> None:
        """Keep only what `roots` needs."""
        self.leaves.clear()

    def roots(self, gradients: Sequence[Tensor | None]) -> "Roots":
        """Return where backwards begin, from gradients of `differentiable`."""
        dealt = {
            position: leaf.deal(gradient, self._divisors)
            for (position, leaf), gradient in zip(self._tracked.items(), gradients, strict=True)
            if gradient is not None
        }
        return Roots(dealt, {position: leaf.edges for position, leaf in self._tracked.items()})


class Roots:
    """Where the backwards of microbatches begin.

    Args:
        dealt: gradients of each differentiable leaf of the output, by microbatch.
        edges: of the same leaves, of microbatches whose graph waits for its backward.
    """

    def __init__(
        self, dealt: Mapping[int, Sequence[Tensor | None]], edges: Mapping[int, Mapping[int, Any]]
    ) -> None:
        self._dealt = dealt
        self._edges = edges

    def waiting(self) -> dict[int, MicrobatchRoots]:
        """Return those of microbatches whose graph waits."""
        waiting = set().union(*self._edges.values())
        roots_of = {m: self._of(m, {p: edges.get(m) for p, edges in self._edges.items()}) for m in waiting}
        return {microbatch: roots for microbatch, roots in roots_of.items() if roots[0]}

    def again(self, microbatch: int, output: Any) -> MicrobatchRoots:
        """Return those of a microbatch for which the model has returned ``output`` once more."""
        leaves, _ = _flat(output)
        return self._of(microbatch, {position: _edge_of(leaves[position]) for position in self._dealt})

    def _of(self, microbatch: int, edges: Mapping[int, Any]) -> MicrobatchRoots:
        pairs = [(edges[position], parts[microbatch]) for position, parts in self._dealt.items()]
        found = [(start, part) for start, part in pairs if start is not None and part is not None]
        return [edge for (edge, _), _ in found], [part.to(device) for (_, device), part in found]


def loss_of(output: Any) -> Tensor | None:
    """Return the loss that a model has returned; None where there is none, or not one number."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _flat(output: Any) -> tuple[list[Any], Any]:
    """Return the leaves of what a model returned, and how they hang together."""
    return torch_private.flatten(vars(output) if _is_namespace(output) else output)


def _edge_of(value: Any) -> Any:
    """Return where the graph of a leaf begins, and on which device; None where it has no history."""
    tracked = isinstance(value, Tensor) and value.requires_grad
    return (torch.autograd.graph.get_gradient_edge(value), value.device) if tracked else None


def _is_namespace(output: Any) -> bool:
    """Whether an output is an object whose attributes are the outputs."""
    return hasattr(output, "__dict__") and torch_private.is_leaf(output) and not isinstance(output, Tensor)


def _shell(output: Any) -> Any:
    """A copy of such an object without its attributes."""
    made = copy.copy(output)
    vars(made).clear()
    return made


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, str | int | float | bool) and one == other)


Backward = Callable[[Roots, Tensor | None], None]


class AutogradBridge:
    """One forward that a backward may follow.

    Args:
        joined: the output.
        backward: runs the backward from roots and their gradients, and is given the model's loss where nothing else of
            the output has one.
        abandon: called when no backward will follow.
        parameters: that train.
        inputs: tensors whose gradients the caller wants as well.
    """

    _backward: Backward | None = None  # of a bridge that was not made whole, which tracers leave behind

    def __init__(
        self,
        joined: Joined,
        backward: Backward,
        abandon: Callable[[], None],
        parameters: Sequence[nn.Parameter],
        inputs: InputGradients,
    ) -> None:
        self._joined = joined
        self._inputs = inputs
        self._shown: list[weakref.ref[Tensor]] = []
        self._losses: list[Tensor | None] = []  # the model's loss among the outputs, without history
        self._parameters = parameters
        self._backward = backward
        self._abandon = abandon

    @property
    def pending(self) -> bool:
        """Whether a backward may still follow."""
        return self._backward is not None

    def output(self) -> Any:
        """Return the output with its history."""
        positions = self._joined.differentiable
        values = tuple(self._joined.leaves[position] for position in positions)
        anchor = torch.zeros((), requires_grad=True)
        tensors = (*self._inputs.given, *self._parameters)
        nodes = _Node.apply(anchor, self, values, *tensors) if values else ()  # type: ignore[no-untyped-call]
        output = self._joined.build(dict(zip(positions, nodes, strict=True)))
        outputs, loss = nodes, loss_of(output)
        if loss is not None:  # a hook on another output is not run with no gradient then: `descend` refuses
            outputs = [one.view_as(one) if one.dim() else one for one in nodes]
            output = self._joined.build(dict(zip(positions, outputs, strict=True)))
            loss = loss_of(output)
        self._parameters = ()
        self._inputs.let_go()
        self._shown = [weakref.ref(tensor) for tensor in outputs]
        self._losses = [loss.detach() if loss is tensor else None for tensor in outputs]
        self._joined.forget_values()
        return output

    def descend(self, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Go backward from the gradients of the outputs that have a history; returns those of the inputs.

        Raises:
            RuntimeError: for the second time; activations are gone after the first.
            ConfigError: the gradient of another output is waited for.
        """
        if self._backward is None:
            raise RuntimeError(
                "backward through a wrapped model for the second time: its activations are gone. Add the losses up "
                "and call backward once, or run the forward again"
            )
        for tensor, gradient in zip((each() for each in self._shown), gradients, strict=True):
            if tensor is not None and gradient is None and wants_gradient(tensor):
                raise ConfigError(
                    "retain_grad() or a hook asks for the gradient of an output (logits, hidden states) from which the "
                    "model itself took the loss: call it without labels, and take the loss of that output"
                )
        backward, self._backward = self._backward, None
        used = [loss for loss, gradient in zip(self._losses, gradients, strict=True) if gradient is not None]
        backward(self._joined.roots(gradients), used[0] if len(used) == 1 else None)
        return self._inputs.gradients()

    def __del__(self) -> None:
        if self._backward is not None:
            self._abandon()


class _Node(torch.autograd.Function):
    """The history of what a wrapped model returns. Values come in a tuple, so that results are no views of them.

    After them come the inputs of the model that have a history of their own, and its parameters: these only so that
    whoever asks for their gradients comes by here, and is told.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, passage: AutogradBridge, values: tuple[Tensor, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.passage = passage
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ConfigError(
                "backward(create_graph=True) asks for gradients of gradients, for which a wrapped model keeps no "
                "graph: leave it out, or take such a loss of the model before outsize.wrap"
            )
        anchor, *others = ctx.next_functions
        if not will_run(anchor[0]):  # nobody can ask for that by itself
            raise ConfigError(
                "torch.autograd.grad and backward(inputs=...) ask for gradients of some tensors alone, and those of a "
                "wrapped model come home all together: use loss.backward(), which leaves them in parameter.grad"
            )
        found = ctx.passage.descend(gradients)
        return (None, None, None, *found, *(None for _ in others[len(found) :]))


def is_pending(passage: "weakref.ref[AutogradBridge] | None") -> bool:
    """Return whether a forward is still referred to, and its backward may still come."""
    bridge = passage() if passage is not None else None
    return bridge is not None and bridge.pending
