"""Time the stages of a pipeline.

How long a step of stages takes when only compute and hand-over count: a fast twin of `simulate`.

A step ends with the backward of unit 0, for which everything else has been done, and the next one begins with
the forward of unit 0, which needs it stepped. So all workers are idle in between, and one step tells the time
of each. `simulate` gives the same time for the program of these stages on a machine whose copies cost nothing
but the hop between stages.

What stages take for one microbatch: said once, for the clock of stages and for what rules cuts out before it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import inf
from typing import NamedTuple

from outsize.planner.program.stages import Span, Stages, rounds_in_turn


class StageTimes(NamedTuple):
    """What a stage takes for one microbatch.

    Attributes:
        seconds: all of it.
        recompute_s: the part of it that needs no gradient; 0 for forward stages and the fused one.
        source: stage that makes the last input that the recompute needs; -1 for none.
        early_s: how long before that stage's end it is made.
        up_s: what its weights take to come up, which they do while the worker's visit before runs.
        sum_s: what its gradients take to come up where an earlier round has begun to sum them.
        down_s: what its gradients take to leave, which they do while the worker's next visit runs.
    """

    seconds: float
    recompute_s: float = 0.0
    source: int = -1
    early_s: float = 0.0
    up_s: float = 0.0
    sum_s: float = 0.0
    down_s: float = 0.0


class StageSums:
    """Tells what any stage takes, from sums over the units below each.

    Args:
        forward_s: by unit.
        backward_s: by unit, recompute included; of the last unit, its forward included.
        weights_s: what the weights of each unit take over the link; nothing where it is empty.
        gradients_s: the same of gradients.
        recompute_s: by unit; a whole forward where it is empty.
        keeps: whether the stage that turns around recomputes nothing.
    """

    def __init__(
        self,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        weights_s: Sequence[float] = (),
        gradients_s: Sequence[float] = (),
        recompute_s: Sequence[float] = (),
        keeps: bool = False,
    ) -> None:
        none, again = (0.0,) * len(forward_s), recompute_s or forward_s
        turning = [f - keeps * r for f, r in zip(forward_s, again, strict=True)]
        self._forward, self._backward, self._recompute = map(sums, (forward_s, backward_s, again))
        self._turning = sums([*turning[:-1], 0.0])
        self._weights, self._gradients = sums(weights_s or none), sums(gradients_s or none)
        # Searches ask thousands of times about some hundred spans.
        self.forward, self.backward = cache(self._only_forward), cache(self._only_backward)

    def _only_forward(self, span: Span) -> StageTimes:
        """Return what a stage takes that only runs forward."""
        first, end = span
        return StageTimes(
            self._forward[end] - self._forward[first], up_s=self._weights[end] - self._weights[first]
        )

    def _only_backward(self, span: Span, source: int = -1, early_s: float = 0.0) -> StageTimes:
        """Return what a stage takes that only runs backward; see `StageTimes` for ``source`` and ``early_s``."""
        first, end = span
        sum_s = self._gradients[end] - self._gradients[first]
        return StageTimes(
            self._backward[end] - self._backward[first],
            self._recompute[end] - self._recompute[first],
            source,
            early_s,
            self._weights[end] - self._weights[first],
            sum_s,
            sum_s,
        )

    def turning(self, span: Span) -> StageTimes:
        """Return what the stage takes that runs forward and backward."""
        first, end = span
        backward_s = self.backward(span)
        seconds = backward_s.seconds + self._turning[end] - self._turning[first]
        return backward_s._replace(seconds=seconds, recompute_s=0.0)

    def of(self, stages: Stages) -> list[StageTimes]:
        """Return the times of the stages of a round, in order."""
        forward_s = self._forward
        ends = [end for _, end in stages.forward]
        fused, *backward = stages.backward
        times = [*map(self.forward, stages.forward), self.turning(fused)]
        for span in backward:
            end, source, early_s = span[1], -1, 0.0
            if end > 1:  # the input of the top unit comes out of the unit below
                source = bisect_right(ends, end - 2)
                early_s = forward_s[ends[source]] - forward_s[end] if ends[source] > end else 0.0
            times.append(self.backward(span, source, early_s))
        return times


def sums(values: Sequence[float]) -> list[float]:
    """Return the sums of all ``values`` before each, and of all."""
    return list(accumulate(values, initial=0.0))


# Rounds repeat once all that happens is later by the same, but for what floats lose.
_ALIKE = 1e-12
_Lines = list[tuple[float, float]]
"""Moments of microbatches 0, 1, …: the highest of lines, each a slope and what it is at microbatch 0."""


def makespan_s(
    times: Sequence[StageTimes],
    num_microbatches: int,
    round_size: int,
    num_workers: int,
    hop_s: float = 0.0,
    halves: tuple[int, int] = (2, 2),
    *,
    overlaps: bool = True,
    may_wait_s: Sequence[float] = (),
) -> float:
    """Return the time of a step of stages that are dealt out in turn.

    What a microbatch starts from comes up while the one before it is computed, not earlier, and takes
    ``hop_s``. A backward stage recomputes while it waits for that. A worker has two halves of slots and accumulators,
    so a visit begins no earlier than its weights are up, and the gradients of the visit before the last one down. Of
    what has one half only (``halves``, of slots and of accumulators) nothing moves before the visit before has ended.
    Unless rounds overlap, each microbatch of a round begins when that of the round before has ended.
    Where a worker has stood still for longer than it may (``may_wait_s``, by worker), the answer is infinity.
    """
    workers = [_Worker(halves, wait_s) for wait_s in may_wait_s or (inf,) * num_workers]
    by_microbatch = any(stage.seconds < hop_s and stage.source >= 0 for stage in times)
    if by_microbatch:
        return _makespan_by_microbatch_s(times, num_microbatches, round_size, workers, hop_s, overlaps)
    turn = start = 0
    period = rounds_in_turn(len(times), num_workers)
    before: list[float] = []
    ends: _Lines = [(0.0, 0.0)]
    while start < num_microbatches:
        if start and turn % (period * len(times)) == 0:
            moments = [moment for worker in workers for moment in worker.moments]
            moments += [] if overlaps else [value for _, value in ends]
            more = (num_microbatches - start) // (round_size * period)
            if more and (repeated_s := _same_step(before, moments)) is not None:
                for worker in workers:
                    worker.delay(more * repeated_s)
                ends = [(slope, value + more * repeated_s) for slope, value in ends]
                start += more * period * round_size
                continue
            before = moments
        last = min(round_size, num_microbatches - start) - 1
        ends = _round(times, workers, turn, [(0.0, 0.0)] if overlaps else ends, hop_s, last, start > 0)
        if not ends:
            return inf
        turn += len(times)
        start += round_size
    return max(worker.free_s for worker in workers)


def _same_step(before: Sequence[float], after: Sequence[float]) -> float | None:
    """Return by how much all moments are later than they were; None where some are by more than others."""
    steps = [b - a for a, b in zip(before, after, strict=False)] if len(before) == len(after) else []
    return max(steps) if steps and max(steps) - min(steps) <= _ALIKE * max(steps) else None


class _Worker:
    """When a worker is free, what it moves beside its visits, and how much longer it may stand still."""

    __slots__ = ("_before_s", "_began_s", "_down_s", "_given_s", "_slots", "_sums", "free_s", "wait_s")

    def __init__(self, halves: tuple[int, int], may_wait_s: float) -> None:
        self._slots, self._sums = halves
        self.free_s = self._began_s = self._before_s = self._down_s = self._given_s = 0.0
        self.wait_s = may_wait_s

    @property
    def moments(self) -> tuple[float, float, float]:
        """When its visit ended, when it began, and when gradients were down."""
        return self.free_s, self._began_s, self._given_s

    def delay(self, seconds: float) -> None:
        """Let everything have been so much later."""
        self.free_s += seconds
        self._began_s += seconds
        self._given_s += seconds

    def ready_s(self, stage: StageTimes, summed: bool) -> float:
        """Return when the worker is free for a visit of ``stage``, and slots and accumulators are as it wants them."""
        up_s = stage.up_s + stage.sum_s if summed else stage.up_s
        ready_s = self._began_s + (up_s if up_s > self._before_s else self._before_s)
        if self._slots == 1:
            ready_s = max(ready_s, self.free_s + up_s)
        if self._sums == 1 and stage.down_s:
            ready_s = max(ready_s, self._given_s + (stage.sum_s if summed else 0.0))
        return ready_s if ready_s > self.free_s else self.free_s

    def visit(self, stage: StageTimes, first_s: float, end_s: float, busy_s: float) -> None:
        """Let a visit end its first microbatch at ``first_s`` and all at ``end_s``, of which it computes ``busy_s``."""
        self.wait_s -= end_s - self.free_s - busy_s
        self.free_s = end_s
        self._began_s = first_s - stage.seconds
        self._before_s, self._down_s = self._down_s, stage.down_s
        if stage.down_s:
            self._given_s = end_s + stage.down_s


def _round(
    times: Sequence[StageTimes],
    workers: Sequence[_Worker],
    turn: int,
    ends: _Lines,
    hop_s: float,
    last: int,
    summed: bool,
) -> _Lines:
    """Let a round of microbatches ``0 … last`` pass its stages; return when they have, nothing where that is too late.

    Microbatch m ends a visit at ``max(g(m), end(m - 1) + pace)`` where g is what it waits for, and pace is what a stage
    or, where that is longer, a hop takes. With g convex, the latest and the earliest of them decide:
    ``max(g(m), g(0) + m * pace)``. That is convex again, so all visits are exact in this form, but for a stage that
    is shorter than a hop and waits for the input of its recompute: there hops wait for computes in turn.
    """
    of_round: list[_Lines] = []
    count, hop = len(workers), 0.0
    for stage in times:
        worker = workers[turn % count]
        turn += 1
        seconds, recompute_s, source = stage.seconds, stage.recompute_s, stage.source
        rest_s = seconds - recompute_s
        lines = [(slope, value + hop + rest_s) for slope, value in ends]
        if source >= 0 and recompute_s:
            late_s = seconds - stage.early_s
            lines += [(slope, value + late_s) for slope, value in of_round[source]]
        first = worker.ready_s(stage, summed) + rest_s + (hop if hop > recompute_s else recompute_s)
        for _, value in lines:
            first = max(first, value)
        pace_s = seconds if seconds > hop else hop
        end = top = first + pace_s * last
        ends = [(pace_s, first)]
        for line in lines:
            reached = line[1] + line[0] * last
            if reached > top:
                ends.append(line)
                end = max(end, reached)
        worker.visit(stage, first, end, seconds * (last + 1))
        if worker.wait_s < 0:
            return []
        of_round.append(ends)
        hop = hop_s
    return ends


def _makespan_by_microbatch_s(
    times: Sequence[StageTimes],
    num_microbatches: int,
    round_size: int,
    workers: Sequence[_Worker],
    hop_s: float,
    overlaps: bool,
) -> float:
    """Makespan in seconds, one microbatch after the other, without assumptions on which stage is slowest."""
    turn = 0
    ends = [0.0] * round_size
    for start in range(0, num_microbatches, round_size):
        count = min(round_size, num_microbatches - start)
        ends = [0.0] * count if overlaps else ends[:count]
        of_round: list[list[float]] = []
        for index, stage in enumerate(times):
            worker = workers[turn % len(workers)]
            turn += 1
            now = before = arrived = worker.ready_s(stage, start > 0)
            hop = hop_s if index else 0.0
            inputs = of_round[stage.source] if stage.recompute_s and stage.source >= 0 else None
            rest_s = stage.seconds - stage.recompute_s
            ready, ends = ends, []
            for microbatch, ready_s in enumerate(ready):
                arrived, before = max(ready_s, before, arrived) + hop, now
                if inputs is not None and inputs[microbatch] - stage.early_s > now:
                    now = inputs[microbatch] - stage.early_s
                now += stage.recompute_s
                now = (now if now > arrived else arrived) + rest_s
                ends.append(now)
            of_round.append(ends)
            worker.visit(stage, ends[0], now, stage.seconds * count)
            if worker.wait_s < 0:
                return inf
    return max(worker.free_s for worker in workers)


def bubble(
    times: Sequence[StageTimes],
    num_microbatches: int,
    round_size: int,
    num_workers: int,
    hop_s: float = 0.0,
    *,
    overlaps: bool = True,
) -> float:
    """Return the share, 0 to 1, of the workers' time in which they compute nothing."""
    total = makespan_s(times, num_microbatches, round_size, num_workers, hop_s, overlaps=overlaps)
    busy = sum(stage.seconds for stage in times) * num_microbatches
    return 1.0 - busy / (num_workers * total) if total > 0 else 0.0
