"""A model's own forward as a coroutine that pauses at every unit.

`Walk` runs ``model(**inputs)``, unmodified, inside a greenlet. `Boundaries` has put a boundary in the place of each
unit's forward; when the model's code calls a unit, the boundary hands the arguments out (`UnitCall`) and waits until
somebody, who has run the unit in its own time on its own device, sends the outputs in. So units run in any order over
microbatches, with no code per architecture: masks, rotary tables, caches and keyword arguments pass through as the
model made them. Code between units ("glue": norms, scalings, the loss) runs inside the coroutine.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import greenlet
import torch
from torch import Tensor, nn

from outsize.compat import torch_private
from outsize.errors import ModelError
from outsize.model.modes import MODES, Modes, check_inference
from outsize.model.recorded import WANTED, note, recording, wanted

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


class Boundaries:
    """Replaces the forward of each unit by a boundary, until closed.

    Outside a `Walk` a boundary calls the real forward, so the model still works as before; or ``outside``, where
    somebody has put a function ``(unit, real forward, args, kwargs)`` there.

    Attributes:
        reals: the units' own forwards.
        forwards: the same, which collect what is recorded inside units; see `recording`.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.reals: tuple[Callable[..., Any], ...] = tuple(module.forward for module in modules)
        self.forwards: tuple[Callable[..., Any], ...] = tuple(map(recording, self.reals))
        self.outside: Outside | None = None
        self._modules = tuple(modules)
        self._had_own = tuple("forward" in vars(module) for module in modules)
        for index, module in enumerate(modules):
            module.forward = self._boundary(index)

    def _boundary(self, index: int) -> Callable[..., Any]:
        real = self.reals[index]

        def boundary(*args: Any, **kwargs: Any) -> Any:
            current = greenlet.getcurrent()
            if isinstance(current, _Coroutine):
                return current.call(index, args, kwargs)
            if self.outside is not None:
                return self.outside(index, real, args, kwargs)
            return real(*args, **kwargs)

        return boundary

    def close(self) -> None:
        """Give every unit its own forward back."""
        for module, real, had_own in zip(self._modules, self.reals, self._had_own, strict=True):
            if had_own:
                module.forward = real
            elif "forward" in vars(module):
                del module.forward

    def __enter__(self) -> "Boundaries":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Coroutine(greenlet.greenlet):  # type: ignore[misc]
    """A greenlet in which boundaries pause.

    Attributes:
        modes: those in which whoever advances it has it go on.
        inferring: whether that is within inference mode.
    """

    modes: Modes
    inferring: bool

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a unit returns, which whoever advances this runs; recorded tensors go where the model looks."""
        modes, keys = Modes.of_now(), wanted()
        check_inference(self.inferring)
        own = modes != self.modes
        told = {**kwargs, **({WANTED: keys} if keys else {}), **({MODES: modes} if own else {})}
        outputs = self.parent.switch(UnitCall(unit, args, told))
        if own:
            modes.take()
        if keys:
            outputs, found = outputs
            note(found)
        return outputs if modes.grad or not self.modes.grad else without_history(outputs)


def without_history(outputs: Any) -> Any:
    """Return what a unit returned to code that makes no graph."""
    return torch_private.map_only(Tensor, Tensor.detach, outputs)


def is_walking() -> bool:
    """Whether the caller runs inside a `Walk`."""
    return isinstance(greenlet.getcurrent(), _Coroutine)


class Walk:
    """One forward of a model over one microbatch, paused at its units.

    A walk lives in the thread that advances it first; greenlets cannot change threads.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        self._coroutine = _Coroutine(lambda: model(**inputs))
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
