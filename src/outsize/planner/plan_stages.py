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
from outsize.optim.spec import StateLayout
from outsize.planner.hazards import SAVE_WINDOW
from outsize.planner.keeping import kept_at_the_turn
from outsize.planner.layout import StepLayout
from outsize.planner.memory import Demand, count_traffic, home_bytes
from outsize.planner.ops import Kind
from outsize.planner.partition import Pipeline, partition
from outsize.planner.plan import Budgets, Plan, Table
from outsize.planner.program import Program
from outsize.planner.schedule import build_step
from outsize.planner.sizing import PlanOptions
from outsize.planner.stages import HALVES, Span, Stages, cursor_after, slots_for
from outsize.planner.transport import device_bytes, host_bytes, packed_bytes
from outsize.units import align_up, format_bytes

# A backward with recompute takes about three forwards.
BACKWARD_FORWARDS = 3.0
# Visits that the search times: enough for an answer in less than a second.
MAX_VISITS = 50_000
_EXTENT_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """What a plan of stages needs beside that of one worker.

    Attributes:
        num_workers: devices, all alike.
        forward_s: time of each streamed unit's forward, in any unit of time.
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
        ConfigError: more workers than there can be stages, or a home on disk.
        InfeasiblePlanError: nothing fits; says by how much, and what to try first.
    """
    if options.home == "disk":
        raise ConfigError(
            "several workers need the home in host memory; set memory.home to host, or use one device"
        )
    bottom = _bottom(model, wanted)
    most = 2 * model.num_streamed - 1 - bottom
    if wanted.num_workers > most:
        raise ConfigError(
            f"memory.device has {wanted.num_workers} workers, but {model.num_streamed} units make at most {most} "
            f"stages; use at most {most} workers"
        )
    layout = partial(_layout, model, options, wanted, False)
    for halves in HALVES:
        smallest = _single_units(model, options, wanted, bottom, halves)
        memory = _memory(model, demand, layout(smallest), options)
        short_by = _shortage(memory, budgets)
        if not short_by:
            break
    else:
        raise InfeasiblePlanError(_what_to_try(memory, short_by, options), short_by)

    for keeps in (True, False) if options.activations != "recompute" else (False,):
        layout = partial(_layout, model, options, wanted, keeps)

        def holds(stages: Stages, layout: Callable[[Stages], StepLayout] = layout) -> bool:
            return not _shortage(_memory(model, demand, layout(stages), options), budgets)

        if wanted.stages is not None:
            found = wanted.stages if holds(wanted.stages) else None
        else:
            pipeline = _pipeline(model, demand, options, wanted, bottom, budgets.device, halves, keeps)
            found = _cut(replace(pipeline, holds=holds), options, wanted)
        if found is not None:
            return _make(model, demand, budgets, options, layout(found))
    return _make(model, demand, budgets, options, layout(smallest))


def num_handed_over(program: Program) -> int:
    """Inputs and gradients that lie below the workers at once, at most."""
    return sum(op.kind in (Kind.SAVE, Kind.SEND) for op in program)


def _bottom(model: ModelSpec, wanted: StageOptions) -> int:
    """Return the lowest unit that runs backward."""
    if wanted.rest_users:
        return 0
    trained = (unit.index for unit in model.units[: model.num_streamed] if unit.trainable)
    return next(trained, model.num_streamed - 1)


def _round_size(options: PlanOptions, wanted: StageOptions) -> int:
    return options.microbatches if len(wanted.rest_users) > 1 else 1


def _single_units(
    model: ModelSpec, options: PlanOptions, wanted: StageOptions, bottom: int, halves: tuple[int, int]
) -> Stages:
    """Return stages of one unit each, which need the least memory."""
    return Stages(
        forward=tuple((u, u + 1) for u in range(model.num_streamed - 1)),
        backward=tuple((u, u + 1) for u in reversed(range(bottom, model.num_streamed))),
        round_size=_round_size(options, wanted),
        slot_halves=halves[0],
        accumulator_halves=halves[1],
    )


def _pipeline(
    model: ModelSpec,
    demand: Demand,
    options: PlanOptions,
    wanted: StageOptions,
    bottom: int,
    device_bytes: int,
    halves: tuple[int, int],
    keeps: bool,
) -> Pipeline:
    """Return what is cut: times, and which single stages fit ``device_bytes``."""
    streamed = model.units[: model.num_streamed]
    weights = [unit.weight_bytes(model.dtype) for unit in streamed]
    gradients = [unit.gradient_bytes * unit.trainable for unit in streamed]
    fixed = demand.shared_bytes + demand.fixed_bytes + _resident(model)

    def fits(span: Span, backward: bool) -> bool:
        units = range(*span)
        if backward and len(wanted.rest_users.intersection(units)) > 1:
            return False
        size = halves[0] * max(*weights, sum(weights[u] for u in units)) + fixed
        size += halves[1] * max(*gradients, sum(gradients[u] for u in units if backward))
        return (
            size + _activations(len(units), demand) + _workspace(model, demand, span, backward, keeps)
            <= device_bytes
        )

    return Pipeline(
        forward_s=wanted.forward_s,
        backward_s=tuple(BACKWARD_FORWARDS * seconds for seconds in wanted.forward_s),
        num_workers=wanted.num_workers,
        num_microbatches=options.microbatches,
        keeps=keeps,
        bottom=bottom,
        fits=fits,
        halves=halves,
    )


def _cut(pipeline: Pipeline, options: PlanOptions, wanted: StageOptions) -> Stages | None:
    """Return the fastest stages found; None where no cut fits."""
    round_sizes = (options.microbatches,) if len(wanted.rest_users) > 1 else ()
    try:
        return partition(pipeline, round_sizes, max_visits=MAX_VISITS)
    except ValueError:
        return None


def _layout(
    model: ModelSpec, options: PlanOptions, wanted: StageOptions, keeps: bool, stages: Stages
) -> StepLayout:
    count = model.num_streamed
    weights = tuple(unit.weight_bytes(model.dtype) for unit in model.units)
    gradients = tuple(unit.gradient_bytes * unit.trainable for unit in model.units)
    return StepLayout(
        num_streamed=count,
        rest=count if len(model.units) > count else None,
        num_microbatches=options.microbatches,
        trainable=tuple(unit.trainable for unit in model.units),
        weight_bytes=weights,
        gradient_bytes=gradients,
        slot_bytes=slots_for(stages, weights),
        accumulator_bytes=slots_for(stages, gradients, only_backward=True),
        clip=options.clip,
        unit_clip=options.unit_clip,
        tiles=(0,) * len(model.units),
        num_workers=wanted.num_workers,
        stages=stages,
        kept=kept_at_the_turn(stages, count, options.microbatches) if keeps else (),
        rest_users=wanted.rest_users,
    )


def _make(
    model: ModelSpec, demand: Demand, budgets: Budgets, options: PlanOptions, layout: StepLayout
) -> Plan:
    programs = _programs(layout)
    state = _state(model, options)
    traffic = partial(
        count_traffic,
        home=options.home,
        below=options.below,
        tile_elements=0,
        transport=options.transport,
        state=state,
    )
    return Plan(
        home=options.home,
        below=options.below,
        layout=layout,
        program=programs[0],
        host_buffer_bytes=0,
        tile_elements=0,
        tile_buffer_bytes=0,
        store_buffer_bytes=0,
        memory=_memory(model, demand, layout, options),
        budgets=budgets,
        traffic=traffic(programs[0], model, layout, demand.boundary_bytes),
        later_programs=tuple(programs[1:]),
        transport=options.transport,
        state=state,
    )


def _state(model: ModelSpec, options: PlanOptions) -> StateLayout:
    """Return how a trained unit lies at home; gradients are summed there from round to round."""
    return options.state or StateLayout(dtype=model.dtype)


def _programs(layout: StepLayout) -> list[Program]:
    """Return the programs of steps that follow one another, until one begins where the first began."""
    assert layout.stages is not None
    programs, first = [build_step(layout)], layout.stages.cursor
    cursor = cursor_after(layout.stages, layout.num_microbatches, layout.num_workers)
    while cursor != first:
        stages = replace(layout.stages, cursor=cursor)
        programs.append(build_step(replace(layout, stages=stages)))
        cursor = cursor_after(stages, layout.num_microbatches, layout.num_workers)
    return programs


def _memory(
    model: ModelSpec, demand: Demand, layout: StepLayout, options: PlanOptions
) -> dict[str, dict[str, int]]:
    """Return bytes by tier and class; the device's are those of each worker."""
    transport = options.transport
    stages = layout.stages
    assert stages is not None
    spans = [*((span, False) for span in stages.forward), *((span, True) for span in stages.backward)]
    extents = num_handed_over(build_step(layout)) * align_up(max(1, *demand.boundary_bytes), _EXTENT_BYTES)
    table = {
        "device": {
            "weight slots": sum(layout.slot_bytes),
            "gradient accumulators": sum(layout.accumulator_bytes),
            "resident": _resident(model),
            "activations": _activations(max(end - first for (first, end), _ in spans), demand),
            "workspace": max(_workspace(model, demand, *span, bool(layout.kept)) for span in spans),
            "shared": demand.shared_bytes,
            "fixed": demand.fixed_bytes,
            "codecs": device_bytes(transport, model, demand.boundary_bytes),
        },
        "host": {
            "encoded weights": host_bytes(transport, model),
            "saved activations": extents,
            "home": sum(home_bytes(unit, _state(model, options)) for unit in model.units)
            - packed_bytes(transport, model),
        },
        "disk": {},
    }
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


def _activations(num_units: int, demand: Demand) -> int:
    """Return the activations of a stage: inputs of this and the next microbatch, gradients, and what is leaving."""
    return (2 * (num_units + 1) + SAVE_WINDOW) * max(demand.boundary_bytes)


def _shortage(memory: Table, budgets: Budgets) -> dict[str, int]:
    """Return the bytes missing in each tier that is too small."""
    totals = {tier: sum(classes.values()) for tier, classes in memory.items()}
    limits = {tier: getattr(budgets, tier) for tier in totals}
    return {
        tier: total - limits[tier]
        for tier, total in totals.items()
        if limits[tier] is not None and total > limits[tier]
    }


def _what_to_try(memory: Table, short_by: dict[str, int], options: PlanOptions) -> str:
    tier = next(iter(short_by))
    classes = memory[tier]
    largest = max(classes, key=lambda name: classes[name])
    advice = {
        "weight slots": "devices with more memory",
        "gradient accumulators": "devices with more memory",
        "home": "one device and the home on disk",
    }.get(largest, f"more microbatches than {options.microbatches}, or shorter sequences")
    needed = format_bytes(sum(classes.values()))
    where = "each worker" if tier == "device" else f"the {tier}"
    return (
        f"the smallest stages need {needed} on {where}, {format_bytes(classes[largest])} of it for {largest}; "
        f"first try {advice}"
    )
