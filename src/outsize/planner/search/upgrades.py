"""Where the memory that a plan leaves free is spent, and what is kept on the device where the tier below has no room.

Memory to spare goes to `sizing.UPGRADES`, one after the other, each as far as it goes, what is left then to
keeping what backwards need (`planner.search.offload_balance`). Units with weights that never train may stay instead,
from step to step, where that is faster. Where the rates of the machine are known, two other ways to spend it
are planned as well: what backwards need before the inputs of units, which may leave the device while it computes; and
what backwards need in the tier below (`planner.search.offload_balance`). The one whose lanes end first is taken.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from outsize.planner.memory.memory_table import Demand
from outsize.planner.program.stages import Choice, Extent, Kept, bytes_of, everywhere, merged
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.offload_balance import balanced, keep_order, most_kept, phases
from outsize.planner.search.sizing import AFTER_INPUTS, BEFORE_INPUTS, UPGRADES, Knobs, Sizing, Upgrade

# Lanes that fill and drain lose a few percent, which is not counted where ways to spend memory are compared: what takes
# slots from weights, or the inputs of units from the device, has to gain more.
ENOUGH = 0.97


def as_asked(choice: Choice, layout: StepLayout, demand: Demand) -> Kept:
    """Return ``choice`` for every unit that has something of that extent; what has no bytes need not leave."""
    if choice.extent is None:
        return ()
    units = [u for u in layout.keepable if bytes_of(choice, u, demand.kept_bytes)]
    choices = everywhere(choice, units, layout.num_streamed, layout.round_size)
    if choice.extent is not Extent.WHOLE:
        return choices
    others = [u for u in layout.keepable if u not in units]
    return merged(choices, everywhere(Choice.KEEP, others, layout.num_streamed, layout.round_size))


def spend(sizing: Sizing, demand: Demand, knobs: Knobs, fits: Callable[[Knobs], bool]) -> Knobs:
    """Return the knobs on which memory to spare is spent best: on units that are resident, and on those that move."""
    best, rates = _spend_on_moving(sizing, demand, knobs, fits), sizing.options.rates
    if rates is None:
        return best

    def step_s(knobs: Knobs) -> float:
        return phases(sizing.layout(knobs), demand, rates).stepped_s

    for start in _resident(sizing, knobs, fits):
        way = _spend_on_moving(sizing, demand, start, fits)
        best = min(best, way, key=step_s)
    return best


def _resident(sizing: Sizing, knobs: Knobs, fits: Callable[[Knobs], bool]) -> Iterator[Knobs]:
    """Yield knobs with some numbers of resident units: all, or as many as fit beside two slots, and fewer."""
    choices = list(sizing.more_resident(knobs))
    if choices and fits(choices[-1]):
        yield choices[-1]
    start = _upgraded(sizing, knobs, BEFORE_INPUTS[:2], fits)
    choices = list(sizing.more_resident(start))
    most = bisect_left(choices, True, key=lambda better: not fits(better))
    for number in dict.fromkeys(most * eighths // 8 for eighths in (8, 7, 6, 4, 2)):
        if number:
            yield choices[number - 1]


def _spend_on_moving(sizing: Sizing, demand: Demand, knobs: Knobs, fits: Callable[[Knobs], bool]) -> Knobs:
    """Return the knobs on which memory to spare is spent best, with the same units resident."""
    options = sizing.options
    inputs_first = _upgraded(sizing, knobs, UPGRADES, fits)

    staying = partial(_upgraded, sizing, upgrades=(Sizing.more_staying,), fits=fits)
    if options.activations != "auto" or not demand.kept_bytes:
        return staying(inputs_first)

    def kept(knobs: Knobs) -> Knobs:
        layout = sizing.layout(knobs)
        order = keep_order(layout, demand)
        return replace(knobs, kept=most_kept(layout, order, partial(_fits_with, fits, knobs)))

    ways = [kept(inputs_first)]
    rates = options.rates
    if rates is None:
        return staying(ways[0])

    def step_s(knobs: Knobs) -> float:
        return phases(sizing.layout(knobs), demand, rates).step_s

    if (stays_first := staying(inputs_first)) is not inputs_first:
        ways = [min(staying(ways[0]), kept(stays_first), key=step_s)]
    if not options.leaves_unasked or _keeps_all(sizing.layout(ways[0])):
        return staying(ways[0])
    leaving = _upgraded(sizing, knobs, BEFORE_INPUTS, fits)
    if inputs_first.num_kept > leaving.num_kept:
        ways.append(_upgraded(sizing, kept(leaving), AFTER_INPUTS, fits))
    # What leaves needs room on its way: where slots and accumulators have taken it, with as few of them as can be.
    for start in dict.fromkeys((leaving, _upgraded(sizing, knobs, BEFORE_INPUTS[:1], fits))):
        away = balanced(sizing.layout(start), demand, rates, partial(_fits_with, fits, start))
        ways.append(_upgraded(sizing, replace(start, kept=away), UPGRADES, fits))
        if _keeps_all(sizing.layout(ways[-1])):
            break
    best = ways[0]
    for way in ways[1:]:
        best = way if step_s(way) < ENOUGH * step_s(best) else best
    return staying(best)


def _fits_with(fits: Callable[[Knobs], bool], knobs: Knobs, choices: Kept) -> bool:
    return fits(replace(knobs, kept=choices))


def _keeps_all(layout: StepLayout) -> bool:
    """Whether no unit computes products again."""
    again = (Extent.PRODUCTS, Extent.WHOLE)
    cells = ((u, m) for u in layout.keepable[1:] for m in range(layout.round_size))
    return all(layout.choice(unit, microbatch).extent in again for unit, microbatch in cells)


def _upgraded(
    sizing: Sizing, knobs: Knobs, upgrades: Sequence[Upgrade], fits: Callable[[Knobs], bool]
) -> Knobs:
    """Return ``knobs`` with each of ``upgrades`` as far as it ``fits``; what goes further takes more."""
    for upgrade in upgrades:
        choices = [knobs, *upgrade(sizing, knobs)]
        knobs = choices[bisect_left(choices, True, lo=1, key=lambda better: not fits(better)) - 1]
    return knobs


def kept_for_the_host(sizing: Sizing, knobs: Knobs, short: Callable[[Knobs], Mapping[str, int]]) -> Knobs:
    """Return ``knobs`` with as many inputs kept on the device as the tier below it has no room for.

    Where that is too much for the device, with as many as the device has room for: what is short then is the least that
    can be.

    Args:
        sizing: what knobs come to.
        knobs: to begin from.
        short: the bytes missing with some knobs, in each tier that is too small.
    """
    below = sizing.options.below
    if below not in short(knobs):
        return knobs
    choices = [knobs, *sizing.more_kept(knobs)]
    enough = bisect_left(choices, True, key=lambda other: below not in short(other))
    if enough < len(choices) and not short(choices[enough]):
        return choices[enough]
    most = bisect_left(choices, True, key=lambda other: bool(short(other).keys() - {below}))
    return choices[max(0, min(enough, most - 1))]
