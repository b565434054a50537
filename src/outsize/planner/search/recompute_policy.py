"""What of a forward is kept on the device for its backward, instead of being computed again: unit by unit.

What a unit keeps costs its bytes for each microbatch, from its forward to its backward, and gains the part of its
recompute that it spares. All that is kept is there at once when the step turns around. So units go from keeping less to
keeping more by seconds gained per byte, until the memory is used up; among equals the last ones first, since theirs is
held for the shortest time.
"""

from collections.abc import Callable, Sequence

from outsize.planner.memory.memory_table import Demand
from outsize.planner.program.stages import ON_DEVICE, Choice, Extent, Kept, Stages, bytes_of, everywhere
from outsize.planner.program.step_layout import StepLayout

# Units and microbatches that are told apart one by one.
FINE = 64

Raise = tuple[int, Choice]
"""A unit that keeps more than before, and what it keeps then."""


def keep_order(layout: StepLayout, demand: Demand) -> list[Raise]:
    """Return what units may keep, the most seconds gained per byte first, each unit from less to more."""
    raises = [
        (gain, unit, extent) for unit in layout.keepable for gain, extent in worthwhile_extents(demand, unit)
    ]
    # A unit gains less per byte the more it keeps, so that its own order survives.
    return [
        (unit, ON_DEVICE[extent]) for _, unit, extent in sorted(raises, key=lambda r: r[:2], reverse=True)
    ]


def worthwhile_extents(demand: Demand, unit: int) -> list[tuple[float, Extent]]:
    """Return how much of a unit is worth keeping, from less to more, and what each gains per byte over the one before.

    These are the corners of the upper hull of gains over bytes; between two of them, some microbatches take either.
    """
    sizes = demand.kept_bytes
    points = [
        (bytes_of(ON_DEVICE[e], unit, sizes), demand.spared_s(e, unit), e) for e in Extent if e in sizes
    ]
    # What takes no memory is always kept.
    free: list[tuple[float, Extent]] = []
    free += ((float("inf"), e) for size, _, e in points if not size and e is Extent.WHOLE)
    found: list[tuple[float, Extent]] = []
    at_bytes, at_s = 0, 0.0
    while not free:
        slopes = [
            ((gain_s - at_s) / (size - at_bytes), size, gain_s, extent)
            for size, gain_s, extent in points
            if size > at_bytes and gain_s > at_s
        ]
        if not slopes:
            break
        slope, at_bytes, at_s, extent = max(slopes, key=lambda found: found[:3])
        found.append((slope, extent))
    return found or free


def kept_so_far(layout: StepLayout, order: Sequence[Raise], count: int) -> Kept:
    """Return what units keep where the first ``count`` of ``order`` are taken, microbatch by microbatch."""
    size = layout.round_size
    kept = [[Choice.RECOMPUTE] * size for _ in range(layout.num_streamed)]
    for rank, (unit, choice) in enumerate(order):
        for microbatch in range(min(max(count - rank * size, 0), size)):
            kept[unit][microbatch] = choice
    return tuple(map(tuple, kept))


def kept_at_the_turn(
    stages: Stages, num_streamed: int, num_microbatches: int, choice: Choice = Choice.KEEP
) -> Kept:
    """Return what stages can keep: of all units that turn around, one microbatch at a time."""
    turning = range(stages.backward[0][0], num_streamed - 1)
    return everywhere(choice, turning, num_streamed, num_microbatches)


def most_kept(layout: StepLayout, order: Sequence[Raise], fits: Callable[[Kept], bool]) -> Kept:
    """Return the most of ``order`` that ``fits``; empty where that is nothing."""
    low, high = 0, len(order) * layout.round_size  # what fits, and what may
    near = high // FINE  # of thousands, a percent more or less is not worth as long a search again
    while low + near < high:
        middle = (low + high + 1) // 2
        if fits(kept_so_far(layout, order, middle)):
            low = middle
        else:
            high = middle - 1
    return kept_so_far(layout, order, low) if low else ()
