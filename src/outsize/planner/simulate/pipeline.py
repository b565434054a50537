"""How long a step of stages takes when only compute and hand-over count: a fast twin of `simulate`.

A step ends with the backward of unit 0, for which everything else has been done, and the next one begins with
the forward of unit 0, which needs it stepped. So all workers are idle in between, and one step tells the time
of each. `simulate` gives the same time for the program of these stages on a machine whose copies cost nothing
but the hop between stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from outsize.planner.program.stages import Stages


@dataclass(frozen=True, slots=True)
class StageTimes:
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


def stage_times(
    stages: Stages,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weights_s: Sequence[float] = (),
    gradients_s: Sequence[float] = (),
    recompute_s: Sequence[float] = (),
    keeps: bool = False,
) -> list[StageTimes]:
    """Return the times of the stages of a round, in order.

    Args:
        stages: how the units are cut.
        forward_s: by unit.
        backward_s: by unit, recompute included; of the last unit, its forward included.
        weights_s: what the weights of each unit take over the link; nothing where it is empty.
        gradients_s: the same of gradients.
        recompute_s: by unit; a whole forward where it is empty.
        keeps: whether the stage that turns around recomputes nothing.
    """
    recompute_s = recompute_s or forward_s
    last = len(forward_s) - 1
    fused = stages.backward[0]
    times = [
        StageTimes(sum(forward_s[first:end]), up_s=sum(weights_s[first:end])) for first, end in stages.forward
    ]
    both = sum(forward_s[u] - keeps * recompute_s[u] for u in range(*fused) if u != last)
    seconds, summed_s = both + sum(backward_s[slice(*fused)]), sum(gradients_s[slice(*fused)])
    times.append(StageTimes(seconds, up_s=sum(weights_s[slice(*fused)]), sum_s=summed_s, down_s=summed_s))
    stage_of = [index for index, (first, end) in enumerate(stages.forward) for _ in range(first, end)]
    for first, end in stages.backward[1:]:
        seconds, early = sum(backward_s[first:end]), sum(recompute_s[first:end])
        source, early_s = -1, 0.0
        if end > 1:  # the input of the top unit comes out of the unit below
            source = stage_of[end - 2]
            early_s = sum(forward_s[end : stages.forward[source][1]]) if stage_of[end - 1] == source else 0.0
        up_s, summed_s = sum(weights_s[first:end]), sum(gradients_s[first:end])
        times.append(StageTimes(seconds, early, source, early_s, up_s, summed_s, summed_s))
    return times


# Rounds repeat once all that happens is later by the same, but for what floats lose.
_ALIKE = 1e-12
_Lines = dict[float, float]
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
) -> float:
    """Return the time of a step of stages that are dealt out in turn.

    What a microbatch starts from comes up while the one before it is computed, not earlier, and takes
    ``hop_s``. A backward stage recomputes while it waits for that. A worker has two halves of slots and accumulators,
    so a visit begins no earlier than its weights are up, and the gradients of the visit before the last one down. Of
    what has one half only (``halves``, of slots and of accumulators) nothing moves before the visit before has ended.
    Unless rounds overlap, each microbatch of a round begins when that of the round before has ended.
    """
    if any(stage.seconds < hop_s and stage.source >= 0 for stage in times):
        return _makespan_by_microbatch_s(
            times, num_microbatches, round_size, num_workers, hop_s, halves, overlaps
        )
    free = [0.0] * num_workers
    copied = _Copied(num_workers, halves)
    turn = start = 0
    # Rounds after which the first stage is the first worker's again.
    period = num_workers // gcd(len(times), num_workers)
    before: list[float] = []
    ends: _Lines = {0.0: 0.0}
    while start < num_microbatches:
        if start and turn % (period * len(times)) == 0:
            moments = [*free, *copied.moments, *([] if overlaps else ends.values())]
            more = (num_microbatches - start) // (round_size * period)
            if more and (repeated_s := _same_step(before, moments)) is not None:
                free = [moment + more * repeated_s for moment in free]
                copied.delay(more * repeated_s)
                ends = {slope: value + more * repeated_s for slope, value in ends.items()}
                start += more * period * round_size
                continue
            before = moments
        last = min(round_size, num_microbatches - start) - 1
        ends = {0.0: 0.0} if overlaps else ends
        of_round: list[_Lines] = []
        for index, stage in enumerate(times):
            worker = turn % num_workers
            turn += 1
            inputs = of_round[stage.source] if stage.recompute_s and stage.source >= 0 else None
            free_s = max(free[worker], copied.ready_s(worker, stage, start > 0, free[worker]))
            ends = _ends(stage, ends, inputs, free_s, hop_s if index else 0.0, last)
            of_round.append(ends)
            free[worker] = max([value + slope * last for slope, value in ends.items()])
            copied.begin(worker, stage, max(ends.values()) - stage.seconds, free[worker])
        start += round_size
    return max(free)


def _same_step(before: Sequence[float], after: Sequence[float]) -> float | None:
    """Return by how much all moments are later than they were; None where some are by more than others."""
    steps = [b - a for a, b in zip(before, after, strict=False)] if len(before) == len(after) else []
    return max(steps) if steps and max(steps) - min(steps) <= _ALIKE * max(steps) else None


class _Copied:
    """What each worker moves beside its visits."""

    def __init__(self, num_workers: int, halves: tuple[int, int]) -> None:
        self._slot_halves, self._sum_halves = halves
        self._began_s = [0.0] * num_workers
        self._down_s = [(0.0, 0.0)] * num_workers
        self._given_s = [0.0] * num_workers

    @property
    def moments(self) -> list[float]:
        """When visits began, and gradients were down."""
        return [*self._began_s, *self._given_s]

    def delay(self, seconds: float) -> None:
        """Let everything have been so much later."""
        self._began_s = [moment + seconds for moment in self._began_s]
        self._given_s = [moment + seconds for moment in self._given_s]

    def ready_s(self, worker: int, stage: StageTimes, summed: bool, free_s: float) -> float:
        """Return when slots and accumulators are as a visit of ``stage`` wants them.

        ``free_s`` is when the worker's visit before ended.
        """
        sum_s = stage.sum_s if summed else 0.0
        up_s = stage.up_s + sum_s
        ready_s = self._began_s[worker] + max(up_s, self._down_s[worker][0])
        if self._slot_halves == 1:
            ready_s = max(ready_s, free_s + up_s)
        if self._sum_halves == 1 and stage.down_s:
            ready_s = max(ready_s, self._given_s[worker] + sum_s)
        return ready_s

    def begin(self, worker: int, stage: StageTimes, began_s: float, end_s: float) -> None:
        """A visit of ``stage`` computes from ``began_s`` to ``end_s``."""
        self._began_s[worker] = began_s
        self._down_s[worker] = (self._down_s[worker][1], stage.down_s)
        if stage.down_s:
            self._given_s[worker] = end_s + stage.down_s


def _ends(
    stage: StageTimes, ready: _Lines, inputs: _Lines | None, free_s: float, hop_s: float, last: int
) -> _Lines:
    """Return when a visit ends each of its microbatches ``0 … last``.

    Microbatch m ends at ``max(g(m), end(m - 1) + pace)`` where g is what it waits for, and pace is what a stage or,
    where that is longer, a hop takes. With g convex, the latest and the earliest of them decide:
    ``max(g(m), g(0) + m * pace)``. That is convex again, so all visits are exact in this form, but for a stage that
    is shorter than a hop and waits for the input of its recompute: there hops wait for computes in turn.
    """
    seconds, recompute_s = stage.seconds, stage.recompute_s
    rest_s = seconds - recompute_s
    ends = {slope: value + hop_s + rest_s for slope, value in ready.items()}
    if inputs is not None:
        late_s = seconds - stage.early_s
        for slope, value in inputs.items():
            if value + late_s > ends.get(slope, 0.0):
                ends[slope] = value + late_s
    pace_s = seconds if seconds > hop_s else hop_s
    first = max(*ends.values(), free_s + rest_s + (hop_s if hop_s > recompute_s else recompute_s))
    top = first + pace_s * last
    for slope in [slope for slope, value in ends.items() if value + slope * last <= top]:
        del ends[slope]
    ends[pace_s] = first
    return ends


def _makespan_by_microbatch_s(
    times: Sequence[StageTimes],
    num_microbatches: int,
    round_size: int,
    num_workers: int,
    hop_s: float,
    halves: tuple[int, int],
    overlaps: bool,
) -> float:
    """The same, whatever takes longer than what: one microbatch after the other."""
    free = [0.0] * num_workers
    copied = _Copied(num_workers, halves)
    turn = 0
    ends = [0.0] * round_size
    for start in range(0, num_microbatches, round_size):
        count = min(round_size, num_microbatches - start)
        ends = [0.0] * count if overlaps else ends[:count]
        of_round: list[list[float]] = []
        for index, stage in enumerate(times):
            worker = turn % num_workers
            turn += 1
            ready_s = copied.ready_s(worker, stage, start > 0, free[worker])
            now = before = arrived = max(free[worker], ready_s)
            hop = hop_s if index else 0.0
            inputs = of_round[stage.source] if stage.recompute_s and stage.source >= 0 else None
            rest_s = stage.seconds - stage.recompute_s
            ready, ends = ends, []
            for microbatch, made in enumerate(ready):
                arrived, before = max(made, before, arrived) + hop, now
                if inputs is not None and inputs[microbatch] - stage.early_s > now:
                    now = inputs[microbatch] - stage.early_s
                now += stage.recompute_s
                now = (now if now > arrived else arrived) + rest_s
                ends.append(now)
            of_round.append(ends)
            free[worker] = now
            copied.begin(worker, stage, ends[0] - stage.seconds, now)
    return max(free)


def bubble(
    times: Sequence[StageTimes], num_microbatches: int, round_size: int, num_workers: int, hop_s: float = 0.0
) -> float:
    """Return the share, 0 to 1, of the workers' time in which they compute nothing."""
    total = makespan_s(times, num_microbatches, round_size, num_workers, hop_s)
    busy = sum(stage.seconds for stage in times) * num_microbatches
    return 1.0 - busy / (num_workers * total) if total > 0 else 0.0
