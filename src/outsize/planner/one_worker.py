"""The candidate of one GPU: the plan that `train` makes, its steps priced on the machine.

The optimizer's tiles are a megabyte each on a disk home, tens of thousands for a large model. They cross the disk one
after the other at the disk's rate, so a few larger ones take the same time; the simulator is given those.
"""

from dataclasses import replace

from outsize.planner.candidate import Candidate
from outsize.planner.costs import cost_model
from outsize.planner.layout import StepLayout
from outsize.planner.memory import Tier
from outsize.planner.plan import Plan, plan_step
from outsize.planner.question import Question, demand_of
from outsize.planner.schedule import build_step
from outsize.planner.sizing import PlanOptions
from outsize.planner.unit_times import unit_times

# Tiles that the largest unit is simulated in: enough that reads, steps and writes overlap as they would.
SIMULATED_TILES = 8
# Steps that are simulated: the first one starts from rest, the others tell the time.
NUM_STEPS = 3


def one_worker(question: Question, microbatches: int, home: Tier) -> Candidate:
    """Return the plan of ``microbatches`` on the machine's first GPU.

    Raises:
        InfeasiblePlanError: nothing fits, and by how much.
    """
    model, machine = question.model, question.machine
    work = question.workload_of(question.sequences_per_microbatch(microbatches))
    options = PlanOptions(home=home, below="host", clip=question.clip, microbatches=microbatches)
    plan = plan_step(
        model, demand_of(question, work, work.held_bytes * microbatches), question.budgets, options
    )
    layout, tile_elements = _coarser(plan, max(unit.numel for unit in model.units))
    costs = cost_model(
        machine,
        model,
        layout,
        unit_times(machine, model.dtype, work),
        work.boundary_bytes,
        home=home,
        tile_elements=tile_elements,
    )
    return Candidate(
        microbatches=microbatches,
        work=work,
        model=model,
        home=home,
        memory=plan.memory,
        layout=layout,
        programs=[build_step(layout)] * NUM_STEPS,
        costs=costs,
    )


def _coarser(plan: Plan, largest: int) -> tuple[StepLayout, int]:
    """Return the layout with few large tiles, and their elements."""
    if not any(plan.layout.tiles):
        return plan.layout, plan.tile_elements
    elements = max(plan.tile_elements, -(-largest // SIMULATED_TILES))
    numels = (size // 4 for size in plan.layout.gradient_bytes)
    return replace(plan.layout, tiles=tuple(-(-numel // elements) for numel in numels)), elements
