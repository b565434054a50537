"""A discrete-event clock for work on lanes: what starts when, who waited for whom, and the critical path.

A piece of work has a fixed time and then an amount that flows at a rate shared with others. A lane does one
thing at a time, in the order given, as the executor's threads do. Time is virtual and ties go to the work
given first, so the same input gives the same timeline, always.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from outsize.planner.fairness import fair_rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a piece of work takes.

    Attributes:
        seconds: fixed time, before anything flows.
        amount: what flows then, e.g. bytes.
        through: the resources that it flows through; needed where there is an amount.
    """

    seconds: float = 0.0
    amount: float = 0.0
    through: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.seconds < 0 or self.amount < 0:
            raise ValueError("time and amount are not negative")
        if self.amount and not self.through:
            raise ValueError("what flows needs something to flow through")


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work.

    Attributes:
        lane: what does it; work without a lane takes no turn, it only waits.
        cost: what it takes.
        after: indices of earlier work that must be done.
    """

    lane: str
    cost: Cost
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """When each piece of work ran.

    Attributes:
        start_s: start of each.
        end_s: end of each.
        cause: the work whose end let it start; -1 for what started at once.
        lane_free_s: when its lane was free for it.
    """

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    cause: tuple[int, ...]
    lane_free_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """End of the last work."""
        return max(self.end_s, default=0.0)

    def critical_path(self) -> tuple[int, ...]:
        """Return the chain of work, first to last, whose durations add up to the makespan."""
        if not self.end_s:
            return ()
        index = max(range(len(self.end_s)), key=lambda i: (self.end_s[i], -i))
        path = [index]
        while self.cause[path[-1]] >= 0:
            path.append(self.cause[path[-1]])
        return tuple(reversed(path))


@dataclass(slots=True)
class _Flow:
    index: int
    left: float
    through: tuple[str, ...]
    rate: float = 0.0
    since_s: float = 0.0
    done_s: float = inf


class _Clock:
    """The state of a run; `run_work` drives it."""

    def __init__(self, work: Sequence[Work], capacity: Mapping[str, float]) -> None:
        self.work, self.capacity = work, capacity
        count = len(work)
        self.start, self.end = [-1.0] * count, [-1.0] * count
        self.cause, self.lane_free = [-1] * count, [0.0] * count
        self.pending = [len(set(item.after)) for item in work]
        self.dependents: list[list[int]] = [[] for _ in work]
        self.turn: defaultdict[str, deque[int]] = defaultdict(deque)
        for index, item in enumerate(work):
            for earlier in set(item.after):
                if not 0 <= earlier < index:
                    raise ValueError(f"work {index} waits for {earlier}, which does not come before it")
                self.dependents[earlier].append(index)
            if item.lane:
                self.turn[item.lane].append(index)
        self.fixed: list[tuple[float, int]] = []
        self.flows: list[_Flow] = []
        self.rates: dict[tuple[tuple[str, ...], ...], dict[tuple[str, ...], float]] = {}
        self.now = 0.0
        self.busy: set[str] = set()

    def begin_all(self) -> None:
        for index, item in enumerate(self.work):
            if self._may_start(index, item.lane):
                self._begin(index, -1)

    def advance(self) -> bool:
        """Go to the next end of something; False when all is done."""
        fixed_s = self.fixed[0][0] if self.fixed else inf
        flow_s = min([flow.done_s for flow in self.flows], default=inf)
        self.now = min(fixed_s, flow_s)
        if self.now == inf:
            return False
        finished = []
        while self.fixed and self.fixed[0][0] <= self.now:
            finished.append(heappop(self.fixed)[1])
        ended = [flow for flow in self.flows if flow.done_s <= self.now]
        started = [i for i in finished if self.work[i].cost.amount]
        if ended or started:
            self.flows = [flow for flow in self.flows if flow.done_s > self.now]
            for index in started:
                cost = self.work[index].cost
                self.flows.append(_Flow(index, cost.amount, cost.through, since_s=self.now))
            self._share()
        done = [i for i in finished if not self.work[i].cost.amount] + [flow.index for flow in ended]
        for index in sorted(done):
            self._finish(index)
        return True

    def _share(self) -> None:
        """Give every flow its fair rate from now on."""
        paths = tuple(sorted([flow.through for flow in self.flows]))
        if paths not in self.rates:  # the same flows meet again and again
            self.rates[paths] = dict(zip(paths, fair_rates(paths, self.capacity), strict=True))
        rates = self.rates[paths]
        for flow in self.flows:
            if (rate := rates[flow.through]) != flow.rate:
                flow.left -= flow.rate * (self.now - flow.since_s)
                flow.since_s, flow.rate = self.now, rate
                flow.done_s = self.now + max(flow.left, 0.0) / rate

    def _may_start(self, index: int, lane: str) -> bool:
        if self.pending[index] or self.start[index] >= 0:
            return False
        return not lane or (lane not in self.busy and self.turn[lane][0] == index)

    def _begin(self, index: int, cause: int) -> None:
        item = self.work[index]
        self.start[index], self.cause[index] = self.now, cause
        if item.lane:
            self.busy.add(item.lane)
        heappush(self.fixed, (self.now + item.cost.seconds, index))

    def _finish(self, index: int) -> None:
        self.end[index] = self.now
        lane = self.work[index].lane
        for dependent in self.dependents[index]:
            self.pending[dependent] -= 1
        if lane:
            self.busy.discard(lane)
            self.turn[lane].popleft()
            if self.turn[lane]:
                following = self.turn[lane][0]
                self.lane_free[following] = self.now
                if self._may_start(following, lane):
                    self._begin(following, index)
        for dependent in self.dependents[index]:
            if self._may_start(dependent, self.work[dependent].lane):
                self._begin(dependent, index)


def run_work(work: Sequence[Work], capacity: Mapping[str, float]) -> Run:
    """Return when each piece of ``work`` runs.

    Args:
        work: in an order in which it could be done by one lane.
        capacity: what the resources carry per second.

    Raises:
        ValueError: work that waits for later work.
        KeyError: a resource without a capacity.
    """
    clock = _Clock(work, capacity)
    clock.begin_all()
    while clock.advance():
        pass
    assert not any(end < 0 for end in clock.end), "lanes in order and waits for earlier work cannot deadlock"
    return Run(tuple(clock.start), tuple(clock.end), tuple(clock.cause), tuple(clock.lane_free))
