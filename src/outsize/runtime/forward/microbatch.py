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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from outsize.compat.torch_private import num_nodes
from outsize.errors import ModelError
from outsize.model.tiled import loss_of
from outsize.model.walk import Finished, UnitCall, Walk
from outsize.runtime.forward.outer_code import OuterBackward
from outsize.runtime.forward.saved_tensors import DivergedError, Keeping, SavedTensors, Selected, storages_of
from outsize.runtime.forward.short_recompute import Shortcuts
from outsize.runtime.forward.unit_facts import NO_EFFECTS, SideEffects
from outsize.runtime.forward.unit_state import UnitState
from outsize.runtime.forward.unit_visit import (
    Forward,
    Gate,
    Gradients,
    Returned,
    Roots,
    UnitVisit,
    constants_of,
    cut,
    hand_out,
    is_differentiable,
    roots_of,
    versions_of,
    visit_of,
)

Reseed = Callable[[int, bool], None]
Ambient = Callable[[], AbstractContextManager[Any]]
Storage = torch.UntypedStorage
StateOf = Callable[[int], tuple[UnitState | None, bool]]


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
        effects: what units do besides returning tensors.
        check_settings: raises where the caller has set layers otherwise since the forward.
        state_of: returns the state of a unit that changes any, and whether it leaves tensors there whose history others
            go on from; None where no unit does.

    Attributes:
        below: units whose input lies in the memory below the device, too.
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
        effects: SideEffects = NO_EFFECTS,
        check_settings: Callable[[], None] = lambda: None,
        state_of: StateOf | None = None,
    ) -> None:
        self._shortcuts, self._state_of, self._effects = shortcuts, state_of, effects
        self._constants: set[int] = set()  # of what waits
        self._gate, self._check_settings = Gate(is_open=False), check_settings
        self._graph, self._ambient, self.inputs = graph, ambient, inputs
        self._walk = Walk(model, inputs)
        self._visits: dict[int, UnitVisit] = {}
        self._tracked, self._reseed = tracked, reseed
        self._waiting: list[Tensor] = []
        self._returned: Returned | None = None
        self._box: Gradients | None = None
        self._came: UnitCall | Finished | None = None  # beyond units that the model passes over
        self.below: set[int] = set()
        self._outer = OuterBackward()

    def forward(self, unit: int, forward: Forward, *, graph: bool = False) -> None:
        """Run ``unit`` and forget how; its outputs wait for the next one.

        With ``graph`` one is made nevertheless, for kernels that give other bits with one.

        Raises:
            ModelError: the model does not call its units once each, in order, or a unit changes its input in place.
        """
        visit = self.arrive(unit)
        if visit is None:
            return
        if graph:
            visit.track_inputs()
        self._pass_on(unit, visit, forward, graph)

    def forward_keep(self, unit: int, forward: Forward, keeping: Keeping) -> None:
        """Run ``unit`` with a graph that waits for its backward; see `forward`."""
        visit = self.arrive(unit)
        if visit is None:
            return
        visit.track_inputs()
        with keeping.hooks():
            returned = self._pass_on(unit, visit, forward, True)
        visit.roots = roots_of(returned)
        self._hold(visit, keeping.held, returned)

    def forward_select(self, unit: int, forward: Forward, selected: Selected) -> None:
        """Run ``unit``, and keep what ``selected`` says of it for its recompute; see `forward`."""
        visit = self.arrive(unit)
        if visit is None:
            return
        visit.track_inputs()
        with selected.recording():
            returned = self._pass_on(unit, visit, forward, True)
        if len(selected):
            visit.selected = selected
            self._hold(visit, selected.held, returned)

    def _hold(self, visit: UnitVisit, held: SavedTensors, returned: list[Tensor]) -> None:
        """Let what a visit's forward kept leave the device, but not what others use as well."""
        held.stay([*visit.leaves, *returned])
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

    def _pass_on(self, unit: int, visit: UnitVisit, forward: Forward, graph: bool) -> list[Tensor]:
        """Run a unit, hand what it returns out to the next one, and return its tensors with their history."""
        given = visit.leaves[: visit.num_arguments]
        versions = versions_of(given)
        with torch.set_grad_enabled(graph), self._ambient():
            self._reseed(unit, False)
            returned = visit.run(forward, graph=graph)
        if versions != versions_of(given):
            raise ModelError(
                f"unit {unit} changes its input in place, so its forward cannot be repeated from that input; "
                "write `x = x + y` instead of `x += y` on what the unit receives"
            )
        visit.note_versions(versions, returned.leaves)
        self._set_waiting(unit, visit, returned)
        return returned.leaves

    def _set_waiting(self, unit: int, visit: UnitVisit, returned: Returned) -> None:
        """Have the tensors of ``unit`` wait, cut from their history, until the model goes on."""
        self._waiting, visit.box = cut(returned.leaves), Gradients(returned.leaves, self._gate)
        here, pairs = constants_of(returned.leaves), self._effects.constants
        plain = (i for i, leaf in enumerate(returned.leaves) if not leaf.requires_grad)
        self._constants = {i for i in plain if i in here or (unit, i) in pairs}
        self._returned = Returned([], returned.outline)
        self._box = visit.box if self._tracked[unit] else None

    def finish(self, unit: int) -> Any:
        """Let the model go on behind its last unit, ``unit``; returns what its forward returns, with its history."""
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
        return tensors[0]

    def backward_from_head_input(self, unit: int, gradient: Tensor) -> None:
        """Go on backward from the gradient of `head_input`; the model's own code after the head never runs."""
        self._end_walk()
        visit = self._visits.pop(unit)
        with self._gate.opened():
            for tensor, edge in visit.sources.values():
                self._outer.defer(edge, gradient, tensor.device)
            self._enter(unit)

    def forward_backward(self, unit: int, forward: Forward, divisor: float) -> Tensor:
        """Run the last unit with a graph, finish the model's forward, and go backward from its loss.

        Returns the model's loss divided by ``divisor``, a scalar without history; zero where ``divisor`` is infinite.

        Raises:
            ModelError: the model's output holds no loss.
        """
        visit = self._arrive_at_last(unit)
        visit.track_inputs()
        with torch.enable_grad():
            self._reseed(unit, False)
            returned = visit.run(forward, graph=True)
            self._set_waiting(unit, visit, returned)
            loss = loss_of(self.finish(unit))
        if math.isinf(divisor):  # no target: the mean over nothing is NaN, and weighs nothing
            return torch.zeros_like(loss)
        with self._gate.opened():
            if loss.requires_grad:
                # No node of this thread: those of outer code are counted.
                self._outer.defer(get_gradient_edge(loss), torch.ones_like(loss) / divisor)
                self._enter_last()
            self._descend(unit, roots_of(returned.leaves))
        return loss.detach() / divisor

    def backward_from(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        """Go backward from what the model returned, through the code behind its last unit."""
        with self._gate.opened():
            for edge, gradient in zip(edges, gradients, strict=True):
                self._outer.defer(edge, gradient)
            self._enter_last()

    def recompute(self, unit: int, forward: Forward) -> None:
        """Run ``unit`` again, with a graph that its backward will use."""
        self._visits[unit].roots = self._recompute(unit, self._visits[unit], forward)

    def backward(self, unit: int, forward: Forward) -> None:
        """Recompute ``unit`` unless its graph was kept, and pull the gradients of its outputs back through it."""
        visit = self._visits.get(unit)
        if visit is None:
            return
        if all(gradient is None for gradient in visit.box.values):
            del self._visits[unit]
            with self._gate.opened():
                self._enter(unit)
            return
        roots, visit.roots = visit.roots, None
        if roots is None:
            roots = self._recompute(unit, visit, forward)
        else:
            visit.let_go()  # its graph holds what it kept
        with self._gate.opened():
            self._descend(unit, roots)

    def _recompute(self, unit: int, visit: UnitVisit, forward: Forward) -> Roots:
        self._check_settings()
        visit.check_unchanged(unit)
        visit.track_inputs()
        selected, visit.selected = visit.selected, None
        visit.let_go()

        def call() -> Roots:
            if selected is not None:
                selected.rewind()
            with self._ambient():  # what an autocast keeps is that of one attempt
                self._reseed(unit, False)
                roots = roots_of(visit.repeat(forward))
            if len(roots) != len(visit.box.values):
                raise ModelError(
                    f"unit {unit} returned {len(visit.box.values)} tensors, or left them, and {len(roots)} when it was "
                    "run again for its backward; a unit that does otherwise each time cannot be recomputed"
                )
            if any(root is not None and (unit, i) in self._effects.constants for i, root in enumerate(roots)):
                raise ModelError(
                    f"unit {unit} returned a tensor with a gradient where a trial saw none; set activations=keep"
                )
            return roots

        run = call if self._shortcuts is None else partial(self._shortcuts.run, unit, call)
        with torch.enable_grad():
            if selected is not None:
                try:
                    with selected.replaying():
                        return run()
                except DivergedError:
                    selected.clear()  # run in full below
            return run()

    def stored(self, unit: int) -> list[tuple[Storage, torch.dtype]]:
        """Storages of the differentiable inputs of ``unit``, each once with its dtype: what SAVE and FETCH move."""
        visit = self._visits.get(unit)
        return [] if visit is None else storages_of(visit.leaves[position] for position in visit.sources)

    def emptied(self, unit: int) -> list[Storage]:
        """Return the storages that a FETCH fills, since graphs refer to them: those that the SAVE has emptied."""
        return [storage for storage, _ in self.stored(unit)]

    def leave_below(self, unit: int) -> None:
        """Free the input of ``unit`` where a copy lies below."""
        if unit in self.below and unit in self._visits:
            for storage, _ in self.stored(unit):
                storage.resize_(0)

    def replace_input(self, unit: int, storages: list[Storage]) -> None:
        """Let what ``unit`` receives lie in ``storages``; those of `emptied` are where it lies already."""

    def drop(self, unit: int) -> None:
        """Forget the arguments of a unit whose backward will not run (a frozen prefix)."""
        self._visits.pop(unit, None)

    def close(self) -> None:
        """Let go of everything; idempotent."""
        self._end_walk()
        self._gate.is_open = False
        self._visits.clear()
        self._outer.clear()
        self._waiting, self._returned, self._box, self._came = [], None, None, None

    def _end_walk(self) -> None:
        self._walk.close()

    def _advance(self, unit: int, waiting: list[Tensor]) -> UnitCall | Finished:
        """Run the model's own code up to ``unit``."""
        box, returned, self._box, self._returned = self._box, self._returned, None, None
        with torch.set_grad_enabled(self._graph), self._ambient():
            self._reseed(unit, True)
            handed = waiting if box is None else hand_out(waiting, box, self._constants)
            came = self._walk.advance(None if returned is None else returned.build(handed))
            if isinstance(came, UnitCall) and came.makes_graph:
                self._outer.end_piece(came.unit, num_nodes())
            return came

    def _come(self, unit: int) -> UnitCall | Finished:
        """Where the model has come to on the way to ``unit``."""
        came, self._came = self._came, None
        if came is None:
            waiting, self._waiting = self._waiting, []
            came = self._advance(unit, waiting)
            waiting.clear()
        return came

    def arrive(self, unit: int) -> UnitVisit | None:
        """Return the visit of ``unit``, to which this brings the model; None where the model skips the unit."""
        came = self._come(unit)
        if isinstance(came, UnitCall) and came.unit < unit:
            raise ModelError(
                f"the model came to unit {came.unit} where unit {unit} was next; outsize streams models that call "
                "each of their units once per forward, in order"
            )
        if not isinstance(came, UnitCall) or came.unit > unit:
            self._came = came
            return None
        where, outlet = (None, False) if self._state_of is None else self._state_of(unit)
        visit = self._visits[unit] = visit_of(came, where, outlet=outlet, changed=self._effects.changed)
        return visit

    def _arrive_at_last(self, unit: int) -> UnitVisit:
        visit = self.arrive(unit)
        if visit is None:
            raise ModelError(f"the model does not call its last unit, {unit}, which a training step ends in")
        return visit

    def _descend(self, unit: int, roots: Roots) -> None:
        """From the gradients of a unit's outputs to its parameters, its inputs, and through the glue before it."""
        visit = self._visits.pop(unit)
        both = zip(roots, visit.box.values, strict=True)
        pairs = [(root, gradient) for root, gradient in both if gradient is not None and root is not None]
        roots.clear()
        given = [(source.edge, visit.leaves[at]) for at, source in reversed(visit.sources.items())]
        # Once, where one tensor is given twice.
        for edge, leaf in {edge[:2]: (edge, leaf) for edge, leaf in given}.values():
            if (sum_so_far := self._outer.take(edge)) is not None:
                pairs.insert(0, (get_gradient_edge(leaf), sum_so_far.to(leaf.device)))
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        del pairs
        for position, source in visit.sources.items():
            if (arrived := visit.arrived.values[position]) is not None:
                self._outer.defer(source.edge, arrived, source.tensor.device)
        visit.leaves.clear()
        visit.arrived.values.clear()
        self._enter(unit)

    def _enter_last(self) -> None:
        """Go backward through the model's own code behind its last unit."""
        self._outer.enter_last()

    def _enter(self, unit: int) -> None:
        """Go backward through the model's own code on the way to ``unit``."""
        self._outer.enter(unit)
