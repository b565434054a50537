"""How long a step of stages takes when only compute and hand-over count: a fast twin of `simulate`.

A step ends with the backward of unit 0, for which everything else has been done, and the next one begins with
the forward of unit 0, which needs it stepped. So all workers are idle in between, and one step tells the time
of each. `simulate` gives the same time for the program of these stages on a machine whose copies cost nothing
but the hop between stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outsize.planner.stages import Stages


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What a stage takes for one microbatch.

    Attributes:
        seconds: all of it.
        recompute_s: the part of it that needs no gradient; 0 for forward stages and the fused one.
        source: stage that makes the last input that the recompute needs; -1 for none.
        early_s: how long before that stage's end it is made.
    """

    seconds: float
    recompute_s: float = 0.0
    source: int = -1
    early_s: float = 0.0


def stage_times(stages: Stages, forward_s: Sequence[float], backward_s: Sequence[float]) -> list[StageTimes]:
    """Return the times of the stages of a round, in order.

    Args:
        stages: how the units are cut.
        forward_s: by unit.
        backward_s: by unit, recompute included; of the last unit, its forward included.
    """
    last = len(forward_s) - 1
    fused = stages.backward[0]
    times = [StageTimes(sum(forward_s[slice(*span)])) for span in stages.forward]
    both = sum(forward_s[u] for u in range(*fused) if u != last)
    times.append(StageTimes(both + sum(backward_s[slice(*fused)])))
    for first, end in stages.backward[1:]:
        seconds, recompute_s = sum(backward_s[first:end]), sum(forward_s[first:end])
        times.append(StageTimes(seconds, recompute_s, *_input_of(end - 1, stages, forward_s)))
    return times


def _input_of(unit: int, stages: Stages, forward_s: Sequence[float]) -> tuple[int, float]:
    """Return which forward stage puts the input of ``unit`` below, and how long before its end."""
    if unit == 0:
        return -1, 0.0
    for index, (first, end) in enumerate(stages.forward):
        if unit == end:
            return index, 0.0
        if first < unit < end:
            return index, sum(forward_s[unit + 1 : end])
    return -1, 0.0


def makespan_s(
    times: Sequence[StageTimes], num_microbatches: int, round_size: int, num_workers: int, hop_s: float = 0.0
) -> float:
    """Return the time of a step of stages that are dealt out in turn.

    What a microbatch starts from comes up while the one before it is computed, not earlier, and takes
    ``hop_s``. A backward stage recomputes while it waits for that.
    """
    free = [0.0] * num_workers
    turn = 0
    for start in range(0, num_microbatches, round_size):
        ends = [0.0] * min(round_size, num_microbatches - start)
        of_round: list[list[float]] = []
        for index, stage in enumerate(times):
            worker = turn % num_workers
            turn += 1
            now = before = arrived = free[worker]
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
    return max(free)


def bubble(
    times: Sequence[StageTimes], num_microbatches: int, round_size: int, num_workers: int, hop_s: float = 0.0
) -> float:
    """Return the share, 0 to 1, of the workers' time in which they compute nothing."""
    total = makespan_s(times, num_microbatches, round_size, num_workers, hop_s)
    busy = sum(stage.seconds for stage in times) * num_microbatches
    return 1.0 - busy / (num_workers * total) if total > 0 else 0.0
