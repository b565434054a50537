"""Compile units before the first step, and time each distinct one forward and backward.

A passage through a unit is more than its operations: arguments are cut from their history, random numbers are seeded,
what autograd saves is looked after one by one, gradients are added up. Of small units that is a third of the time. So
what is timed are the passages of a run (`MicrobatchRun`), through one unit again and again.

Weights do not matter to times, so every unit is bound to one plane of small random numbers. Blocks of the same class
and shapes that are called alike are timed once. It takes the memory of one unit and its activations, as a step does.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outsize.accelerators import as_current, synchronize
from outsize.compat import torch_private
from outsize.errors import ModelError
from outsize.group.group import Pace, SingleGroup
from outsize.model.compiled import is_compiled
from outsize.model.split import Split
from outsize.model.tiled import chunked_head_loss, shift_labels
from outsize.model.walk import Boundaries, UnitCall, Walk
from outsize.planner.simulate.costs import UnitTimes
from outsize.runtime.device.heap import ResidentLimit
from outsize.runtime.forward.binding import Binder, GradientSums, buffers_on
from outsize.runtime.forward.microbatch import MicrobatchRun
from outsize.runtime.forward.saved_tensors import Keeping
from outsize.runtime.forward.unit_state import UnitState, untouched
from outsize.runtime.forward.unit_visit import is_differentiable
from outsize.runtime.ops.compute_ops import tracked_units
from outsize.runtime.trial.calibrate import Discard
from outsize.runtime.trial.live_bytes import without_trace
from outsize.runtime.trial.unit_measure import signature
from outsize.runtime.trial.unit_trials import OneUnit, bind_trial_weights

# A first sample touches memory and builds kernels, and takes up to twice as long as those that follow: it counts only
# where it takes this long. Shorter work is repeated: once, for half a second, twice, for a few milliseconds, and up to
# five times where that takes no longer than a quarter of a second, so that one bad sample does not decide.
SLOW_S, ENDLESS_S = 0.5, 15.0
REPEATED_S = 0.005
FEWEST, MOST = 2, 1000
WANTED, WANTED_S = 5, 0.25
# Forwards that wait for their backwards at once: so many that no cache holds what they keep, as in a step.
MOST_WAITING, WAITING_S = 64, 0.5
# Seconds of the parts of a sample.
Sample = tuple[float, ...]


def time_units(
    split: Split,
    forwards: tuple[Callable[..., Any], ...],
    inputs: Mapping[str, Tensor],
    *,
    chunk_tokens: int | None,
    device: torch.device,
    num_kept: Sequence[int] = (),
    limit: ResidentLimit | None = None,
    pace: Pace | None = None,
) -> UnitTimes:
    """Return the seconds that each streamed unit computes for a microbatch such as ``inputs``.

    Args:
        split: the model; its boundaries must be in place.
        forwards: the units' own forwards.
        inputs: of one microbatch, with labels, [B, S] each.
        chunk_tokens: tokens per chunk of the loss; None for the model's own loss, of which the head's part is timed.
        device: that computes.
        num_kept: of each unit, how many forwards may keep all that their backward needs, at once, on the device, one at
            least; empty where none does, and nothing of that is timed.
        limit: of resident memory, which a run on a CPU looks at wherever autograd saves or uses a tensor; None where it
            is nobody's promise.
        pace: of the ranks that time the same units at the same time; None for a single process.

    Raises:
        ModelError: the model does not call its units in order, or raised something.
    """
    # Kernels keep buffers for every thread that ever called them; those of this one go with it.
    num_threads = torch.get_num_threads()
    kept_to = pace or Pace(SingleGroup())
    with ThreadPoolExecutor(1, "unit-clock", lambda: torch.set_num_threads(num_threads)) as thread:
        timing = thread.submit(
            _time_units, split, forwards, inputs, chunk_tokens, device, num_kept, limit, kept_to
        )
        return timing.result()


def _time_units(
    split: Split,
    forwards: tuple[Callable[..., Any], ...],
    inputs: Mapping[str, Tensor],
    chunk_tokens: int | None,
    device: torch.device,
    num_kept: Sequence[int],
    limit: ResidentLimit | None,
    pace: Pace,
) -> UnitTimes:
    sums = GradientSums()
    binder = Binder(split, sums)
    try:
        with as_current(device), buffers_on(split.model, device), without_trace(split.model, device):
            weights = bind_trial_weights(binder, split.spec, device)
            numel = max(unit.numel for unit in split.spec.units)
            gradient = torch.zeros(numel, dtype=torch.float32, device=device)
            for unit in split.spec.units:
                sums.open(unit, gradient[: unit.numel])
            on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
            clock = _Clock(split, forwards, on_device, chunk_tokens, device, pace, weights, num_kept, limit)
            return clock.run()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"{type(split.model).__name__} raised while its units were timed: {error}"
        ) from error
    finally:
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
        pace: Pace,
        weights: Tensor,
        num_kept: Sequence[int],
        limit: ResidentLimit | None,
    ) -> None:
        self._split = split
        self._forwards = forwards
        self._inputs = dict(inputs)
        self._chunk_tokens = chunk_tokens
        self._device = device
        self._pace = pace
        self._weights = weights
        self._num_kept = num_kept
        self._limit = limit
        self._known: dict[Any, tuple[Sample, Sample, Any]] = {}

    def run(self) -> UnitTimes:
        walk = Walk(self._split.model, self._inputs)
        last = len(self._forwards) - 1
        times: list[Sample] = []
        kept_samples: list[Sample] = []
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
                        kept_samples.append(times[-1])
                        break
                    seconds, kept_s, returned = self._unit(unit, call)
                    times.append(seconds)
                    kept_samples.append(kept_s)
                    outputs = returned
        finally:
            walk.close()
        forward, backward = zip(*times, strict=True)
        if not self._num_kept:
            return UnitTimes(forward_s=forward, backward_s=backward)
        kept_forward, kept_backward = zip(*kept_samples, strict=True)
        return UnitTimes(
            forward_s=forward, backward_s=backward, kept_forward_s=kept_forward, kept_backward_s=kept_backward
        )

    def _unit(self, unit: int, call: UnitCall) -> tuple[Sample, Sample, Any]:
        """Return the seconds of forward and backward, those where all is kept, and what the unit returns."""
        tensors = self._split.spec.units[unit].tensors
        form = tuple((tensor.shape, tensor.trainable) for tensor in tensors)
        key = (type(self._split.modules[unit]), form, signature(call))
        if key not in self._known:
            run = self._passage(call)
            with untouched(UnitState(()), (call.args, tuple(call.kwargs.values()))):
                seconds = self._timed(f"unit {unit}", lambda count: self._recomputed(unit, run, count))
                kept_s: Sample = ()
                if self._num_kept:
                    kept_s = self._timed_kept(unit, call)
            self._known[key] = seconds, kept_s, run
        seconds, kept_s, run = self._known[key]
        if run.meets_objects:  # into which the unit writes, each one something else
            run = self._passage(call)
            run.forward(unit, self._forwards[unit])
            run.drop(unit)
        return seconds, kept_s, run.hand_out()

    def _passage(self, call: UnitCall) -> OneUnit:
        return OneUnit(self._split.model, call, len(self._forwards))

    def _recomputed(self, unit: int, run: OneUnit, count: int) -> list[Sample]:
        """F, and a B that recomputes."""
        forward, samples = self._forwards[unit], list[Sample]()
        graph = is_compiled(forward)  # without one it runs as it is
        for _ in range(count):
            forward_s = self._once(lambda: run.forward(unit, forward, graph=graph))
            run.bring_gradients(unit)
            samples.append((forward_s, self._once(lambda: run.backward(unit, forward))))
        return samples

    def _kept(self, unit: int, call: UnitCall, count: int) -> list[Sample]:
        """FK, and its B; as in a step several wait at once, so that caches do not hold what each has kept."""
        forward, planes, samples = self._forwards[unit], {unit: (self._weights,)}, list[Sample]()
        look = self._limit.keep if self._limit is not None else lambda: None
        while len(samples) < count:
            waiting = []
            for _ in range(min(self._num_kept[unit], count - len(samples))):
                run, keeping = self._passage(call), Keeping(planes, planes.__getitem__, look)
                waiting.append((run, self._once(partial(run.forward_keep, unit, forward, keeping))))
                run.bring_gradients(unit)
            while waiting:
                run, forward_s = waiting.pop()
                samples.append((forward_s, self._once(partial(run.backward, unit, forward))))
        return samples

    def _head(self, call: UnitCall) -> float:
        """Return the time of the head's forward, loss and backward."""
        unit = len(self._forwards) - 1
        if self._chunk_tokens is None:
            run = self._passage(call)
            return self._timed("the head", lambda count: self._recomputed(unit, run, count))[1]
        hidden = next(
            t for t in torch_private.leaves_of((call.args, call.kwargs)) if is_differentiable(t)
        ).detach()
        targets, chunk = shift_labels(self._inputs["labels"]), self._chunk_tokens

        work = partial(chunked_head_loss, self._forwards[unit], hidden, targets, float(len(targets)), chunk)
        return self._timed("the head", lambda count: [(self._once(work),) for _ in range(count)])[0]

    def _timed_kept(self, unit: int, call: UnitCall) -> Sample:
        """Return the seconds of FK and its B, the median of as many as may wait; a first round touches their memory."""
        what = f"unit {unit}, kept"
        self._pace.meet(what)
        samples = self._kept(unit, call, 1)
        wanted = min(self._num_kept[unit], _num_waiting(sum(samples[0])))
        for _ in range(2):
            count = int(self._pace.most(what, wanted))
            samples = self._kept(unit, call, count) or samples
        return _median(samples)

    def _timed(self, what: str, sampled: Callable[[int], list[Sample]]) -> Sample:
        """Return the seconds of each part of a sample, the median of a few where they are short.

        All ranks take as many, beginning at the same time.
        """
        self._pace.meet(what)
        first = sampled(1)
        count = int(self._pace.most(what, _num_samples(sum(first[0]))))
        return _median(sampled(count) or first)

    def _once(self, work: Callable[[], object]) -> float:
        synchronize(self._device)
        started = time.perf_counter()
        with nullcontext() if self._limit is None else self._limit.watched():  # as of a run
            work()
        synchronize(self._device)
        return time.perf_counter() - started


def _median(samples: list[Sample]) -> Sample:
    return tuple(statistics.median(part) for part in zip(*samples, strict=True))


def _num_waiting(first_s: float) -> int:
    """How many forwards to keep at once where one and its backward take ``first_s``; none where that is long."""
    return 0 if first_s > SLOW_S else max(FEWEST, min(MOST_WAITING, int(WAITING_S / max(first_s, 1e-9))))


def _num_samples(first_s: float) -> int:
    """How many samples to take behind one of ``first_s``; none where it is long enough to count."""
    if first_s > SLOW_S:
        return int(first_s < ENDLESS_S)
    wanted = min(WANTED, math.ceil(WANTED_S / max(first_s, 1e-9)))
    return min(MOST, max(FEWEST, wanted, math.ceil(REPEATED_S / max(first_s, 1e-9))))


def compile_units(split: Split, inputs: Mapping[str, Tensor], device: torch.device) -> None:
    """Have units compiled for microbatches such as ``inputs``: pass them once, with graphs, as a step does.

    Args:
        split: the model.
        inputs: of one microbatch, [B, S] each.
        device: that computes.
    """
    # What is compiled is for as many threads, and kernels keep buffers for every thread that ever called them.
    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(1, "compile", lambda: torch.set_num_threads(num_threads)) as thread:
        thread.submit(_compile_units, split, inputs, device).result()


def _compile_units(split: Split, inputs: Mapping[str, Tensor], device: torch.device) -> None:
    binder = Binder(split, Discard())
    on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
    run = MicrobatchRun(split.model, on_device, tracked_units(split.spec), lambda *_: None)
    try:
        with (
            as_current(device),
            Boundaries(split.modules) as boundaries,
            buffers_on(split.model, device),
            without_trace(split.model, device),
        ):
            bind_trial_weights(binder, split.spec, device)
            compiled = [unit for unit, forward in enumerate(boundaries.forwards) if is_compiled(forward)]
            for unit in range(1 + max(compiled, default=-1)):
                run.forward(unit, boundaries.forwards[unit], graph=True)
                run.drop(unit)
    finally:
        run.close()
        binder.close()
