"""The plan of a run on several workers: stages cut for their memory, dealt out in turn.

Memory is that of each worker: slots and accumulators twice, so that one half fills while the other is used, or once
where memory is too tight for that (`stages.HALVES`); the rest beside them; inputs and gradients of two microbatches;
workspace for all units of a backward stage, which are recomputed before the first of them is differentiated. Where
several units add to the gradient of a rest that trains, each is in a stage of its own and a round takes all
microbatches: sums are then taken use by use, as everywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.model.spec import ModelSpec
from outsize.planner.choice import Extent
from outsize.planner.costs import UnitTimes
from outsize.planner.layout import StepLayout
from outsize.planner.leaving import Way, away_in, most_on_its_way, spared, ways_of
from outsize.planner.memory import Demand, by_class, count_traffic, offload_rooms, store_buffer_bytes
from outsize.planner.partition import Pipeline, partition
from outsize.planner.plan import Budgets, Plan, Table
from outsize.planner.schedule import successive_steps
from outsize.planner.sizing import PlanOptions
from outsize.planner.spending import ENOUGH
from outsize.planner.stage_layout import (
    ARRIVALS,
    activation_bytes,
    arrival_bytes,
    num_handed_over,
    single_units,
    spans_that_fit,
    staged_layout,
)
from outsize.planner.stage_room import Room, bytes_below, in_room, rooms, state_of
from outsize.planner.stages import HALVES, Span, Stages
from outsize.planner.transport import device_bytes, host_bytes
from outsize.units import align_up, format_bytes

# A backward takes about two forwards, besides what it recomputes.
GRADIENT_FORWARDS = 2.0
# Visits that the search times: enough for an answer in less than a second.
MAX_VISITS = 50_000
_EXTENT_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """What a plan of stages needs beside that of one worker.

    Attributes:
        num_workers: devices, all alike.
        forward_s: time of each streamed unit's forward, in the unit of what recomputes take.
        rest_users: units whose backward adds to the gradient of a rest that trains.
        stages: how the step is cut; None lets the planner choose.
    """

    num_workers: int
    forward_s: tuple[float, ...]
    rest_users: frozenset[int] = frozenset()
    stages: Stages | None = None


def plan_stages(
    model: ModelSpec, demand: Demand, budgets: Budgets, options: PlanOptions, wanted: StageOptions
) -> Plan:
    """Return the plan of the fastest stages found that fit ``budgets``, the device's for each worker.

    Raises:
        ConfigError: more workers than there can be stages.
        InfeasiblePlanError: nothing fits; says by how much, and what to try first.
    """
    bottom = _bottom(model, wanted)
    most = 2 * model.num_streamed - 1 - bottom
    if wanted.num_workers > most:
        raise ConfigError(
            f"memory.device has {wanted.num_workers} workers, but {model.num_streamed} units make at most {most} "
            f"stages; use at most {most} workers"
        )
    *roomier, least = rooms(model, options, wanted.num_workers)

    def holds(layout: StepLayout, room: Room) -> bool:
        return not budgets.short_by(_memory(model, demand, layout, options, room))

    def holds_stages(make: Callable[[Stages], StepLayout], stages: Stages) -> bool:
        return holds(make(stages), least)

    def fits(way: Way) -> bool:
        return holds(_layout(model, options, wanted, way, least, single), least)

    below = range(bottom, model.num_streamed - 1)
    for halves in HALVES:
        single = single_units(model.num_streamed, bottom, _round_size(options, wanted), halves)
        ways = ways_of(options.activations, below, demand, options.rates, fits)
        smallest = _layout(model, options, wanted, ways[-1], least, single)
        memory = _memory(model, demand, smallest, options, least)
        short_by = budgets.short_by(memory)
        if not short_by:
            break
    else:
        raise InfeasiblePlanError(_what_to_try(memory, short_by, options), short_by)

    found: list[tuple[float, StepLayout]] = []
    for way in ways:
        layout = partial(_layout, model, options, wanted, way, least)
        pipeline = _pipeline(model, demand, options, wanted, bottom, budgets.device, halves, way)
        pipeline = replace(pipeline, holds=partial(holds_stages, layout))
        stages = _cut(pipeline, options, wanted)
        if stages is not None:
            # What moves unasked has to gain what lanes lose that fill and drain.
            unasked = bool(way.away) and not ways[-1].away
            found.append((pipeline.step_s(stages) / (ENOUGH if unasked else 1.0), layout(stages)))
    chosen = min(found, key=lambda pair: pair[0])[1] if found else smallest
    chosen = _with_peers(
        chosen, options, lambda layout: budgets.short_by(_memory(model, demand, layout, options, least))
    )
    room = next((room for room in roomier if holds(in_room(model, chosen, options, room), room)), least)
    return _make(model, demand, budgets, options, in_room(model, chosen, options, room), room)


def _with_peers(
    layout: StepLayout, options: PlanOptions, short_by: Callable[[StepLayout], dict[str, int]]
) -> StepLayout:
    """Return ``layout`` with copies between the devices that can, where there is room for what arrives.

    Raises:
        InfeasiblePlanError: they are asked for, and there is none.
    """
    candidate = replace(layout, peers=options.peers & layout.neighbours)
    missing = short_by(candidate)
    if not missing:
        return candidate
    if options.handover == "peer":
        raise InfeasiblePlanError(
            f"parallel.handover=peer needs room for {candidate.num_places} microbatches that arrive on each device; "
            "first try parallel.handover=auto, which goes by way of host memory where there is none",
            missing,
        )
    return layout


def _bottom(model: ModelSpec, wanted: StageOptions) -> int:
    """Return the lowest unit that runs backward."""
    if wanted.rest_users:
        return 0
    trained = (unit.index for unit in model.units[: model.num_streamed] if unit.trainable)
    return next(trained, model.num_streamed - 1)


def _round_size(options: PlanOptions, wanted: StageOptions) -> int:
    """Return the microbatches of a round where it has to take all of them, else 1.

    Each round reads all weights, and with a home on disk sums of gradients too.
    """
    whole = len(wanted.rest_users) > 1 or options.home == "disk"
    return options.microbatches if whole else 1


def _pipeline(
    model: ModelSpec,
    demand: Demand,
    options: PlanOptions,
    wanted: StageOptions,
    bottom: int,
    device_bytes: int,
    halves: tuple[int, int],
    way: Way,
) -> Pipeline:
    """Return what is cut: times, and which single stages fit ``device_bytes``."""
    streamed = model.units[: model.num_streamed]
    weights = tuple(unit.weight_bytes(model.dtype) for unit in streamed)
    gradients = tuple(unit.gradient_bytes * unit.trainable for unit in streamed)
    fixed = demand.shared_bytes + demand.fixed_bytes + _resident(model)
    times, rates = _times(demand, options, wanted), options.rates

    has_room = spans_that_fit(
        device_bytes - fixed,
        weights,
        gradients,
        halves,
        max(demand.boundary_bytes),
        lambda span, backward: _workspace(model, demand, span, backward, way.keeps),
        way.away,
        demand.kept_bytes,
    )

    def fits(span: Span, backward: bool) -> bool:
        several = backward and len(wanted.rest_users.intersection(range(*span))) > 1
        return not several and has_room(span, backward)

    return Pipeline(
        forward_s=times.forward_s,
        backward_s=spared(times.backward_s, times, way.away),
        recompute_s=spared(times.recompute_s or times.forward_s, times, way.away),
        num_workers=wanted.num_workers,
        num_microbatches=options.microbatches,
        hop_s=0.0 if rates is None else max(demand.boundary_bytes) / rates.up_bytes_per_s,
        weights_s=() if rates is None else tuple(size / rates.up_bytes_per_s for size in weights),
        gradients_s=() if rates is None else tuple(size / rates.down_bytes_per_s for size in gradients),
        keeps=way.keeps,
        bottom=bottom,
        fits=fits,
        halves=halves,
    )


def _times(demand: Demand, options: PlanOptions, wanted: StageOptions) -> UnitTimes:
    """Return the times of units: as they were measured, or else beside each other."""
    if options.rates is not None:
        return options.rates.times
    # The last unit runs forward before its backward, all of it.
    recomputes_s = (*(demand.recompute_s or wanted.forward_s)[:-1], wanted.forward_s[-1])
    units = range(len(recomputes_s))
    return UnitTimes(
        forward_s=wanted.forward_s,
        backward_s=tuple(
            recompute_s + GRADIENT_FORWARDS * forward_s
            for recompute_s, forward_s in zip(recomputes_s, wanted.forward_s, strict=True)
        ),
        recompute_s=recomputes_s,
        spared_s={
            extent: tuple(demand.spared_s(extent, unit) for unit in units)
            for extent in (Extent.ATTENTION, Extent.PRODUCTS)
            if extent in demand.selected_s
        },
    )


def _cut(pipeline: Pipeline, options: PlanOptions, wanted: StageOptions) -> Stages | None:
    """Return the stages that were asked for, or the fastest found; None where they, or all, do not fit."""
    if wanted.stages is not None:
        return wanted.stages if pipeline.holds(wanted.stages) else None
    whole = _round_size(options, wanted) > 1
    round_sizes = (options.microbatches,) if whole else ()
    try:
        return partition(pipeline, round_sizes, max_visits=MAX_VISITS)
    except ValueError:
        return None


def _layout(
    model: ModelSpec, options: PlanOptions, wanted: StageOptions, way: Way, room: Room, stages: Stages
) -> StepLayout:
    layout = staged_layout(model, options, wanted.num_workers, way, stages, wanted.rest_users)
    return in_room(model, layout, options, room)


def _make(
    model: ModelSpec, demand: Demand, budgets: Budgets, options: PlanOptions, layout: StepLayout, room: Room
) -> Plan:
    programs = successive_steps(layout)
    state = state_of(model, options)
    return Plan(
        home=options.home,
        below=options.below,
        layout=layout,
        program=programs[0],
        host_buffer_bytes=room.host_buffer_bytes,
        tile_elements=room.tile_elements,
        tile_buffer_bytes=state.tile_bytes(model, room.tile_elements, whole=layout.tiles_on_disk),
        store_buffer_bytes=store_buffer_bytes(model, options.home),
        memory=_memory(model, demand, layout, options, room),
        budgets=budgets,
        traffic=count_traffic(
            programs[0],
            model,
            layout,
            demand.boundary_bytes,
            home=options.home,
            below=options.below,
            tile_elements=room.tile_elements,
            transport=options.transport,
            state=state,
            kept_bytes=demand.kept_bytes,
        ),
        later_programs=programs[1:],
        transport=options.transport,
        offload_rooms=offload_rooms(layout, demand),
        state=state,
        home_parts=by_class(model, state, commits=layout.commits, transport=options.transport),
    )


def _memory(
    model: ModelSpec, demand: Demand, layout: StepLayout, options: PlanOptions, room: Room
) -> dict[str, dict[str, int]]:
    """Return bytes by tier and class; the device's are those of each worker."""
    stages, transport = layout.stages, options.transport
    assert stages is not None
    spans = [*((span, False) for span in stages.forward), *((span, True) for span in stages.backward)]
    deepest = max(end - first for (first, end), _ in spans)
    extents = num_handed_over(layout) * align_up(max(1, *demand.boundary_bytes), _EXTENT_BYTES)
    keeps = any(layout.keeps_anything(unit) for unit in layout.keepable)
    away = away_in(layout)
    leaving = most_on_its_way(stages, away, demand.kept_bytes)
    waiting = offload_rooms(layout, demand) if away else {}
    table = {
        "device": {
            "weight slots": sum(layout.slot_bytes),
            "gradient accumulators": sum(layout.accumulator_bytes),
            "resident": _resident(model),
            "activations": activation_bytes(deepest, max(demand.boundary_bytes)) + leaving,
            ARRIVALS: arrival_bytes(layout, max(demand.boundary_bytes)),
            "workspace": max(_workspace(model, demand, *span, keeps) for span in spans),
            "shared": demand.shared_bytes,
            "fixed": demand.fixed_bytes,
            "codecs": device_bytes(transport, model, demand.boundary_bytes),
        },
        "host": {
            "encoded weights": host_bytes(transport, model),
            "saved activations": extents,
            "offloaded activations": sum(count * size for count, size in waiting.values()),
        },
        "disk": {},
    }
    for tier, classes in bytes_below(model, layout, options, room).items():
        table[tier] |= classes
    return {tier: {name: size for name, size in found.items() if size} for tier, found in table.items()}


def _resident(model: ModelSpec) -> int:
    """Return the bytes of the rest and its gradient."""
    rest = model.units[model.num_streamed :]
    return sum(unit.weight_bytes(model.dtype) + unit.gradient_bytes * unit.trainable for unit in rest)


def _workspace(model: ModelSpec, demand: Demand, span: Span, backward: bool, keeps: bool) -> int:
    """Return what the units of a stage allocate while they run; those of a backward stage keep their graphs."""
    kinds = [model.units[unit].kind for unit in range(*span)]
    forward = [demand.forward_workspace_bytes.get(kind, 0) for kind in kinds]
    both = [demand.backward_workspace_bytes.get(kind, 0) for kind in kinds]
    if not backward:
        return max(forward)
    # The stage that turns around recomputes its units one by one, where it recomputes them.
    return max(*forward, *both) if span[1] == model.num_streamed and not keeps else sum(both)


def _what_to_try(memory: Table, short_by: dict[str, int], options: PlanOptions) -> str:
    tier = next(iter(short_by))
    classes = memory[tier]
    largest = max(classes, key=lambda name: classes[name])
    advice = {
        "offloaded activations": "memory.activations=auto, which keeps what has room",
        "weight slots": "devices with more memory",
        "gradient accumulators": "devices with more memory",
        "home": "the home on disk" if options.home == "host" else "a larger disk budget",
    }.get(largest, f"more microbatches than {options.microbatches}, or shorter sequences")
    needed = format_bytes(sum(classes.values()))
    where = "each worker" if tier == "device" else f"the {tier}"
    return (
        f"the smallest stages need {needed} on {where}, {format_bytes(classes[largest])} of it for {largest}; "
        f"first try {advice}"
    )
