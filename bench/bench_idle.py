"""Why do eight GPUs idle? The plans of two models, simulated with one kind of op after the other that takes no time.

What is left where all copies and the optimizer are free is the schedule's own: stages fill and drain, wait for each
other, or take longer than an equal share of all compute, as the head does where one GPU has it for the whole step.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from common import finish, machine, print_table
from published_record import MODELS

from outsize.cli.plan.plan_model import AskedModel
from outsize.cli.plan.plan_options import PlanFlags
from outsize.cli.plan.plan_question import ask
from outsize.planner.predict.decision import Decision, Simulated
from outsize.planner.predict.decision_search import decide
from outsize.planner.program.program import COMPUTE_KINDS, Kind
from outsize.planner.program.stages import Stages
from outsize.planner.simulate.discrete import Cost

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
CASES = {"Qwen3-1.7B": (QWEN3, 1_048_576), "Llama-3.1-8B": (MODELS["Llama-3.1-8B"], 524_288)}
FREE = {
    "nothing": (),
    "optimizer": (Kind.STEP, Kind.CLIP, Kind.NORM),
    "weights": (Kind.LOAD,),
    "gradients": (Kind.SUM, Kind.GRAD),
    "hand-over": (Kind.SAVE, Kind.FETCH, Kind.SEND, Kind.RECV, Kind.PASS, Kind.RETURN),
    "what forwards keep": (Kind.OFFLOAD, Kind.ONLOAD),
    "all but compute": set(Kind) - COMPUTE_KINDS,
}


def simulated(decision: Decision, free: Iterable[Kind]) -> Simulated:
    """Return steps of the plan in which ops of the kinds ``free`` take no time."""
    step, costs, kinds = decision.step, decision.simulated.costs, set(free)
    return step.simulate(
        replace(costs, cost_of=lambda op: Cost() if op.kind in kinds else costs.cost_of(op)), 3
    )


def head_share(decision: Decision, done: Simulated) -> float:
    """Return the idle share below which no step comes whose head one GPU has in each round, all rounds in turn."""
    stages = decision.plan.layout.stages
    assert isinstance(stages, Stages)
    times, layout = decision.microbatch.times, decision.plan.layout
    head_s = layout.num_microbatches * times.backward_s[-1] / min(layout.num_rounds, layout.num_workers)
    return max(0.0, 1 - done.busy_s / (layout.num_workers * head_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--activations", default="auto", help="what becomes of them: recompute, say")
    parser.add_argument("--output", type=Path, help="keep the result here")
    options = parser.parse_args()
    rows, result = [], {}
    for name in options.models:
        config, tokens = CASES[name]
        flags = PlanFlags(model=name, gpus="8x4090", tokens_per_step=tokens)
        question = ask(flags, AskedModel(name, config)).question
        decision = decide(question.deciding(activations=options.activations))
        result[name] = {"stages": str(decision.plan.layout.stages), "free": {}}
        for what, kinds in FREE.items():
            done = simulated(decision, kinds)
            rows.append((name, what, f"{100 * done.bubble:.1f}", f"{done.step_s:.2f}"))
            result[name]["free"][what] = {"idle_percent": 100 * done.bubble, "step_s": done.step_s}
        bound = 100 * head_share(decision, decision.simulated)
        rows.append((name, "bound of the head", f"{bound:.1f}", ""))
        result[name]["head_bound_percent"] = bound
    print_table(("model", "free", "idle %", "step s"), rows, "Idle share of 8 GPUs, predicted")
    finish({"bench": "idle", "models": result, "machine": machine()}, options.output)


if __name__ == "__main__":
    main()
