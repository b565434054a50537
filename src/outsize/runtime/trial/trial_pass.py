"""One forward over the units of a model at a short length, each distinct unit measured forward and backward."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from outsize.compat import torch_private
from outsize.compat.torch_private import memory_key
from outsize.errors import ModelError
from outsize.model.sizes.model_spec import SECTOR_BYTES
from outsize.model.split import ALL_LISTS, Split, UnitChoice
from outsize.model.tiled import chunked_head_loss, shift_labels
from outsize.model.walk import Finished, UnitCall, Walk
from outsize.runtime.forward.microbatch import Ambient
from outsize.runtime.forward.unit_facts import SideEffects, UnitFlops
from outsize.runtime.forward.unit_visit import is_differentiable
from outsize.runtime.trial.effects_trial import CrossedState, UnitEffects
from outsize.runtime.trial.live_bytes import LiveBytes, OpTrial
from outsize.runtime.trial.measured import Kept, Row
from outsize.runtime.trial.unit_measure import CPU, UnitMeasure, given_tensors, random_like
from outsize.runtime.trial.unit_trials import OuterUses, SharedInputs, is_plain, is_shifted, units_that_share

T = TypeVar("T")


class UnitOrderError(ModelError):
    """A model calls its units in another order than they are in.

    Attributes:
        calls: names of the units that it calls, each time, in its order.
    """

    def __init__(self, message: str, calls: Sequence[str]) -> None:
        super().__init__(message)
        self.calls = tuple(calls)


def in_turn(make: Callable[[UnitChoice], T]) -> T:
    """Return what ``make`` makes of units in the order in which the model calls them, found out by trying.

    Args:
        make: given a choice of units, raises `UnitOrderError` where the model calls them in another order.

    Raises:
        UnitOrderError: it has none that holds.
    """
    choice = ALL_LISTS
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
        is_longest: whether chunks of the loss are measured: `scale` reads those of the longest length alone.
        device: that computes.
        is_full: whether it is of the size of a run, up to the last unit, whose logits would be too large for most
            devices; then the device's allocator says what the others take.
    """

    def __init__(
        self,
        split: Split,
        forwards: tuple[Callable[..., Any], ...],
        inputs: Mapping[str, Any],
        chunk_tokens: int | None,
        ambient: Ambient = nullcontext,
        effects: dict[Any, UnitEffects] | None = None,
        *,
        is_longest: bool = True,
        device: torch.device = CPU,
        is_full: bool = False,
    ) -> None:
        self._split = split
        self._ambient = ambient
        self._inputs = dict(inputs)
        if device != CPU:
            self._inputs = _moved(self._inputs, device)
        self._device, self._is_full = device, is_full
        self._chunk_tokens = chunk_tokens
        self._is_longest = is_longest
        self._row = Row([], [], [], [], 0, False, False)
        self._units = UnitMeasure(
            split, forwards, ambient, self._row, {} if effects is None else effects, device
        )
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
        calls: list[int] = []
        outputs: Any = None
        try:
            with live, torch.enable_grad():
                while isinstance(call := self._advance(walk, 0, outputs), UnitCall):
                    calls.append(call.unit)
                    self._receive(call)
                    outputs = self._units.run(call.unit, call, live)
        finally:
            walk.close()
            live.forget()
        return calls

    def _run(self, weights: torch.UntypedStorage) -> Row:
        live = LiveBytes(weights, self._device if self._is_full else None)
        self._crossed = CrossedState(self._split)
        walk = Walk(self._split.model, self._inputs)
        last = len(self._units.forwards) - 1
        storages: list[Tensor] = []
        several = False
        outputs: Any = None
        try:
            with live, torch.enable_grad():
                call: UnitCall | Finished | None = None
                for unit in range(last + 1):
                    if unit == last:
                        received = {memory_key(t): t.untyped_storage().nbytes() for t in storages}
                        handed = {memory_key(t): t.untyped_storage().nbytes() for t in _tensors(outputs)}
                        self._row.held = max(live.restart() - sum((received | handed).values()), 0)
                        if self._is_full:
                            break
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
                        outputs = self._units.run(unit, call, live)
                    call = None
        finally:
            walk.close()
            live.forget()
        pointers = [memory_key(tensor) for tensor in storages]
        several = several or self._shared.used_later or not self._returned.isdisjoint(pointers)
        self._row.shared = len(set(pointers)) < len(pointers) or several
        self._row.effects |= SideEffects(shared=self._shared.places, changed=frozenset(self._shared.changed))
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
        forward, backward, saved = self._units.alike(unit)
        self._row.boundary.append(max(self._row.boundary, default=0) if saved.num_bytes else 0)
        self._row.forward.append(forward)
        self._row.backward.append(backward)
        self._row.kept.append(saved)
        if unit == len(self._units.forwards) - 1 and isinstance(call, Finished):
            self._note_output(call)

    def _note_output(self, ending: Finished) -> None:
        self._row.output = sum(tensor.nbytes for tensor in _tensors(ending.output))
        self._returned = {memory_key(tensor) for tensor in _tensors(ending.output)}
        self._shared.use(_tensors(ending.output))

    def _advance(self, walk: Walk, unit: int, outputs: Any) -> UnitCall | Finished:
        """Go on to ``unit``, and note what the model's own code uses on the way."""
        self._uses.unit = unit
        state = self._units.random_states()
        with self._ambient(), self._uses:
            call = walk.advance(outputs)
        self._units.note_random(state)
        if isinstance(call, UnitCall):
            self._crossed.reach_unit(call.unit)
        else:
            self._row.effects |= SideEffects(crosses=self._crossed.crossing())
        return call

    def _receive(self, call: UnitCall) -> list[Tensor]:
        leaves = torch_private.leaves_of((call.args, call.kwargs))
        caches = [held for leaf in leaves if (held := cached_tensors(leaf)) is not None]
        first, self._has_cache = bool(caches) and not self._has_cache, self._has_cache or bool(caches)
        if first:
            check_caches(self._split.model, caches)
        given = given_tensors(call)
        self._shared.receive(call.unit, given)
        self._uses.give(call.unit, given)
        moves = [leaf for leaf in given if is_differentiable(leaf)]
        tensors = [leaf for leaf in moves if leaf.requires_grad or not call.makes_graph]
        unique = {memory_key(tensor): tensor for tensor in tensors}
        sizes = [tensor.untyped_storage().nbytes() for tensor in unique.values()]
        # Below the device each begins on a sector of its own.
        self._row.boundary.append(sum(sizes) + SECTOR_BYTES * max(0, len(sizes) - 1))
        return list(unique.values())

    def _note_loss(self, head_output: Any, output: Any) -> None:
        """Note what the model's loss is of, where the head made ``head_output``."""
        labels = self._inputs.get("labels")
        self._row.plain, self._row.shifted = is_plain(head_output, output, labels), is_shifted(output, labels)

    def _last(self, unit: int, call: UnitCall, walk: Walk, live: LiveBytes) -> None:
        before, glue = live.now, live.peak - live.now
        forward = self._units.forwards[unit]
        effects = self._units.effects_of(unit, call, live)
        with torch.no_grad():
            state = self._units.random_states()
            ran = OpTrial([])
            if effects.state or effects.objects:
                with ran.forward():
                    outputs = self._units.passed_on(unit, call, effects, live)
            else:
                with ran.forward():
                    head_output = forward(*call.args, **call.kwargs)
                self._units.note_random(state)
                outputs = torch_private.map_only(
                    Tensor, partial(random_like, device=self._device), head_output
                )
                del head_output
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
            if self._is_longest:
                hidden = next(
                    t for t in torch_private.leaves_of((call.args, call.kwargs)) if is_differentiable(t)
                )
                self._chunk(forward, hidden.detach().flatten(0, -2), live)
            self._row.backward.append(())
            return
        live.restart()
        with self._units.unnoticed(effects, unit, call, live):
            _, saved, _ = self._units.backward(unit, call, live)
        self._row.kept[-1] = saved
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


def _of_head(ran: OpTrial, head: nn.Module) -> UnitFlops:
    """Return the FLOPs of the last unit, of which a trial has seen the forward alone."""
    flops = ran.flops()
    trains = any(parameter.requires_grad for parameter in head.parameters())
    return flops._replace(gradient=(1 + trains) * flops.forward)


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


def _moved(inputs: dict[str, Any], device: torch.device) -> Any:
    """Return inputs on a device; a tensor that is there twice is one there as well."""
    copies: dict[int, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().to(device).requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    return torch_private.map_only(Tensor, moved, inputs)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch_private.leaves_of(values) if isinstance(leaf, Tensor)]
