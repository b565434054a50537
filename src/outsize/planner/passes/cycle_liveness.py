"""Activation bytes of a round of a V-cycle at once: what `ActivationMeter` counts op by op, for searches that ask much.

Microbatches of a unit whose forwards keep the same are alike: from the fourth on each adds what the one before it did.
The backward is prefix sums, since everything comes back a fixed number of backwards ahead.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, reduce
from itertools import accumulate, chain, groupby
from operator import add
from typing import Any

from outsize.planner.memory.activation_liveness import Live
from outsize.planner.passes.cycle import ONLOAD_AHEAD
from outsize.planner.program.activation_policy import Choice, KeptBytes, bytes_of
from outsize.planner.program.hazards import SAVE_WINDOW
from outsize.planner.program.step_layout import StepLayout

# Forwards from which on each one changes what is held as the one before it did: what they save leaves two later.
_UNLIKE = SAVE_WINDOW + 2


def cycle_peak(layout: StepLayout, boundary_bytes: Sequence[int], kept_bytes: KeptBytes) -> Live:
    """Return the most bytes of activations that are ever live on the device, and saved below it.

    Args:
        layout: of one worker; each round uses the room of the one before.
        boundary_bytes: bytes of the input of each streamed unit, for one microbatch.
        kept_bytes: bytes that forwards of each extent keep; what it does not tell counts none.
    """
    sizes = (0, *boundary_bytes[1:], 0)
    runs = [
        [(choice, count, bytes_of(choice, unit, kept_bytes)) for choice, count in _runs(layout, unit)]
        for unit in range(layout.num_streamed)
    ]
    forward, bottom = _Forward(), layout.first_backward
    for unit in range(layout.last + layout.cut):
        gone = sizes[unit] if unit < bottom else 0
        inputs = [sizes[unit]] * (unit in layout.offload)
        forward.unit(
            tuple(
                (count, sizes[unit + 1], kept - gone, (*inputs, *((kept,) * choice.leaves)))
                for choice, count, kept in runs[unit]
            )
        )
    peak = max(forward.peak, _backward_peak(layout, sizes, runs, forward.device, sum(forward.leaving)))
    return Live(peak, forward.below)


_Run = tuple[Choice, int, int]
"""Microbatches of a round that follow one another and keep the same: what, how many, and bytes of each."""


def _runs(layout: StepLayout, unit: int) -> Sequence[tuple[Choice, int]]:
    """Return how many microbatches of a round follow one another that keep the same, and what."""
    if unit >= len(layout.kept):
        return ((Choice.RECOMPUTE, layout.round_size),)
    return _grouped(layout.kept[unit])


@lru_cache(maxsize=64)
def _grouped(choices: tuple[Choice, ...]) -> Sequence[tuple[Choice, int]]:
    """Return the same of a unit: those of one model mostly choose alike."""
    return tuple([(choice, len(list(alike))) for choice, alike in groupby(choices)])


class _Forward:
    """What is held while forwards run."""

    def __init__(self) -> None:
        self.device = self.below = self.peak = 0
        self.leaving: deque[int] = deque()  # bytes of SAVEs that nothing has waited for yet
        self._behind = 0  # of them, those behind the last forward
        self._former: tuple[Any, ...] = ()  # what the last unit ran, and began with
        self._added = (
            0,
            0,
            0,
        )  # what it has added to device and below, and its peak over what was on the device

    def unit(self, runs: tuple[tuple[int, int, int, tuple[int, ...]], ...]) -> None:
        """Add the forwards of a unit; a repeat of the former unit from the same state adds the same bytes."""
        begun, device, below = (runs, *self.leaving, self._behind), self.device, self.below
        if begun == self._former:
            self.peak = max(self.peak, device + self._added[2])
            self.device, self.below = device + self._added[0], below + self._added[1]
            return
        former, self.peak = self.peak, device
        for run in runs:
            self._run(*run)
        self._former, self._added = begun, (self.device - device, self.below - below, self.peak - device)
        self.peak = max(former, self.peak)

    def _run(self, count: int, made: int, stays: int, saved: tuple[int, ...]) -> None:
        """Run so many forwards of a unit, each of which makes an input, keeps something, and saves something."""
        before = top = 0
        for _ in range(min(count, _UNLIKE)):
            before = self.device
            while len(self.leaving) > max(SAVE_WINDOW - 1, self._behind):
                self.device -= self.leaving.popleft()
            top = self.device + made
            self.device = top + stays
            top = max(top, self.device) if saved else top
            self.peak = max(self.peak, top)
            self.leaving.extend(saved)
            self._behind = len(saved)
        more = max(0, count - _UNLIKE) * (self.device - before)
        self.peak = max(self.peak, top + more)
        self.device += more
        self.below += count * sum(saved)


def _backward_peak(
    layout: StepLayout, sizes: Sequence[int], runs: Sequence[Sequence[_Run]], device: int, leaving: int
) -> int:
    """Return the most that is live on the device while backwards run.

    Args:
        layout: of the step.
        sizes: of the inputs of units.
        runs: of each unit.
        device: bytes that are live behind the forwards.
        leaving: of them, those of SAVEs that nothing has waited for yet.
    """
    rises: list[int] = []  # by backward: what is live while it runs, over what was before
    changes: list[int] = []  # what is live behind it, over what was before
    fetches, onloads = _Arrivals(layout.prefetch_depth), _Arrivals(ONLOAD_AHEAD)
    bottom = layout.first_backward
    for unit in range(layout.last, bottom - 1, -1):
        made = sizes[unit] if unit > bottom else 0
        spent = sizes[unit] + sizes[unit + 1]
        for choice, count, kept in runs[unit]:
            rises += [made - kept] * count
            changes += [made - kept - spent] * count
            fetches.add(sizes[unit] if unit in layout.offload else None, count)
            onloads.add(kept if choice.leaves else None, count)
    held = list(accumulate(changes[:-1], initial=device))
    ways = [way for way in (fetches, onloads) if way.first is not None]
    if not ways:
        return max(_sums(held, rises))
    arrived = reduce(lambda one, other: list(_sums(one, other)), [way.arrived() for way in ways])
    firsts = [(way.first or 0, way.ahead) for way in ways]
    first_needed = min(first for first, _ in firsts)
    first_comes = min(max(0, first - ahead) for first, ahead in firsts)
    peak = max(_sums(held[:first_comes], rises), default=0)
    come = arrived[first_comes:]
    held = list(_sums(held[first_comes:], [size - leaving for size in come]))
    # Backwards that need nothing of it may run before anything comes, and so before all SAVEs are done.
    late = [max(0, leaving - size) for size in arrived[first_comes:first_needed]]
    late += [0] * (len(held) - len(late))
    return max(chain((peak,), held, _sums(_sums(held, rises[first_comes:]), late)))


def _sums(one: Iterable[int], other: Iterable[int]) -> Iterator[int]:
    return map(add, one, other)


class _Arrivals:
    """Sizes of offloaded activations that return ``ahead`` backwards before their use.

    Attributes:
        ahead: how many.
        first: the first backward for which anything does; None where nothing does.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.first: int | None = None
        self._sizes: list[int] = []

    def add(self, size: int | None, count: int) -> None:
        """Have ``size`` come back for each of the next ``count`` backwards."""
        if size is not None and self.first is None:
            self.first = len(self._sizes)
        self._sizes += [size or 0] * count

    def arrived(self) -> list[int]:
        """Return what has come back when each backward begins."""
        sums = list(accumulate(self._sizes))
        return [*sums[self.ahead :], *[sums[-1]] * min(self.ahead, len(sums))]
