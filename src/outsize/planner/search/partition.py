"""Where to cut a model into stages, for forward and for backward apart.

The objective is the time of the step itself (`pipeline.makespan_s`), not a proxy of it. Stages of nearly equal times
leave little to choose but their numbers, so the search begins there: pairs of numbers of forward and backward
stages, drawn widely, of which the best climb to neighbouring numbers and rounds. The best of what that finds
climb by moving one unit across a cut, by splitting a stage and by joining two, until nothing gains. Everything is in a
fixed order, so the same units give the same cuts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf, sqrt
from typing import TypeVar

from outsize.planner.program.stages import Span, Stages, spans_down, spans_up
from outsize.planner.search.cuts import (
    Least,
    Sizes,
    StepBound,
    drawn,
    even_cut,
    limits,
    neighbours,
    packed_cut,
    without_first_unit,
)
from outsize.planner.simulate.gpu_times import StageTraffic, with_shared
from outsize.planner.simulate.pipeline import StageSums, bubble, makespan_s

# How many numbers of stages are drawn for each direction, and into how many parts the effort of climbing is cut: the
# best start has one of them, and whatever it leaves goes on to the next.
NUM_DRAWN = 8
NUM_CLIMBERS = 4
# Rounds after which a step mostly repeats itself, and takes no longer to time.
MANY_ROUNDS = 8
# What a look at a cut costs, in visits of stages that are timed, and of how many stages it costs one more.
LOOK_VISITS, STAGES_LOOKED_AT = 12, 8

Fits = Callable[[Span, bool], bool]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What is cut, and for whom.

    Attributes:
        forward_s: seconds by unit and microbatch.
        backward_s: the same, recompute included; of the last unit, its forward included.
        num_workers: how many there are.
        num_microbatches: of a step.
        hop_s: hand-over between stages.
        weights_s: what weights take over the link, by unit; nothing where it is empty.
        gradients_s: the same of gradients.
        recompute_s: by unit, how much of its backward is recompute; a whole forward where it is empty.
        keeps: whether the stage that turns around recomputes nothing.
        bottom: the lowest unit that runs backward.
        fits: whether a worker can hold the units of a span, forward (False) or backward (True).
        holds: whether it can hold all that these stages set aside; asked only of stages that fit one by one.
        halves: sets of slots and of accumulators that a worker has, see `Stages`.
        overlaps: whether rounds of so many microbatches overlap, see there.
        traffic: of what all workers share; None where they share nothing.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    num_workers: int
    num_microbatches: int
    hop_s: float = 0.0
    weights_s: tuple[float, ...] = ()
    gradients_s: tuple[float, ...] = ()
    recompute_s: tuple[float, ...] = ()
    keeps: bool = False
    bottom: int = 0
    fits: Fits = lambda span, backward: True
    holds: Callable[[Stages], bool] = lambda stages: True
    halves: tuple[int, int] = (2, 2)
    overlaps: Callable[[int], bool] = lambda size: True
    traffic: StageTraffic | None = None

    def stages(self, forward: Sizes, backward: Sizes, round_size: int) -> Stages:
        """Return the stages of these sizes."""
        top = len(self.forward_s)
        slot_halves, accumulator_halves = self.halves
        return Stages(
            forward=spans_up(forward),
            backward=spans_down(backward, top),
            round_size=round_size,
            slot_halves=slot_halves,
            accumulator_halves=accumulator_halves,
            overlaps=self.overlaps(round_size),
        )

    @cached_property
    def sums(self) -> StageSums:
        """What any stage takes."""
        return StageSums(
            self.forward_s,
            self.backward_s,
            self.weights_s,
            self.gradients_s,
            self.recompute_s,
            self.keeps,
        )

    def shared_s(self, num_ups: int, fused: int, num_downs: int, round_size: int) -> float:
        """Return what a step takes of what all workers share; see `StageTraffic.up_and_down`."""
        if self.traffic is None:
            return 0.0
        return self.traffic.least_s(num_ups, fused, num_downs, self.num_microbatches, round_size)

    def step_s(self, stages: Stages, limit_s: float = inf, busy_s: Sequence[float] = ()) -> float:
        """Return the time of a step; infinity where it is seen to be no less than ``limit_s``.

        Of a step for ``limit_s``, ``busy_s`` is what each worker computes at least, and what follows behind it.
        """
        shared_s = self.shared_s(
            len(stages.forward), stages.backward[0][0], len(stages.backward), stages.round_size
        )
        alone_s = sqrt(max(0.0, limit_s**2 - shared_s**2)) if limit_s < inf else inf
        seconds = makespan_s(
            self.sums.of(stages),
            self.num_microbatches,
            stages.round_size,
            self.num_workers,
            self.hop_s,
            self.halves,
            overlaps=stages.overlaps,
            may_wait_s=[alone_s - worker_s for worker_s in busy_s],
        )
        return with_shared(seconds, shared_s)

    def least_s(self, round_size: int) -> float:
        """Return seconds that a step takes at least, however it is cut, in rounds of so many microbatches or fewer."""
        top, most = len(self.forward_s), 1  # units that turn around: their weights come up once in a round
        while most < top - self.bottom and self.fits((top - most - 1, top), True):
            most += 1
        spared_s = self.keeps * sum((self.recompute_s or self.forward_s)[top - most : -1])
        computing_s = self.num_microbatches * (
            sum(self.forward_s[:-1]) + sum(self.backward_s[self.bottom :]) - spared_s
        )
        round_s = sum(self.weights_s[: top - most]) + sum(self.weights_s[self.bottom :])
        return max(computing_s, -(-self.num_microbatches // round_size) * round_s) / self.num_workers

    def free_bubble(self, stages: Stages) -> float:
        """Return the share of the workers' time in which they compute nothing though copies take no time."""
        free = replace(self, weights_s=(), gradients_s=())
        return bubble(
            free.sums.of(stages),
            self.num_microbatches,
            stages.round_size,
            self.num_workers,
            overlaps=stages.overlaps,
        )


def usual_round_sizes(num_microbatches: int, num_workers: int) -> tuple[int, ...]:
    """Return microbatches per round worth a try: all of them, and one to four for each worker."""
    few = (max(1, quarters * num_workers // 4) for quarters in (4, 5, 6, 7, 8, 10, 12, 16))
    return tuple(sorted({num_microbatches, *(min(size, num_microbatches) for size in few)}))


def partition(pipeline: Pipeline, round_sizes: Sequence[int] = (), max_visits: int = 400_000) -> Stages:
    """Return the stages whose step is shortest, as far as the search finds them.

    Args:
        pipeline: what is cut.
        round_sizes: microbatches per round to choose from; by default all microbatches, and one to four for
            each worker.
        max_visits: how many visits of stages are timed at most, in all steps together, and cuts looked at; a million
            take seconds.

    Raises:
        ValueError: not even single units fit, or there are fewer stages than workers whatever the cut.
    """
    sizes = round_sizes or usual_round_sizes(pipeline.num_microbatches, pipeline.num_workers)
    search = _Search(pipeline, sorted({min(size, pipeline.num_microbatches) for size in sizes}), max_visits)
    even = search.first_of(search.drawn(), search.numbers_s, search.cut)
    for index, (_, numbers) in enumerate(even):
        share = search.left // (2 * (len(even) - index))
        even[index] = search.climb(numbers, search.numbers_s, search.near_numbers, share)
    starts = [(seconds, search.cut(numbers)) for seconds, numbers in even]
    starts += search.first_of(search.packed(), search.step_s, lambda cut: cut)
    if not starts:
        raise ValueError("no cut fits the workers' memory and gives each of them a stage")
    best = min(starts)
    climbers = sorted(set(starts))
    for index, (_, cut) in enumerate(climbers):
        share = search.left // min(NUM_CLIMBERS, len(climbers) - index)
        best = min(best, search.climb(cut, search.step_s, search.near_cuts, share))
    best = search.climb(best[1], search.step_s, search.two_changes, search.left)
    return pipeline.stages(*best[1])


# Stages forward and backward, and microbatches per round.
_Cut = tuple[Sizes, Sizes, int]
# Units of the fused stage, stages forward and backward beside it, and microbatches per round.
_Numbers = tuple[int, int, int, int]
_Place = TypeVar("_Place", _Cut, _Numbers)


class _Search:
    def __init__(self, pipeline: Pipeline, round_sizes: Sequence[int], max_visits: int) -> None:
        self.pipeline = pipeline
        self.round_sizes = round_sizes
        self.left = max_visits
        self.top = len(pipeline.forward_s)
        self.fits = cache(pipeline.fits)
        self.allowed = cache(self._allowed)
        # A climb changes one direction at a time.
        self.ups_fit, self.downs_fit = cache(self._ups_fit), cache(self._downs_fit)
        self.cut = cache(self._cut)
        self.least = StepBound(pipeline).least
        self.known: dict[_Cut, float] = {}
        self.no_less: dict[_Cut, float] = {}  # what cuts take at least that waited too long

    def least_s(self, cut: _Cut) -> float:
        """Return what a step takes at least; infinity where there is no cut."""
        return self.least(*cut).step_s if cut[1] else inf

    def step_s(self, cut: _Cut, limit_s: float = inf) -> float:
        """Return the time of a step, infinity where a cut is not allowed; or what is no less than ``limit_s``."""
        seconds = self.known.get(cut)
        if seconds is not None:
            return seconds
        if (timed := cut in self.no_less) and self.no_less[cut] >= limit_s:
            return inf
        if not timed:
            self.left -= LOOK_VISITS + (len(cut[0]) + len(cut[1])) // STAGES_LOOKED_AT
        least = self.least(*cut) if cut[1] and limit_s < inf else Least(0.0)
        if not cut[1] or least.step_s >= limit_s:
            return inf
        if not self.allowed(*cut):
            self.known[cut] = inf
            return inf
        stages = self.pipeline.stages(*cut)
        if not timed:
            rounds = -(-self.pipeline.num_microbatches // cut[2])
            self.left -= stages.num_stages * min(rounds, MANY_ROUNDS)
        seconds = self.pipeline.step_s(stages, limit_s, least.busy_s)
        if seconds < inf:
            self.known[cut] = seconds
        else:
            self.no_less[cut] = limit_s
        return seconds

    def numbers_s(self, numbers: _Numbers, limit_s: float = inf) -> float:
        """Return the same of even stages."""
        return self.step_s(self.cut(numbers), limit_s)

    def first_of(
        self,
        places: Iterable[_Place],
        step_s: Callable[[_Place, float], float],
        cut: Callable[[_Place], _Cut],
    ) -> list[tuple[float, _Place]]:
        """Return the `NUM_CLIMBERS` fastest of ``places``, and their time; what cannot be one of them is not timed."""
        ranked: list[tuple[float, _Place]] = []
        bounds = ((self.least_s(cut(place)), place) for place in places)
        for least_s, place in sorted(bounds):
            limit_s = ranked[-1][0] if len(ranked) == NUM_CLIMBERS else inf
            if least_s >= limit_s:
                break
            ranked.append((step_s(place, inf), place))
            ranked.sort()
            del ranked[NUM_CLIMBERS:]
        return [(seconds, place) for seconds, place in ranked if seconds < inf]

    def drawn(self) -> Iterator[_Numbers]:
        """Yield numbers of stages from the fewest that fit to one for each unit."""
        sizes = sorted({*self.round_sizes[:1], *self.round_sizes[-2:]})
        for fused in range(1, min(2, self.top - self.pipeline.bottom) + 1):
            ups, downs = self._beside(fused)
            for up in drawn(len(self._pack_up(fused, inf)), len(ups), NUM_DRAWN):
                for down in drawn(len(self._pack_down(fused, inf)), len(downs), NUM_DRAWN):
                    yield from ((fused, up, down, size) for size in sizes)

    def near_numbers(self, numbers: _Numbers) -> Iterator[_Numbers]:
        """Yield what lies next to even stages."""
        fused, up, down, size = numbers
        yield from ((fused, up, down, other) for other in self.round_sizes if other != size)
        for more_up, more_down in _STEPS:
            yield fused, up + more_up, down + more_down, size
        yield from ((fused + more, up, down, size) for more in (1, -1))

    def packed(self) -> Iterator[_Cut]:
        """Yield cuts by pairs of time limits."""
        for fused in range(1, min(2, self.top - self.pipeline.bottom) + 1):
            ups, downs = self._beside(fused)
            for up in {self._pack_up(fused, limit): None for limit in limits(ups, NUM_DRAWN)}:
                for down in {self._pack_down(fused, limit): None for limit in limits(downs, NUM_DRAWN)}:
                    yield from ((up, (fused, *down), size) for size in self.round_sizes[-2:])

    def near_cuts(self, cut: _Cut, up_fits: bool = True, down_fits: bool = True) -> Iterator[_Cut]:
        """Yield what lies next to a cut, and may be allowed; what changes nothing of what does not fit is not."""
        forward, backward, size = cut
        if up_fits and down_fits:
            yield from ((forward, backward, other) for other in self.round_sizes if other != size)
        if down_fits:
            yield from ((changed, backward, size) for changed in neighbours(forward))
        if up_fits:
            yield from ((forward, (backward[0], *changed), size) for changed in neighbours(backward[1:]))
        if len(backward) > 1:  # the fused stage takes a unit from its neighbours, or gives them one
            tried_cuts = (backward[0] + 1, *without_first_unit(backward[1:]))
            yield without_first_unit(forward[::-1])[::-1], tried_cuts, size
        if backward[0] > 1 and self.top - backward[0] + 1 > self.pipeline.bottom:
            more = (backward[1] + 1, *backward[2:]) if len(backward) > 1 else (1,)
            grown = (*forward[:-1], forward[-1] + 1) if forward else (1,)
            yield grown, (backward[0] - 1, *more), size
            yield (*forward, 1), (backward[0] - 1, 1, *backward[1:]), size

    def two_changes(self, cut: _Cut) -> Iterator[_Cut]:
        """Yield what lies next to what lies next to a cut."""
        return (
            other
            for one in self.near_cuts(cut)
            for other in self.near_cuts(one, self.ups_fit(one[0]), self.downs_fit(one[1]))
        )

    def climb(
        self,
        place: _Place,
        step_s: Callable[[_Place, float], float],
        near: Callable[[_Place], Iterator[_Place]],
        num_visits: int,
    ) -> tuple[float, _Place]:
        """Return what single changes lead to, taking the first that gains each time."""
        until = self.left - num_visits
        best_s, better = step_s(place, inf), True
        while better:
            better = False
            for other in near(place):
                if self.left <= until:
                    break
                if (seconds := step_s(other, best_s)) < best_s * (1 - 1e-9):
                    best_s, place, better = seconds, other, True
                    break
        return best_s, place

    def _cut(self, numbers: _Numbers) -> _Cut:
        """Return the even cut of these numbers; one that is not allowed where there is none."""
        fused, up, down, size = numbers
        ups, downs = self._beside(fused)
        if not (0 < fused <= self.top and _can_cut(len(ups), up) and _can_cut(len(downs), down)):
            return (), (), size
        return even_cut(ups, up), (fused, *even_cut(downs, down)), size

    def _beside(self, fused: int) -> tuple[Sequence[float], Sequence[float]]:
        """Return seconds of the units below a fused stage of so many, up for forward and down for backward."""
        top = self.top - fused
        return self.pipeline.forward_s[:top], self.pipeline.backward_s[self.pipeline.bottom : top][::-1]

    def _pack_up(self, fused: int, limit_s: float) -> Sizes:
        """Return forward stages under a time limit; the first takes what is left, since all others wait for it."""
        top = self.top - fused
        ups, _ = self._beside(fused)
        return packed_cut(ups[::-1], limit_s, lambda first, end: self.fits((top - end, top - first), False))[
            ::-1
        ]

    def _pack_down(self, fused: int, limit_s: float) -> Sizes:
        """Return backward stages under a time limit."""
        top = self.top - fused
        _, downs = self._beside(fused)
        return packed_cut(downs, limit_s, lambda first, end: self.fits((top - end, top - first), True))

    def _allowed(self, forward: Sizes, backward: Sizes, size: int) -> bool:
        """Whether every stage fits, all of them together too, and every worker has one."""
        if not backward or len(forward) + len(backward) < self.pipeline.num_workers:
            return False
        if not (self.ups_fit(forward) and self.downs_fit(backward)):
            return False
        return self.pipeline.holds(self.pipeline.stages(forward, backward, size))

    def _ups_fit(self, forward: Sizes) -> bool:
        at = 0
        for size in forward:
            if not self.fits((at, at + size), False):
                return False
            at += size
        return True

    def _downs_fit(self, backward: Sizes) -> bool:
        at = self.top
        for size in backward:
            if not self.fits((at - size, at), True):
                return False
            at -= size
        return True


# Changes of the numbers of stages, forward and backward, that a climb tries.
_STEPS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1), (2, 0), (-2, 0), (0, 2), (0, -2))


def _can_cut(num_units: int, num_stages: int) -> bool:
    return 0 < num_stages <= num_units or num_units == num_stages == 0
