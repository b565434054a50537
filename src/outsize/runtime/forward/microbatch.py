"""One microbatch on its way through the units: forward, recompute, backward, and what waits in between.

The story of unit ``u`` for one microbatch:

1. ``forward(u)`` resumes the model's own code (`Walk`) with what unit ``u-1`` returned. That code may do something of
   its own ("glue": a norm, a scaling) and then calls unit ``u``. Its arguments are kept: they are all that the
   backward needs. The unit runs without a graph; its outputs wait for ``forward(u+1)``.
2. The last unit runs forward with a graph, its loss is taken, and the backward goes down at once.
   ``forward_keep(u)`` runs it with a graph, and the roots of that graph wait for its backward. ``forward_select(u)``
   keeps what some of its operations returned, so that a recompute need not run them.
3. ``backward(u)`` runs the unit again, now with a graph, from the arguments kept, unless its forward kept its graph. It
   pulls the gradients of its outputs back to its parameters and arguments, and from there through the glue to the
   outputs of the units before it.

The next unit's arguments come into being only when it is about to run, so glue of one microbatch at a time is alive.

A forward may pass over units: the embedding, where it is given vectors, or layers that it drops. Such a unit has
nothing to do for this microbatch, neither forward nor backward.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from outsize.errors import ModelError
from outsize.model.walk import Finished, UnitCall, Walk
from outsize.runtime.forward.boundary import Gradients, cut, hand_out, is_differentiable
from outsize.runtime.forward.kept_graph import Keeping
from outsize.runtime.forward.saved_tensors import SavedTensors, storages_of
from outsize.runtime.forward.selective_recompute import DivergedError, Selected
from outsize.runtime.forward.short_recompute import Shortcuts

Forward = Callable[..., Any]
Reseed = Callable[[int, bool], None]
Ambient = Callable[[], AbstractContextManager[Any]]
Roots = list[GradientEdge | None]


@dataclass(slots=True)
class UnitVisit:
    """A unit called by the model: its arguments, and the gradients of what it returned.

    Attributes:
        leaves: the flattened arguments; differentiable ones cut from their history.
        structure: how to unflatten them into ``(args, kwargs)``.
        sources: position in ``leaves`` → the same tensor with its history, where it has one.
        box: gradients of the outputs, filled as later units and glue run backward.
        roots: where the graph of the unit begins, for each of its outputs; None where there is no graph yet.
        held: memory of what its forward kept, which may leave the device; None where it kept nothing.
        selected: results that a recompute need not compute; None where there are none.
        came_at: number of the last node of the graph of the model's own code before it.
        known: gradients of what that code made and the model returned, and where they begin.
    """

    leaves: list[Any]
    structure: pytree.TreeSpec
    sources: dict[int, Tensor]
    box: Gradients
    roots: Roots | None = None
    held: SavedTensors | None = None
    selected: Selected | None = None
    came_at: int = -1
    known: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)

    def call(self, forward: Forward) -> Any:
        """Run the unit on its arguments."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.structure)
        return forward(*args, **kwargs)

    def let_go(self) -> None:
        """Look no longer after what the forward kept: it goes as the backward uses it up."""
        if self.held is not None:
            self.held.clear()
        self.held = None

    def track_inputs(self) -> None:
        """Make the arguments that carry gradients leaves of a graph."""
        for position in self.sources:
            self.leaves[position] = self.leaves[position].detach().requires_grad_()


class MicrobatchRun:
    """The passage of one microbatch through the units of a model.

    Args:
        model: the model whose units are replaced by boundaries.
        inputs: keyword arguments of its forward.
        tracked: for each unit, whether its outputs can carry a gradient (something trainable at or before it).
        reseed: called as ``reseed(unit, is_glue)`` before each piece of code that may draw random numbers.
        graph: whether the model's own code makes a graph for a backward.
        ambient: makes what the model's forward runs in, e.g. an autocast; a backward runs outside of it.
        shortcuts: runs units again where that may end early; None runs them in full.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        tracked: tuple[bool, ...],
        reseed: Reseed,
        graph: bool = True,
        ambient: Ambient = nullcontext,
        shortcuts: Shortcuts | None = None,
    ) -> None:
        self._shortcuts = shortcuts
        self._graph = graph
        self._ambient = ambient
        self.inputs = inputs
        self._walk = Walk(model, inputs)
        self._visits: dict[int, UnitVisit] = {}
        self._tracked = tracked
        self._reseed = reseed
        self._waiting: Any = None
        self._box: Gradients | None = None
        self._came: UnitCall | Finished | None = (
            None  # where the model has come to, beyond units it passes over
        )

    def forward(self, unit: int, forward: Forward, *, graph: bool = False) -> None:
        """Run ``unit`` and forget how; its outputs wait for the next one.

        Args:
            unit: the unit.
            forward: its own forward.
            graph: whether to make a graph nevertheless, for kernels that give other bits with one.

        Raises:
            ModelError: the model does not call its units once each, in order, or a unit changes its input in place.
        """
        visit = self._arrive(unit)
        if visit is None:
            return
        if graph:
            visit.track_inputs()
        self._pass_on(unit, visit, forward, graph)

    def forward_keep(self, unit: int, forward: Forward, keeping: Keeping) -> None:
        """Run ``unit`` with a graph that waits for its backward; see `forward`."""
        visit = self._arrive(unit)
        if visit is None:
            return
        visit.track_inputs()
        with keeping.hooks():
            outputs = self._pass_on(unit, visit, forward, True)
        visit.roots = roots_of(outputs)
        self._hold(visit, keeping.held, outputs)

    def forward_select(self, unit: int, forward: Forward, selected: Selected) -> None:
        """Run ``unit``, and keep what ``selected`` says of it for its recompute; see `forward`."""
        visit = self._arrive(unit)
        if visit is None:
            return
        visit.track_inputs()
        with selected.recording():
            outputs = self._pass_on(unit, visit, forward, True)
        if len(selected):
            visit.selected = selected
            self._hold(visit, selected.held, outputs)

    def _hold(self, visit: UnitVisit, held: SavedTensors, outputs: Any) -> None:
        """Let what a visit's forward kept leave the device, but not what others use as well."""
        given = [leaf for leaf in visit.leaves if isinstance(leaf, Tensor)]
        held.stay([*given, *(leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor))])
        visit.held = held

    def held(self, unit: int) -> SavedTensors | None:
        """Return what the forward of ``unit`` keeps; None where that is nothing."""
        visit = self._visits.get(unit)
        return None if visit is None else visit.held

    def let_go(self, unit: int) -> None:
        """Keep nothing of the forward of ``unit`` after all: its backward will recompute it."""
        visit = self._visits[unit]
        visit.let_go()
        visit.roots = visit.selected = None

    def _pass_on(self, unit: int, visit: UnitVisit, forward: Forward, graph: bool) -> Any:
        """Run a unit, hand its outputs out to the next one, and return them with their history."""
        before = [leaf._version for leaf in visit.leaves if is_differentiable(leaf)]
        with self._ambient(), torch.set_grad_enabled(graph):
            self._reseed(unit, False)
            outputs = visit.call(forward)
        if before != [leaf._version for leaf in visit.leaves if is_differentiable(leaf)]:
            raise ModelError(
                f"unit {unit} changes its input in place, so its forward cannot be repeated from that input; "
                "write `x = x + y` instead of `x += y` on what the unit receives"
            )
        self._set_waiting(unit, visit, outputs)
        return outputs

    def _set_waiting(self, unit: int, visit: UnitVisit, outputs: Any) -> None:
        """Have the outputs of ``unit`` wait, cut from their history, until the model goes on."""
        self._waiting, visit.box = cut(outputs), Gradients(outputs)
        self._box = visit.box if self._tracked[unit] else None

    def finish(self, unit: int) -> Any:
        """Let the model go on behind its last unit, ``unit``; returns what its forward returns, with its history.

        Raises:
            ModelError: the model calls a unit again.
        """
        ending = self._come(unit + 1)
        if not isinstance(ending, Finished):
            raise ModelError(f"the model calls unit {ending.unit} after its last unit {unit}")
        return ending.output

    def head_input(self, unit: int) -> Tensor:
        """Bring the model to its last unit and return the tensor that it is called with, cut from its history."""
        visit = self._arrive_at_last(unit)
        tensors = [leaf for leaf in visit.leaves if is_differentiable(leaf)]
        if len(tensors) != 1:
            raise ModelError(f"the head is called with {len(tensors)} tensors; set train.loss=model")
        hidden: Tensor = tensors[0]
        return hidden

    def backward_from_head_input(self, unit: int, gradient: Tensor) -> None:
        """Go on backward from the gradient of `head_input`; the model's own code after the head never runs."""
        self._end_walk()
        visit = self._visits.pop(unit)
        self._pull(list(visit.sources.values()), [gradient] * len(visit.sources))

    def forward_backward(self, unit: int, forward: Forward, divisor: float) -> Tensor:
        """Run the last unit with a graph, finish the model's forward, and go backward from its loss.

        Returns:
            The model's loss divided by ``divisor``, a scalar without history; zero where ``divisor`` is infinite.

        Raises:
            ModelError: the model's output holds no loss.
        """
        visit = self._arrive_at_last(unit)
        visit.track_inputs()
        with torch.enable_grad():
            self._reseed(unit, False)
            outputs = visit.call(forward)
            self._set_waiting(unit, visit, outputs)
            loss = loss_of(self.finish(unit)) / divisor
        if math.isinf(divisor):  # no target: the mean over nothing is NaN, and weighs nothing
            return torch.zeros_like(loss)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        self._descend(unit, roots_of(outputs))
        return loss.detach()

    def backward_from(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        """Go backward from what the model returned, up to its units.

        What was made before a unit (a hidden state) waits for the backward of that unit: an uncut one adds to it
        what comes out of the unit, term by term, and goes through the code before the unit once.
        """
        pairs: list[tuple[GradientEdge, Tensor]] = []
        for edge, gradient in zip(edges, gradients, strict=True):
            made_at = edge.node._sequence_nr()
            later = (visit.known for visit in self._visits.values() if visit.came_at >= made_at)
            next(later, pairs).append((edge, gradient))
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])

    def backward(self, unit: int, forward: Forward) -> None:
        """Recompute ``unit`` unless its graph was kept, and pull the gradients of its outputs back through it."""
        visit = self._visits.get(unit)
        if visit is None:
            return
        if all(gradient is None for gradient in visit.box.values) and not visit.known:
            del self._visits[unit]
            return
        roots, visit.roots = visit.roots, None
        if roots is not None:
            visit.let_go()  # its graph holds what it kept
        if roots is None:
            roots = self._recompute(unit, visit, forward)
        self._descend(unit, roots)

    def _recompute(self, unit: int, visit: UnitVisit, forward: Forward) -> Roots:
        visit.track_inputs()
        selected, visit.selected = visit.selected, None
        visit.let_go()

        def call() -> Roots:
            if selected is not None:
                selected.rewind()
            self._reseed(unit, False)
            return roots_of(visit.call(forward))

        with self._ambient(), torch.enable_grad():
            if selected is not None:
                try:
                    with selected.replaying():
                        return self._run_again(unit, call)
                except DivergedError:
                    selected.clear()  # run in full below
            return self._run_again(unit, call)

    def _run_again(self, unit: int, call: Callable[[], Roots]) -> Roots:
        return call() if self._shortcuts is None else self._shortcuts.run(unit, call)

    def stored(self, unit: int) -> list[tuple[torch.UntypedStorage, torch.dtype]]:
        """Storages of the differentiable inputs of ``unit``, each once with its dtype: what SAVE and FETCH move."""
        visit = self._visits.get(unit)
        if visit is None:
            return []
        return storages_of(visit.leaves[position] for position in visit.sources)

    def drop(self, unit: int) -> None:
        """Forget the arguments of a unit whose backward will not run (a frozen prefix)."""
        self._visits.pop(unit, None)

    def close(self) -> None:
        """Let go of everything; idempotent."""
        self._end_walk()
        self._visits.clear()
        self._waiting = self._box = self._came = None

    def _end_walk(self) -> None:
        self._walk.close()

    def _advance(self, unit: int, outputs: Any) -> UnitCall | Finished:
        """Run the model's own code up to ``unit``."""
        box, self._box = self._box, None
        with self._ambient(), torch.set_grad_enabled(self._graph):
            self._reseed(unit, True)
            return self._walk.advance(outputs if box is None else hand_out(outputs, box))

    def _come(self, unit: int) -> UnitCall | Finished:
        """Where the model has come to on the way to ``unit``."""
        came, self._came = self._came, None
        if came is None:
            waiting, self._waiting = self._waiting, None
            came = self._advance(unit, waiting)
        return came

    def _arrive(self, unit: int) -> UnitVisit | None:
        """Bring the model to ``unit``; None where it passes over that."""
        came = self._come(unit)
        if isinstance(came, UnitCall) and came.unit < unit:
            raise ModelError(
                f"the model came to unit {came.unit} where unit {unit} was next; outsize streams models that call "
                "each of their units once per forward, in order"
            )
        if not isinstance(came, UnitCall) or came.unit > unit:
            self._came = came
            return None
        visit = self._visits[unit] = visit_of(came)
        return visit

    def _arrive_at_last(self, unit: int) -> UnitVisit:
        visit = self._arrive(unit)
        if visit is None:
            raise ModelError(
                f"the model does not call its last unit, {unit}, which a step of training ends in"
            )
        return visit

    def _descend(self, unit: int, roots: Roots) -> None:
        """From the gradients of a unit's outputs to its parameters, its inputs, and through the glue before it."""
        visit = self._visits.pop(unit)
        pairs = [
            (root, gradient)
            for root, gradient in zip(roots, visit.box.values, strict=True)
            if gradient is not None and root is not None
        ]
        roots.clear()
        known = {edge[:2]: (edge, gradient) for edge, gradient in visit.known}
        for position, source in visit.sources.items():
            if known and (found := known.pop(get_gradient_edge(source)[:2], None)) is not None:
                leaf = visit.leaves[position]
                pairs.insert(0, (get_gradient_edge(leaf), found[1].to(leaf.device)))
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        del pairs
        sources = [(s, visit.leaves[p].grad) for p, s in visit.sources.items()]
        arrived = [(source, gradient) for source, gradient in sources if gradient is not None]
        visit.leaves.clear()
        begun: list[tuple[Any, Tensor]] = [*known.values(), *arrived]
        self._pull([source for source, _ in begun], [gradient for _, gradient in begun])

    def _pull(self, tensors: list[Any], gradients: list[Tensor]) -> None:
        """Go backward through outer code; what units share there (a position bias) is passed once per unit: keep it."""
        if tensors:
            torch.autograd.backward(tensors, gradients, retain_graph=True)


def roots_of(outputs: Any) -> Roots:
    """Where the graph of ``outputs`` begins, by position; unlike the tensors themselves it holds no memory of them."""
    return [
        get_gradient_edge(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None
        for leaf in pytree.tree_leaves(outputs)
    ]


def loss_of(output: Any) -> Tensor:
    """Return the loss of a model's output: its ``loss``, or its first element.

    Raises:
        ModelError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ModelError("the model returned no scalar loss; give it labels, or set train.loss=chunked")
    return loss


def visit_of(call: UnitCall) -> UnitVisit:
    """Return a unit that is called with these arguments, each differentiable one cut from its history."""
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    sources: dict[int, Tensor] = {}
    for position, leaf in enumerate(leaves):
        if is_differentiable(leaf):
            if leaf.requires_grad:
                sources[position] = leaf
            leaves[position] = leaf.detach()
    came_at = max((s.grad_fn._sequence_nr() for s in sources.values() if s.grad_fn is not None), default=-1)
    return UnitVisit(leaves, structure, sources, Gradients(()), came_at=came_at)
