"""What several workers cut: the times of units, and what single stages take on a worker."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outsize.model.sizes.model_spec import ModelSpec
from outsize.planner.memory.memory_table import Demand
from outsize.planner.program.activation_policy import Extent
from outsize.planner.program.stages import Span, Stages
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.offload_balance import UnitRates
from outsize.planner.search.partition import Pipeline
from outsize.planner.search.sizing import PlanOptions
from outsize.planner.search.stage_layout import spans_that_fit
from outsize.planner.search.stage_offload import Way, away_in, spared
from outsize.planner.simulate.costs import UnitTimes

# A backward takes about two forwards, besides what it recomputes.
GRADIENT_FORWARDS = 2.0


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


def bottom_of(model: ModelSpec, wanted: StageOptions) -> int:
    """Return the lowest unit that runs backward."""
    if wanted.rest_users:
        return 0
    trained = (unit.index for unit in model.units[: model.num_streamed] if unit.trainable)
    return next(trained, model.num_streamed - 1)


def round_size_of(options: PlanOptions, wanted: StageOptions) -> int:
    """Return the microbatches of a round where it has to take all of them, else 1.

    Each round reads all weights, and with a home on disk sums of gradients too. A step that is cut runs all forwards
    before the first backward.
    """
    whole = len(wanted.rest_users) > 1 or options.home == "disk" or options.cut
    return options.microbatches if whole else 1


def pipeline_of(
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
    fixed = demand.shared_bytes + demand.fixed_bytes + resident_bytes(model)
    times, rates = times_of(demand, options, wanted), options.rates

    has_room = spans_that_fit(
        device_bytes - fixed,
        weights,
        gradients,
        halves,
        max(demand.boundary_bytes),
        lambda span, backward: workspace_bytes(model, demand, span, backward, way.keeps),
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


def times_of(demand: Demand, options: PlanOptions, wanted: StageOptions) -> UnitTimes:
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


def resident_bytes(model: ModelSpec) -> int:
    """Return the bytes of the rest and its gradient."""
    rest = model.units[model.num_streamed :]
    return sum(unit.weight_bytes(model.dtype) + unit.gradient_bytes * unit.trainable for unit in rest)


def workspace_bytes(model: ModelSpec, demand: Demand, span: Span, backward: bool, keeps: bool) -> int:
    """Return what the units of a stage allocate while they run; those of a backward stage keep their graphs."""
    kinds = [model.units[unit].kind for unit in range(*span)]
    forward = [demand.forward_workspace_bytes.get(kind, 0) for kind in kinds]
    both = [demand.backward_workspace_bytes.get(kind, 0) for kind in kinds]
    if not backward:
        return max(forward)
    # The stage that turns around recomputes its units one by one, where it recomputes them.
    return max(*forward, *both) if span[1] == model.num_streamed and not keeps else sum(both)


def clock_of(
    model: ModelSpec,
    demand: Demand,
    options: PlanOptions,
    wanted: StageOptions,
    layout: StepLayout,
    flops_per_s: float,
    link_bytes_per_s: float,
) -> Pipeline:
    """Return the partitioner's clock for a step that has been planned of FLOPs, on workers of these rates.

    Args:
        model: its units.
        demand: of a microbatch, times in FLOPs.
        options: of the plan.
        wanted: likewise, times in FLOPs.
        layout: of the plan.
        flops_per_s: of a worker.
        link_bytes_per_s: of its link, in each direction.
    """
    counted = times_of(demand, replace(options, rates=None), wanted)
    times = UnitTimes(
        forward_s=_over(counted.forward_s, flops_per_s),
        backward_s=_over(counted.backward_s, flops_per_s),
        recompute_s=_over(counted.recompute_s, flops_per_s),
        spared_s={extent: _over(flops, flops_per_s) for extent, flops in counted.spared_s.items()},
    )
    rates = UnitRates(times=times, up_bytes_per_s=link_bytes_per_s, down_bytes_per_s=link_bytes_per_s)
    stages = layout.stages
    assert stages is not None
    way = Way(layout.choice(stages.backward[0][0], 0), away_in(layout))
    halves = (stages.slot_halves, stages.accumulator_halves)
    return pipeline_of(
        model, demand, replace(options, rates=rates), wanted, layout.first_backward, 0, halves, way
    )


def _over(flops: Sequence[float], flops_per_s: float) -> tuple[float, ...]:
    return tuple(each / flops_per_s for each in flops)
