"""How long units compute: each distinct one timed, forward and backward, on one microbatch of made-up tokens.

Weights do not matter to times, so every unit is bound to one plane of small random numbers. Blocks of the same class
and shapes that are called alike are timed once. It takes the memory of one unit and its activations, as a step does.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from outsize.errors import ModelError
from outsize.model.split import Split
from outsize.model.walk import UnitCall, Walk
from outsize.planner.costs import UnitTimes
from outsize.runtime.binding import Binder, buffers_on
from outsize.runtime.boundary import hand_out, is_differentiable
from outsize.runtime.calibrate import Discard
from outsize.runtime.head_loss import chunked_head_loss, shift_labels
from outsize.runtime.trial_pass import signature
from outsize.runtime.trial_weights import bind_trial_weights

# A first call that takes this long is its own warm-up. Shorter work is repeated: twice, for a few milliseconds, and up
# to five times where that takes no longer than a quarter of a second, so that one bad sample does not decide.
SLOW_S = 0.5
REPEATED_S = 0.005
FEWEST = 2
WANTED, WANTED_S = 5, 0.25


def time_units(
    split: Split,
    forwards: tuple[Callable[..., Any], ...],
    inputs: Mapping[str, Tensor],
    *,
    chunk_tokens: int | None,
    device: torch.device,
) -> UnitTimes:
    """Return the seconds that each streamed unit computes for a microbatch such as ``inputs``.

    Args:
        split: the model; its boundaries must be in place.
        forwards: the units' own forwards.
        inputs: of one microbatch, with labels, [B, S] each.
        chunk_tokens: tokens per chunk of the loss; None for the model's own loss, of which the head's part is timed.
        device: that computes.

    Raises:
        ModelError: the model does not call its units in order, or raised something.
    """
    # Kernels keep buffers for every thread that ever called them; those of this one go with it.
    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(1, "unit-clock", lambda: torch.set_num_threads(num_threads)) as thread:
        return thread.submit(_time_units, split, forwards, inputs, chunk_tokens, device).result()


def _time_units(
    split: Split,
    forwards: tuple[Callable[..., Any], ...],
    inputs: Mapping[str, Tensor],
    chunk_tokens: int | None,
    device: torch.device,
) -> UnitTimes:
    binder = Binder(split, Discard())
    state = torch.get_rng_state()
    try:
        with buffers_on(split.model, device):
            bind_trial_weights(binder, split.spec, device)
            on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
            return _Clock(split, forwards, on_device, chunk_tokens, device).run()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"{type(split.model).__name__} raised while its units were timed: {error}"
        ) from error
    finally:
        torch.set_rng_state(state)
        binder.close()


class _Clock:
    """One forward over the units, each distinct one timed on the way."""

    def __init__(
        self,
        split: Split,
        forwards: tuple[Callable[..., Any], ...],
        inputs: Mapping[str, Tensor],
        chunk_tokens: int | None,
        device: torch.device,
    ) -> None:
        self._split = split
        self._forwards = forwards
        self._inputs = dict(inputs)
        self._chunk_tokens = chunk_tokens
        self._device = device
        self._known: dict[Any, tuple[float, float, Any]] = {}

    def run(self) -> UnitTimes:
        walk = Walk(self._split.model, self._inputs)
        last = len(self._forwards) - 1
        times: list[tuple[float, float]] = []
        outputs: Any = None
        try:
            with torch.enable_grad():
                for unit in range(last + 1):
                    call = walk.advance(outputs)
                    if not isinstance(call, UnitCall) or call.unit != unit:
                        raise ModelError(
                            f"the model does not call unit {self._split.spec.units[unit].name} in turn"
                        )
                    if unit == last:
                        times.append((0.0, self._head(call)))
                        break
                    forward_s, backward_s, made = self._unit(unit, call)
                    times.append((forward_s, backward_s))
                    outputs = hand_out(made, tracked=True)[0]
        finally:
            walk.close()
        forward, backward = zip(*times, strict=True)
        return UnitTimes(forward_s=forward, backward_s=backward)

    def _unit(self, unit: int, call: UnitCall) -> tuple[float, float, Any]:
        tensors = self._split.spec.units[unit].tensors
        form = tuple((tensor.shape, tensor.trainable) for tensor in tensors)
        key = (type(self._split.modules[unit]), form, signature(call))
        if key not in self._known:
            with torch.no_grad():
                made = self._forwards[unit](*call.args, **call.kwargs)
                forward_s = self._timed(lambda: self._forwards[unit](*call.args, **call.kwargs))
            self._known[key] = forward_s, self._timed(lambda: self._backward(unit, call)), made
        return self._known[key]

    def _backward(self, unit: int, call: UnitCall) -> None:
        """Recompute the unit with a graph, and backward."""
        args, kwargs = pytree.tree_map_only(
            Tensor,
            lambda t: t.detach().requires_grad_() if t.requires_grad else t,
            (call.args, call.kwargs),
        )
        leaves = pytree.tree_leaves(self._forwards[unit](*args, **kwargs))
        wanted = [leaf for leaf in leaves if is_differentiable(leaf) and leaf.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, [torch.zeros_like(leaf) for leaf in wanted])

    def _head(self, call: UnitCall) -> float:
        """Return the time of the head's forward, loss and backward."""
        unit = len(self._forwards) - 1
        if self._chunk_tokens is None:
            return self._timed(lambda: self._backward(unit, call))
        hidden = next(
            t for t in pytree.tree_leaves((call.args, call.kwargs)) if is_differentiable(t)
        ).detach()
        targets, chunk = shift_labels(self._inputs["labels"]), self._chunk_tokens
        return self._timed(
            lambda: chunked_head_loss(self._forwards[unit], hidden, targets, float(len(targets)), chunk)
        )

    def _timed(self, work: Callable[[], object]) -> float:
        """Return the seconds of ``work``, the median of a few repetitions where they are short."""
        first = self._once(work)
        if first > SLOW_S:
            return first
        samples: list[float] = []
        while _too_few(len(samples), sum(samples)):
            samples.append(self._once(work))
        return statistics.median(samples)

    def _once(self, work: Callable[[], object]) -> float:
        self._finish()
        started = time.perf_counter()
        work()
        self._finish()
        return time.perf_counter() - started

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _too_few(count: int, total_s: float) -> bool:
    """Whether ``count`` samples that took ``total_s`` say too little."""
    return count < FEWEST or total_s < REPEATED_S or (count < WANTED and total_s < WANTED_S)
