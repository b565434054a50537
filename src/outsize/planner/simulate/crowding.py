"""Lanes that share cores with compute: what they compute is taken from it where no core is left for them.

On a CPU every lane is a thread. Units and lanes are timed one at a time, each with the cores to itself; in a step
copies, optimizer, sums over ranks and the sending of bytes run beside compute. With a core to spare for them they cost
nothing. Where compute keeps all cores busy, as with several ranks on one machine, a second of theirs costs compute a
second of one core. They are taken to use one core at a time, and compute to share the loss evenly among its threads.
"""

from collections.abc import Iterable
from dataclasses import replace

from outsize.planner.program.program import COMPUTE_KINDS, Op
from outsize.planner.simulate.costs import EXCHANGE_S, UnitTimes
from outsize.planner.simulate.simulator import CostModel


def crowded(
    times: UnitTimes,
    ops: Iterable[Op],
    costs: CostModel,
    *,
    cores: float,
    threads: int,
    core_s_per_byte: float,
) -> UnitTimes:
    """Return what units take where the lanes of a step compute beside them.

    Args:
        times: of units that have the cores to themselves.
        ops: of a step.
        costs: of these ops, one at a time.
        cores: that this process has, its part of those that it shares.
        threads: that compute keeps busy.
        core_s_per_byte: of a core, to send a byte to another rank and to receive and add one meanwhile.
    """
    free = min(1.0, max(0.0, cores - threads))
    compute_s = lanes_s = 0.0
    for op in ops:
        cost = costs.cost_of(op)
        if op.kind in COMPUTE_KINDS:
            compute_s += cost.seconds
        elif op.row.is_net:  # codecs and messages, but no waits
            lanes_s += max(0.0, cost.seconds - EXCHANGE_S) + cost.amount * core_s_per_byte
        elif op.row.price not in ("disk", "commit"):
            lanes_s += cost.alone_s(costs.capacity)
    if not compute_s:
        return times
    return scaled(times, 1.0 + (1.0 - free) * lanes_s / (threads * compute_s))


def scaled(times: UnitTimes, factor: float) -> UnitTimes:
    """Return ``times`` of compute that is so many times as slow."""

    def each(seconds: Iterable[float]) -> tuple[float, ...]:
        return tuple(s * factor for s in seconds)

    return replace(
        times,
        forward_s=each(times.forward_s),
        backward_s=each(times.backward_s),
        recompute_s=each(times.recompute_s),
        spared_s={extent: each(seconds) for extent, seconds in times.spared_s.items()},
        kept_forward_s=each(times.kept_forward_s),
        kept_backward_s=each(times.kept_backward_s),
    )
