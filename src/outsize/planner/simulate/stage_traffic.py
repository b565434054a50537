"""What a step of stages moves over the links of all workers, from the numbers of its stages alone.

All of it goes through host memory, which the optimizer and a disk use too, and what workers behind one switch move
through its uplink. What is shared is in use for a time of its own, and the more of a step that is, the more copies wait
for each other that would be hidden otherwise (`with_shared`).
`memory.traffic.count_traffic` counts the same of a program, op by op.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, inf

from outsize.planner.simulate.pipeline import sums


def with_shared(alone_s: float, shared_s: float) -> float:
    """Return about what a step takes that would take ``alone_s`` if nothing were shared, and ``shared_s`` of what is.

    No less than either, and little more than the longer one where the other is short. Simulated steps of 8B and 14B on
    two to eight GPUs, whose host memory was in use for a sixth to nine tenths of a step, took 0.78 to 1.10 times that.
    """
    return hypot(alone_s, shared_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRates:
    """What all workers share, by its bytes per second.

    Attributes:
        host: reads and writes of host memory together.
        uplinks: each direction of a switch, with the share of the workers that are behind it.
    """

    host: float = inf
    uplinks: tuple[tuple[float, float], ...] = ()


class StageTraffic:
    """Counts bytes of stages that run backward down to unit ``bottom``.

    Args:
        weights: of each streamed unit, as they come up.
        gradients: of each, in a round.
        away: of what its forward keeps and lets leave, for a microbatch.
        boundary_bytes: of what stages hand over, and of an input that a backward needs, for a microbatch.
        bottom: lowest unit that runs backward.
        by_host: whether what stages hand over goes by way of host memory.
        others: bytes of host memory that a step takes whatever its stages.
        rates: of what is shared.
        passes: how often a byte of weights and gradients passes host memory: twice where a disk is behind it.
    """

    def __init__(
        self,
        *,
        weights: Sequence[float],
        gradients: Sequence[float],
        away: Sequence[float] = (),
        boundary_bytes: float = 0.0,
        bottom: int = 0,
        by_host: bool = True,
        others: float = 0.0,
        rates: SharedRates,
        passes: int = 1,
    ) -> None:
        self._weights, self._away = sums(weights), sums(away or (0.0,) * len(weights))
        self._backward_weights, self._gradients = sum(weights[bottom:]), sum(gradients[bottom:])
        self._boundary_bytes, self._bottom, self._by_host = boundary_bytes, max(1, bottom), by_host
        self._others, self._rates, self._passes = others, rates, passes

    def up_and_down(
        self, num_ups: int, fused: int, num_downs: int, num_microbatches: int, round_size: int
    ) -> tuple[float, float, float]:
        """Return the bytes of weights and gradients, those of all that goes up, and of all that goes down.

        Args:
            num_ups: forward stages.
            fused: lowest unit of the stage that turns around.
            num_downs: backward stages, that one included.
            num_microbatches: of a step.
            round_size: of them, in a round.
        """
        rounds = -(-num_microbatches // round_size)
        weights = rounds * (self._weights[fused] + self._backward_weights)
        summed, gradients = (rounds - 1) * self._gradients, rounds * self._gradients
        # Inputs that a backward needs; some are what a stage hands over anyhow.
        up = down = inputs = max(0, fused - self._bottom)
        if self._by_host:
            up += num_ups + num_downs - 1
            down += num_ups - min(inputs, max(0, num_ups - 1)) + num_downs - 1
        away = num_microbatches * self._away[fused]
        each = num_microbatches * self._boundary_bytes
        return (
            weights + summed + gradients,
            weights + summed + away + up * each,
            gradients + away + down * each,
        )

    def least_s(
        self, num_ups: int, fused: int, num_downs: int, num_microbatches: int, round_size: int
    ) -> float:
        """Return the seconds that what is shared takes for a step, see `up_and_down`."""
        state, up, down = self.up_and_down(num_ups, fused, num_downs, num_microbatches, round_size)
        host_s = (up + down + (self._passes - 1) * state + self._others) / self._rates.host
        return max([host_s, *(share * max(up, down) / rate for rate, share in self._rates.uplinks)])
