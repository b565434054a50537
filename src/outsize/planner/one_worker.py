"""The candidate of one GPU: the plan that `train` makes, its steps priced on the machine."""

from outsize.planner.candidate import Candidate
from outsize.planner.costs import cost_model
from outsize.planner.expectation import coarser
from outsize.planner.memory import NO_CODECS, Tier
from outsize.planner.plan import plan_step
from outsize.planner.question import Question, demand_of, exchange_of, node_assumptions
from outsize.planner.schedule import build_step
from outsize.planner.sizing import PlanOptions
from outsize.planner.unit_times import unit_times

# Steps that are simulated: the first one starts from rest, the others tell the time.
NUM_STEPS = 3


def one_worker(question: Question, microbatches: int, home: Tier) -> Candidate:
    """Return the plan of ``microbatches`` on the machine's first GPU.

    Raises:
        InfeasiblePlanError: nothing fits, and by how much.
    """
    model, machine = question.model, question.machine
    work = question.workload_of(question.sequences_per_microbatch(microbatches))
    transport = question.transport if home == "host" else NO_CODECS
    options = PlanOptions(
        home=home, below="host", clip=question.clip, microbatches=microbatches, transport=transport
    )
    plan = plan_step(
        model, demand_of(question, work, work.held_bytes * microbatches), question.budgets, options
    )
    layout, tile_elements = coarser(plan, max(unit.numel for unit in model.units))
    costs = cost_model(
        machine,
        model,
        layout,
        unit_times(machine, model.compute_dtype, work),
        work.boundary_bytes,
        home=home,
        tile_elements=tile_elements,
        transport=transport,
        **exchange_of(question),
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
        assumptions=node_assumptions(question),
    )
