"""How many tokens per second would 1 to 8 RTX 4090 train? The published system predicted, and ours.

The published rows (RoundPipe, arXiv 2604.27085: full recompute, fp16, weights one step stale) are predicted from
their layer times and the idle share of their schedule in the simulator: rounds of one microbatch per GPU, as
their own simulation has it, and of one more, as their library defaults to. Nothing is fitted.

Ours is an exact step on the preset of such a machine: compute takes the same layer times, weights, gradients
and activations cross PCIe and host memory, the optimizer steps on the host, and the next step waits for it. The
embedding and the final norm are left out, as in the layer times. Two things are computed less often: a recompute
leaves out the last product of a layer (its share of the layer's FLOPs is taken for its share of the layer's time), and
the stage that turns around recomputes nothing. Each row is told without the two, with the first, and with both.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from bench_bubble import CASES, Case
from classical import round_robin, run_schedule
from common import finish, machine, print_table

from outsize.hardware.cards import parse_gpus
from outsize.model.sizes.model_spec import ModelSpec, pack_unit
from outsize.planner.passes.slots import validate
from outsize.planner.passes.step_parts import build_step
from outsize.planner.program.program import Program, lane_of
from outsize.planner.program.stages import cursor_after, slots_for
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.offload_balance import kept_at_the_turn
from outsize.planner.search.partition import Pipeline, partition
from outsize.planner.simulate.costs import UnitTimes, cost_model
from outsize.planner.simulate.simulator import CostModel, Simulation, simulate

PUBLISHED = {
    "Qwen3-1.7B": {1: 8881, 2: 17026, 4: 33178, 8: 65417},
    "Llama-3.1-8B": {1: 3142, 2: 6259, 4: 12278, 8: 24275},
    "Qwen3-32B": {1: 740, 2: 1476, 4: 2897, 8: 5516},
}
# Parameters of a layer and of the head, the width that crosses between units, that of the MLP, and that of attention.
SIZES = {
    "Qwen3-1.7B": (50_335_744, 311_164_928, 2048, 6144, 2048),
    "Llama-3.1-8B": (218_112_000, 525_336_576, 4096, 14336, 4096),
    "Qwen3-32B": (487_596_544, 777_912_320, 5120, 25600, 8192),
}
# What is computed less often, one thing after the other.
SAVINGS = ("recompute in full", "recompute what is needed", "and keep at the turn")
SEQ_LEN, SEQUENCES = 2048, 4
# What slots and accumulators of a 24 GB card may take; the rest is for activations and workspace.
PLACES_BYTES = 16e9


def published_system(case: Case, gpus: int, round_size: int) -> float:
    """Return the tokens per second of the published system, its iterations overlapping."""
    count = case.sequences // SEQUENCES
    schedule = round_robin(gpus, count, round_size, case.forward, case.backward)
    timeline, idle = run_schedule(schedule, case.layers)
    busy_s = sum(event.end_s - event.start_s for event in timeline.events) / 1e3
    return case.sequences * SEQ_LEN * gpus * (1 - idle.inner) / busy_s


def needed_share(model: str) -> float:
    """Return the share of a layer's forward that its backward needs: all but the last product."""
    layer, _, width, intermediate, attention = SIZES[model]
    return 1 - 2 * width * intermediate / (2 * layer + 2 * SEQ_LEN * attention)


def ours(
    model: str, case: Case, gpus: int, sequences: int, saving: str
) -> tuple[float, dict[str, float], str]:
    """Return our tokens per second, what the first GPU waited for as shares of the time, and what ends the step."""
    layer, head, width, *_ = SIZES[model]
    layers, share = case.layers, sequences / SEQUENCES / 1e3
    count = layers.num_layers + 1
    units = tuple(
        pack_unit(u, f"layer {u}", "block", [("w", (layer if u < count - 1 else head,), True, True)])
        for u in range(count)
    )
    spec = ModelSpec(units=units, dtype="fp16")
    weights = tuple(unit.weight_bytes("fp16") for unit in units)
    gradients = tuple(unit.gradient_bytes for unit in units)
    forward_s = share * layers.forward_s
    recompute_s = forward_s * (1.0 if saving == SAVINGS[0] else needed_share(model))
    keeps = saving == SAVINGS[2]
    times = UnitTimes(
        forward_s=(*[forward_s] * (count - 1), 0.0),
        recompute_s=(*[recompute_s] * (count - 1), 0.0),
        backward_s=(
            *[recompute_s + share * layers.backward_s] * (count - 1),
            share * (layers.head_forward_s + layers.head_backward_s),
        ),
    )
    pipeline = Pipeline(
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        recompute_s=times.recompute_s,
        keeps=keeps,
        num_workers=gpus,
        num_microbatches=case.sequences // sequences,
        hop_s=share * layers.hop_s,
        fits=lambda span, back: (
            2 * sum(weights[slice(*span)]) + back * 2 * sum(gradients[slice(*span)]) < PLACES_BYTES
        ),
    )
    stages = partition(pipeline, max_visits=800_000)
    layout = StepLayout(
        num_streamed=count,
        rest=None,
        num_microbatches=pipeline.num_microbatches,
        trainable=(True,) * count,
        weight_bytes=weights,
        gradient_bytes=gradients,
        slot_bytes=slots_for(stages, weights),
        accumulator_bytes=slots_for(stages, gradients, only_backward=True),
        tiles=(0,) * count,
        num_workers=gpus,
        stages=stages,
        kept=kept_at_the_turn(stages, count, pipeline.num_microbatches) if keeps else (),
    )
    boundary = (sequences * SEQ_LEN * width * 2,) * count
    box = replace(parse_gpus("8x4090"), name="published")
    programs = []
    for _ in range(2):
        programs.append(build_step(layout))
        validate(programs[-1], layout)
        cursor = cursor_after(layout.stages, pipeline.num_microbatches, gpus)
        layout = replace(layout, stages=replace(layout.stages, cursor=cursor))
    costs = cost_model(box, spec, layout, times, boundary)
    done = simulate(programs, layout, costs)
    span_s = done.timeline.span_s
    waits = {owner: s / span_s for owner, s in done.timeline.stall_s_by_owner().items() if s > 0.001 * span_s}
    return case.sequences * SEQ_LEN / done.step_s, waits, busiest(programs[-1], costs, done, gpus)


def busiest(program: Program, costs: CostModel, done: Simulation, gpus: int) -> str:
    """Return the resource that is in use most, with its share of a step."""
    amounts: dict[str, float] = {}
    compute_s = 0.0
    for op in program:
        cost = costs.cost_of(op)
        compute_s += cost.seconds * lane_of(op).startswith("compute")
        for name in cost.through:
            amounts[name] = amounts.get(name, 0.0) + cost.amount
    shares = {name: amount / costs.capacity[name] / done.step_s for name, amount in amounts.items()}
    shares["compute"] = compute_s / gpus / done.step_s
    name = max(shares, key=lambda key: shares[key])
    return f"{name} {shares[name]:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(PUBLISHED), choices=PUBLISHED)
    parser.add_argument("--sequences", type=int, default=4, help="per microbatch of ours")
    parser.add_argument("--skip-ours", action="store_true", help="only the published system")
    parser.add_argument("--output", type=Path, help="keep the result here")
    options = parser.parse_args()
    rows, result = [], {}
    for model in options.models:
        for gpus, published in PUBLISHED[model].items():
            case = CASES[model]
            predicted = published_system(case, gpus, gpus)
            more = published_system(case, gpus, gpus + 1)
            savings = () if options.skip_ours else SAVINGS
            found = [ours(model, case, gpus, options.sequences, saving) for saving in savings]
            best, waits, ends_it = max(found) if found else (None, {}, None)
            rows.append(
                (
                    f"{model} x{gpus}",
                    published,
                    round(predicted),
                    f"{100 * (predicted / published - 1):+.1f}%",
                    f"{100 * (more / published - 1):+.1f}%",
                    None if best is None else round(best),
                    *(f"{tokens_per_s / published:.3f}" for tokens_per_s, *_ in found),
                    ends_it,
                )
            )
            result[f"{model} x{gpus}"] = {
                "published": published,
                "predicted": predicted,
                "predicted_rounds_of_one_more": more,
                "ours": best,
                "ours_by_saving": dict(zip(savings, (row[0] for row in found), strict=True)),
                "ours_waits": waits,
                "ours_is_ended_by": ends_it,
            }
    headers = ("model", "published", "predicted", "error", "error (k+1)", "ours, exact")
    if not options.skip_ours:
        headers = (*headers, *SAVINGS, "used most")
    print_table(headers, rows, "Tokens per second on RTX 4090")
    worst = max(abs(row["predicted"] / row["published"] - 1) for row in result.values())
    finish(
        {"bench": "throughput", "worst_error": worst, "rows": result, "machine": machine()}, options.output
    )


if __name__ == "__main__":
    main()
