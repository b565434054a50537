"""How many tokens per second would 1 to 8 RTX 4090 train? The published system predicted, and ours.

The published rows (RoundPipe, arXiv 2604.27085: full recompute, fp16, weights one step stale) are predicted from
their layer times and the idle share of their schedule in the simulator: rounds of one microbatch per GPU, as
their own simulation has it, and of one more, as their library defaults to. Nothing is fitted.

Ours is an exact step on the preset of such a machine: compute takes the same layer times, weights, gradients
and activations cross PCIe and host memory, the optimizer steps on the host, and the next step waits for it. The
embedding and the final norm are left out, as in the layer times.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from bench_bubble import CASES, Case
from common import finish, machine, print_table

from outsize.hardware.presets import parse_gpus
from outsize.model.spec import ModelSpec, pack_unit
from outsize.planner.classical import round_robin, run_schedule
from outsize.planner.costs import UnitTimes, cost_model
from outsize.planner.layout import StepLayout
from outsize.planner.partition import Pipeline, partition
from outsize.planner.schedule import build_step
from outsize.planner.simulate import simulate
from outsize.planner.stages import cursor_after, slots_for
from outsize.planner.validate import validate

PUBLISHED = {
    "Qwen3-1.7B": {1: 8881, 2: 17026, 4: 33178, 8: 65417},
    "Llama-3.1-8B": {1: 3142, 2: 6259, 4: 12278, 8: 24275},
    "Qwen3-32B": {1: 740, 2: 1476, 4: 2897, 8: 5516},
}
# Parameters of a layer and of the head, and the width that crosses between units.
SIZES = {
    "Qwen3-1.7B": (50_335_744, 311_164_928, 2048),
    "Llama-3.1-8B": (218_112_000, 525_336_576, 4096),
    "Qwen3-32B": (487_596_544, 777_912_320, 5120),
}
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


def ours(model: str, case: Case, gpus: int, sequences: int) -> tuple[float, dict[str, float]]:
    """Return our tokens per second, and what the first GPU waited for as shares of the time."""
    layer, head, width = SIZES[model]
    layers, share = case.layers, sequences / SEQUENCES / 1e3
    count = layers.num_layers + 1
    units = tuple(
        pack_unit(u, f"layer {u}", "block", [("w", (layer if u < count - 1 else head,), True, True)])
        for u in range(count)
    )
    spec = ModelSpec(units=units, dtype="fp16")
    weights = tuple(unit.weight_bytes("fp16") for unit in units)
    gradients = tuple(unit.gradient_bytes for unit in units)
    recompute_s = share * layers.forward_s
    times = UnitTimes(
        forward_s=(*[recompute_s] * (count - 1), 0.0),
        backward_s=(
            *[recompute_s + share * layers.backward_s] * (count - 1),
            share * (layers.head_forward_s + layers.head_backward_s),
        ),
    )
    pipeline = Pipeline(
        forward_s=times.forward_s,
        backward_s=times.backward_s,
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
    )
    boundary = (sequences * SEQ_LEN * width * 2,) * count
    box = replace(parse_gpus("8x4090"), name="published")
    programs = []
    for _ in range(2):
        programs.append(build_step(layout))
        validate(programs[-1], layout)
        cursor = cursor_after(layout.stages, pipeline.num_microbatches, gpus)
        layout = replace(layout, stages=replace(layout.stages, cursor=cursor))
    done = simulate(programs, layout, cost_model(box, spec, layout, times, boundary))
    span_s = done.timeline.span_s
    waits = {owner: s / span_s for owner, s in done.timeline.stall_s_by_owner().items() if s > 0.001 * span_s}
    return case.sequences * SEQ_LEN / done.step_s, waits


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
            mine, waits = (None, {}) if options.skip_ours else ours(model, case, gpus, options.sequences)
            rows.append(
                (
                    f"{model} x{gpus}",
                    published,
                    round(predicted),
                    f"{100 * (predicted / published - 1):+.1f}%",
                    f"{100 * (more / published - 1):+.1f}%",
                    None if mine is None else round(mine),
                    None if mine is None else f"{mine / published:.3f}",
                )
            )
            result[f"{model} x{gpus}"] = {
                "published": published,
                "predicted": predicted,
                "predicted_rounds_of_one_more": more,
                "ours": mine,
                "ours_waits": waits,
            }
    headers = ("model", "published", "predicted", "error", "error (k+1)", "ours, exact", "ours/published")
    print_table(headers, rows, "Tokens per second on RTX 4090")
    worst = max(abs(row["predicted"] / row["published"] - 1) for row in result.values())
    finish(
        {"bench": "throughput", "worst_error": worst, "rows": result, "machine": machine()}, options.output
    )


if __name__ == "__main__":
    main()
