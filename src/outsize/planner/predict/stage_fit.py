"""The stages of several GPUs that fit a machine: the fastest that are found."""

import contextlib
from dataclasses import dataclass, replace
from functools import partial

from outsize.planner.predict.candidate import Table
from outsize.planner.predict.stage_memory import check, device_memory_of, layout_of, memory_of, table_below
from outsize.planner.predict.stage_task import StageTask
from outsize.planner.program.stages import HALVES, Span, Stages
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.partition import Pipeline, partition
from outsize.planner.search.stage_layout import spans_that_fit
from outsize.planner.search.stage_offload import Way, spared
from outsize.planner.search.upgrades import ENOUGH


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Stages that fit.

    Attributes:
        layout: of the step.
        memory: bytes by tier and class; the device's are those of each GPU.
        way: what becomes of what forwards keep.
        step_s: by the partitioner's clock.
    """

    layout: StepLayout
    memory: Table
    way: Way
    step_s: float


def fit(task: StageTask, max_visits: int) -> Fitted:
    """Return the fastest stages found that fit, timing ``max_visits`` visits at most.

    Raises:
        ConfigError: what is asked of activations cannot be.
        InfeasiblePlanError: nothing fits.
    """
    budgets, table = task.question.budgets, partial(memory_of, task, table_below(task))

    def fits(way: Way) -> bool:
        return not budgets.short_by(table(way, single))

    for halves in HALVES:
        single = task.single_units(halves)
        ways = task.ways(fits)
        if sum(device_memory_of(task, ways[-1], single).values()) <= budgets.device:
            break
    check(table(ways[-1], single), task)
    found = []
    for way in filter(fits, ways):
        stages = _cut(task, way, single, halves, max_visits)
        own = (stages.slot_halves, stages.accumulator_halves)
        step_s = pipeline_of(task, way, own).step_s(stages)
        # What moves unasked has to gain what lanes lose that fill and drain.
        unasked = bool(way.away) and not ways[-1].away
        found.append((step_s / (ENOUGH if unasked else 1.0), stages, way, step_s))
    _, stages, way, step_s = min(found, key=lambda each: each[0])
    layout = layout_of(task, way, stages)
    return Fitted(layout=layout, memory=table(way, stages), way=way, step_s=step_s)


def _cut(
    task: StageTask,
    way: Way,
    single: Stages,
    halves: tuple[int, int],
    max_visits: int,
) -> Stages:
    """Return the stages that were asked for, or the fastest found; ``single`` where they, or all others, do not fit."""

    def holds(stages: Stages) -> bool:
        return sum(device_memory_of(task, way, stages).values()) <= task.question.budgets.device

    asked = task.question.stages
    if asked is not None:
        return asked if holds(asked) else single
    pipeline = replace(pipeline_of(task, way, halves), holds=holds)
    round_sizes = (task.options.microbatches,) if task.options.home == "disk" else ()
    with contextlib.suppress(ValueError):
        return partition(pipeline, round_sizes, max_visits=max_visits)
    return single


def pipeline_of(task: StageTask, way: Way, halves: tuple[int, int]) -> Pipeline:
    """Return what is cut: times, and which single stages a GPU could hold."""
    weights, gradients = task.weights, task.gradients
    workspace = [task.workspace(unit) for unit in range(task.model.num_streamed)]
    times, rates = task.times, task.rates

    most = max(workspace)

    def workspace_of(span: Span, backward: bool) -> int:
        return max(most, sum(workspace[slice(*span)])) if backward else most

    read, written = (
        rates.up_bytes_per_s,
        rates.down_bytes_per_s,
    )  # of units, whose home may be slower than links
    if task.options.home == "disk":
        disk = task.question.machine.disk
        assert disk is not None
        read = min(read, disk.read_bytes_per_s.value / task.num_workers)
        written = min(written, disk.write_bytes_per_s.value / task.num_workers)
    return Pipeline(
        forward_s=times.forward_s,
        backward_s=spared(times.backward_s, times, way.away),
        recompute_s=spared(times.recompute_s or times.forward_s, times, way.away),
        keeps=way.keeps,
        num_workers=task.num_workers,
        num_microbatches=task.options.microbatches,
        hop_s=task.work.boundary_bytes[-1] / rates.up_bytes_per_s,
        weights_s=tuple(size / read for size in task.sent_weights),
        gradients_s=tuple(size / written for size in gradients),
        fits=spans_that_fit(
            task.question.budgets.device,
            weights,
            gradients,
            halves,
            task.work.boundary_bytes[-1],
            workspace_of,
            way.away,
            task.demand.kept_bytes,
        ),
        halves=halves,
        bottom=task.bottom,
    )
