"""The candidate of one GPU: the plan that `train` makes, its steps priced on the machine."""

from dataclasses import replace

from outsize.model.sizes.model_spec import Workload
from outsize.planner.memory.memory_table import NO_CODECS, Demand, Tier
from outsize.planner.passes.step_schedule import build_step
from outsize.planner.predict.candidate import Candidate
from outsize.planner.predict.expectation import coarser
from outsize.planner.predict.question import Question, demand_of, exchange_of, node_assumptions
from outsize.planner.program.activation_policy import Extent
from outsize.planner.search.offload_balance import UnitRates
from outsize.planner.search.sizing import PlanOptions
from outsize.planner.search.step_plan import fits_at_all, plan_step
from outsize.planner.simulate.costs import UnitTimes, cost_model
from outsize.planner.simulate.gpu_times import unit_times

# Steps that are simulated: the first one starts from rest, the others tell the time.
NUM_STEPS = 3
# Looking at each operation of a unit costs Python tens of microseconds for each: less than this is not worth it.
LEAST_SELECTED_S = 0.002


def one_worker(question: Question, microbatches: int, home: Tier) -> Candidate:
    """Return the plan of ``microbatches`` on the machine's first GPU.

    Raises:
        InfeasiblePlanError: nothing fits, and by how much.
    """
    model, machine = question.model, question.machine
    work = question.workload_of(question.sequences_per_microbatch(microbatches))
    times = unit_times(machine, model.compute_dtype, work)
    link = machine.links[0]
    rates = UnitRates(
        times=times, up_bytes_per_s=link.up_bytes_per_s.value, down_bytes_per_s=link.down_bytes_per_s.value
    )
    options = replace(_options(question, microbatches, home), rates=rates)
    demand = in_seconds(_demand(question, microbatches), work, times)
    plan = plan_step(model, demand, question.budgets, options)
    layout, tile_elements = coarser(plan, max(unit.numel for unit in model.units))
    costs = cost_model(
        machine,
        model,
        layout,
        times,
        work.boundary_bytes,
        home=home,
        tile_elements=tile_elements,
        transport=options.transport,
        kept_bytes=demand.kept_bytes,
        state=plan.state,
        **exchange_of(question),
    )
    return Candidate(
        microbatches=microbatches,
        work=work,
        model=model,
        state=plan.state,
        home=home,
        transport=options.transport,
        memory=plan.memory,
        layout=layout,
        programs=[build_step(layout)] * NUM_STEPS,
        costs=costs,
        assumptions=node_assumptions(question),
    )


def in_seconds(demand: Demand, work: Workload, times: UnitTimes) -> Demand:
    """Return ``demand`` with what choices of activations gain on the machine."""
    if not work.attention_bytes:
        return replace(demand, recompute_s=times.recompute_s)
    return replace(
        demand,
        recompute_s=times.recompute_s,
        selected_bytes={Extent.ATTENTION: work.attention_bytes, Extent.PRODUCTS: work.products_bytes},
        selected_s=times.spared_s,
        least_selected_s=LEAST_SELECTED_S,
    )


def fits_one_worker(question: Question, microbatches: int, home: Tier) -> bool:
    """Return whether any plan of `one_worker` fits."""
    options = _options(question, microbatches, home)
    return fits_at_all(question.model, _demand(question, microbatches), question.budgets, options)


def _demand(question: Question, microbatches: int) -> Demand:
    work = question.workload_of(question.sequences_per_microbatch(microbatches))
    return demand_of(question, work, work.held_bytes * microbatches)


def _options(question: Question, microbatches: int, home: Tier) -> PlanOptions:
    transport = question.transport if home == "host" else NO_CODECS
    # Nodes reduce whole gradients, so these wait at home there.
    return PlanOptions(
        home=home,
        below="host",
        clip=question.clip,
        unit_clip=question.unit_clip,
        may_skip=question.model.compute_dtype == "fp16",
        state=question.state_layout(whole_gradients=question.nodes > 1 or not transport.is_raw("gradients")),
        microbatches=microbatches,
        most_microbatches=question.sequences,
        can_part=question.in_mlp_parts is not None,
        transport=transport,
        activations=question.activations,
        nodes=question.nodes,
        wire=question.wire,
    )
