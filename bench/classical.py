"""Schedules of the field, for comparison in the simulator: what others would make of the same layers.

A rank runs its actions in order: F and B of a stage for a microbatch. B recomputes the stage first; where stages
are not bound to ranks that is an action of its own, R, which needs no gradient and so may fill a wait. What
crosses ranks takes a hop. Unlike our own programs these move no weights, and all but `round_robin` bind stages to
ranks.

The orders are those of the papers: GPipe (Huang et al. 2019), 1F1B (PipeDream-Flush, Narayanan et al. 2021),
interleaved 1F1B (Megatron-LM, Narayanan et al. 2021), looped breadth-first (Lamy-Poirier 2023), and round-robin
dispatch (RoundPipe, 2026).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from outsize.planner.simulate.discrete import Cost, Order, run_order
from outsize.planner.simulate.simulator import Event, Timeline

Action = tuple[str, int, int]  # "F" or "B" (with its R), stage, microbatch
_Key = tuple[str, int, int]


class _Work(NamedTuple):
    """What a lane does, or a wait without one, and the indices of what comes before."""

    lane: str
    cost: Cost
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """What is cut into stages: equal layers and a head.

    Attributes:
        num_layers: equal layers.
        forward_s: forward of a layer for one microbatch.
        backward_s: its backward, without recompute.
        head_forward_s: forward of the head and the loss, never recomputed.
        head_backward_s: their backward.
        hop_s: hand-over between ranks.
    """

    num_layers: int
    forward_s: float
    backward_s: float
    head_forward_s: float
    head_backward_s: float
    hop_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Who runs what in which order.

    Attributes:
        ranks: the actions of each rank.
        forward_layers: layers of each stage that runs forward.
        backward_layers: layers of each stage that runs backward, in the numbering of ``B`` actions.
        mirrored: whether stage s runs both ways (then ``B`` of s follows ``B`` of s+1), or backward stages are
            numbered on their own in the order in which they run.
    """

    ranks: tuple[tuple[Action, ...], ...]
    forward_layers: tuple[int, ...]
    backward_layers: tuple[int, ...]
    mirrored: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Where the ranks' time went, as shares of ranks times makespan.

    Attributes:
        bubble: all of it that is not compute.
        fill: before a rank's first action; one that starts with R could as well have waited with it.
        drain: after its last.
    """

    bubble: float
    fill: float
    drain: float

    @property
    def inner(self) -> float:
        """What is left where the neighbours of an iteration fill its fill and drain, as without a barrier."""
        return self.bubble - self.fill - self.drain


def gpipe(num_microbatches: int, layers_of: Sequence[int]) -> Schedule:
    """Return GPipe: all forwards, then all backwards; one stage per rank."""
    both = [[(kind, s, m) for kind in "FB" for m in range(num_microbatches)] for s in range(len(layers_of))]
    return _bound(both, layers_of)


def one_f_one_b(num_microbatches: int, layers_of: Sequence[int]) -> Schedule:
    """Return 1F1B: a rank alternates as soon as its first gradient may come; one stage per rank."""
    ranks = []
    for stage in range(len(layers_of)):
        ahead = min(num_microbatches, len(layers_of) - stage)
        forwards = [("F", stage, m) for m in range(num_microbatches)]
        backwards = [("B", stage, m) for m in range(num_microbatches)]
        ranks.append(_alternate(forwards, backwards, ahead))
    return _bound(ranks, layers_of)


def interleaved(num_ranks: int, num_microbatches: int, layers_of: Sequence[int]) -> Schedule:
    """Return interleaved 1F1B: several stages per rank, groups of as many microbatches as there are ranks."""
    local = len(layers_of) // num_ranks
    group = num_microbatches // max(1, num_microbatches // num_ranks)
    ranks = []
    for rank in range(num_ranks):
        turns = [
            (i // group % local, i // (group * local) * group + i % group)
            for i in range(num_microbatches * local)
        ]
        forwards = [("F", c * num_ranks + rank, m) for c, m in turns]
        backwards = [("B", (local - 1 - c) * num_ranks + rank, m) for c, m in turns]
        ahead = min(len(forwards), (local - 1) * group + 2 * (num_ranks - 1 - rank) + 1)
        ranks.append(_alternate(forwards, backwards, ahead))
    return _bound(ranks, layers_of)


def looped_bfs(num_ranks: int, num_microbatches: int, layers_of: Sequence[int]) -> Schedule:
    """Return looped breadth-first: several stages per rank, all microbatches of one before the next."""
    ranks = []
    for rank in range(num_ranks):
        stages = range(rank, len(layers_of), num_ranks)
        forwards = [("F", s, m) for s in stages for m in range(num_microbatches)]
        backwards = [("B", s, m) for s in reversed(stages) for m in reversed(range(num_microbatches))]
        ranks.append([*forwards, *backwards])
    return _bound(ranks, layers_of)


def round_robin(
    num_ranks: int, num_microbatches: int, round_size: int, forward: Sequence[int], backward: Sequence[int]
) -> Schedule:
    """Return round-robin dispatch: stages dealt out in turn, the first backward one with the head."""
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    stages = [("F", s) for s in range(len(forward))] + [("B", s) for s in range(len(backward))]
    turn = 0
    for start in range(0, num_microbatches, round_size):
        for kind, stage in stages:
            of_round = range(start, min(start + round_size, num_microbatches))
            ranks[turn % num_ranks] += [(kind, stage, m) for m in of_round]
            turn += 1
    return Schedule(
        ranks=tuple(map(tuple, ranks)),
        forward_layers=tuple(forward),
        backward_layers=tuple(backward),
        mirrored=False,
    )


def run_schedule(schedule: Schedule, layers: Layers) -> tuple[Timeline, Idle]:
    """Return the timeline of one iteration, and how idle the ranks are in it.

    Raises:
        ValueError: the ranks would wait for each other for ever.
    """
    work, names = _work(schedule, layers)
    order = Order([item.lane for item in work], [item.after for item in work])
    run = run_order(order, [item.cost for item in work], {})
    events = tuple(
        Event(lane=item.lane, op=name, start_s=start, end_s=end)
        for item, name, start, end in zip(work, names, run.start_s, run.end_s, strict=True)
        if item.lane
    )
    timeline = Timeline(events)
    whole = len(schedule.ranks) * run.makespan_s
    lanes = [timeline.lane(f"rank {rank}") for rank in range(len(schedule.ranks))]
    busy = sum(event.end_s - event.start_s for event in events)
    fill = sum(_first_start_s(lane) if lane else run.makespan_s for lane in lanes)
    drain = sum(run.makespan_s - lane[-1].end_s for lane in lanes if lane)
    return timeline, Idle(bubble=1 - busy / whole, fill=fill / whole, drain=drain / whole)


def _first_start_s(lane: Sequence[Event]) -> float:
    """Return when a lane had to start: a recompute at its beginning may come right before its backward."""
    first = lane[0]
    return lane[1].start_s - (first.end_s - first.start_s) if str(first.op).startswith("R") else first.start_s


def _bound(ranks: Sequence[Sequence[Action]], layers_of: Sequence[int]) -> Schedule:
    sizes = tuple(layers_of)
    return Schedule(ranks=tuple(map(tuple, ranks)), forward_layers=sizes, backward_layers=sizes)


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """Return ``ahead`` forwards, then backward and forward by turns, then the backwards left."""
    actions = forwards[:ahead]
    for backward, forward in zip(backwards, forwards[ahead:], strict=False):
        actions += (backward, forward)
    return actions + backwards[len(forwards) - ahead :]


class _Costs:
    """Durations and needs of actions."""

    def __init__(self, schedule: Schedule, layers: Layers) -> None:
        self.schedule, self.layers = schedule, layers
        self.last_forward = len(schedule.forward_layers) - 1
        self.last_backward = len(schedule.backward_layers) - 1

    def forward_s(self, stage: int) -> float:
        head = self.schedule.mirrored and stage == self.last_forward
        own = self.schedule.forward_layers[stage] * self.layers.forward_s
        return own + (self.layers.head_forward_s if head else 0.0)

    def recompute_s(self, stage: int) -> float:
        """The fused stage of a schedule that is not mirrored runs its layers and the head forward here."""
        own = self.schedule.backward_layers[stage] * self.layers.forward_s
        return own + (self.layers.head_forward_s if not self.schedule.mirrored and stage == 0 else 0.0)

    def backward_s(self, stage: int) -> float:
        own = self.schedule.backward_layers[stage] * self.layers.backward_s
        head = stage == (self.last_backward if self.schedule.mirrored else 0)
        return own + (self.layers.head_backward_s if head else 0.0)

    def before_forward(self, stage: int, microbatch: int) -> Iterator[_Key]:
        if stage:
            yield "F", stage - 1, microbatch

    def before_recompute(self, stage: int, microbatch: int) -> Iterator[_Key]:
        made_by = stage if self.schedule.mirrored else self._source(stage)
        if made_by is not None:
            yield "F", made_by, microbatch

    def before_backward(self, stage: int, microbatch: int) -> Iterator[_Key]:
        after = stage + 1 if self.schedule.mirrored else stage - 1
        if 0 <= after <= self.last_backward:
            yield "B", after, microbatch

    def _source(self, stage: int) -> int | None:
        """Return the forward stage that makes the input of a backward stage of its own numbering."""
        below = sum(self.schedule.backward_layers[stage + 1 :])
        ends = list(accumulate(self.schedule.forward_layers))
        return next((s for s, end in enumerate(ends) if below <= end), None) if below else None


def _work(schedule: Schedule, layers: Layers) -> tuple[list[_Work], list[str]]:
    """Return the work of all ranks, each action behind what it needs, and its names."""
    costs = _Costs(schedule, layers)
    work: list[_Work] = []
    names: list[str] = []
    made: dict[_Key, tuple[int, int]] = {}  # -> index of the work, rank

    def add(rank: int, name: str, seconds: float, needs: Sequence[_Key]) -> int:
        after = []
        for need in needs:
            index, source = made[need]
            if source != rank and layers.hop_s:
                work.append(_Work("", Cost(seconds=layers.hop_s), (index,)))
                names.append("")
                index = len(work) - 1
            after.append(index)
        work.append(_Work(f"rank {rank}", Cost(seconds=seconds), tuple(after)))
        names.append(name)
        return len(work) - 1

    def run(rank: int, action: Action) -> bool:
        kind, stage, microbatch = action
        forward = kind == "F"
        first = list((costs.before_forward if forward else costs.before_recompute)(stage, microbatch))
        then = [] if forward else list(costs.before_backward(stage, microbatch))
        if any(need not in made for need in (*first, *then)):
            return False
        text = f"{stage}.{microbatch}"
        if forward:
            index = add(rank, f"F {text}", costs.forward_s(stage), first)
        else:
            recompute_s = costs.recompute_s(stage)
            if not schedule.mirrored:
                add(rank, f"R {text}", recompute_s, first)
                first, recompute_s = [], 0.0
            index = add(rank, f"B {text}", recompute_s + costs.backward_s(stage), [*first, *then])
        made[action] = (index, rank)
        return True

    _merge(schedule.ranks, run)
    return work, names


def _merge(ranks: Sequence[Sequence[Action]], run: Callable[[int, Action], bool]) -> None:
    """Run the actions of all ranks, each in order, in any order of the ranks in which their needs are met."""
    at = [0] * len(ranks)
    moving = True
    while moving:
        moving = False
        for rank, actions in enumerate(ranks):
            while at[rank] < len(actions) and run(rank, actions[at[rank]]):
                at[rank] += 1
                moving = True
    stuck = [rank for rank, actions in enumerate(ranks) if at[rank] < len(actions)]
    if stuck:
        raise ValueError(f"ranks {stuck} wait for each other")
