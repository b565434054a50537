"""Rounds of one worker that are worth a plan: of how many microbatches each.

A smaller round keeps more of what its backward needs, since less of it is there at once, and loads weights more often.
So as long as loads are hidden the smallest round is the fastest, and once they are not, no round is faster than its
loads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from outsize.planner.memory.memory_table import Demand
from outsize.planner.program.stages import Choice, everywhere
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.microbatch_search import NEAR
from outsize.planner.search.offload_balance import Phases, UnitRates, phases


def smaller_rounds(size: int) -> Iterator[int]:
    """Yield how many microbatches smaller rounds than those of ``size`` take, the most first."""
    while size > 1:
        size = -(-size // 2)
        yield size


def rounds_to_try(
    layout: StepLayout, demand: Demand, rates: UnitRates, sizes: Sequence[int]
) -> Iterator[int]:
    """Yield those of ``sizes`` whose rounds could take a percent less than those of ``layout``, the most first.

    Args:
        layout: of the largest rounds that fit.
        demand: of a microbatch.
        rates: of the worker.
        sizes: microbatches of smaller rounds, the most first.
    """
    step_s = phases(layout, demand, rates).step_s
    least = {size: _all_kept(layout, demand, rates, size) for size in sizes}
    hidden = [size for size, lanes in least.items() if lanes.step_s <= lanes.forward_s + lanes.backward_s]
    for size in sizes:
        if least[size].step_s * NEAR < step_s and size <= min(hidden, default=size):
            yield size


def _all_kept(layout: StepLayout, demand: Demand, rates: UnitRates, size: int) -> Phases:
    """Return what lanes take in rounds of ``size`` with room for everything on the device."""
    kept = everywhere(Choice.KEEP, layout.keepable, layout.num_streamed, size)
    tiles = (0,) * layout.num_units
    roomy = replace(layout, round_microbatches=size, offload=frozenset(), kept=kept, ring=False, tiles=tiles)
    return phases(roomy, demand, rates)
