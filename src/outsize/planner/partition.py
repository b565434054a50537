"""Where to cut a model into stages, for forward and for backward apart.

The objective is the time of the step itself (`pipeline.makespan_s`), not a proxy of it. Starts come from packing
units greedily under pairs of time limits, one for forward and one for backward stages; the best of them
climb by moving one unit across a cut, by splitting a stage and by joining two, until nothing gains. Everything is
in a fixed order, so the same units give the same cuts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

from outsize.planner.pipeline import makespan_s, stage_times
from outsize.planner.stages import Span, Stages, spans_down, spans_up

# How many starts climb, and how many limits are tried on each side.
NUM_CLIMBERS = 6
NUM_LIMITS = 10

Fits = Callable[[Span, bool], bool]
_Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What is cut, and for whom.

    Attributes:
        forward_s: seconds by unit and microbatch.
        backward_s: the same, recompute included; of the last unit, its forward included.
        num_workers: how many there are.
        num_microbatches: of a step.
        hop_s: hand-over between stages.
        bottom: the lowest unit that runs backward.
        fits: whether a worker can hold the units of a span, forward (False) or backward (True).
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    num_workers: int
    num_microbatches: int
    hop_s: float = 0.0
    bottom: int = 0
    fits: Fits = lambda span, backward: True

    def stages(self, forward: _Sizes, backward: _Sizes, round_size: int) -> Stages:
        """Return the stages of these sizes."""
        top = len(self.forward_s)
        return Stages(forward=spans_up(forward), backward=spans_down(backward, top), round_size=round_size)

    def step_s(self, stages: Stages) -> float:
        """Return the time of a step."""
        times = stage_times(stages, self.forward_s, self.backward_s)
        size = stages.round_size
        return makespan_s(times, self.num_microbatches, size, self.num_workers, self.hop_s)


def partition(pipeline: Pipeline, round_sizes: Sequence[int] = (), max_evaluations: int = 6000) -> Stages:
    """Return the stages whose step is shortest, as far as the search finds them.

    Args:
        pipeline: what is cut.
        round_sizes: microbatches per round to choose from; by default all microbatches, and one to four for
            each worker.
        max_evaluations: how many steps are timed at most.

    Raises:
        ValueError: not even single units fit, or there are fewer stages than workers whatever the cut.
    """
    search = _Search(pipeline, max_evaluations)
    workers, microbatches = pipeline.num_workers, pipeline.num_microbatches
    usual = {microbatches, *(max(1, n * workers // 4) for n in (4, 5, 6, 7, 8, 10, 12, 16))}
    sizes = sorted({min(size, microbatches) for size in round_sizes or usual})
    starts = [
        (search.step_s(forward, backward, size), forward, backward, size)
        for forward, backward in search.starts()
        for size in sizes
    ]
    if not starts:
        raise ValueError("no cut fits the workers' memory and gives each of them a stage")
    best = min(starts)
    climbers = list(islice(_distinct(sorted(starts)), NUM_CLIMBERS))
    for index, start in enumerate(climbers):
        best = min(best, search.climb(start, sizes, search.left // (len(climbers) - index)))
    return pipeline.stages(*best[1:])


_Found = tuple[float, _Sizes, _Sizes, int]


def _distinct(found: Sequence[_Found]) -> Iterator[_Found]:
    """Yield what has not been cut like that before."""
    seen: set[tuple[_Sizes, _Sizes]] = set()
    for entry in found:
        if entry[1:3] not in seen:
            seen.add(entry[1:3])
            yield entry


class _Search:
    def __init__(self, pipeline: Pipeline, max_evaluations: int) -> None:
        self.pipeline = pipeline
        self.left = max_evaluations
        self.fits = cache(pipeline.fits)
        self.known: dict[tuple[_Sizes, _Sizes, int], float] = {}

    def step_s(self, forward: _Sizes, backward: _Sizes, round_size: int) -> float:
        key = (forward, backward, round_size)
        if key not in self.known:
            self.left -= 1
            self.known[key] = self.pipeline.step_s(self.pipeline.stages(*key))
        return self.known[key]

    def starts(self) -> Iterator[tuple[_Sizes, _Sizes]]:
        """Yield cuts by pairs of limits, the last unit fused alone or with what fits beside it."""
        pipeline = self.pipeline
        forwards, backwards = pipeline.forward_s, pipeline.backward_s
        top = len(forwards)
        seen = set()
        for fused in range(top - 1, max(pipeline.bottom, top - 2) - 1, -1):
            for up in _limits(forwards[:fused]):
                for down in _limits(backwards[pipeline.bottom : fused]):
                    forward = self._pack(range(fused - 1, -1, -1), forwards, up, False)[::-1]
                    rest = self._pack(range(fused - 1, pipeline.bottom - 1, -1), backwards, down, True)
                    cut = (forward, (top - fused, *rest))
                    if cut not in seen and self.allowed(*cut):
                        seen.add(cut)
                        yield cut

    def climb(self, found: _Found, round_sizes: Sequence[int], num_evaluations: int) -> _Found:
        """Return what single changes lead to, taking the first that gains each time."""
        until = self.left - num_evaluations
        better: _Found | None = found
        while better is not None:
            found, better = better, None
            neighbours = [(found[1], found[2], size) for size in round_sizes if size != found[3]]
            neighbours += [(f, b, found[3]) for f, b in self._neighbours(found[1], found[2])]
            for cut in neighbours:
                if self.left <= until:
                    break
                if (seconds := self.step_s(*cut)) < found[0] * (1 - 1e-9):
                    better = (seconds, *cut)
                    break
        return found

    def allowed(self, forward: _Sizes, backward: _Sizes) -> bool:
        """Whether every stage fits and every worker has one."""
        if len(forward) + len(backward) < self.pipeline.num_workers:
            return False
        top = len(self.pipeline.forward_s)
        ups = all(self.fits(span, False) for span in spans_up(forward))
        return ups and all(self.fits(span, True) for span in spans_down(backward, top))

    def _pack(self, units: range, seconds: Sequence[float], limit: float, backward: bool) -> _Sizes:
        """Return sizes of stages, as many units in each as stay under the limit and fit."""
        sizes: list[int] = []
        total = 0.0
        for unit in units:
            span = (unit, unit + (sizes[-1] if sizes else 0) + 1)
            if sizes and total + seconds[unit] <= limit * (1 + 1e-9) and self.fits(span, backward):
                sizes[-1] += 1
                total += seconds[unit]
            else:
                sizes.append(1)
                total = seconds[unit]
        return tuple(sizes)

    def _neighbours(self, forward: _Sizes, backward: _Sizes) -> Iterator[tuple[_Sizes, _Sizes]]:
        pipeline = self.pipeline
        changes = [(changed, backward) for changed in _changes(forward)]
        changes += [(forward, (backward[0], *changed)) for changed in _changes(backward[1:])]
        if len(backward) > 1:  # the fused stage takes a unit from its neighbours, or gives them one
            taken = (backward[0] + 1, *_less(backward[1:]))
            changes.append((_less(forward[::-1])[::-1], taken))
        if backward[0] > 1 and len(pipeline.forward_s) - backward[0] + 1 > pipeline.bottom:
            more = (backward[1] + 1, *backward[2:]) if len(backward) > 1 else (1,)
            grown = (*forward[:-1], forward[-1] + 1) if forward else (1,)
            changes += [
                (grown, (backward[0] - 1, *more)),
                ((*forward, 1), (backward[0] - 1, 1, *backward[1:])),
            ]
        return (change for change in changes if self.allowed(*change))


def _less(sizes: _Sizes) -> _Sizes:
    """Return ``sizes`` with one unit less in the first."""
    return (sizes[0] - 1, *sizes[1:]) if sizes[0] > 1 else sizes[1:]


def _changes(sizes: _Sizes) -> Iterator[_Sizes]:
    """Yield sizes with one unit moved, one stage split in two, or two joined."""
    for i, size in enumerate(sizes):
        for j in (i - 1, i + 1):
            if size > 1 and 0 <= j < len(sizes):
                moved = list(sizes)
                moved[i] -= 1
                moved[j] += 1
                yield tuple(moved)
        for part in range(1, size):
            yield (*sizes[:i], part, size - part, *sizes[i + 1 :])
        if i + 1 < len(sizes):
            yield (*sizes[:i], size + sizes[i + 1], *sizes[i + 2 :])
    for i in range(len(sizes)):  # a unit travels further
        for j in range(len(sizes)):
            if abs(i - j) > 1 and sizes[i] > 1:
                moved = list(sizes)
                moved[i] -= 1
                moved[j] += 1
                yield tuple(moved)


def _limits(seconds: Sequence[float]) -> list[float]:
    """Return limits to pack under: sums of consecutive units, at most `NUM_LIMITS` of them, evenly drawn."""
    sums = set()
    for first in range(len(seconds)):
        total = 0.0
        for value in seconds[first : first + 12]:
            total += value
            sums.add(round(total, 12))
    found = sorted(sums) or [0.0]
    if len(found) <= NUM_LIMITS:
        return found
    return [found[i * (len(found) - 1) // (NUM_LIMITS - 1)] for i in range(NUM_LIMITS)]
