"""Walk through the forward of a model, unit by unit.

A model's own forward is a coroutine that pauses at every unit. `Walk` runs ``model(**inputs)``, unmodified, inside a
greenlet. `Boundaries` has put a boundary in the place of each unit's forward; when the model's code calls a unit, the
boundary hands the arguments out (`UnitCall`) and waits until somebody, who has run the unit in its own time on its own
device, sends the outputs in. So units run in any order over microbatches, with no code per architecture: masks, rotary
tables, caches and keyword arguments pass through as the model made them. Code between units ("glue": norms, scalings,
the loss) runs inside the coroutine.

What transformers records inside units (router logits, attention probabilities) travels with a unit's outputs.
transformers hangs hooks on modules deep inside; they append to lists of the forward that is under way in their context.
A unit of a walk runs in another context, and more than once. So the boundary asks which lists the forward wants; the
unit's forward collects them for itself and returns them behind its outputs, cut and given gradients as those are; and
the boundary appends them where the model's own code will look.

What the model's own code has turned on around a unit (no gradients, another autocast, a context variable) belongs to a
thread, and a forward that pauses shares its thread with whoever goes on meanwhile. So a boundary tells a unit's forward
the modes that it was called in, where they are others than those that the model's forward runs in, and takes them again
when the model goes on.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MethodType
from typing import Any, Self

import greenlet
import torch
from torch import Tensor, nn

from outsize.accelerators import VENDORS
from outsize.compat import torch_private
from outsize.compat.transformers_private import output_collector, output_variable
from outsize.errors import Closing, ModelError

# The keyword argument that tells a unit's forward what to run in.
MODES = "_outsize_modes"


@cache
def _kinds() -> tuple[str, ...]:
    """Return the types of devices that this torch knows; those of extensions once they are imported."""
    return ("cpu", *(kind for kind in VENDORS if hasattr(torch, kind)))


@dataclass(frozen=True, slots=True)
class Modes:
    """Modes of a thread.

    Attributes:
        grad: whether graphs are made.
        autocast: the dtype of each type of device, where its operations are cast.
        variables: context variables and their values.
    """

    grad: bool = True
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    variables: tuple[tuple[contextvars.ContextVar[Any], Any], ...] = field(default=(), compare=False)

    @classmethod
    def of_now(cls) -> Self:
        """Return those of the calling thread, without its variables."""
        active = [kind for kind in _kinds() if torch.is_autocast_enabled(kind)]
        return cls(torch.is_grad_enabled(), tuple((kind, torch.get_autocast_dtype(kind)) for kind in active))

    def on_trial(self, kind: str) -> "Modes":
        """Return what these are on devices of a kind, for a trial there or on a CPU."""
        kinds = dict.fromkeys((kind, "cpu"))
        return Modes(
            autocast=tuple((each, dtype) for of, dtype in self.autocast if of == kind for each in kinds)
        )

    def take(self) -> None:
        """Have the calling thread in these modes."""
        torch.set_grad_enabled(self.grad)
        given = dict(self.autocast)
        for kind in _kinds():
            if torch.is_autocast_enabled(kind) != (kind in given):
                torch.set_autocast_enabled(kind, kind in given)
            if kind in given and torch.get_autocast_dtype(kind) != given[kind]:
                torch.set_autocast_dtype(kind, given[kind])

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Run in these modes while the context lasts; graphs are made where both have them.

        Raises:
            ModelError: what runs sets one of the variables, which whoever comes next would not find.
        """
        outer_modes = Modes.of_now()
        cached = torch.is_autocast_cache_enabled()
        given = [(variable, variable.set(value)) for variable, value in self.variables]
        Modes(self.grad and outer_modes.grad, self.autocast).take()
        torch.set_autocast_cache_enabled(False)  # it would keep casts of weights that have left their slot
        try:
            yield
            _check_variables(self.variables)
        finally:
            outer_modes.take()
            torch.set_autocast_cache_enabled(cached)
            for variable, token in reversed(given):
                variable.reset(token)


def _check_variables(given: Iterable[tuple[contextvars.ContextVar[Any], Any]]) -> None:
    """Check that context variables have the values that they were given."""
    for variable, value in given:
        if variable.get() is not value:
            raise ModelError(
                f"the model's code sets the context variable {variable.name!r}, which layers and callers do not "
                "see, since they run in other threads; pass it as an argument"
            )


def check_inference(before: bool) -> None:
    """Check that code of the model has not turned inference mode on before it calls a unit.

    Raises:
        ModelError: it has.
    """
    if torch.is_inference_mode_enabled() != before:
        raise ModelError(
            "the model calls a unit within torch.inference_mode() of its own, which cannot pause; write torch.no_grad()"
        )


# The keyword argument that tells a unit's forward what to collect.
WANTED = "_outsize_recorded"
# These are recorded of the units themselves, outside of them.
_OF_UNITS = frozenset({"hidden_states", "_hidden_states_layers"})
Found = dict[str, list[Any]]


def wanted() -> tuple[str, ...]:
    """What the forward under way in this context wants recorded inside units; empty for nothing."""
    lists = output_collector().get()
    return tuple(key for key in lists or () if key not in _OF_UNITS)


def note(records: Found) -> None:
    """Give the forward under way in this context what was recorded inside a unit."""
    collector = output_collector()
    assert collector is not None
    for key, values in records.items():
        collector.get()[key].extend(values)


def recording(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a unit's forward that returns ``(outputs, recorded)`` where `WANTED` says what to record.

    It runs in the modes that `MODES` says.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        modes = kwargs.pop(MODES, None)
        if modes is not None:
            with modes.around():
                return forward(*args, **kwargs)
        keys = kwargs.pop(WANTED, ())
        if not keys:
            return real(*args, **kwargs)
        with _collecting(keys) as records:
            outputs = real(*args, **kwargs)
        return outputs, records

    forward.__wrapped__ = real  # type: ignore[attr-defined]
    return forward


@contextlib.contextmanager
def _collecting(keys: tuple[str, ...]) -> Iterator[Found]:
    collector = output_collector()
    assert collector is not None
    records: Found = {key: [] for key in keys}
    token = collector.set(records)
    try:
        yield records
    finally:
        collector.reset(token)


Outside = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class UnitCall:
    """The model has called a unit and waits for its outputs."""

    unit: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def makes_graph(self) -> bool:
        """Whether it is not called under ``no_grad`` of the model's own code."""
        modes = self.kwargs.get(MODES)
        return not isinstance(modes, Modes) or modes.grad


@dataclass(frozen=True, slots=True)
class Finished:
    """The forward has returned."""

    output: Any


class Boundaries(Closing):
    """Replaces the forward of each unit by a boundary, until closed.

    Outside a `Walk` a boundary calls the real forward, so the model still works as before; or ``outside``, where
    somebody has put a function ``(unit, real forward, args, kwargs)`` there.

    Attributes:
        reals: the units' own forwards.
        on_unstreamed: called once with a unit that is called outside of all these, where its gradients may be wanted.
        forwards: the same, which collect what is recorded inside units; see `recording`.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.reals: tuple[Callable[..., Any], ...] = tuple(module.forward for module in modules)
        self.forwards: tuple[Callable[..., Any], ...] = tuple(map(recording, self.reals))
        self.outside: Outside | None = None
        self.on_unstreamed: Callable[[int], None] | None = None
        self._modules = tuple(modules)
        self._had_own = tuple("forward" in vars(module) for module in modules)
        for index, module in enumerate(modules):
            module.forward = self._boundary(index)

    def _boundary(self, index: int) -> Callable[..., Any]:
        real, module, had_own = self.reals[index], self._modules[index], self._had_own[index]

        # A method of that name: a copy of the unit, or a pickled one, has its own, and is no unit.
        def forward(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if called is not module:
                if not had_own:
                    return type(called).forward(called, *args, **kwargs)
                # Perhaps itself a copy's boundary.
                if isinstance(real, MethodType) and real.__self__ is module:
                    return real.__func__(called, *args, **kwargs)
                return real(*args, **kwargs)
            current = greenlet.getcurrent()
            if isinstance(current, _Coroutine):
                return current.call(index, args, kwargs)
            if self.outside is not None:
                return self.outside(index, real, args, kwargs)
            if self.on_unstreamed is not None and torch.is_grad_enabled():
                self.on_unstreamed(index)
                self.on_unstreamed = None
            return real(*args, **kwargs)

        return MethodType(forward, module)

    def close(self) -> None:
        """Give every unit its own forward back."""
        for module, real, had_own in zip(self._modules, self.reals, self._had_own, strict=True):
            if had_own:
                module.forward = real
            elif "forward" in vars(module):
                del module.forward


class _Coroutine(greenlet.greenlet):  # type: ignore[misc]
    """A greenlet in which boundaries pause.

    Attributes:
        modes: those in which whoever advances it has it go on.
        inferring: whether that is within inference mode.
        given: context variables that it began with.
    """

    modes: Modes
    inferring: bool
    given: contextvars.Context

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a unit returns, which whoever advances this runs; recorded tensors go where the model looks."""
        modes, keys = replace(Modes.of_now(), variables=self._variables()), wanted()
        check_inference(self.inferring)
        has_modes = modes != self.modes or bool(modes.variables)
        arguments = {**kwargs, **({WANTED: keys} if keys else {}), **({MODES: modes} if has_modes else {})}
        outputs = self.parent.switch(UnitCall(unit, args, arguments))
        if has_modes:
            modes.take()
        if keys:
            outputs, recorded = outputs
            note(recorded)
        return outputs if modes.grad or not self.modes.grad else without_history(outputs)

    def _variables(self) -> tuple[tuple[contextvars.ContextVar[Any], Any], ...]:
        """Return the context variables that the model's own code has set, but for that in which it collects outputs."""
        now, collector = contextvars.copy_context().items(), output_variable()
        changed = tuple((v, x) for v, x in now if v is not collector and self.given.get(v, self) is not x)
        if any(isinstance(value, Tensor) and value.requires_grad for _, value in changed):
            raise ModelError(
                "the model's code sets a context variable to a tensor with a gradient, which does not find its way "
                "back from a layer; pass it as an argument"
            )
        return changed


def without_history(outputs: Any) -> Any:
    """Return what a unit returned to code that makes no graph."""
    return torch_private.map_only(Tensor, Tensor.detach, outputs)


def is_walking() -> bool:
    """Whether the caller runs inside a `Walk`."""
    return isinstance(greenlet.getcurrent(), _Coroutine)


class Walk:
    """One forward of a model over one microbatch, or other code that calls the model, paused at its units.

    A walk lives in the thread that advances it first; greenlets cannot change threads.
    """

    def __init__(self, model: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
        def run() -> Any:
            output = model(**inputs)
            _check_variables(self._coroutine.given.items())
            return output

        self._coroutine = _Coroutine(run)
        self._started = False

    def advance(self, outputs: Any = None) -> UnitCall | Finished:
        """Run until the next unit is called or the forward returns.

        Args:
            outputs: what the unit called last returned; ignored on the first call.

        Raises:
            ModelError: the forward has already returned.
            Exception: whatever the model's own code raises.
        """
        if self._coroutine.dead:
            raise ModelError("the forward of this microbatch has already returned")
        # A greenlet returns to its parent: the greenlet that advances it now.
        self._coroutine.parent = greenlet.getcurrent()
        self._coroutine.modes = modes = Modes.of_now()
        self._coroutine.inferring = torch.is_inference_mode_enabled()
        try:
            if not self._started:
                self._coroutine.given = contextvars.copy_context()
                self._coroutine.gr_context = self._coroutine.given.copy()
            result = self._coroutine.switch(outputs) if self._started else self._coroutine.switch()
        finally:
            modes.take()
        self._started = True
        return result if isinstance(result, UnitCall) and not self._coroutine.dead else Finished(result)

    def close(self) -> None:
        """Unwind a forward that will not be continued; its frames let go of their tensors."""
        if self._started and not self._coroutine.dead:
            self._coroutine.parent = greenlet.getcurrent()
            with contextlib.suppress(Exception):  # what the model's code makes of it concerns nobody any more
                self._coroutine.throw(greenlet.GreenletExit)
