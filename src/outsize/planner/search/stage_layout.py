"""What stages are made of and what they take on a worker, in plans that run and in those that are only simulated."""

from collections.abc import Callable

from outsize.model.sizes.model_spec import ModelSpec
from outsize.planner.program.hazards import SAVE_WINDOW
from outsize.planner.program.stages import KeptBytes, Span, Stages, slots_for
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.sizing import PlanOptions
from outsize.planner.search.stage_offload import Away, Way, kept_in_stages, on_its_way

ARRIVALS = "arrivals from devices"


def single_units(num_streamed: int, bottom: int, round_size: int, halves: tuple[int, int]) -> Stages:
    """Return stages of one unit each in rounds that do not overlap, which need the least memory.

    Args:
        num_streamed: units.
        bottom: the lowest that runs backward.
        round_size: microbatches of a round.
        halves: sets of slots and of accumulators, see `Stages`.
    """
    return Stages(
        forward=tuple((u, u + 1) for u in range(num_streamed - 1)),
        backward=tuple((u, u + 1) for u in reversed(range(bottom, num_streamed))),
        round_size=round_size,
        slot_halves=halves[0],
        accumulator_halves=halves[1],
        overlaps=False,
    )


def staged_layout(
    model: ModelSpec,
    options: PlanOptions,
    way: Way,
    stages: Stages,
    rest_users: frozenset[int],
    stays: frozenset[int] = frozenset(),
) -> StepLayout:
    """Return the step, its home, nodes and copies between devices apart.

    Args:
        model: its units.
        options: what is decided.
        way: what becomes of what forwards keep.
        stages: of the step.
        rest_users: units whose backward adds to the gradient of a rest that trains.
        stays: see `StepLayout.stays`.
    """
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
        slot_bytes=slots_for(stages, [0 if unit in stays else size for unit, size in enumerate(weights)]),
        accumulator_bytes=slots_for(stages, gradients, only_backward=True),
        clip=options.clip,
        unit_clip=options.unit_clip,
        stays=stays,
        tiles=(0,) * len(model.units),
        num_workers=options.num_workers,
        stages=stages,
        kept=kept_in_stages(stages, count, options.microbatches, way),
        rest_users=rest_users,
        cut=options.cut,
    )


def num_handed_over(layout: StepLayout) -> int:
    """Return how many inputs and gradients lie below the workers at once, at most: those of the rounds under way.

    Forward stages save the inputs of all their units that a backward needs, and what comes out at their end; backward
    stages send the gradient of what came in, of each microbatch one at a time. Where all of that goes from device to
    device, only the former. In a step that is cut the stage that turns around is a forward stage, too; and what later
    rounds hand over lies there beside what the first has saved.
    """
    stages, bottom = layout.stages, layout.first_backward
    assert stages is not None
    turning = max(0, layout.num_streamed - max(stages.backward[0][0] + 1, bottom)) if layout.cut else 0
    if layout.peers == layout.neighbours and layout.peers:
        kept = (max(0, end - max(first, bottom, 1)) for first, end in stages.forward)
        return layout.microbatches_at_once * (sum(kept) + turning + layout.cut)
    inputs = sum(max(0, end - max(first + 1, bottom)) + 1 for first, end in stages.forward)
    gradient = stages.backward[0][0] > bottom or (layout.cut and layout.num_rounds > 1)
    return layout.microbatches_at_once * (inputs + turning + gradient)


def activation_bytes(num_units: int, boundary_bytes: int) -> int:
    """Return the activations of a stage: inputs of this and the next microbatch, gradients, and what is leaving."""
    return (2 * (num_units + 1) + SAVE_WINDOW) * boundary_bytes


def arrival_bytes(layout: StepLayout, boundary_bytes: int) -> int:
    """Return the places of a worker for what comes from another one, and what is on its way out to one."""
    return (layout.num_places + SAVE_WINDOW) * boundary_bytes if layout.peers else 0


def spans_that_fit(
    budget_bytes: int,
    weights: tuple[int, ...],
    gradients: tuple[int, ...],
    halves: tuple[int, int],
    boundary_bytes: int,
    workspace: Callable[[Span, bool], int],
    away: Away,
    kept_bytes: KeptBytes,
) -> Callable[[Span, bool], bool]:
    """Return what says whether a worker can hold the units of a span, forward (False) or backward (True).

    Args:
        budget_bytes: of a worker, for stages.
        weights: bytes of each streamed unit.
        gradients: of the gradient of each.
        halves: sets of slots and of accumulators.
        boundary_bytes: of the largest input of a unit.
        workspace: of a span.
        away: what leaves of what forwards keep.
        kept_bytes: that forwards of each extent keep.
    """
    slots, sums = halves
    most_weights, most_gradients, count = max(weights), max(gradients), len(weights)

    def fits(span: Span, backward: bool) -> bool:
        first, end = span
        size = slots * max(most_weights, sum(weights[first:end]))
        size += sums * max(most_gradients, sum(gradients[first:end]) if backward else 0)
        size += activation_bytes(end - first, boundary_bytes) + workspace(span, backward)
        size += 0 if end == count else on_its_way(span, backward, away, kept_bytes)
        return size <= budget_bytes

    return fits
