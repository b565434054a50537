"""What leaves the workers of a step of stages, of what forwards keep: unit by unit, and the memory that it takes.

Where a step turns around, a backward follows its forward on the same worker, and what is kept stays there
(`offload_balance.kept_at_the_turn`). The backward of any other unit may be another worker's. Then what its forward
has kept goes below the workers, and comes up where the unit is recomputed. What attention or products returned can go,
since a recompute takes results from wherever they are; a graph cannot, since it is made of the worker that made it.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    merged,
)
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.offload_balance import Raise, UnitRates, kept_at_the_turn, worthwhile_extents
from outsize.planner.simulate.costs import UnitTimes

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
