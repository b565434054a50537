"""Measure one unit of a trial: its forward, its backward, and what it does besides returning tensors."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outsize.compat import torch_private
from outsize.compat.torch_private import forward_hooks_of, memory_key
from outsize.model.compiled import is_compiled
from outsize.model.split import Split
from outsize.model.walk import Modes, UnitCall
from outsize.runtime.forward.microbatch import Ambient
from outsize.runtime.forward.outline import outline_of
from outsize.runtime.forward.short_recompute import Trial
from outsize.runtime.forward.unit_facts import SideEffects
from outsize.runtime.forward.unit_state import (
    States,
    UnitState,
    random_states,
    same_values,
    set_random_states,
    untouched,
)
from outsize.runtime.forward.unit_visit import Gradients, constants_of, hand_out, is_differentiable, visit_of
from outsize.runtime.ops.compute_ops import tracked_units
from outsize.runtime.trial.effects_trial import UnitEffects, effects_of
from outsize.runtime.trial.live_bytes import LiveBytes, OpTrial
from outsize.runtime.trial.measured import Kept, Row, Trace
from outsize.runtime.trial.unit_trials import measure_compiled

CPU = torch.device("cpu")
PassedOn = Mapping[int, int]
"""Of what a unit returns, by position: the position of that in what it was given."""


class UnitMeasure:
    """Units of a trial, each distinct one measured once.

    Args:
        split: a model with the trial's weights.
        forwards: of its units.
        ambient: context that each runs within.
        row: of the trial, to which sizes and effects are added.
        effects: by kind of unit, what it does besides returning tensors; more is added.
        device: that computes.

    Attributes:
        forwards: of the units, within their context.
    """

    def __init__(
        self,
        split: Split,
        forwards: tuple[Callable[..., Any], ...],
        ambient: Ambient,
        row: Row,
        effects: dict[Any, UnitEffects],
        device: torch.device = CPU,
    ) -> None:
        self.forwards = tuple(_within(ambient, forward) for forward in forwards)
        self._split, self._bare, self._row, self._effects = split, forwards, row, effects
        self._device = device
        self._tracked = tracked_units(split.spec)
        self._known: dict[Any, tuple[Trace, Trace, Kept, set[int], Any, PassedOn]] = {}

    def alike(self, unit: int) -> tuple[Trace, Trace, Kept]:
        """Return what units of equal form took in a forward and a backward, and what they kept; nothing if none ran."""
        alike = (sizes for form, sizes in self._known.items() if form[:2] == self._kind(unit))
        forward, backward, saved, *_ = next(alike, ((), (), Kept()))
        return forward, backward, saved

    def run(self, unit: int, call: UnitCall, live: LiveBytes) -> Any:
        """Measure a unit, unless one of its form has been, note its sizes, and return outputs as fresh leaves."""
        key = (*self._kind(unit), signature(call))
        effects = self.effects_of(unit, call, live)
        if key not in self._known:
            sizes = self._measure_compiled(unit, call, live) or self._measure(unit, call, live, effects)
            passed = _passed_on(call, sizes[-1])
            with live.blind():  # a form to make others by, which takes no memory
                outputs = torch_private.map_only(Tensor, lambda tensor: tensor.detach().to("meta"), sizes[-1])
            self._known[key] = *sizes[:-1], outputs, passed
        forward, backward, saved, constants, outputs, passed = self._known[key]
        self._row.forward.append(forward)
        self._row.backward.append(backward)
        if not self._tracked[unit]:  # it runs no backward
            saved = saved._replace(flops=saved.flops._replace(gradient=0))
        self._row.kept.append(saved)
        if effects.state or effects.objects:
            return self.passed_on(unit, call, effects, live)
        self._row.effects |= SideEffects(constants=frozenset((unit, at) for at in constants))
        given = given_tensors(call)
        leaves, structure = torch_private.flatten(outputs)
        leaves = [
            random_like(leaf, self._device) if at not in passed else _shown(given[passed[at]], leaf)
            for at, leaf in enumerate(leaves)
        ]
        fresh = torch_private.unflatten(leaves, structure)
        return hand_out(fresh, Gradients(fresh), constants)

    def effects_of(self, unit: int, call: UnitCall, live: LiveBytes) -> UnitEffects:
        """Return what a unit does besides returning tensors, and note it."""
        kind = (*self._kind(unit), _marks_of(self._split.modules[unit]))
        effects = self._effects.get(kind)
        if effects is None and not is_compiled(self._bare[unit]):
            with live.suspended():
                effects = effects_of(self._split.modules[unit], self.forwards[unit], call, self._device)
            self._effects[kind] = effects
        effects = effects or UnitEffects()
        one: frozenset[int] = frozenset({unit})
        none: frozenset[int] = frozenset()
        self._row.effects |= SideEffects(
            one if effects.state else none, one if effects.outlet else none, one if effects.stashes else none
        )
        return effects

    @contextmanager
    def unnoticed(self, effects: UnitEffects, unit: int, call: UnitCall, live: LiveBytes) -> Iterator[None]:
        """Measure a unit that changes things on what there is, and leave no change."""
        if not (effects.state or effects.objects):
            yield
            return
        with ExitStack() as stack:
            with live.blind():
                state = UnitState(self._split.modules[unit].modules() if effects.state else ())
                stack.enter_context(untouched(state, (call.args, tuple(call.kwargs.values()))))
            yield

    def passed_on(self, unit: int, call: UnitCall, effects: UnitEffects, live: LiveBytes) -> Any:
        """Run a unit for its side effects and return its outputs as fresh leaves."""
        with live.blind():
            state = UnitState(self._split.modules[unit].modules()) if effects.state else None
            visit = visit_of(call, state, outlet=effects.outlet)
            drawn = self.random_states()
            with torch.no_grad():
                returned = visit.run(self.forwards[unit], graph=False)
            self.note_random(drawn)
        fresh = [random_like(leaf, self._device) for leaf in returned.leaves]
        return returned.build(hand_out(fresh, Gradients(fresh)))

    def is_same(self, leaves: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        """Return whether a unit gave the same with a graph and without."""
        return all(map(same_values, leaves, others))

    def random_states(self) -> States:
        """Return where the generators of random numbers are."""
        return random_states(self._device)

    def note_random(self, before: States) -> None:
        """Note whether random numbers of torch's, Python's or numpy's were drawn since ``before``."""
        now = self.random_states()
        pairs = ((before.cpu, now.cpu), (before.device, now.device))
        self._row.random |= any(a is not None and b is not None and not torch.equal(a, b) for a, b in pairs)
        self._row.random |= pickle.dumps(before[2:]) != pickle.dumps(now[2:])

    def _measure(
        self, unit: int, call: UnitCall, live: LiveBytes, effects: UnitEffects
    ) -> tuple[Trace, Trace, Kept, set[int], Any]:
        before = live.restart()
        state = self.random_states()
        with self.unnoticed(effects, unit, call, live), torch.no_grad():
            outputs = self.forwards[unit](*call.args, **call.kwargs)
        forward = live.since(before)
        self.note_random(state)
        set_random_states(self._device, state)
        before = live.restart()
        with self.unnoticed(effects, unit, call, live):
            same, saved, constants = self.backward(unit, call, live, outline_of((outputs,))[0])
        self._row.graph_matters |= not same
        return forward, live.since(before), saved, constants, outputs

    def _measure_compiled(
        self, unit: int, call: UnitCall, live: LiveBytes
    ) -> tuple[Trace, Trace, Kept, set[int], Any] | None:
        """Measure a unit that runs compiled, with a graph in any case; None where it does not."""
        if not is_compiled(self._bare[unit]):
            return None
        state = self.random_states()

        def run() -> Any:
            args, kwargs = _leaves_of(call)
            return self.forwards[unit](*args, **kwargs)

        ran = OpTrial([])
        with live.suspended():
            run()
            compiled = measure_compiled(run) if is_compiled(self._bare[unit]) else None
            if compiled is not None:
                with ran.forward():  # as it is, where operations are seen
                    run()
        self.note_random(state)
        if compiled is None:
            return None
        self._row.graph_matters = True
        flops = ran.flops()
        flops = flops._replace(gradient=2 * flops.forward)  # two products for each of the forward's
        saved = Kept(compiled.saved, num_saved=compiled.num_saved, flops=flops)
        constants = constants_of(torch_private.leaves_of(compiled.outputs))
        return compiled.forward, compiled.backward, saved, constants, compiled.outputs

    def _kind(self, unit: int) -> tuple[Any, Any]:
        spec = self._split.spec.units[unit]
        shapes = tuple((tensor.shape, tensor.trainable) for tensor in spec.all_tensors)
        return type(self._split.modules[unit]), shapes

    def backward(
        self, unit: int, call: UnitCall, live: LiveBytes, expected: Sequence[Tensor] = ()
    ) -> tuple[bool, Kept, set[int]]:
        """Run the unit with a graph and backward.

        Returns:
            Whether it gave what was expected, bit for bit; what it saved for its backward; and which of what it returns
            has no gradient.
        """
        before = live.now
        visit = visit_of(call)
        visit.track_inputs()
        trial = Trial([], [])
        live.ops = trial.ops
        ran = OpTrial(trial.ops)
        with trial.hooks(), trial.parts(), ran.forward():
            outputs = visit.repeat(self.forwards[unit])
        live.ops = None
        given = {memory_key(tensor) for tensor in visit.leaves}
        made_bytes = {
            memory_key(t): t.untyped_storage().nbytes() for t in outputs if memory_key(t) not in given
        }
        saved = max(live.now - before - sum(made_bytes.values()), 0)
        leaves = [leaf for leaf in outputs if is_differentiable(leaf)]
        constants = constants_of(outputs)
        del outputs
        others = [t for t in expected if is_differentiable(t)]
        same = self.is_same(leaves, others)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if wanted:
            with ran.backward():
                torch.autograd.backward(wanted, [torch.zeros_like(leaf) for leaf in wanted])
        last, needed = trial.saved_at[-1] if trial.saved_at else 0, trial.needed()
        yields = ran.yields(last, given | made_bytes.keys())
        flops = ran.flops(None if needed is None else last)
        return same, Kept(saved, needed, yields, len(trial.saved_at), flops), constants


def _within(ambient: Ambient, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with ambient():
            return forward(*args, **kwargs)

    return run


def _leaves_of(call: UnitCall) -> Any:
    """Return the arguments of a call, those that carry gradients as leaves of a graph."""
    return torch_private.map_only(
        Tensor, lambda t: t.detach().requires_grad_() if t.requires_grad else t, (call.args, call.kwargs)
    )


def given_tensors(call: UnitCall) -> list[Tensor]:
    """Return the tensors that a unit is called with, in any nesting."""
    return outline_of((call.args, tuple(call.kwargs.values())))[0]


def _passed_on(call: UnitCall, outputs: Any) -> PassedOn:
    """Return which leaves of ``outputs`` lie in the memory of something given, and of what."""
    given = {memory_key(leaf): position for position, leaf in enumerate(given_tensors(call))}
    leaves = enumerate(torch_private.leaves_of(outputs))
    return {
        at: given[memory_key(leaf)]
        for at, leaf in leaves
        if isinstance(leaf, Tensor) and memory_key(leaf) in given
    }


def _shown(given: Tensor, form: Tensor) -> Tensor:
    return given.detach().view(form.dtype).as_strided(form.shape, form.stride(), form.storage_offset())


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


def random_like(leaf: Any, device: torch.device = CPU) -> Any:
    """Return a tensor of the same form on a device, small random numbers or zeros; what is no tensor as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    fresh = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
    return fresh.normal_(0.0, 0.5) if fresh.is_floating_point() else fresh
