"""The candidate of several GPUs: stages cut for the machine's memory, dealt out in turn, priced on the machine."""

from collections.abc import Sequence
from dataclasses import replace

from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.model.sizes.model_spec import ModelSpec, PartKind, UnitSpec, pack_part, pack_unit
from outsize.planner.memory.memory_table import Tier
from outsize.planner.passes.step_schedule import build_step
from outsize.planner.predict.candidate import Candidate
from outsize.planner.predict.expectation import SIMULATED_TILES
from outsize.planner.predict.question import Question, exchange_of, node_assumptions
from outsize.planner.predict.stage_fit import fit, pipeline_of
from outsize.planner.predict.stage_memory import room_of, shared_out
from outsize.planner.predict.stage_task import StageTask, task_of
from outsize.planner.program.program import Program
from outsize.planner.program.stages import HALVES, Stages, cursor_after
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.stage_layout import ARRIVALS, arrival_bytes
from outsize.planner.search.stage_offload import Way
from outsize.planner.search.stage_room import in_room
from outsize.planner.simulate.costs import cost_model

# Two follow one another: the second one tells the time of a step among others.
NUM_STEPS = 2
# Visits that the partitioner times: enough for an answer in a second or two.
MAX_VISITS, MANY_UNITS = 200_000, 48
# The same for an estimate.
BRIEF_VISITS = 50_000

ASSUMPTIONS = (
    "several GPUs: `outsize train` cuts stages of its own, for what it measures of the model",
    "several GPUs: the final norm travels with the head; ids and labels of the step, and masks and position tables of "
    "two microbatches, lie on every GPU",
)
PEERS = "several GPUs: stages hand over from GPU to GPU, where that is no slower than by way of host memory"
TIED = "several GPUs: the table of tied embeddings is counted twice, as embedding and as head"


def several_workers(question: Question, microbatches: int, home: Tier = "host") -> Candidate:
    """Return stages for all GPUs of the machine.

    Raises:
        ConfigError: more GPUs than there can be stages, or activations that stages cannot have.
        InfeasiblePlanError: nothing fits, and by how much.
    """
    task = _task(question, microbatches, home)
    fitted = fit(task, _effort(task.model))
    tile_elements = _simulated_tile(task)
    room = replace(room_of(task), tile_elements=tile_elements)
    layout = in_room(task.model, shared_out(task, fitted.layout), task.options, room)
    programs, layout = _steps(layout)
    return Candidate(
        microbatches=microbatches,
        work=task.work,
        model=task.model,
        state=question.state_layout(whole_gradients=True),
        home=home,
        transport=task.options.transport,
        memory=fitted.memory,
        layout=layout,
        programs=programs,
        costs=cost_model(
            question.machine,
            task.model,
            layout,
            task.times,
            task.work.boundary_bytes,
            home=home,
            tile_elements=tile_elements,
            kept_bytes=task.demand.kept_bytes,
            state=task.options.state,
            transport=task.options.transport,
            **exchange_of(question),
        ),
        assumptions=(
            *ASSUMPTIONS,
            *node_assumptions(question),
            *((TIED,) if _is_tied(question.model) else ()),
        ),
    )


def with_peers(question: Question, candidate: Candidate) -> Candidate | None:
    """Return ``candidate`` with stages that hand over from GPU to GPU, between those that can.

    None where none can, or where there is no room for what arrives.
    """
    machine, layout = question.machine, candidate.layout
    pairs = frozenset(pair for pair in layout.neighbours if machine.peer(*pair) is not None)
    layout = replace(layout, peers=pairs)
    arrivals = arrival_bytes(layout, candidate.work.boundary_bytes[-1])
    device = {**candidate.memory["device"], ARRIVALS: arrivals}
    if not pairs or sum(device.values()) > question.budgets.device:
        return None
    programs, layout = _steps(replace(layout, stages=_at_the_start(layout)))
    return replace(
        candidate,
        memory={**candidate.memory, "device": device},
        layout=layout,
        programs=programs,
        assumptions=(*candidate.assumptions, PEERS),
    )


def _at_the_start(layout: StepLayout) -> Stages:
    assert layout.stages is not None
    return replace(layout.stages, cursor=0)


def estimate_s(question: Question, microbatches: int, stages: Stages | None, home: Tier = "host") -> float:
    """Return what the partitioner makes of a step: compute, hand-over and copies, each link by itself.

    No simulation: what shares host memory, and the optimizer at the end of a step, is not in it.

    Args:
        question: of several GPUs.
        microbatches: of the step.
        stages: of the step; None has them searched, for a moment.
        home: where weights and optimizer state rest.

    Raises:
        ConfigError: more GPUs than there can be stages.
        InfeasiblePlanError: nothing fits.
    """
    return fit(_task(replace(question, stages=stages), microbatches, home), BRIEF_VISITS).step_s


def filling_and_draining_s(question: Question, microbatches: int, stages: Stages, home: Tier) -> float:
    """Return how long a GPU waits, on the mean, until the first microbatch reaches it and once the last has left it.

    Both are as long as microbatches are; `estimate_s` has the arguments.
    """
    task = _task(question, microbatches, home)
    pipeline = pipeline_of(task, Way(), (stages.slot_halves, stages.accumulator_halves))
    return pipeline.filling_and_draining_s(stages)


def fits_several_workers(question: Question, microbatches: int, home: Tier) -> bool:
    """Return whether stages of single units, which need the least memory, fit."""
    try:
        task = _task(question, microbatches, home)
        fit(replace(task, question=replace(question, stages=task.single_units(HALVES[-1]))), 0)
    except (ConfigError, InfeasiblePlanError):
        return False
    return True


def _task(question: Question, microbatches: int, home: Tier) -> StageTask:
    model = without_rest(question.model)
    task = task_of(question, model, microbatches, home)
    most = 2 * len(model.units) - 1 - task.bottom
    if task.num_workers > most:
        raise ConfigError(
            f"{task.num_workers} GPUs, but {len(model.units)} units make at most {most} stages; use at most {most} GPUs"
        )
    return task


def without_rest(model: ModelSpec) -> ModelSpec:
    """Return ``model`` with its rest dealt out to the head, and to the embedding where the two are tied."""
    units = list(model.units[: model.num_streamed])
    rest = model.units[model.num_streamed :]
    for extra in rest:
        units[-1] = _joined(units[-1], extra)
        if _is_tied(model):
            units[0] = _joined(units[0], _table_of(extra))
    return ModelSpec(units=tuple(units), dtype=model.dtype)


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


def _simulated_tile(task: StageTask) -> int:
    """Return the elements of the optimizer tiles that are simulated, 0 for a home in host memory."""
    largest = max(unit.numel for unit in task.model.units)
    return -(-largest // SIMULATED_TILES) if task.options.home == "disk" else 0


def _effort(model: ModelSpec) -> int:
    """Return how many visits the partitioner times: a visit of many units takes longer, and gains less."""
    return MAX_VISITS if len(model.units) <= MANY_UNITS else MAX_VISITS // 2


def _steps(layout: StepLayout) -> tuple[Sequence[Program], StepLayout]:
    """Return steps that follow one another, each beginning where the cursor stands, and the layout of the last."""
    programs = [build_step(layout)]
    while len(programs) < NUM_STEPS:
        assert layout.stages is not None
        cursor = cursor_after(layout.stages, layout.num_microbatches, layout.num_workers)
        layout = replace(layout, stages=replace(layout.stages, cursor=cursor))
        programs.append(build_step(layout))
    return programs, layout
