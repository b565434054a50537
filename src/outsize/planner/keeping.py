"""Which units keep what their backward needs on the device, instead of recomputing it, and for how many microbatches.

A unit that keeps costs its saved bytes for each microbatch, from its forward to its backward, and gains its forward.
All that is kept is there at once when the step turns around. So units are taken by seconds gained per byte until the
memory is used up; among equals the last ones first, since theirs is held for the shortest time.
"""

from collections.abc import Callable, Sequence

from outsize.planner.layout import StepLayout
from outsize.planner.memory import Demand
from outsize.planner.stages import Stages


def keep_order(layout: StepLayout, demand: Demand) -> list[int]:
    """Return the units that gain something by keeping, the most seconds per byte first."""

    def gain(unit: int) -> tuple[float, int]:
        size = demand.saved_bytes[unit]
        return (demand.recompute_s[unit] / size if size else float("inf")), unit

    worth = [u for u in layout.keepable if not demand.saved_bytes[u] or demand.recompute_s[u] > 0]
    return sorted(worth, key=gain, reverse=True)


def kept_microbatches(layout: StepLayout, order: Sequence[int], count: int) -> tuple[int, ...]:
    """Return how many microbatches each unit keeps where the first ``count`` of ``order``, one by one, are kept."""
    kept = [0] * layout.num_streamed
    for rank, unit in enumerate(order):
        kept[unit] = min(max(count - rank * layout.num_microbatches, 0), layout.num_microbatches)
    return tuple(kept)


def kept_at_the_turn(stages: Stages, num_streamed: int, num_microbatches: int) -> tuple[int, ...]:
    """Return what stages can keep: all of the units that turn around, one microbatch at a time."""
    first = stages.backward[0][0]
    return (*[0] * first, *[num_microbatches] * (num_streamed - 1 - first), 0)


def most_kept(layout: StepLayout, demand: Demand, fits: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...]:
    """Return the most that `keep_order` keeps and that ``fits``; empty where that is nothing."""
    order = keep_order(layout, demand)
    low, high = 0, len(order) * layout.num_microbatches  # what fits, and what may
    while low < high:
        middle = (low + high + 1) // 2
        if fits(kept_microbatches(layout, order, middle)):
            low = middle
        else:
            high = middle - 1
    return kept_microbatches(layout, order, low) if low else ()
