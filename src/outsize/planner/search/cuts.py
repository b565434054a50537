"""Cuts of a model into stages, and lower bounds of a step that rule cuts out.

A worker computes all its visits one after the other. The first of them begins when the stages before have had their
first microbatch, and behind the last one the stages that follow have theirs. And the weights of each visit come up
behind those of the visit before.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from outsize.planner.program.stages import spans_down, spans_up
from outsize.planner.simulate.gpu_times import with_shared
from outsize.planner.simulate.pipeline import StageTimes

if TYPE_CHECKING:
    from outsize.planner.search.partition import Pipeline


Sizes = tuple[int, ...]


def even_cut(seconds: Sequence[float], num_stages: int) -> Sizes:
    """Return sizes of stages that take as nearly the same time as cuts at its quantiles give; at least a unit each.

    Args:
        seconds: by unit.
        num_stages: at most as many as there are units.
    """
    count = len(seconds)
    total, done, at = sum(seconds), 0.0, 0
    sizes = []
    for stage in range(1, num_stages + 1):
        first, limit = at, total * stage / num_stages
        latest = count - (num_stages - stage)
        while at < latest and (at == first or stage == num_stages or done + seconds[at] / 2 <= limit):
            done += seconds[at]
            at += 1
        sizes.append(at - first)
    return tuple(sizes)


def packed_cut(seconds: Sequence[float], limit_s: float, fits: Callable[[int, int], bool]) -> Sizes:
    """Return sizes of stages that take units as long as they stay under a time and fit.

    Args:
        seconds: by unit, in the order in which they are packed.
        limit_s: most that a stage of several units takes.
        fits: whether units ``[first, end)`` may be a stage; single units are not asked about.
    """
    sizes: list[int] = []
    total = 0.0
    for unit, unit_s in enumerate(seconds):
        total += unit_s
        if sizes and total <= limit_s * (1 + 1e-9) and fits(unit - sizes[-1], unit + 1):
            sizes[-1] += 1
        else:
            sizes.append(1)
            total = unit_s
    return tuple(sizes)


def limits(seconds: Sequence[float], count: int) -> list[float]:
    """Return times to pack under: sums of up to a dozen consecutive units, at most ``count`` of them, evenly drawn."""
    sums = set()
    for first in range(len(seconds)):
        total = 0.0
        for value in seconds[first : first + 12]:
            total += value
            sums.add(round(total, 12))
    limits_s = sorted(sums) or [0.0]
    if len(limits_s) <= count:
        return limits_s
    return [limits_s[i * (len(limits_s) - 1) // (count - 1)] for i in range(count)]


def drawn(least: int, most: int, count: int) -> list[int]:
    """Return at most ``count`` numbers from ``least`` to ``most``, each about as many times the one before."""
    if most - least < count:
        return list(range(least, most + 1))
    ratio = (most / max(least, 1)) ** (1 / (count - 1))
    return sorted({least, most, *(round(max(least, 1) * ratio**i) for i in range(count))})


def neighbours(sizes: Sizes) -> Iterator[Sizes]:
    """Yield sizes with one unit moved to the stage beside, one stage split or two joined, then a unit moved further."""
    for i, size in enumerate(sizes):
        for j in (i - 1, i + 1):
            if size > 1 and 0 <= j < len(sizes):
                yield _moved(sizes, i, j)
        for part in range(1, size):
            yield (*sizes[:i], part, size - part, *sizes[i + 1 :])
        if i + 1 < len(sizes):
            yield (*sizes[:i], size + sizes[i + 1], *sizes[i + 2 :])
    for i, size in enumerate(sizes):
        for j in range(len(sizes)) if size > 1 else ():
            if abs(i - j) > 1:
                yield _moved(sizes, i, j)


def without_first_unit(sizes: Sizes) -> Sizes:
    """Return ``sizes`` with one unit less in the first stage, which is gone where it had no other."""
    return (sizes[0] - 1, *sizes[1:]) if sizes[0] > 1 else sizes[1:]


def _moved(sizes: Sizes, source: int, target: int) -> Sizes:
    changed = list(sizes)
    changed[source] -= 1
    changed[target] += 1
    return tuple(changed)


class Least(NamedTuple):
    """What a step takes at least.

    Attributes:
        step_s: seconds of it.
        busy_s: by worker, what it computes, and what follows its last visit.
    """

    step_s: float
    busy_s: tuple[float, ...] = ()


class _Direction(NamedTuple):
    """The stages of one direction, and by worker what those of a round take that it gets.

    Attributes:
        waits: by stage, how much later the first microbatch comes out of it than of the one before.
        again: by stage, what of it needs no gradient.
        work: seconds of computing for a microbatch.
        up: seconds of weights on their way up in a round.
        summed: seconds of sums on their way up in a later one.
    """

    waits: list[float]
    again: list[float]
    work: list[float]
    up: list[float]
    summed: list[float]


class StepBound:
    """The bound for cuts of one pipeline.

    Args:
        pipeline: what is cut.
    """

    def __init__(self, pipeline: "Pipeline") -> None:
        self._pipeline, self._top = pipeline, len(pipeline.forward_s)
        # A climb changes one direction at a time.
        self._ups, self._downs, self._visits = cache(self._up), cache(self._down), cache(self._dealt)

    def least(self, forward: Sizes, backward: Sizes, round_size: int) -> Least:
        """Return what a step of stages of these sizes takes at least; nothing where a worker would have none."""
        workers, num_ups = self._pipeline.num_workers, len(forward)
        count = num_ups + len(backward)
        if count < workers:
            return Least(0.0)
        parts = zip(self._ups(forward), self._downs(backward, num_ups % workers), strict=True)
        (ups, downs), (early, late), *of_workers = parts
        waits = ups + downs
        begun = list(accumulate(waits[: workers - 1], initial=0.0))
        behind = list(accumulate(waits[: count - workers : -1], initial=0.0))
        visits, last = self._visits(count, round_size)
        work, up, summed = ([a + b for a, b in zip(*each, strict=True)] for each in of_workers)
        busy = [behind[(count - 1 - worker + last) % workers] for worker in range(workers)]
        moved = [0.0] * workers
        for shift, (microbatches, times, later) in visits:
            if shift:  # the worker that begins is another one
                work, up, summed = ([*each[-shift:], *each[:-shift]] for each in (work, up, summed))
            busy = [total + each * microbatches for total, each in zip(busy, work, strict=True)]
            moved = [
                total + each * times + sums * later
                for total, each, sums in zip(moved, up, summed, strict=True)
            ]
        again = early + late if len(early) < workers else early
        first = [start - earlier + total for start, earlier, total in zip(begun, again, busy, strict=False)]
        shared_s = self._pipeline.shared_s(num_ups, self._top - backward[0], len(backward), round_size)
        return Least(with_shared(max(*moved, *first), shared_s), tuple(busy))

    def _dealt(self, count: int, round_size: int) -> tuple[list[tuple[int, tuple[int, int, int]]], int]:
        """Return microbatches, rounds and later rounds by the worker that they begin with, and the last such worker."""
        workers, left = self._pipeline.num_workers, self._pipeline.num_microbatches
        microbatches, times, later = Counter[int](), Counter[int](), Counter[int]()
        shift = 0
        for number, start in enumerate(range(0, left, round_size)):
            shift = number * count % workers
            microbatches[shift] += min(round_size, left - start)
            times[shift] += 1
            later[shift] += number > 0
        # Each as seen from the one before.
        shifts = list(microbatches)
        steps = [(at - before) % workers for before, at in pairwise([0, *shifts])]
        dealt = [(microbatches[at], times[at], later[at]) for at in shifts]
        return list(zip(steps, dealt, strict=True)), shift

    def _up(self, sizes: Sizes) -> _Direction:
        return self._direction(tuple(map(self._pipeline.sums.forward, spans_up(sizes))), 0)

    def _down(self, sizes: Sizes, first_worker: int) -> _Direction:
        sums, (fused, *below) = self._pipeline.sums, spans_down(sizes, self._top)
        return self._direction((sums.turning(fused), *map(sums.backward, below)), first_worker)

    def _direction(self, stages: tuple[StageTimes, ...], first_worker: int) -> _Direction:
        workers = self._pipeline.num_workers
        firsts = [(worker - first_worker) % workers for worker in range(workers)]
        work, up, summed = (
            [sum(values[first::workers]) for first in firsts]
            for values in (
                [stage.seconds for stage in stages],
                [stage.up_s for stage in stages],
                [stage.sum_s for stage in stages],
            )
        )
        again, hop_s = [stage.recompute_s for stage in stages], self._pipeline.hop_s
        waits = [stage.seconds - stage.recompute_s + hop_s for stage in stages]
        return _Direction(waits, again, work, up, summed)
