"""The plan of a run on several workers: stages cut for their memory, dealt out in turn.

Memory is that of each worker: slots and accumulators twice, so that one half fills while the other is used, or once
where memory is too tight for that (`stages.HALVES`); the rest beside them; inputs and gradients of two microbatches;
workspace for all units of a backward stage, which are recomputed before the first of them is differentiated. Where
several units add to the gradient of a rest that trains, each is in a stage of its own and a round takes all
microbatches: sums are then taken use by use, as everywhere.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.planner.memory.link_bytes import device_bytes, host_bytes
from outsize.planner.memory.memory_table import Demand, by_class, offload_rooms, store_buffer_bytes
from outsize.planner.memory.traffic import count_traffic
from outsize.planner.passes.step_schedule import successive_steps
from outsize.planner.program.stages import HALVES, Stages
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.partition import Pipeline, partition
from outsize.planner.search.sizing import PlanOptions
from outsize.planner.search.smaller import smaller_microbatches
from outsize.planner.search.stage_layout import (
    ARRIVALS,
    activation_bytes,
    arrival_bytes,
    num_handed_over,
    single_units,
    staged_layout,
)
from outsize.planner.search.stage_offload import Way, away_in, most_on_its_way, ways_of
from outsize.planner.search.stage_pipeline import (
    StageOptions,
    bottom_of,
    pipeline_of,
    resident_bytes,
    round_size_of,
    workspace_bytes,
)
from outsize.planner.search.stage_room import HostRoom, bytes_below, in_room, rooms, state_of
from outsize.planner.search.step_plan import Budgets, Plan, Table
from outsize.planner.search.upgrades import ENOUGH
from outsize.units import align_up, format_bytes

# Visits that the search times: enough for an answer in less than a second.
MAX_VISITS = 50_000
_EXTENT_BYTES = 4096


def plan_stages(
    model: ModelSpec, demand: Demand, budgets: Budgets, options: PlanOptions, wanted: StageOptions
) -> Plan:
    """Return the plan of the fastest stages found that fit ``budgets``, the device's for each worker.

    Raises:
        ConfigError: more workers than there can be stages.
        InfeasiblePlanError: nothing fits; says by how much, and what to try first.
    """
    bottom = bottom_of(model, wanted)
    most = 2 * model.num_streamed - 1 - bottom
    if wanted.num_workers > most:
        raise ConfigError(
            f"memory.device has {wanted.num_workers} workers, but {model.num_streamed} units make at most {most} "
            f"stages; use at most {most} workers"
        )
    *roomier, least = rooms(model, options, wanted.num_workers)

    def holds(layout: StepLayout, room: HostRoom) -> bool:
        return not budgets.short_by(_memory(model, demand, layout, options, room))

    def holds_stages(make: Callable[[Stages], StepLayout], stages: Stages) -> bool:
        return holds(make(stages), least)

    def fits(way: Way) -> bool:
        return holds(_layout(model, options, wanted, way, least, single), least)

    below = range(bottom, model.num_streamed - 1)
    for halves in HALVES:
        single = single_units(model.num_streamed, bottom, round_size_of(options, wanted), halves)
        ways = ways_of(options.activations, below, demand, options.rates, fits, turns=not options.cut)
        smallest = _layout(model, options, wanted, ways[-1], least, single)
        memory = _memory(model, demand, smallest, options, least)
        short_by = budgets.short_by(memory)
        if not short_by:
            break
    else:
        raise InfeasiblePlanError(_what_to_try(memory, short_by, options, demand.largest_kind), short_by)

    found: list[tuple[float, StepLayout]] = []
    for way in ways:
        layout = partial(_layout, model, options, wanted, way, least)
        pipeline = pipeline_of(model, demand, options, wanted, bottom, budgets.device, halves, way)
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


def _cut(pipeline: Pipeline, options: PlanOptions, wanted: StageOptions) -> Stages | None:
    """Return the stages that were asked for, or the fastest found; None where they, or all, do not fit."""
    if wanted.stages is not None:
        return wanted.stages if pipeline.holds(wanted.stages) else None
    whole = round_size_of(options, wanted) > 1
    round_sizes = (options.microbatches,) if whole else ()
    try:
        return partition(pipeline, round_sizes, max_visits=MAX_VISITS)
    except ValueError:
        return None


def _layout(
    model: ModelSpec, options: PlanOptions, wanted: StageOptions, way: Way, room: HostRoom, stages: Stages
) -> StepLayout:
    layout = staged_layout(model, options, wanted.num_workers, way, stages, wanted.rest_users)
    return in_room(model, layout, options, room)


def _make(
    model: ModelSpec,
    demand: Demand,
    budgets: Budgets,
    options: PlanOptions,
    layout: StepLayout,
    room: HostRoom,
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
    model: ModelSpec, demand: Demand, layout: StepLayout, options: PlanOptions, room: HostRoom
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
            "resident": resident_bytes(model),
            "activations": activation_bytes(deepest, max(demand.boundary_bytes)) + leaving,
            ARRIVALS: arrival_bytes(layout, max(demand.boundary_bytes)),
            "workspace": max(workspace_bytes(model, demand, *span, keeps) for span in spans),
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


def _what_to_try(
    memory: Table, short_by: dict[str, int], options: PlanOptions, largest_kind: str | None
) -> str:
    tier = next(iter(short_by))
    classes = memory[tier]
    largest = max(classes, key=lambda name: classes[name])
    advice = {
        "offloaded activations": "memory.activations=auto, which keeps what has room",
        "weight slots": "devices with more memory",
        "gradient accumulators": "devices with more memory",
        "home": "the home on disk" if options.home == "host" else "a larger disk budget",
    }.get(largest) or smaller_microbatches(options, largest_kind if largest == "workspace" else None)
    needed = format_bytes(sum(classes.values()))
    where = "each worker" if tier == "device" else f"the {tier}"
    return (
        f"the smallest stages need {needed} on {where}, {format_bytes(classes[largest])} of it for {largest}; "
        f"first try {advice}"
    )
