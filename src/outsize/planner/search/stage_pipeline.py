"""Times of units under several workers, and what single stages take on a worker."""

from outsize.model.sizes.model_spec import ModelSpec
from outsize.planner.memory.memory_table import Demand
from outsize.planner.memory.step_bytes import load_bytes
from outsize.planner.program.stages import Span, bytes_of
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.partition import Pipeline, usual_round_sizes
from outsize.planner.search.sizing import PlanOptions
from outsize.planner.search.stage_memory import StageMemory, spans_that_fit, state_of
from outsize.planner.search.step_plan import Plan
from outsize.planner.search.upgrades import Way, away_in, spared
from outsize.planner.simulate.costs import step_pace
from outsize.planner.simulate.gpu_times import StageTraffic


def bottom_of(model: ModelSpec, demand: Demand) -> int:
    """Return the lowest unit that runs backward."""
    if demand.rest_users:
        return 0
    trained = (unit.index for unit in model.units[: model.num_streamed] if unit.trainable)
    return next(trained, model.num_streamed - 1)


def round_sizes_of(options: PlanOptions, demand: Demand) -> tuple[int, ...]:
    """Return the microbatches of a round that may be chosen from, the most last.

    Each round reads all weights, and with a home on disk sums of gradients too, and of a rest with several users all
    wait for its sum: there a round is as large as memory lets it. So it is in a step that is cut, where later rounds
    run forward twice.
    """
    most = options.microbatches
    if options.round_microbatches is not None or options.cut:
        return (min(options.round_microbatches or most, most),)
    if is_large(options, demand):
        return tuple(sorted({-(-most // 2**halvings) for halvings in range(most.bit_length() + 1)}))
    return usual_round_sizes(most, options.num_workers)


def is_large(options: PlanOptions, demand: Demand) -> bool:
    """Return whether a round is to be as large as memory lets it, see `round_sizes_of`."""
    return len(demand.rest_users) > 1 or options.home == "disk"


def pipeline_of(memory: StageMemory, device_bytes: int, halves: tuple[int, int], way: Way) -> Pipeline:
    """Return what is cut: the times of units, and which single stages fit ``device_bytes``."""
    model, demand, options, rates = memory.model, memory.demand, memory.options, memory.options.rates
    if rates is None:
        raise ValueError("stages are cut by the rates of a worker")
    times, state = rates.times, state_of(model, options)
    has_room = spans_that_fit(
        device_bytes - sum(memory.constant.values()),
        memory.weights,
        memory.gradients,
        halves,
        memory.boundary_bytes,
        lambda span, backward: memory.workspace_bytes(span, backward, way.keeps),
        way.away,
        demand.kept_bytes,
    )

    def fits(span: Span, backward: bool) -> bool:
        users = demand.rest_users.intersection(range(*span)) if backward else ()
        # A later user of a rest waits until all microbatches have passed the one before: nothing else is to wait so.
        waits = len(demand.rest_users) > 1 and span[1] < model.num_streamed
        several = span[1] - span[0] > 1 and len(users) > (not waits)
        return not several and has_room(span, backward)

    streamed = model.units[: model.num_streamed]
    sent = tuple(
        load_bytes(options.transport, unit, model.dtype, stays=unit.index in memory.stays)
        for unit in streamed
    )
    bottom = bottom_of(model, demand)
    return Pipeline(
        forward_s=times.forward_s,
        backward_s=spared(times.backward_s, times, way.away),
        recompute_s=spared(times.recompute_s or times.forward_s, times, way.away),
        num_workers=options.num_workers,
        num_microbatches=options.microbatches,
        hop_s=memory.boundary_bytes / rates.up_bytes_per_s,
        weights_s=tuple(size / rates.load_bytes_per_s for size in sent),
        gradients_s=tuple(size / rates.store_bytes_per_s for size in memory.gradients),
        keeps=way.keeps,
        bottom=bottom,
        fits=fits,
        halves=halves,
        traffic=StageTraffic(
            weights=sent,
            gradients=memory.gradients,
            away=[
                bytes_of(way.away[u], u, demand.kept_bytes) if u in way.away else 0 for u in range(len(sent))
            ],
            boundary_bytes=memory.boundary_bytes,
            bottom=bottom,
            by_host=not options.peers,
            others=state.step_bytes / step_pace(state) * model.num_trainable / options.nodes,
            rates=rates.shared,
            passes=1 + options.staged,
        ),
    )


def clock_of(model: ModelSpec, demand: Demand, options: PlanOptions, plan: Plan) -> Pipeline:
    """Return the partitioner's clock for a step that has been planned with ``options``."""
    layout, stages = plan.layout, plan.layout.stages
    assert stages is not None
    memory = StageMemory(model=model, demand=demand, options=options, stays=layout.stays)
    return pipeline_of(memory, 0, (stages.slot_halves, stages.accumulator_halves), way_of(layout))


def way_of(layout: StepLayout) -> Way:
    """Return what becomes of what forwards of ``layout`` keep."""
    assert layout.stages is not None
    return Way(layout.choice(layout.stages.backward[0][0], 0), away_in(layout))
