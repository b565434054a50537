"""One forward over the units of a model at a short length, each distinct unit measured forward and backward."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from outsize.compat import torch_private
from outsize.compat.torch_private import forward_hooks_of, memory_key
from outsize.errors import ModelError
from outsize.model.compiled import is_compiled
from outsize.model.products import Modes
from outsize.model.split import Split
from outsize.model.tiled import chunked_head_loss, shift_labels
from outsize.model.unit_lists import UnitChoice
from outsize.model.walk import Finished, UnitCall, Walk
from outsize.runtime.forward.microbatch import Ambient
from outsize.runtime.forward.outline import outline_of
from outsize.runtime.forward.short_recompute import Trial
from outsize.runtime.forward.unit_facts import SideEffects, UnitFlops
from outsize.runtime.forward.unit_state import UnitState, untouched
from outsize.runtime.forward.unit_visit import Gradients, hand_out, is_differentiable, visit_of
from outsize.runtime.ops.compute_ops import tracked_units
from outsize.runtime.trial.effects_trial import CrossedState, UnitEffects, effects_of
from outsize.runtime.trial.live_bytes import LiveBytes, OpTrial
from outsize.runtime.trial.measured import Kept, Row, Trace
from outsize.runtime.trial.unit_trials import (
    OuterUses,
    SharedInputs,
    is_plain,
    is_shifted,
    measure_compiled,
    units_that_share,
)

SECTOR_BYTES = 4096
T = TypeVar("T")
PassedOn = Mapping[int, int]
"""Of what a unit returns, by position: the position of that in what it was given."""


class UnitOrderError(ModelError):
    """A model calls its units in another order than they are in.

    Attributes:
        calls: names of the units that it calls, each time, in its order.
    """

    def __init__(self, message: str, calls: Sequence[str]) -> None:
        super().__init__(message)
        self.calls = tuple(calls)


def in_turn(make: Callable[[UnitChoice], T], choice: UnitChoice) -> T:
    """Return what ``make`` makes of units in the order in which the model calls them, found out by trying.

    Args:
        make: given a choice of units, raises `UnitOrderError` where the model calls them in another order.
        choice: to begin with.

    Raises:
        UnitOrderError: it has none that holds.
    """
    while True:
        try:
            return make(choice)
        except UnitOrderError as error:
            if error.calls in choice.calls:
                raise
            choice = choice.after(error.calls)


class _OutOfTurnError(Exception):
    """A unit, of that index, is called again or after later ones."""


class TrialPass:
    """The forward, over ``inputs``; most other arguments are those of `runtime.trial.calibrate.calibrate`.

    Args:
        effects: what is known of units of each kind besides what they return; more is added.
    """

    def __init__(
        self,
        split: Split,
        forwards: tuple[Callable[..., Any], ...],
        inputs: Mapping[str, Any],
        chunk_tokens: int | None,
        ambient: Ambient = nullcontext,
        effects: dict[Any, UnitEffects] | None = None,
    ) -> None:
        self._effects = {} if effects is None else effects
        self._split = split
        self._bare = forwards
        self._forwards = tuple(_within(ambient, forward) for forward in forwards)
        self._ambient = ambient
        self._inputs = dict(inputs)
        self._tracked = tracked_units(split.spec)
        self._chunk_tokens = chunk_tokens
        self._known: dict[Any, tuple[Trace, Trace, Kept, Any, PassedOn]] = {}
        self._row = Row([], [], [], [], 0, False, False)
        self._has_cache = False
        self._returned: set[int] = set()
        self._shared = SharedInputs()
        self._uses = OuterUses(split, self._shared)

    def run(self, weights: torch.UntypedStorage) -> Row:
        """Run it.

        Args:
            weights: memory of the weights that units are bound to, which is not counted.

        Raises:
            UnitOrderError: the model does not call its units in order, each at most once.
        """
        try:
            return self._run(weights)
        except _OutOfTurnError as error:
            unit = error.args[0]
        names = [self._split.spec.units[each].name for each in self._all_calls(weights)]
        raise UnitOrderError(
            f"the model does not call unit {self._split.spec.units[unit].name} in its turn: it calls it again, or "
            "after later ones",
            names,
        )

    def _all_calls(self, weights: torch.UntypedStorage) -> list[int]:
        """Return the units that the model calls, each time, in whichever order."""
        live, walk = LiveBytes(weights), Walk(self._split.model, self._inputs)
        self._crossed, self._has_cache = CrossedState(self._split), False
        found: list[int] = []
        outputs: Any = None
        try:
            with live, torch.enable_grad():
                while isinstance(call := self._advance(walk, 0, outputs), UnitCall):
                    found.append(call.unit)
                    self._receive(call)
                    outputs = self._unit(call.unit, call, live)
        finally:
            walk.close()
            live.forget()
        return found

    def _run(self, weights: torch.UntypedStorage) -> Row:
        live = LiveBytes(weights)
        self._crossed = CrossedState(self._split)
        walk = Walk(self._split.model, self._inputs)
        last = len(self._forwards) - 1
        storages: list[Tensor] = []
        several = False
        outputs: Any = None
        try:
            with live, torch.enable_grad():
                call: UnitCall | Finished | None = None
                for unit in range(last + 1):
                    if unit == last:
                        received = {_place(t): t.untyped_storage().nbytes() for t in storages}
                        handed = {_place(t): t.untyped_storage().nbytes() for t in _tensors(outputs)}
                        self._row.held = max(live.restart() - sum((received | handed).values()), 0)
                    if call is None:
                        call, outputs = self._advance(walk, unit, outputs), None
                    if not self._calls(call, unit):
                        self._pass_over(unit, call)
                        continue
                    assert isinstance(call, UnitCall)
                    arguments = self._receive(call)
                    # Who else uses what a unit is given or returns without a graph, no graph tells.
                    several = several or len(arguments) > 1 or not call.makes_graph
                    storages += arguments
                    if unit == last:
                        self._last(unit, call, walk, live)
                    else:
                        outputs = self._unit(unit, call, live)
                    call = None
        finally:
            walk.close()
            live.forget()
        pointers = [_place(tensor) for tensor in storages]
        several = several or not self._returned.isdisjoint(pointers)
        self._row.shared = len(set(pointers)) < len(pointers) or several
        self._row.effects |= SideEffects(shared=self._shared.places)
        self._row.side = self._shared.num_bytes
        self._row.rest_users = {min(unit, last) for unit in self._uses.found} | units_that_share(self._split)
        self._row.outside = self._uses.names
        return self._row

    def _calls(self, call: UnitCall | Finished, unit: int) -> bool:
        """Whether the model calls ``unit`` now; else it passes over it."""
        if isinstance(call, UnitCall) and call.unit < unit:
            raise _OutOfTurnError(call.unit)
        return isinstance(call, UnitCall) and call.unit == unit

    def _pass_over(self, unit: int, call: UnitCall | Finished) -> None:
        """Record a unit that this forward skips, with the sizes of units of equal form: a later forward may call it."""
        alike = (known for form, known in self._known.items() if form[:2] == self._kind(unit))
        forward, backward, kept, *_ = next(alike, ((), (), Kept()))
        self._row.boundary.append(max(self._row.boundary, default=0) if kept.num_bytes else 0)
        self._row.forward.append(forward)
        self._row.backward.append(backward)
        self._row.kept.append(kept)
        if unit == len(self._forwards) - 1 and isinstance(call, Finished):
            self._note_output(call)

    def _note_output(self, ending: Finished) -> None:
        self._row.output = sum(tensor.nbytes for tensor in _tensors(ending.output))
        self._returned = {_place(tensor) for tensor in _tensors(ending.output)}
        self._shared.use(_tensors(ending.output))

    def _advance(self, walk: Walk, unit: int, outputs: Any) -> UnitCall | Finished:
        """Go on to ``unit``, and note what the model's own code uses on the way."""
        self._uses.unit = unit
        state = torch.get_rng_state()
        with self._ambient(), self._uses:
            call = walk.advance(outputs)
        self._note_random(state)
        if isinstance(call, UnitCall):
            self._crossed.reach_unit()
        else:
            self._row.effects |= SideEffects(crosses=self._crossed.crossing())
        return call

    def _note_random(self, before: Tensor) -> None:
        self._row.random |= not torch.equal(before, torch.get_rng_state())

    def _receive(self, call: UnitCall) -> list[Tensor]:
        leaves = torch_private.leaves_of((call.args, call.kwargs))
        caches = [held for leaf in leaves if (held := cached_tensors(leaf)) is not None]
        first, self._has_cache = bool(caches) and not self._has_cache, self._has_cache or bool(caches)
        if first:
            check_caches(self._split.model, caches)
        given = _given(call)
        self._shared.receive(call.unit, given)
        self._uses.give(call.unit, given)
        moves = [leaf for leaf in given if is_differentiable(leaf)]
        tensors = [leaf for leaf in moves if leaf.requires_grad or not call.makes_graph]
        unique = {_place(tensor): tensor for tensor in tensors}
        sizes = [tensor.untyped_storage().nbytes() for tensor in unique.values()]
        # Below the device each begins on a sector of its own.
        self._row.boundary.append(sum(sizes) + SECTOR_BYTES * max(0, len(sizes) - 1))
        return list(unique.values())

    def _unit(self, unit: int, call: UnitCall, live: LiveBytes) -> Any:
        key = self._form(unit, call)
        effects = self._effects_of(key, unit, call, live)
        if key not in self._known:
            found = self._measure_compiled(unit, call, live) or self._measure(unit, call, live, effects)
            passed = _passed_on(call, found[-1])
            with live.blind():  # a form to make others by, which takes no memory
                outputs = torch_private.map_only(Tensor, lambda tensor: tensor.detach().to("meta"), found[-1])
            self._known[key] = *found[:-1], outputs, passed
        forward, backward, kept, outputs, passed = self._known[key]
        self._row.forward.append(forward)
        self._row.backward.append(backward)
        if not self._tracked[unit]:  # it runs no backward
            kept = kept._replace(flops=kept.flops._replace(gradient=0))
        self._row.kept.append(kept)
        if effects.state or effects.objects:
            return self._passed_on(unit, call, effects, live)
        given = _given(call)
        leaves, structure = torch_private.flatten(outputs)
        fresh = torch_private.unflatten(
            [
                _like(leaf) if at not in passed else _shown(given[passed[at]], leaf)
                for at, leaf in enumerate(leaves)
            ],
            structure,
        )
        return hand_out(fresh, Gradients(fresh))

    def _effects_of(self, key: Any, unit: int, call: UnitCall, live: LiveBytes) -> UnitEffects:
        """Return what a unit does besides returning tensors, and note it."""
        kind = (*key[:2], _marks_of(self._split.modules[unit]))
        found = self._effects.get(kind)
        if found is None and not is_compiled(self._bare[unit]):
            with live.suspended():
                found = effects_of(self._split.modules[unit], self._forwards[unit], call)
            self._effects[kind] = found
        found = found or UnitEffects()
        one: frozenset[int] = frozenset({unit})
        none: frozenset[int] = frozenset()
        self._row.effects |= SideEffects(
            one if found.state else none, one if found.outlet else none, one if found.stashes else none
        )
        return found

    @contextmanager
    def _unnoticed(self, effects: UnitEffects, unit: int, call: UnitCall, live: LiveBytes) -> Iterator[None]:
        """Measure a unit that changes things on what there is, and leave no change."""
        if not (effects.state or effects.objects):
            yield
            return
        with ExitStack() as stack:
            with live.blind():
                state = UnitState(self._split.modules[unit].modules() if effects.state else ())
                stack.enter_context(untouched(state, (call.args, tuple(call.kwargs.values()))))
            yield

    def _passed_on(self, unit: int, call: UnitCall, effects: UnitEffects, live: LiveBytes) -> Any:
        """Run a unit for its side effects and return its outputs as fresh leaves."""
        with live.blind():
            state = UnitState(self._split.modules[unit].modules()) if effects.state else None
            visit = visit_of(call, state, outlet=effects.outlet)
            drawn = torch.get_rng_state()
            with torch.no_grad():
                returned = visit.run(self._forwards[unit], graph=False)
            self._note_random(drawn)
        fresh = [_like(leaf) for leaf in returned.leaves]
        return returned.build(hand_out(fresh, Gradients(fresh)))

    def _measure(
        self, unit: int, call: UnitCall, live: LiveBytes, effects: UnitEffects
    ) -> tuple[Trace, Trace, Kept, Any]:
        before = live.restart()
        state = torch.get_rng_state()
        with self._unnoticed(effects, unit, call, live), torch.no_grad():
            outputs = self._forwards[unit](*call.args, **call.kwargs)
        forward = live.since(before)
        self._note_random(state)
        torch.set_rng_state(state)
        before = live.restart()
        with self._unnoticed(effects, unit, call, live):
            same, kept = self._backward(unit, call, live, outline_of((outputs,))[0])
        self._row.graph_matters |= not same
        return forward, live.since(before), kept, outputs

    def _measure_compiled(
        self, unit: int, call: UnitCall, live: LiveBytes
    ) -> tuple[Trace, Trace, Kept, Any] | None:
        """Measure a unit that runs compiled, with a graph in any case; None where it does not."""
        if not is_compiled(self._bare[unit]):
            return None
        state = torch.get_rng_state()

        def run() -> Any:
            args, kwargs = _leaves_of(call)
            return self._forwards[unit](*args, **kwargs)

        ran = OpTrial([])
        with live.suspended():
            run()
            taken = measure_compiled(run) if is_compiled(self._bare[unit]) else None
            if taken is not None:
                with ran.forward():  # as it is, where operations are seen
                    run()
        self._note_random(state)
        if taken is None:
            return None
        self._row.graph_matters = True
        flops = ran.flops()
        flops = flops._replace(gradient=2 * flops.forward)  # two products for each of the forward's
        kept = Kept(taken.saved, num_saved=taken.num_saved, flops=flops)
        return taken.forward, taken.backward, kept, taken.outputs

    def _form(self, unit: int, call: UnitCall) -> Any:
        """What units that are measured once have in common."""
        return (*self._kind(unit), signature(call))

    def _kind(self, unit: int) -> tuple[Any, Any]:
        spec = self._split.spec.units[unit]
        shapes = tuple((tensor.shape, tensor.trainable) for tensor in spec.all_tensors)
        return type(self._split.modules[unit]), shapes

    def _backward(
        self, unit: int, call: UnitCall, live: LiveBytes, expected: Sequence[Tensor] = ()
    ) -> tuple[bool, Kept]:
        """Run the unit with a graph and backward.

        Returns:
            Whether it gave what was expected, bit for bit; and what it saved for its backward.
        """
        before = live.now
        visit = visit_of(call)
        visit.track_inputs()
        trial = Trial([], [])
        live.ops = trial.ops
        ran = OpTrial(trial.ops)
        with trial.hooks(), trial.parts(), ran.forward():
            outputs = visit.repeat(self._forwards[unit])
        live.ops = None
        given = {_place(tensor) for tensor in visit.leaves}
        made = {_place(t): t.untyped_storage().nbytes() for t in outputs if _place(t) not in given}
        saved = max(live.now - before - sum(made.values()), 0)
        leaves = [leaf for leaf in outputs if is_differentiable(leaf)]
        del outputs
        others = [t for t in expected if is_differentiable(t)]
        same = self._is_same(leaves, others)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if wanted:
            with ran.backward():
                torch.autograd.backward(wanted, [torch.zeros_like(leaf) for leaf in wanted])
        last, needed = trial.saved_at[-1] if trial.saved_at else 0, trial.needed()
        yields = ran.yields(last, given | made.keys())
        flops = ran.flops(None if needed is None else last)
        return same, Kept(saved, needed, yields, len(trial.saved_at), flops)

    def _is_same(self, leaves: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        """Whether a unit gave the same with a graph and without."""
        return all(torch.equal(one, other) for one, other in zip(leaves, others, strict=False))

    def _note_loss(self, made: Any, output: Any) -> None:
        """Note what the model's loss is of, where the head made ``made``."""
        labels = self._inputs.get("labels")
        self._row.plain, self._row.shifted = is_plain(made, output, labels), is_shifted(output, labels)

    def _last(self, unit: int, call: UnitCall, walk: Walk, live: LiveBytes) -> None:
        before, glue = live.now, live.peak - live.now
        forward = self._forwards[unit]
        effects = self._effects_of(self._form(unit, call), unit, call, live)
        with torch.no_grad():
            state = torch.get_rng_state()
            ran = OpTrial([])
            if effects.state or effects.objects:
                with ran.forward():
                    outputs = self._passed_on(unit, call, effects, live)
            else:
                with ran.forward():
                    made = forward(*call.args, **call.kwargs)
                self._note_random(state)
                outputs = torch_private.map_only(Tensor, _like, made)
                del made
            ending = self._advance(walk, unit + 1, outputs)
        if isinstance(ending, UnitCall):
            raise _OutOfTurnError(ending.unit)
        self._note_output(ending)
        self._note_loss(outputs, ending.output)
        del outputs
        self._row.forward.append(())
        self._row.kept.append(Kept(flops=_of_head(ran, self._split.modules[unit])))
        self._row.glue = max(glue, 0)
        if self._chunk_tokens is not None and self._row.plain:
            del ending
            hidden = next(
                t for t in torch_private.leaves_of((call.args, call.kwargs)) if is_differentiable(t)
            )
            self._chunk(forward, hidden.detach().flatten(0, -2), live)
            self._row.backward.append(())
            return
        live.restart()
        with self._unnoticed(effects, unit, call, live):
            _, kept = self._backward(unit, call, live)
        self._row.kept[-1] = kept
        # What the loss adds: logits in fp32, their softmax and their gradient.
        logits = getattr(ending.output, "logits", None)
        loss = 3 * 4 * logits.numel() if isinstance(logits, Tensor) else 0
        self._row.backward.append(live.since(before - loss))

    def _chunk(self, forward: Callable[..., Any], hidden: Tensor, live: LiveBytes) -> None:
        """Measure a chunk of the loss at two numbers of tokens."""
        targets = shift_labels(self._inputs["labels"])
        self._row.chunk_tokens = (max(len(hidden) // 2, 1), len(hidden))
        for count in self._row.chunk_tokens:
            before = live.restart()
            chunked_head_loss(forward, hidden[:count], targets[:count], 1.0, count)
            self._row.chunk += (live.since(before),)


def _within(ambient: Ambient, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with ambient():
            return forward(*args, **kwargs)

    return run


def _of_head(ran: OpTrial, head: nn.Module) -> UnitFlops:
    """Return the FLOPs of the last unit, of which a trial has seen the forward alone."""
    flops = ran.flops()
    trains = any(parameter.requires_grad for parameter in head.parameters())
    return flops._replace(gradient=(1 + trains) * flops.forward)


def _leaves_of(call: UnitCall) -> Any:
    """Return the arguments of a call, those that carry gradients as leaves of a graph."""
    return torch_private.map_only(
        Tensor,
        lambda t: t.detach().requires_grad_() if t.requires_grad else t,
        (call.args, call.kwargs),
    )


def check_caches(model: object, caches: Iterable[Sequence[Tensor]]) -> None:
    """Check that no cache of keys and values trains.

    Raises:
        ModelError: one does.
    """
    if any(tensor.requires_grad for held in caches for tensor in held):
        raise ModelError(
            f"{type(model).__name__} gives its units a cache of keys and values that trains (prefix tuning); they "
            "add to it, and would once more in the recompute of a backward. Prompt tuning, P-tuning and LoRA can be "
            "streamed"
        )


def cached_tensors(value: Any) -> list[Tensor] | None:
    """Return the tensors of one of transformers' caches; None of what is no cache."""
    layers = getattr(getattr(value, "self_attention_cache", value), "layers", None)
    return _tensors([vars(layer) for layer in layers]) if isinstance(layers, list) else None


def _given(call: UnitCall) -> list[Tensor]:
    return outline_of((call.args, tuple(call.kwargs.values())))[0]


def _passed_on(call: UnitCall, outputs: Any) -> PassedOn:
    """Return which leaves of ``outputs`` lie in the memory of something given, and of what."""
    given = {_place(leaf): position for position, leaf in enumerate(_given(call))}
    leaves = enumerate(torch_private.leaves_of(outputs))
    return {
        at: given[_place(leaf)] for at, leaf in leaves if isinstance(leaf, Tensor) and _place(leaf) in given
    }


def _shown(given: Tensor, form: Tensor) -> Tensor:
    return given.detach().view(form.dtype).as_strided(form.shape, form.stride(), form.storage_offset())


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch_private.leaves_of(values) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    return memory_key(tensor)


def signature(call: UnitCall) -> Any:
    """What tells calls of different form apart: nesting, shapes and dtypes of tensors, types of the rest."""
    leaves, structure = torch_private.flatten((call.args, call.kwargs))
    forms = [
        (leaf.shape, leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, Modes)
        else type(leaf)
        for leaf in leaves
    ]
    return (str(structure), tuple(forms))


def _marks_of(module: nn.Module) -> Any:
    """Return what tells units of one class apart by what they do: flags, and whether hooks look into them."""
    return tuple(
        (
            *map(len, forward_hooks_of(one)),
            *((name, value) for name, value in vars(one).items() if isinstance(value, (bool, str))),
        )
        for one in module.modules()
    )


def _like(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return made.normal_(0.0, 0.5) if made.is_floating_point() else made
