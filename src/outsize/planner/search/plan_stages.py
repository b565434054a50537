"""The plan of a step on several workers: stages cut for their memory (`stage_memory`), dealt out in turn.

Where several units add to the gradient of a rest that trains, each is in a stage of its own, and a round takes as many
microbatches as have room: sums are taken use by use, round by round, as everywhere.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.optim.optimizer_spec import StateLayout
from outsize.optim.shares import largest_share
from outsize.planner.memory.memory_table import Demand
from outsize.planner.program.stages import HALVES, Stages
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.forward_plan import frozen_units, spread
from outsize.planner.search.microbatch_search import (
    OF_TOKENS,
    PER_GPU,
    smaller_microbatches,
    smaller_states,
    without_products,
)
from outsize.planner.search.partition import Pipeline, partition
from outsize.planner.search.sizing import PlanOptions
from outsize.planner.search.stage_memory import (
    HostRoom,
    StageMemory,
    in_room,
    rooms,
    single_units,
    staged_layout,
    state_of,
)
from outsize.planner.search.stage_pipeline import bottom_of, is_large, pipeline_of, round_sizes_of, way_of
from outsize.planner.search.step_plan import Budgets, Plan
from outsize.planner.search.upgrades import ENOUGH, Way, ways_of
from outsize.units import format_bytes

# Visits that the search times: enough for an answer in a second or two. A visit of many units takes longer, and gains
# less, as does one of more microbatches than fill the GPUs. `BRIEF_VISITS` are for a look at whether other
# microbatches, or other ways, gain.
MAX_VISITS, MANY_UNITS, BRIEF_VISITS = 200_000, 48, 10_000
# A way whose stages of single units take so many times as long as what was found is not searched.
HOPELESS = 3.0


def plan_stages(
    model: ModelSpec, demand: Demand, budgets: Budgets, options: PlanOptions, max_visits: int | None = None
) -> Plan:
    """Return the plan of the fastest stages found that fit ``budgets``, the device's for each worker.

    Args:
        model: that is trained.
        demand: of it.
        budgets: most bytes in each tier.
        options: what is decided; with the rates of a worker.
        max_visits: that the search times; None for as many as pay.

    Raises:
        ConfigError: more workers than there can be stages, or activations that stages cannot have.
        InfeasiblePlanError: nothing fits; says by how much, and what to try first.
    """
    visits = _effort(model, options) if max_visits is None else max_visits
    _, layout, planner = _fastest(model, demand, budgets, options, visits)
    return planner.make(layout)


def estimate_s(model: ModelSpec, demand: Demand, budgets: Budgets, options: PlanOptions) -> float:
    """Return what the partitioner makes of a step, seconds: compute, hand-over and copies, each link by itself.

    No simulation: what shares host memory, and the optimizer at the end of a step, is not in it. `plan_stages` has the
    arguments and errors.
    """
    return _fastest(model, demand, budgets, options, BRIEF_VISITS)[0]


def fits_stages(model: ModelSpec, demand: Demand, budgets: Budgets, options: PlanOptions) -> bool:
    """Return whether stages of single units, which need the least memory, fit."""
    try:
        _Planner(model, demand, budgets, options).least()
    except (ConfigError, InfeasiblePlanError):
        return False
    return True


def without_peers(plan: Plan, model: ModelSpec, demand: Demand, options: PlanOptions) -> Plan:
    """Return ``plan`` with stages that hand over by way of host memory."""
    planner = _Planner(model, demand, plan.budgets, options, plan.layout.stays)
    return planner.make(replace(plan.layout, peers=frozenset()))


def _fastest(
    model: ModelSpec, demand: Demand, budgets: Budgets, options: PlanOptions, max_visits: int
) -> tuple[float, StepLayout, "_Planner"]:
    """Return the fastest step found, its time, and its planner: with units whose frozen weights stay, or none.

    (A READ from a disk is for all workers alike, whoever has the weights already; there nothing stays.)

    Stages move from worker to worker, so each worker holds all that stays. The more stays, the fewer units a stage has
    room for: the most that leave room for single units are tried, and shares of them, each with as many more as the
    stages found for it leave room for.
    """
    planner = _Planner(model, demand, budgets, options)
    fastest = (*planner.fit(max_visits), planner)
    frozen = [] if options.slots is not None or options.home == "disk" else frozen_units(model)

    def with_staying(number: int) -> _Planner:
        return _Planner(model, demand, budgets, options, spread(frozen, number))

    numbers = range(1, len(frozen) + 1)
    most = bisect_left(numbers, True, key=lambda number: not with_staying(number).fits())
    for number in sorted({most * quarters // 4 for quarters in (2, 3, 4)} - {0}, reverse=True):
        _, layout = with_staying(number).fit(min(max_visits, BRIEF_VISITS))
        more = range(number, len(frozen) + 1)
        room = bisect_left(more, True, lo=1, key=lambda count: not with_staying(count).has_room(layout))
        planner = with_staying(more[room - 1])
        layout = planner.staying(layout)
        step_s = planner.step_s(layout)
        if step_s < fastest[0]:
            fastest = step_s, layout, planner
        if number == len(frozen):
            break
    return fastest


class _Planner:
    def __init__(
        self,
        model: ModelSpec,
        demand: Demand,
        budgets: Budgets,
        options: PlanOptions,
        stays: frozenset[int] = frozenset(),
    ) -> None:
        self._model, self._demand, self._budgets, self._options = model, demand, budgets, options
        self._bottom = bottom_of(model, demand)
        most = 2 * model.num_streamed - 1 - self._bottom
        if options.num_workers > most:
            raise ConfigError(
                f"{options.num_workers} devices, but {model.num_streamed} units make at most {most} stages; use at "
                f"most {most} devices"
            )
        self._memory = StageMemory(model=model, demand=demand, options=options, stays=stays)
        *self._roomier, self._least = rooms(model, options, options.num_workers)

    def fits(self) -> bool:
        """Return whether stages of single units fit."""
        try:
            self.least()
        except InfeasiblePlanError:
            return False
        return True

    def staying(self, layout: StepLayout) -> StepLayout:
        """Return ``layout`` with what stays here."""
        assert layout.stages is not None
        stays = self._memory.stays
        changed = self._layout(way_of(layout), layout.stages)
        return replace(layout, stays=stays, slot_bytes=changed.slot_bytes)

    def has_room(self, layout: StepLayout) -> bool:
        """Return whether ``layout`` fits with what stays here."""
        return self._holds(self.staying(layout))

    def step_s(self, layout: StepLayout) -> float:
        """Return the time of a step of ``layout``."""
        assert layout.stages is not None
        return self._pipeline(way_of(layout), layout.stages).step_s(layout.stages)

    def fit(self, max_visits: int) -> tuple[float, StepLayout]:
        """Return the time of the fastest stages found, and the step that they make."""
        halves, single, ways = self.least()
        holds = [way for way in ways if self._holds(self._layout(way, single))]
        # Of ways from which the same leaves, the one that keeps more is never slower with the same stages. That another
        # may turn around in a larger stage is given up.
        holding = list({str(sorted(way.away.items())): way for way in reversed(holds)}.values())
        # What moves unasked has to gain what lanes lose that fill and drain.
        enough = {id(way): ENOUGH if way.away and not ways[-1].away else 1.0 for way in holding}

        def cut(way: Way, visits: int) -> list[tuple[float, Way, Stages]]:
            stages = self._cut(way, halves, visits)
            return [] if stages is None else [(stages[0] / enough[id(way)], way, stages[1])]

        candidates: list[tuple[float, Way, Stages]] = []
        outlooks = [(*self._outlook(way, halves, single), way) for way in holding]
        for single_s, least_s, way in sorted(outlooks, key=_seconds):
            if not candidates or (
                least_s / enough[id(way)] < candidates[0][0] and single_s < HOPELESS * candidates[0][0]
            ):
                candidates = sorted(
                    [*candidates, *cut(way, BRIEF_VISITS if candidates else max_visits)], key=_seconds
                )
                if candidates[1:] and candidates[0][1] is way and max_visits > BRIEF_VISITS:
                    candidates = sorted([*candidates, *cut(way, max_visits)], key=_seconds)
        if not candidates:
            candidates = [(self._pipeline(ways[-1], single).step_s(single), ways[-1], single)]
        step_s, way, stages = candidates[0]
        return step_s, self._with_peers(self._layout(way, stages))

    def make(self, layout: StepLayout) -> Plan:
        """Return the plan of ``layout``, with as much of host memory for a home on disk as it has room for."""
        model, options, demand = self._model, self._options, self._demand
        fitting = (room for room in self._roomier if self._holds(layout, room))
        room = next(fitting, self._least)
        layout = in_room(model, self._shared_out(layout), options, room)
        return Plan.of(
            model,
            demand,
            options,
            layout,
            state=state_of(model, options),
            tile_elements=room.tile_elements,
            host_buffer_bytes=room.host_buffer_bytes,
            memory=self._memory.table(layout, room),
            budgets=self._budgets,
        )

    def least(self) -> tuple[tuple[int, int], Stages, list[Way]]:
        """Return the sets of places that fit, stages of single units in them, and what may become of what is kept.

        Raises:
            InfeasiblePlanError: not even these fit.
        """
        options, demand = self._options, self._demand
        below = range(self._bottom, self._model.num_streamed - 1)
        rates = options.rates if options.leaves_unasked else None
        for halves in HALVES:
            single = options.stages if options.stages is not None else self._single_units(halves)

            def fits(way: Way, single: Stages = single) -> bool:
                return self._holds(self._layout(way, single))

            ways = ways_of(options.activations, below, demand, rates, fits, turns=not options.cut)
            memory = self._table(self._layout(ways[-1], single))
            short_by = self._budgets.short_by(memory)
            if not short_by:
                return halves, single, ways
        state = state_of(self._model, options)
        states = smaller_states(options, state)
        fitting = (keys for keys, other in states if fits_stages(self._model, demand, self._budgets, other))
        raise InfeasiblePlanError(
            lambda: _what_to_try(memory, short_by, options, state, demand.largest_kind, fitting), short_by
        )

    def _single_units(self, halves: tuple[int, int]) -> Stages:
        options = self._options
        named = options.round_microbatches is not None or options.cut
        least = round_sizes_of(options, self._demand)[0] if named else 1
        return single_units(self._model.num_streamed, self._bottom, least, halves)

    def _cut(self, way: Way, halves: tuple[int, int], max_visits: int) -> tuple[float, Stages] | None:
        """Return the stages that were asked for, or the fastest found, and their time; None where none fit."""
        options, budget = self._options, self._budgets.device
        if options.stages is not None:
            return self._pipeline(way, options.stages).step_s(options.stages), options.stages
        pipeline = pipeline_of(self._memory, budget, halves, way)
        sizes = self._round_sizes(way, halves)
        on_device = self._memory.on_device(way.keeps, way.away)
        pipeline = replace(
            pipeline,
            holds=lambda stages: sum(on_device(stages).values()) <= budget,
            overlaps=lambda size: sizes.get(size, False),
        )
        try:
            stages = partition(pipeline, tuple(sizes), max_visits=max_visits)
        except ValueError:
            return None
        return pipeline.step_s(stages), stages

    def _outlook(self, way: Way, halves: tuple[int, int], single: Stages) -> tuple[float, float]:
        """Return the time of a step of single units in the largest rounds of ``way``, and of any step at least."""
        wanted = self._options.stages
        sizes = self._round_sizes(way, halves) if wanted is None else {wanted.round_size: wanted.overlaps}
        pipeline, size = self._pipeline(way, single), max(sizes)
        stages = replace(single, round_size=size, overlaps=sizes[size])
        return pipeline.step_s(stages), pipeline.least_s(size)

    def _round_sizes(self, way: Way, halves: tuple[int, int]) -> dict[int, bool]:
        """Return the microbatches of a round to choose from, where what stages of single units hand over has room.

        No others hand over more. With each goes whether rounds of it overlap. Where nothing leaves of what is kept,
        rounds of which no two have room go one by one; where there is none for as many as there are workers, there are
        fewer in a round. (What leaves of small rounds waits for host memory, of which the search knows little.)
        """
        single, round_sizes = self._single_units(halves), round_sizes_of(self._options, self._demand)

        def fitting(sizes: Sequence[int], overlaps: bool) -> dict[int, bool]:
            stages = {size: replace(single, round_size=size, overlaps=overlaps) for size in sizes}
            return {size: overlaps for size in sizes if self._holds(self._layout(way, stages[size]))}

        sizes = fitting(round_sizes, True)
        if len(sizes) < len(round_sizes) and not way.away:
            alone = fitting([size for size in round_sizes if size not in sizes], False)
            sizes = dict(sorted((sizes | alone).items()))
            if not sizes and self._options.round_microbatches is None:
                fewer = range(single.round_size, round_sizes[0])
                sizes = {**fitting(fewer, False), **fitting(fewer, True)}
        if is_large(self._options, self._demand):
            sizes = dict(list(sizes.items())[-1:])
        return sizes or {single.round_size: False}

    def _pipeline(self, way: Way, stages: Stages) -> Pipeline:
        halves = (stages.slot_halves, stages.accumulator_halves)
        return pipeline_of(self._memory, self._budgets.device, halves, way)

    def _with_peers(self, layout: StepLayout) -> StepLayout:
        """Return ``layout`` with copies between the devices that can, where there is room for what arrives."""
        candidate = replace(layout, peers=self._options.peers & layout.neighbours)
        missing = self._budgets.short_by(self._table(candidate))
        if not missing:
            return candidate
        if self._options.handover == "peer":
            raise InfeasiblePlanError(
                f"parallel.handover=peer needs room for what arrives of a round of {candidate.num_places} on each "
                "device; first try parallel.handover=auto, which goes by way of host memory where there is none",
                missing,
            )
        return layout

    def _layout(self, way: Way, stages: Stages) -> StepLayout:
        users = self._demand.rest_users
        return staged_layout(self._model, self._options, way, stages, users, self._memory.stays)

    def _shared_out(self, layout: StepLayout) -> StepLayout:
        """Return ``layout`` as that of one of the nodes that share the step: the one that steps most."""
        nodes = self._options.nodes
        if nodes == 1:
            return layout
        return replace(layout, num_nodes=nodes, own_elements=largest_share(self._model, nodes))

    def _table(self, layout: StepLayout, room: HostRoom | None = None) -> Mapping[str, Mapping[str, int]]:
        room = room or self._least
        layout = in_room(self._model, self._shared_out(layout), self._options, room)
        return self._memory.table(layout, room)

    def _holds(self, layout: StepLayout, room: HostRoom | None = None) -> bool:
        return not self._budgets.short_by(self._table(layout, room))


def _seconds(candidate: tuple[float, *tuple[object, ...]]) -> float:
    return candidate[0]


def _effort(model: ModelSpec, options: PlanOptions) -> int:
    many = options.microbatches > PER_GPU * options.num_workers
    return MAX_VISITS // (1 + (many or len(model.units) > MANY_UNITS))


def _what_to_try(
    memory: Mapping[str, Mapping[str, int]],
    short_by: Mapping[str, int],
    options: PlanOptions,
    state: StateLayout,
    largest_kind: str | None,
    fitting: Iterator[str],
) -> str:
    tier = next(iter(short_by))
    classes = memory[tier]
    largest = max(classes, key=lambda name: classes[name])
    needed = format_bytes(sum(classes.values()), up=True)
    advice = {
        "offloaded activations": "memory.activations=auto, which keeps what has room",
        "weight slots": f"devices with {needed}",
        "gradient accumulators": f"devices with {needed}",
    }.get(largest)
    can_free = short_by[tier] < sum(classes.get(name, 0) for name in OF_TOKENS)
    if advice is None and can_free and (tier == "device" or largest == "saved activations"):
        advice = smaller_microbatches(options, largest_kind if largest == "workspace" else None)
    elif advice is None and largest == "home" and options.home == "host":
        otherwise = "the home on disk" if options.may_be_on_disk else f"a {tier} budget of {needed}"
        keys = next(fitting, None)
        advice = otherwise if keys is None else f"{keys}, with which it fits"
    elif advice is None:
        advice = f"a {tier} budget of {needed}"
    if tier == "device":
        advice = without_products(state) + advice
    where = "each device" if tier == "device" else f"the {tier}"
    return (
        f"the smallest stages need {needed} on {where}, {format_bytes(classes[largest])} of it for {largest}; "
        f"first try {advice}"
    )
