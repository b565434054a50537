"""Spend the memory that a plan leaves free: what forwards keep stays on workers or leaves them, unit by unit.

Memory to spare goes to `sizing.UPGRADES`, one after the other, each as far as it goes, what is left then to
keeping what backwards need (`planner.search.offload_balance`). Units with weights that never train may stay instead,
from step to step, where that is faster. Where the rates of the machine are known, two other ways to spend it
are planned as well: what backwards need before the inputs of units, which may leave the device while it computes; and
what backwards need in the tier below. The one whose lanes end first is taken.

Where a step turns around, a backward follows its forward on the same worker, and what is kept stays there
(`offload_balance.kept_at_the_turn`). The backward of any other unit may be another worker's. Then what its forward
has kept goes below the workers, and comes up where the unit is recomputed. What attention or products returned can go,
since a recompute takes results from wherever they are; a graph cannot, since it is made of the worker that made it.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from outsize.errors import ConfigError
from outsize.planner.memory.memory_table import Demand
from outsize.planner.program.stages import (
    OFFLOADED,
    ON_DEVICE,
    Choice,
    Extent,
    Kept,
    KeptBytes,
    Span,
    Stages,
    bytes_of,
    everywhere,
    merged,
)
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.offload_balance import (
    Raise,
    UnitRates,
    balanced,
    keep_order,
    kept_at_the_turn,
    most_kept,
    phases,
    worthwhile_extents,
)
from outsize.planner.search.sizing import AFTER_INPUTS, BEFORE_INPUTS, UPGRADES, Knobs, Sizing, Upgrade
from outsize.planner.simulate.costs import UnitTimes

# Frozen units that stay, or are held as they are encoded, before such as stay decoded.
HOLDING: tuple[Upgrade, ...] = (Sizing.more_encoded, Sizing.more_staying)
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

    former_s = step_s(best)
    choices = list(sizing.more_resident(knobs))
    if choices and fits(choices[-1]):
        best = min(best, _spend_on_moving(sizing, demand, choices[-1], fits), key=step_s)
    for start in _resident(sizing, knobs, fits):
        way = _spend_on_moving(sizing, demand, start, fits)
        best, way_s = min(best, way, key=step_s), step_s(way)
        if way_s > former_s:  # and so it is with more of them
            break
        former_s = way_s
    return best


def _resident(sizing: Sizing, knobs: Knobs, fits: Callable[[Knobs], bool]) -> Iterator[Knobs]:
    """Yield knobs with more and more resident units, in the end as many as fit beside two slots."""
    start = _upgraded(sizing, knobs, BEFORE_INPUTS[:2], fits)
    choices = list(sizing.more_resident(start))
    most = bisect_left(choices, True, key=lambda better: not fits(better))
    for number in dict.fromkeys(most * eighths // 8 for eighths in (2, 4, 6, 7, 8)):
        if number:
            yield choices[number - 1]


def _spend_on_moving(sizing: Sizing, demand: Demand, knobs: Knobs, fits: Callable[[Knobs], bool]) -> Knobs:
    """Return the knobs on which memory to spare is spent best, with the same units resident."""
    options = sizing.options
    inputs_first = _upgraded(sizing, knobs, UPGRADES, fits)

    holding = partial(_upgraded, sizing, upgrades=HOLDING, fits=fits)
    staying = partial(_upgraded, sizing, upgrades=(*HOLDING, Sizing.more_decoded), fits=fits)
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
        held = holding(inputs_first)
        ways = [min(staying(ways[0]), kept(stays_first), *([kept(held)] if held.encoded else []), key=step_s)]
    ways = [staying(way) for way in ways]
    if not options.leaves_unasked or (sizing.all_frozen_stay(ways[0]) and _keeps_all(sizing.layout(ways[0]))):
        return ways[0]
    leaving = _upgraded(sizing, knobs, BEFORE_INPUTS, fits)
    if inputs_first.num_kept > leaving.num_kept:
        ways.append(staying(_upgraded(sizing, kept(leaving), AFTER_INPUTS, fits)))
    # What leaves needs room on its way: where slots and accumulators have taken it, with as few of them as can be.
    for start in dict.fromkeys((leaving, _upgraded(sizing, knobs, BEFORE_INPUTS[:1], fits))):
        away = balanced(sizing.layout(start), demand, rates, partial(_fits_with, fits, start))
        ways.append(staying(_upgraded(sizing, replace(start, kept=away), UPGRADES, fits)))
        if _keeps_all(sizing.layout(ways[-1])):
            break
    best = ways[0]
    for way in ways[1:]:
        best = way if step_s(way) < ENOUGH * step_s(best) else best
    return best


def _fits_with(fits: Callable[[Knobs], bool], knobs: Knobs, choices: Kept) -> bool:
    return fits(replace(knobs, kept=choices))


def _keeps_all(layout: StepLayout) -> bool:
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


Away = Mapping[int, Choice]
"""What becomes of what the forward of a unit keeps, for the units of which it leaves."""


@dataclass(frozen=True, slots=True)
class Way:
    """Policy for kept activations: on the turning stage and on the stages below it.

    Attributes:
        turn: of all units that turn around.
        away: of those below them, as far as theirs leaves.
    """

    turn: Choice = Choice.RECOMPUTE
    away: Away = field(default_factory=dict)

    @property
    def keeps(self) -> bool:
        """Whether the stage that turns around recomputes nothing, or not all."""
        return self.turn is not Choice.RECOMPUTE


# Parts on their way out while the next one is made, as of inputs (`hazards.SAVE_WINDOW`).
ON_THEIR_WAY = 2


def ways_of(
    activations: str,
    units: Sequence[int],
    demand: Demand,
    rates: UnitRates | None,
    fits: Callable[[Way], bool],
    *,
    turns: bool = True,
) -> list[Way]:
    """Return the ways that ``activations`` leaves open, the one that needs the least memory last.

    Args:
        activations: as asked for.
        units: those that do not turn around in some cut.
        demand: of a microbatch.
        rates: of a worker; None has nothing leave unasked.
        fits: whether the tiers have room for a way.
        turns: whether a stage turns around at once; without one no unit has its backward on the same worker.

    Raises:
        ConfigError: a graph would leave its worker.
    """
    if not turns:
        found_ways = ways_of(activations, units, demand, rates, fits)
        return list(
            {str(way): way for way in (replace(way, turn=Choice.RECOMPUTE) for way in found_ways)}.values()
        )
    choice = Choice.KEEP if activations == "auto" else Choice(activations)
    if choice is Choice.OFFLOAD:
        raise ConfigError(
            f"memory.activations={choice}: of several workers, one may run the backward of what another one ran "
            f"forward, and a graph stays with the worker that made it; use {Choice.OFFLOAD_PRODUCTS}, or one device"
        )
    if choice.leaves and choice.extent is not None:
        away = stages_as_asked(choice.extent, units, demand)
        return [Way(ON_DEVICE[choice.extent], away), Way(away=away)]
    ways = [] if choice is Choice.RECOMPUTE else [Way(choice)]
    if activations == "auto" and rates is not None:
        away = most_hidden(hidden(units, demand, rates), lambda away: fits(Way(choice, away)))
        ways = [*([Way(choice, away)] if away else []), *ways]
    return [*ways, Way()]


def stages_as_asked(extent: Extent, units: Iterable[int], demand: Demand) -> Away:
    """Return ``extent`` for those of ``units`` whose forwards have something of it."""
    choice = OFFLOADED[extent]
    return {unit: choice for unit in units if bytes_of(choice, unit, demand.kept_bytes)}


def hidden(units: Iterable[int], demand: Demand, rates: UnitRates) -> list[Raise]:
    """Return what of ``units`` may leave, the most seconds gained per byte first, each unit from less to more.

    Of each that is as much as its own compute hides, on its way down and on its way up again.
    """
    selected, times = replace(demand, saved_bytes=()), rates.times
    ways = []
    for unit in units:
        for gain, extent in worthwhile_extents(selected, unit):
            choice = OFFLOADED[extent]
            size = bytes_of(choice, unit, demand.kept_bytes)
            left_s = times.backward_s[unit] - times.spared(choice, unit)
            goes = size / rates.down_bytes_per_s <= times.forward_s[unit]
            if size and goes and size / rates.up_bytes_per_s <= left_s:
                ways.append((-gain, unit, choice))
    return [(unit, choice) for _, unit, choice in sorted(ways, key=lambda each: each[:2])]


def most_hidden(raises: Sequence[Raise], fits: Callable[[Away], bool]) -> Away:
    """Return the most of ``raises`` that ``fits``."""
    counts = range(len(raises) + 1)
    most = bisect_left(counts, True, lo=1, key=lambda count: not fits(dict(raises[:count]))) - 1
    return dict(raises[:most])


def kept_in_stages(stages: Stages, num_streamed: int, num_microbatches: int, way: Way) -> Kept:
    """Return what stages keep of each microbatch of a round where they go ``way``."""
    in_a_round = min(stages.round_size, num_microbatches)
    choices = kept_at_the_turn(stages, num_streamed, in_a_round, way.turn)
    leaving = {unit: choice for unit, choice in way.away.items() if unit < stages.backward[0][0]}
    if not leaving:
        return choices
    below = (leaving.get(unit, Choice.RECOMPUTE) for unit in range(num_streamed))
    return merged(choices, tuple((choice,) * in_a_round for choice in below))


def away_in(layout: StepLayout) -> Away:
    """Return what leaves of a step of stages, which is the same for all microbatches of a unit."""
    if not layout.kept:
        return {}
    return {unit: layout.choice(unit, 0) for unit in layout.leavable if layout.choice(unit, 0).leaves}


def on_its_way(span: Span, backward: bool, away: Away, sizes: KeptBytes) -> int:
    """Return the most that lies on a worker of what leaves: on its way out of a forward, or there for a backward."""
    parts = [bytes_of(away[unit], unit, sizes) for unit in range(*span) if unit in away]
    return sum(parts) if backward else ON_THEIR_WAY * max(parts, default=0)


def spared(seconds: Sequence[float], times: UnitTimes, away: Away) -> tuple[float, ...]:
    """Return ``seconds`` of recomputes, or of what holds them, without what ``away`` spares them."""
    return tuple(
        max(0.0, unit_s - times.spared(away[unit], unit)) if unit in away else unit_s
        for unit, unit_s in enumerate(seconds)
    )
