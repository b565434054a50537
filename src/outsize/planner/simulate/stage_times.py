"""What stages take for one microbatch: said once, for the clock of stages and for what rules cuts out before it."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from outsize.planner.program.stages import Span, Stages


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
