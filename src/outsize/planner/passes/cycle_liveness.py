"""Activation bytes of a round of a V-cycle at once: what `ActivationMeter` counts op by op, for searches that ask much.

Microbatches of a unit whose forwards keep the same are alike: from the fourth on each adds what the one before it did.
The backward is prefix sums, since everything comes back a fixed number of backwards ahead.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

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
    forward = _Forward()
    for unit in range(layout.last + layout.cut):
        gone = sizes[unit] if unit < layout.first_backward else 0
        inputs = [sizes[unit]] * (unit in layout.offload)
        for choice, count in _runs(layout, unit):
            kept = bytes_of(choice, unit, kept_bytes)
            forward.run(count, sizes[unit + 1], kept - gone, [*inputs, *([kept] * choice.leaves)])
    peak = max(forward.peak, _backward_peak(layout, sizes, kept_bytes, forward.device, sum(forward.leaving)))
    return Live(peak, forward.below)


def _runs(layout: StepLayout, unit: int) -> Iterator[tuple[Choice, int]]:
    """Yield how many microbatches of a round follow one another that keep the same, and what."""
    if unit >= len(layout.kept):
        yield Choice.RECOMPUTE, layout.round_size
        return
    for choice, alike in groupby(layout.kept[unit]):
        yield choice, len(list(alike))


class _Forward:
    """What is held while forwards run."""

    def __init__(self) -> None:
        self.device = self.below = self.peak = 0
        self.leaving: deque[int] = deque()  # bytes of SAVEs that nothing has waited for yet
        self._behind = 0  # of them, those behind the last forward

    def run(self, count: int, made: int, stays: int, saved: list[int]) -> None:
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
    layout: StepLayout, sizes: Sequence[int], kept_bytes: KeptBytes, device: int, leaving: int
) -> int:
    """Return the most that is live on the device while backwards run.

    Args:
        layout: of the step.
        sizes: of the inputs of units.
        kept_bytes: that forwards of each extent keep.
        device: bytes that are live behind the forwards.
        leaving: of them, those of SAVEs that nothing has waited for yet.
    """
    rises: list[int] = []  # by backward: what is live while it runs, over what was before
    changes: list[int] = []  # what is live behind it, over what was before
    fetches: list[int | None] = []  # what comes back for it, None where nothing does
    onloads: list[int | None] = []
    for unit in range(layout.last, layout.first_backward - 1, -1):
        made = sizes[unit] if unit > layout.first_backward else 0
        for choice, count in _runs(layout, unit):
            kept = bytes_of(choice, unit, kept_bytes)
            rises += [made - kept] * count
            changes += [made - kept - sizes[unit] - sizes[unit + 1]] * count
            fetches += [sizes[unit] if unit in layout.offload else None] * count
            onloads += [kept if choice.leaves else None] * count
    held = list(accumulate(changes[:-1], initial=device))
    ways = [
        (each, ahead)
        for each, ahead in ((fetches, layout.prefetch_depth), (onloads, ONLOAD_AHEAD))
        if any(size is not None for size in each)
    ]
    if not ways:
        return max(size + rise for size, rise in zip(held, rises, strict=True))
    arrived = list(map(sum, zip(*(_arrived(each, ahead) for each, ahead in ways), strict=True)))
    firsts = [next(i for i, size in enumerate(each) if size is not None) for each, _ in ways]
    first_needed = min(firsts)
    first_comes = min(max(0, first - ahead) for first, (_, ahead) in zip(firsts, ways, strict=True))
    peak = max(map(sum, zip(held[:first_comes], rises, strict=False)), default=0)
    held = [
        size - leaving + come for size, come in zip(held[first_comes:], arrived[first_comes:], strict=True)
    ]
    # Backwards that need nothing of it may run before anything comes, and so before all SAVEs are done.
    late = [max(0, leaving - come) for come in arrived[first_comes:first_needed]]
    late += [0] * (len(held) - len(late))
    running = map(sum, zip(held, rises[first_comes:], late, strict=True))
    return max(peak, *held, *running)


def _arrived(sizes: list[int | None], ahead: int) -> list[int]:
    """Return what has come back when each backward begins, each size so many backwards ahead of its own."""
    sums = list(accumulate(size or 0 for size in sizes))
    return [*sums[ahead:], *[sums[-1]] * min(ahead, len(sums))]
