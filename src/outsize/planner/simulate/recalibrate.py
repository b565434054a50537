"""What a run's own trace says of the machine: how long each op took, and the rates of its lanes."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outsize.planner.program.ops import COMPUTE_KINDS, Kind, Op
from outsize.planner.simulate.discrete import Cost
from outsize.planner.simulate.simulator import CostModel
from outsize.planner.simulate.timeline import Timeline

# A rate from less than this many seconds of work says more about the clock than about the lane.
LEAST_S = 1e-4
_Key = tuple[Kind, int | None]


@dataclass(slots=True)
class _Sum:
    seconds: float = 0.0
    amount: float = 0.0
    count: int = 0

    def add(self, seconds: float, amount: float) -> None:
        self.seconds, self.amount, self.count = self.seconds + seconds, self.amount + amount, self.count + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The ops of some steps, added up.

    Attributes:
        by_op: by kind and unit, over microbatches, workers and steps; pieces of a unit count under its kind alone.
        rates: what each resource of a cost model carried per second while an op used it; those that nothing went
            through, or hardly, are left out.
        compute_share: what computing took, over what was predicted; 1 where nothing was.
    """

    by_op: Mapping[_Key, _Sum] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    compute_share: float = 1.0

    def costs(self, predicted: CostModel) -> CostModel:
        """Return costs with which each op takes as long as it took; ``predicted`` ones for ops that never ran."""
        return CostModel(cost_of=_measured(self.by_op, predicted.cost_of), capacity=predicted.capacity)


def read_trace(timeline: Timeline, costs: CostModel) -> Trace:
    """Add up the events of ``timeline``.

    Args:
        timeline: of steps that ran.
        costs: predicted, of the very ops that ran: how much each moves, and through what.
    """
    by_op: defaultdict[_Key, _Sum] = defaultdict(_Sum)
    resources: defaultdict[str, _Sum] = defaultdict(_Sum)
    took_s = expected_s = 0.0
    for event in timeline.events:
        op = event.op
        assert isinstance(op, Op), "the lanes of a run run its programs"
        seconds, cost = event.end_s - event.start_s, costs.cost_of(op)
        by_op[_key(op)].add(seconds, cost.amount)
        if cost.amount:
            behind_s = 0.0 if cost.then is None else cost.then.alone_s(costs.capacity)
            resources[_bottleneck(cost)].add(max(0.0, seconds - cost.seconds - behind_s), cost.amount)
        if op.kind in COMPUTE_KINDS:
            took_s, expected_s = took_s + seconds, expected_s + cost.seconds
    rates = {name: part.amount / part.seconds for name, part in resources.items() if part.seconds > LEAST_S}
    share = took_s / expected_s if took_s > 0 and expected_s > 0 else 1.0
    return Trace(by_op=dict(by_op), rates=rates, compute_share=share)


def _key(op: Op) -> _Key:
    return op.kind, None if op.tile is not None else op.unit


def _bottleneck(cost: Cost) -> str:
    """Return the resource that a lane waits for: the disk where bytes go on to it, else the first of its path."""
    return next((name for name in cost.through if name.startswith("disk")), cost.through[0])


def _measured(by_op: Mapping[_Key, _Sum], predicted: Callable[[Op], Cost]) -> Callable[[Op], Cost]:
    def cost_of(op: Op) -> Cost:
        timings, cost = by_op.get(_key(op)), predicted(op)
        if timings is None or not timings.count:
            return cost
        if op.tile is None or not timings.amount:
            return Cost(seconds=timings.seconds / timings.count)
        return Cost(
            seconds=timings.seconds / timings.amount * cost.amount
        )  # larger tiles than those that ran

    return cost_of
