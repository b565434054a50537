"""Simulate a program event by event, with fair shares of links.

A discrete-event clock for work on lanes: what starts when, who waited for whom, and the critical path.

A piece of work has a fixed time and then an amount that flows at a rate shared with others, and perhaps the same again
through other resources. A lane does one thing at a time, in the order given, as the executor's threads do. Time is
virtual and ties go to the work given first, so the same input gives the same timeline, always.

How flows share bandwidths: max-min fair, by progressive filling.

All flows grow alike until a resource that some of them use is full; those keep their rate, the others grow on.
No flow can then be given more without taking from one that has no more than it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf


def fair_rates(flows: Sequence[tuple[str, ...]], capacity: Mapping[str, float]) -> list[float]:
    """Return the rate of each flow.

    Args:
        flows: the resources that each flow goes through; at least one, none twice.
        capacity: what each resource can carry, in the unit of the rates.
    """
    users: dict[str, list[int]] = {}
    for index, resources in enumerate(flows):
        for name in resources:
            users.setdefault(name, []).append(index)
    # What nobody else uses bounds a flow; often that leaves room in all that is shared.
    rates = [
        min([capacity[name] for name in resources if len(users[name]) == 1], default=inf)
        for resources in flows
    ]
    if all(
        len(indices) == 1 or sum([rates[index] for index in indices]) <= capacity[name]
        for name, indices in users.items()
    ):
        return rates
    left = {name: capacity[name] for name in users}
    open_users = {name: len(indices) for name, indices in users.items()}
    growing = set(range(len(flows)))
    while growing:
        share, full = min((left[name] / open_users[name], name) for name in users if open_users[name])
        for index in users[full]:
            if index in growing:
                growing.discard(index)
                rates[index] = share
                for name in flows[index]:
                    left[name] = max(0.0, left[name] - share)
                    open_users[name] -= 1
    return rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a piece of work takes.

    Attributes:
        seconds: fixed time, before anything flows.
        amount: what flows then, e.g. bytes.
        through: the resources that it flows through; needed where there is an amount.
        then: what the work takes behind that; None for nothing.
    """

    seconds: float = 0.0
    amount: float = 0.0
    through: tuple[str, ...] = ()
    then: "Cost | None" = None

    def __post_init__(self) -> None:
        if self.seconds < 0 or self.amount < 0:
            raise ValueError("time and amount are not negative")
        if self.amount and not self.through:
            raise ValueError("what flows needs something to flow through")

    @property
    def parts(self) -> Iterator["Cost"]:
        """Yield this cost and its successors in order."""
        part: Cost | None = self
        while part is not None:
            yield part
            part = part.then

    def alone_s(self, capacity: Mapping[str, float]) -> float:
        """Return the seconds of work that has everything to itself, all parts of it."""
        flows = (
            part.amount / min(capacity[name] for name in part.through) for part in self.parts if part.amount
        )
        return sum(part.seconds for part in self.parts) + sum(flows)


@dataclass(frozen=True, slots=True)
class LaneRun:
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


@dataclass(slots=True)
class _Flow:
    index: int
    left: float
    path: int
    rate: float = 0.0
    since_s: float = 0.0
    done_s: float = inf


# More flows than this many bits can count never take one path: each is of a lane of its own.
_BITS = 16


class _Rates:
    """Fair rates of flows, by the numbers of their paths: the same flows meet again and again.

    Resources of one path alone only bound its flow, so that meetings of flows with the same bounds are alike, whichever
    worker's they are.
    """

    def __init__(self, paths: Iterable[tuple[str, ...]], capacity: Mapping[str, float]) -> None:
        self._capacity = dict(capacity)
        self._paths = {path: number for number, path in enumerate(sorted(set(paths)))}
        self._names = list(self._paths)
        users = Counter(name for path in self._names for name in path)
        self._alike = [
            (
                min([capacity[name] for name in path if users[name] == 1], default=inf),
                tuple([name for name in path if users[name] > 1]),
            )
            for path in self._names
        ]
        self._known: dict[int, tuple[dict[int, float], bool]] = {}
        self._solved: dict[tuple[tuple[float, tuple[str, ...]], ...], list[float]] = {}

    def number(self, path: tuple[str, ...]) -> int:
        return self._paths[path]

    def of(self, meeting: int, flows: list[_Flow]) -> tuple[dict[int, float], bool]:
        """Return the rate of each path, and whether that is as fast as it gets, whoever else flows.

        ``meeting`` has a digit of so many flows for each path.
        """
        solution = self._known.get(meeting)
        if solution is None:
            paths = sorted([flow.path for flow in flows], key=self._alike.__getitem__)
            rates = dict(zip(paths, self._fair(paths), strict=True))
            free = all(
                rate >= min([self._capacity[name] for name in self._names[path]])
                for path, rate in rates.items()
            )
            solution = self._known[meeting] = rates, free
        return solution

    def _fair(self, paths: list[int]) -> list[float]:
        if len(set(paths)) < len(paths):  # of several lanes, which share all of it
            return fair_rates([self._names[path] for path in paths], self._capacity)
        key = tuple([self._alike[path] for path in paths])
        rates = self._solved.get(key)
        if rates is None:
            rates = self._solved[key] = fair_rates([self._names[path] for path in paths], self._capacity)
        return rates


class Order:
    """Dependency order of work items; built once, then simulated with different costs.

    Args:
        lanes: what does each piece of work; work without one takes no turn, it only waits.
        after: indices of earlier work that each waits for.

    Raises:
        ValueError: work that waits for later work.
    """

    def __init__(self, lanes: Sequence[str], after: Sequence[Sequence[int]]) -> None:
        count = len(lanes)
        self.lanes, self.after = lanes, after
        self.num_waits = [0] * count
        self.dependents: list[list[int]] = [[] for _ in lanes]
        self.following = [-1] * count  # the work that its lane does next
        self.is_due = [False] * count  # whether its lane has done all before it, or it takes no turn
        last: dict[str, int] = {}
        for index, (lane, waits) in enumerate(zip(lanes, after, strict=True)):
            unique = set(waits) if len(waits) > 1 else waits
            self.num_waits[index] = len(unique)
            for earlier in unique:
                if not 0 <= earlier < index:
                    raise ValueError(f"work {index} waits for {earlier}, which does not come before it")
                self.dependents[earlier].append(index)
            if lane in last:
                self.following[last[lane]] = index
            else:
                self.is_due[index] = True
            if lane:
                last[lane] = index


class _Clock:
    """The state of a run, from its first start to its last end."""

    def __init__(self, order: Order, costs: Sequence[Cost], capacity: Mapping[str, float]) -> None:
        count = len(costs)
        self.costs = list(costs)  # of each piece the part that it is at
        self.start, self.end = [-1.0] * count, [-1.0] * count
        self.cause, self.lane_free = [-1] * count, [0.0] * count
        self.pending, self.is_due = order.num_waits.copy(), order.is_due.copy()
        self.dependents, self.following = order.dependents, order.following
        self.fixed: list[tuple[float, int]] = []
        self.flows: list[_Flow] = []
        self.flow_s = inf  # when the first of them is done
        self.meeting = 0  # their paths, see `_Rates.of`
        self.rates = _Rates(
            [
                part.through
                for cost in costs
                for part in (cost.parts if cost.then else (cost,))
                if part.amount
            ],
            capacity,
        )
        self.free = True  # whether flows do not slow each other down

    def run(self) -> None:
        """Do all work."""
        fixed, costs = self.fixed, self.costs
        for index, waits in enumerate(self.pending):
            if not waits and self.is_due[index]:
                self.start[index] = 0.0
                heappush(fixed, (costs[index].seconds, index))
        while fixed or self.flows:
            now = fixed[0][0] if fixed and fixed[0][0] < self.flow_s else self.flow_s
            done: list[int] = []
            started: list[int] = []
            while fixed and fixed[0][0] <= now:
                index = heappop(fixed)[1]
                (started if costs[index].amount > 0 else done).append(index)
            if started or self.flow_s <= now:
                self._change_flows(now, started, done)
            if len(done) > 1:
                done.sort()
            for index in done:
                following = costs[index].then
                if following is None:
                    self._finish(index, now)
                else:
                    costs[index] = following
                    heappush(fixed, (now + following.seconds, index))

    def _change_flows(self, now: float, started: list[int], done: list[int]) -> None:
        """Let flows that ``started`` flow, add to ``done`` those that have ended, and share what there is anew."""
        if self.flow_s <= now:
            ended = [flow for flow in self.flows if flow.done_s <= now]
            done += [flow.index for flow in ended]
            self.meeting -= sum([1 << _BITS * flow.path for flow in ended])
            self.flows = [flow for flow in self.flows if flow.done_s > now]
        before = len(self.flows)
        for index in started:
            cost = self.costs[index]
            path = self.rates.number(cost.through)
            self.meeting += 1 << _BITS * path
            self.flows.append(_Flow(index, cost.amount, path, since_s=now))
        was_free = self.free
        rates, self.free = self.rates.of(self.meeting, self.flows)
        for flow in self.flows[before:] if was_free and self.free else self.flows:
            rate = rates[flow.path]
            if rate != flow.rate:
                flow.left -= flow.rate * (now - flow.since_s)
                flow.since_s, flow.rate = now, rate
                flow.done_s = now + max(flow.left, 0.0) / rate
        self.flow_s = min([flow.done_s for flow in self.flows], default=inf)

    def _finish(self, index: int, now: float) -> None:
        """End a piece of work, and begin what has waited for it and for nothing else, its lane's next work first."""
        self.end[index] = now
        pending, is_due, following = self.pending, self.is_due, self.following[index]
        dependents = self.dependents[index]
        for dependent in dependents:
            pending[dependent] -= 1
        if following >= 0:
            is_due[following] = True
            self.lane_free[following] = now
            if not pending[following]:
                self.start[following], self.cause[following] = now, index
                heappush(self.fixed, (now + self.costs[following].seconds, following))
        for dependent in dependents:
            if not pending[dependent] and is_due[dependent] and self.start[dependent] < 0:
                self.start[dependent], self.cause[dependent] = now, index
                heappush(self.fixed, (now + self.costs[dependent].seconds, dependent))


def run_order(order: Order, costs: Sequence[Cost], capacity: Mapping[str, float]) -> LaneRun:
    """Return when each piece of work runs.

    Args:
        order: in which it could be done by one lane.
        costs: what each piece takes.
        capacity: what the resources carry per second.

    Raises:
        KeyError: a resource without a capacity.
    """
    clock = _Clock(order, costs, capacity)
    clock.run()
    assert not any(end < 0 for end in clock.end), "lanes in order and waits for earlier work cannot deadlock"
    return LaneRun(tuple(clock.start), tuple(clock.end), tuple(clock.cause), tuple(clock.lane_free))
