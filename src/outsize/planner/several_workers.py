"""The candidate of several GPUs: stages cut for the machine's memory, dealt out in turn, priced on the machine.

Memory is counted as a run of stages would set it aside: slots and accumulators twice, so that one half fills while
the other is used, or once where memory is too tight for that (`stages.HALVES`); activations of two microbatches;
workspace for all units of the largest backward stage, which are recomputed before the first of them is differentiated.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.model.spec import ModelSpec, PartKind, UnitSpec, Workload, pack_part, pack_unit
from outsize.optim.shares import largest_share
from outsize.planner.candidate import Candidate, Table
from outsize.planner.costs import UnitTimes, cost_model
from outsize.planner.expectation import SIMULATED_TILES
from outsize.planner.hazards import SAVE_WINDOW
from outsize.planner.keeping import kept_at_the_turn
from outsize.planner.layout import StepLayout
from outsize.planner.memory import Tier
from outsize.planner.partition import Pipeline, partition
from outsize.planner.plan import Budgets
from outsize.planner.program import Program
from outsize.planner.question import Question, exchange_of, node_assumptions
from outsize.planner.schedule import build_step
from outsize.planner.sizing import PlanOptions
from outsize.planner.stage_room import Room, bytes_below, in_room, rooms
from outsize.planner.stages import HALVES, Span, Stages, cursor_after, slots_for
from outsize.planner.unit_times import unit_times
from outsize.units import format_bytes

# Two follow one another: the second one tells the time of a step among others.
NUM_STEPS = 2
# Visits that the partitioner times: enough for an answer in a second or two.
MAX_VISITS, MANY_UNITS = 200_000, 48
# The same for an estimate.
BRIEF_VISITS = 50_000
_ID_BYTES = 16

ASSUMPTIONS = (
    "several GPUs: `outsize train` cuts stages of its own, for what it measures of the model",
    "several GPUs: the final norm travels with the head; ids and labels of the step, and masks and position tables of "
    "two microbatches, lie on every GPU",
)
TIED = "several GPUs: the table of tied embeddings is counted twice, as embedding and as head"


def several_workers(question: Question, microbatches: int, home: Tier = "host") -> Candidate:
    """Return stages for all GPUs of the machine.

    Raises:
        ConfigError: more GPUs than there can be stages.
        InfeasiblePlanError: nothing fits, and by how much.
    """
    num_workers, machine = len(question.machine.gpus), question.machine
    model = without_rest(question.model)
    _check_count(num_workers, model)
    work = question.workload_of(question.sequences_per_microbatch(microbatches))
    times = unit_times(machine, model.compute_dtype, work)
    options = _options(question, microbatches, home)
    layout, memory = _fit(question, model, work, options, times, _effort(model))
    tile_elements = _simulated_tile(model, options)
    room = replace(_room(model, options, layout), tile_elements=tile_elements)
    layout = in_room(model, _shared_out(question, model, layout), options, room)
    programs, layout = _steps(layout)
    return Candidate(
        microbatches=microbatches,
        work=work,
        model=model,
        state=question.state_layout(whole_gradients=True),
        home=home,
        memory=memory,
        layout=layout,
        programs=programs,
        costs=cost_model(
            machine,
            model,
            layout,
            times,
            work.boundary_bytes,
            home=home,
            tile_elements=tile_elements,
            state=options.state,
            **exchange_of(question),
        ),
        assumptions=(
            *ASSUMPTIONS,
            *node_assumptions(question),
            *((TIED,) if _is_tied(question.model) else ()),
        ),
    )


def estimate_s(question: Question, microbatches: int, stages: Stages | None) -> float:
    """Return what the partitioner makes of a step: compute, hand-over and copies, each link by itself.

    No simulation: what shares host memory, and the optimizer at the end of a step, is not in it.

    Args:
        question: of several GPUs, their home in host memory.
        microbatches: of the step.
        stages: of the step; None has them searched, for a moment.

    Raises:
        ConfigError: more GPUs than there can be stages.
        InfeasiblePlanError: nothing fits.
    """
    model = without_rest(question.model)
    work = question.workload_of(question.sequences_per_microbatch(microbatches))
    times = unit_times(question.machine, model.compute_dtype, work)
    _check_count(len(question.machine.gpus), model)
    asked = replace(question, stages=stages)
    options = _options(question, microbatches, "host")
    layout, _ = _fit(asked, model, work, options, times, BRIEF_VISITS)
    assert layout.stages is not None
    halves = (layout.stages.slot_halves, layout.stages.accumulator_halves)
    pipeline = _pipeline(question, model, work, options, times, halves)
    return pipeline.step_s(layout.stages)


def fits_several_workers(question: Question, microbatches: int, home: Tier) -> bool:
    """Return whether stages of single units, which need the least memory, fit."""
    model = without_rest(question.model)
    work = question.workload_of(question.sequences_per_microbatch(microbatches))
    times = unit_times(question.machine, model.compute_dtype, work)
    options = _options(question, microbatches, home)
    try:
        _check_count(len(question.machine.gpus), model)
        _fit(
            replace(question, stages=_single_units(model, HALVES[-1], options)),
            model,
            work,
            options,
            times,
            0,
        )
    except (ConfigError, InfeasiblePlanError):
        return False
    return True


def without_rest(model: ModelSpec) -> ModelSpec:
    """Return ``model`` with its rest dealt out to the head, and to the embedding where the two are tied."""
    units = list(model.units[: model.num_streamed])
    rest = model.units[model.num_streamed :]
    for extra in rest:
        units[-1] = _joined(units[-1], extra)
        if _is_tied(model):
            units[0] = _joined(units[0], _table_of(extra))
    return ModelSpec(units=tuple(units), dtype=model.dtype)


def _check_count(num_workers: int, model: ModelSpec) -> None:
    most = 2 * len(model.units) - 1 - _bottom(model)
    if num_workers > most:
        raise ConfigError(
            f"{num_workers} GPUs, but {len(model.units)} units make at most {most} stages; use at most {most} GPUs"
        )


def _is_tied(model: ModelSpec) -> bool:
    return not model.units[0].all_tensors


def _table_of(rest: UnitSpec) -> UnitSpec:
    """Return the rest with its first tensor only, which is the table of tied embeddings."""
    if rest.tensors:
        return replace(rest, tensors=rest.tensors[:1], frozen=())
    part = rest.frozen[0]
    return replace(rest, frozen=(replace(part, tensors=part.tensors[:1]),))


def _joined(unit: UnitSpec, extra: UnitSpec) -> UnitSpec:
    rows = [(t.name, t.shape, t.trainable, t.decay) for t in (*unit.tensors, *extra.tensors)]
    parts = [part for member in (unit, extra) for part in member.frozen]
    tensors = [(t.name, t.shape) for part in parts for t in part.tensors]
    kind = [PartKind(plane=part.plane, dtype=part.dtype) for part in parts[:1]]
    return pack_unit(unit.index, unit.name, unit.kind, rows, tuple(pack_part(one, tensors) for one in kind))


def _options(question: Question, microbatches: int, home: Tier) -> PlanOptions:
    state = question.state_layout(whole_gradients=True)
    return PlanOptions(
        home=home,
        below="host",
        clip=question.clip,
        unit_clip=question.unit_clip,
        microbatches=microbatches,
        state=state,
    )


def _shared_out(question: Question, model: ModelSpec, layout: StepLayout) -> StepLayout:
    """Return ``layout`` as that of one of the nodes that share the step: the one that steps most."""
    if question.nodes == 1:
        return layout
    own = largest_share(model, question.nodes)
    return replace(layout, num_nodes=question.nodes, own_elements=own)


def _room(model: ModelSpec, options: PlanOptions, layout: StepLayout) -> Room:
    """Return what a home on disk is given in host memory: as much as helps, which is little beside a GPU's memory."""
    return next(rooms(model, options, layout.num_workers))


def _simulated_tile(model: ModelSpec, options: PlanOptions) -> int:
    """Return the elements of the optimizer tiles that are simulated, 0 for a home in host memory."""
    return -(-max(unit.numel for unit in model.units) // SIMULATED_TILES) if options.home == "disk" else 0


def _fit(
    question: Question,
    model: ModelSpec,
    work: Workload,
    options: PlanOptions,
    times: UnitTimes,
    max_visits: int,
) -> tuple[StepLayout, Table]:
    """Return the layout of the fastest stages found that fit, and their memory."""
    machine, budgets = question.machine, question.budgets
    shared = 2 * work.held_bytes + question.sequences * question.seq_len * _ID_BYTES + question.fixed_bytes
    layout_of = partial(_layout, model, options, len(machine.gpus))
    least = _shared_out(question, model, layout_of(_single_units(model, HALVES[-1], options)))
    room = _room(model, options, least)
    below = bytes_below(model, in_room(model, least, options, room), options, room)
    table = partial(_memory, model, work, options.microbatches, shared, below)
    for halves in HALVES:
        stages = _single_units(model, halves, options)
        if sum(table(stages)["device"].values()) <= budgets.device:
            break
    _check(table(stages), budgets)

    def holds(stages: Stages) -> bool:
        return sum(table(stages)["device"].values()) <= budgets.device

    if question.stages is None:
        pipeline = _pipeline(question, model, work, options, times, halves)
        round_sizes = (options.microbatches,) if options.home == "disk" else ()
        with contextlib.suppress(ValueError):
            stages = partition(replace(pipeline, holds=holds), round_sizes, max_visits=max_visits)
    elif holds(question.stages):
        stages = question.stages
    return layout_of(stages), table(stages)


def _effort(model: ModelSpec) -> int:
    """Return how many visits the partitioner times: a visit of many units takes longer, and gains less."""
    return MAX_VISITS if len(model.units) <= MANY_UNITS else MAX_VISITS // 2


def _bottom(model: ModelSpec) -> int:
    """Return the lowest unit that runs backward."""
    return next((unit.index for unit in model.units if unit.trainable), len(model.units) - 1)


def _single_units(model: ModelSpec, halves: tuple[int, int], options: PlanOptions) -> Stages:
    """Return stages of one unit each, which need the least memory."""
    count = model.num_streamed
    return Stages(
        forward=tuple((u, u + 1) for u in range(count - 1)),
        backward=tuple((u, u + 1) for u in reversed(range(_bottom(model), count))),
        round_size=options.microbatches if options.home == "disk" else 1,
        slot_halves=halves[0],
        accumulator_halves=halves[1],
    )


def _pipeline(
    question: Question,
    model: ModelSpec,
    work: Workload,
    options: PlanOptions,
    times: UnitTimes,
    halves: tuple[int, int],
) -> Pipeline:
    """Return what is cut: times, and which single stages a GPU could hold."""
    weights = [unit.weight_bytes(model.dtype) for unit in model.units]
    gradients = [unit.gradient_bytes * unit.trainable for unit in model.units]
    workspace = [_workspace(work, unit.kind) for unit in model.units]

    def fits(span: Span, backward: bool) -> bool:
        units = range(*span)
        size = halves[0] * max(*weights, sum(weights[u] for u in units)) + _activations(len(units), work)
        at_once = units if backward else range(0)
        size += halves[1] * max(*gradients, sum(gradients[u] for u in at_once))
        size += max(*workspace, sum(workspace[u] for u in at_once))
        return size <= question.budgets.device

    machine = question.machine
    count = len(machine.gpus)
    # All links at once move no more than host memory gives and takes.
    most = machine.host.bytes_per_s.value / count
    up = min(most, *(link.up_bytes_per_s.value for link in machine.links))
    down = min(most, *(link.down_bytes_per_s.value for link in machine.links))
    read, written = up, down  # of units, whose home may be slower than the links
    if options.home == "disk":
        assert machine.disk is not None
        read = min(up, machine.disk.read_bytes_per_s.value / count)
        written = min(down, machine.disk.write_bytes_per_s.value / count)
    return Pipeline(
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        recompute_s=times.recompute_s,
        keeps=True,
        num_workers=count,
        num_microbatches=options.microbatches,
        hop_s=work.boundary_bytes[-1] / up,
        weights_s=tuple(size / read for size in weights),
        gradients_s=tuple(size / written for size in gradients),
        fits=fits,
        halves=halves,
        bottom=_bottom(model),
    )


def _layout(model: ModelSpec, options: PlanOptions, num_workers: int, stages: Stages) -> StepLayout:
    weights = tuple(unit.weight_bytes(model.dtype) for unit in model.units)
    gradients = tuple(unit.gradient_bytes * unit.trainable for unit in model.units)
    return StepLayout(
        num_streamed=len(model.units),
        rest=None,
        num_microbatches=options.microbatches,
        trainable=tuple(unit.trainable for unit in model.units),
        weight_bytes=weights,
        gradient_bytes=gradients,
        slot_bytes=slots_for(stages, weights),
        accumulator_bytes=slots_for(stages, gradients, only_backward=True),
        clip=options.clip,
        unit_clip=options.unit_clip,
        tiles=(0,) * len(model.units),
        num_workers=num_workers,
        stages=stages,
        kept=kept_at_the_turn(stages, len(model.units), options.microbatches),
    )


def _memory(
    model: ModelSpec, work: Workload, microbatches: int, shared_bytes: int, below: Table, stages: Stages
) -> dict[str, dict[str, int]]:
    """Return bytes by tier and class; the device's are those of each GPU."""
    weights = [unit.weight_bytes(model.dtype) for unit in model.units]
    gradients = [unit.gradient_bytes * unit.trainable for unit in model.units]
    deepest = max(end - first for first, end in (*stages.forward, *stages.backward))
    workspace = max(
        sum(_workspace(work, model.units[u].kind) for u in range(*span)) for span in stages.backward
    )
    saved = sum(work.boundary_bytes[1:]) + work.boundary_bytes[-1]  # inputs, and the gradient under way
    table = {
        "device": {
            "weight slots": sum(slots_for(stages, weights)),
            "gradient accumulators": sum(slots_for(stages, gradients, only_backward=True)),
            "activations": _activations(deepest, work),
            "workspace": workspace,
            "shared": shared_bytes,
        },
        "host": {"saved activations": microbatches * saved, **below["host"]},
        "disk": dict(below["disk"]),
    }
    return {tier: {name: size for name, size in found.items() if size} for tier, found in table.items()}


def _workspace(work: Workload, kind: str) -> int:
    return work.backward_workspace_bytes.get(kind, 0)


def _activations(num_units: int, work: Workload) -> int:
    """Return the activations of a stage: inputs of this and the next microbatch, gradients, and what is leaving."""
    return (2 * (num_units + 1) + SAVE_WINDOW) * work.boundary_bytes[-1]


def _check(memory: Table, budgets: Budgets) -> None:
    """Check the least plan.

    Raises:
        InfeasiblePlanError: it does not fit.
    """
    device, host, disk = (sum(memory[tier].values()) for tier in ("device", "host", "disk"))
    if device > budgets.device:
        largest = max(memory["device"], key=lambda name: memory["device"][name])
        advice = "more microbatches, or shorter sequences"
        if largest in ("weight slots", "gradient accumulators"):
            advice = f"GPUs with {format_bytes(device)}"
        raise InfeasiblePlanError(
            f"the smallest stages need {format_bytes(device)} on each GPU, "
            f"{format_bytes(memory['device'][largest])} of it for {largest}; first try {advice}",
            {"device": device - budgets.device},
        )
    for tier, needed, budget in (("host", host, budgets.host), ("disk", disk, budgets.disk)):
        if budget is not None and needed > budget:
            largest = max(memory[tier], key=lambda name: memory[tier][name])
            at_home = tier == "host" and largest == "home"
            raise InfeasiblePlanError(
                f"the smallest plan needs {format_bytes(needed)} on the {tier}, "
                f"{format_bytes(memory[tier][largest])} of it for {largest}; first try "
                + ("the home on disk" if at_home else f"a {tier} budget of {format_bytes(needed)}"),
                {tier: needed - budget},
            )


def _steps(layout: StepLayout) -> tuple[Sequence[Program], StepLayout]:
    """Return steps that follow one another, each beginning where the cursor stands, and the layout of the last."""
    programs = [build_step(layout)]
    while len(programs) < NUM_STEPS:
        assert layout.stages is not None
        cursor = cursor_after(layout.stages, layout.num_microbatches, layout.num_workers)
        layout = replace(layout, stages=replace(layout.stages, cursor=cursor))
        programs.append(build_step(layout))
    return programs, layout
