"""How long a step of stages takes when only compute and hand-over count: a fast twin of `simulate`.

A step ends with the backward of unit 0, for which everything else has been done, and the next one begins with
the forward of unit 0, which needs it stepped. So all workers are idle in between, and one step tells the time
of each. `simulate` gives the same time for the program of these stages on a machine whose copies cost nothing
but the hop between stages.
"""

from collections.abc import Sequence

from outsize.planner.stages import Stages


def stage_seconds(stages: Stages, forward_s: Sequence[float], backward_s: Sequence[float]) -> list[float]:
    """Return the time that each stage takes for one microbatch.

    Args:
        stages: how the units are cut.
        forward_s: by unit.
        backward_s: by unit, recompute included; of the last unit, its forward included.
    """
    last = len(forward_s) - 1
    fused = stages.backward[0]
    times = [sum(forward_s[slice(*span)]) for span in stages.forward]
    both = sum(forward_s[u] for u in range(*fused) if u != last)
    return [
        *times,
        both + sum(backward_s[slice(*fused)]),
        *(sum(backward_s[slice(*s)]) for s in stages.backward[1:]),
    ]


def makespan_s(
    seconds: Sequence[float], num_microbatches: int, round_size: int, num_workers: int, hop_s: float = 0.0
) -> float:
    """Return the time of a step whose stages take ``seconds`` per microbatch, dealt out in turn.

    A microbatch's input comes up while the one before it is computed, not earlier, and takes ``hop_s``.
    """
    free = [0.0] * num_workers
    turn = 0
    for start in range(0, num_microbatches, round_size):
        ends = [0.0] * min(round_size, num_microbatches - start)
        for index, duration in enumerate(seconds):
            worker = turn % num_workers
            turn += 1
            now = before = arrived = free[worker]
            hop = hop_s if index else 0.0
            ready, ends = ends, []
            for made in ready:
                arrived = max(made, before, arrived) + hop
                before = now
                now = (now if now > arrived else arrived) + duration
                ends.append(now)
            free[worker] = now
    return max(free)


def bubble(
    seconds: Sequence[float], num_microbatches: int, round_size: int, num_workers: int, hop_s: float = 0.0
) -> float:
    """Return the share, 0 to 1, of the workers' time in which they compute nothing."""
    total = makespan_s(seconds, num_microbatches, round_size, num_workers, hop_s)
    return 1.0 - sum(seconds) * num_microbatches / (num_workers * total) if total > 0 else 0.0
