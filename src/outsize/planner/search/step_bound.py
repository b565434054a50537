"""What a step of stages takes at least, in a fraction of the time of `Pipeline.step_s`: cuts are ruled out by it.

A worker computes all its visits one after the other. The first of them begins when the stages before have had their
first microbatch, and behind the last one the stages that follow have theirs. And the weights of each visit come up
behind those of the visit before.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from outsize.planner.search.cuts import Sizes

if TYPE_CHECKING:
    from outsize.planner.search.partition import Pipeline


class _Stages(NamedTuple):
    """Seconds of each stage for a microbatch, of what of it needs no gradient, of weights on their way up, of sums."""

    seconds: list[float]
    recompute_s: list[float]
    up_s: list[float]
    sum_s: list[float]


class StepBound:
    """The bound for cuts of one pipeline.

    Args:
        pipeline: what is cut.
    """

    def __init__(self, pipeline: "Pipeline") -> None:
        self._pipeline = pipeline
        count = len(pipeline.forward_s)
        recompute_s = pipeline.recompute_s or pipeline.forward_s
        turning = [
            f - pipeline.keeps * r for f, r in zip(pipeline.forward_s[:-1], recompute_s[:-1], strict=True)
        ]
        self._forward = _sums(pipeline.forward_s)
        self._backward = _sums(pipeline.backward_s)
        self._recompute = _sums(recompute_s)
        self._turning = _sums([*turning, 0.0])
        self._weights = _sums(pipeline.weights_s or (0.0,) * count)
        self._gradients = _sums(pipeline.gradients_s or (0.0,) * count)
        self._ups, self._downs, self._visits = cache(self._up), cache(self._down), cache(self._dealt)

    def least_s(self, forward: Sizes, backward: Sizes, round_size: int) -> float:
        """Return seconds that a step of stages of these sizes takes at least; 0 where a worker would have none."""
        workers, hop_s = self._pipeline.num_workers, self._pipeline.hop_s
        ups, downs = self._ups(forward), self._downs(backward)
        seconds, recompute_s, up_s, sum_s = (one + other for one, other in zip(ups, downs, strict=True))
        count = len(seconds)
        if count < workers:
            return 0.0
        work, up, summed = (
            [sum(values[first::workers]) for first in range(workers)] for values in (seconds, up_s, sum_s)
        )
        waits = [s - r + hop_s for s, r in zip(seconds, recompute_s, strict=True)]
        begun = list(accumulate(waits, initial=0.0))
        visits, last = self._visits(count, round_size)
        least_s = 0.0
        for worker in range(workers):
            busy_s = moved_s = 0.0
            for shift, (microbatches, times, later) in visits:
                stage = worker - shift  # negative ones count from the end
                busy_s += work[stage] * microbatches
                moved_s += up[stage] * times + summed[stage] * later
            place = (worker - last) % workers
            final = place + (count - 1 - place) // workers * workers
            begins_s = begun[worker] - recompute_s[worker]
            least_s = max(least_s, moved_s, begins_s + busy_s + begun[count] - begun[final + 1])
        return least_s

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
        return [(at, (microbatches[at], times[at], later[at])) for at in microbatches], shift

    def _up(self, sizes: Sizes) -> _Stages:
        spans, none = list(pairwise(accumulate(sizes, initial=0))), [0.0] * len(sizes)
        return _Stages(_over(self._forward, spans), none, _over(self._weights, spans), none)

    def _down(self, sizes: Sizes) -> _Stages:
        ends = [len(self._forward) - 1 - below for below in accumulate(sizes, initial=0)]
        spans = [(first, end) for end, first in pairwise(ends)]
        seconds, recompute_s = _over(self._backward, spans), _over(self._recompute, spans)
        fused, top = spans[0]
        seconds[0], recompute_s[0] = seconds[0] + self._turning[top] - self._turning[fused], 0.0
        return _Stages(seconds, recompute_s, _over(self._weights, spans), _over(self._gradients, spans))


def _over(sums: list[float], spans: list[tuple[int, int]]) -> list[float]:
    return [sums[end] - sums[first] for first, end in spans]


def _sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))
