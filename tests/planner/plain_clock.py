"""The clock of `outsize.planner.simulate.discrete` without what makes it fast: every moment looks at all work."""

from dataclasses import replace
from math import inf
from typing import NamedTuple

from outsize.planner.simulate.discrete import Cost, fair_rates


class Work(NamedTuple):
    """A piece of work.

    Attributes:
        lane: what does it; work without a lane takes no turn, it only waits.
        cost: what it takes.
        after: indices of earlier work that must be done.
    """

    lane: str
    cost: Cost
    after: tuple[int, ...] = ()


def run_plainly(work, capacity):
    """Return (start, end) of each piece of work; what comes behind a part is a piece of the same lane."""
    pieces, last = [], []
    for number, item in enumerate(work):
        waits = tuple(last[i] for i in item.after)
        for part in item.cost.parts:
            pieces.append(Work(item.lane or f"part of {number}", replace(part, then=None), waits))
            waits = (len(pieces) - 1,)
        last.append(len(pieces) - 1)
    start_s, end_s = _run_pieces(pieces, capacity)
    first = [0, *(index + 1 for index in last[:-1])]
    return [start_s[index] for index in first[: len(work)]], [end_s[index] for index in last]


def _run_pieces(work, capacity):
    count, now = len(work), 0.0
    start, end, flowing = [inf] * count, [inf] * count, {}  # work that flows -> what is left of it

    def may_start(index):
        before = [i for i in range(index) if work[i].lane == work[index].lane and work[index].lane]
        return start[index] == inf and all(end[i] <= now for i in (*before, *work[index].after))

    while True:
        waiting = True
        while waiting:  # what takes no time lets others start at the same moment
            waiting = [i for i in range(count) if may_start(i)]
            for index in waiting:  # type: ignore[attr-defined]
                start[index] = now
                if work[index].cost.amount:
                    flowing[index] = work[index].cost.amount
                else:
                    end[index] = now + work[index].cost.seconds
        begun = [i for i in sorted(flowing) if start[i] + work[i].cost.seconds <= now + 1e-12]
        rates = dict(zip(begun, fair_rates([work[i].cost.through for i in begun], capacity), strict=True))
        moments = [now + flowing[i] / rates[i] for i in begun]
        moments += [start[i] + work[i].cost.seconds for i in flowing if i not in rates]
        moments += [moment for moment in end if now < moment < inf]
        following = min(moments, default=inf)
        if following == inf:
            return start, end
        for index in begun:
            flowing[index] -= rates[index] * (following - now)
            if flowing[index] <= 1e-9:
                end[index] = following
                del flowing[index]
        now = following
