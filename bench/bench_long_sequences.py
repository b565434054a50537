"""How much faster is a step of long sequences where what forwards make leaves the device, instead of being made again?

Simulated, on one RTX 4090 of the machine of `bench_throughput.py`: a step on a few sequences of 31K tokens, bf16, the
training state in host memory. Each way is the best plan found for it:

- *full recompute*: a backward computes the whole forward again, as activation checkpointing does;
- *needed recompute*: it leaves out what nothing needs;
- the choices that offload, everywhere; and *auto*, which mixes them so that no lane waits for another;
- *auto* with MLPs that take the tokens in parts (``train.mlp_parts``), which leaves more of the device to the rest.

A model whose microbatch of one sequence does not fit the device says what it lacks.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import counted, finish, machine, print_table

from outsize.errors import InfeasiblePlanError
from outsize.hardware.cards import parse_gpus
from outsize.hardware.machine_spec import DEVICE_SHARE, HOST_SHARE
from outsize.model.sizes.model_spec import Workload
from outsize.planner.predict.decision_search import decide
from outsize.planner.predict.prediction import predict
from outsize.planner.predict.question import Question
from outsize.planner.search.step_plan import Budgets, PlanOptions

# Sizes of the published configs.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-1.7B": {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "Qwen3-32B": {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 25600,
        "vocab_size": 151936,
    },
}
FULL = "full recompute"
WAYS = {
    FULL: "recompute",
    "needed recompute": "recompute",
    "offload-attention": "offload-attention",
    "offload-products": "offload-products",
    "offload": "offload",
    "auto": "auto",
    "auto, MLPs in 4 parts": "auto",
    "auto, MLPs in 16 parts": "auto",
}
MLP_PARTS = {"auto, MLPs in 4 parts": 4, "auto, MLPs in 16 parts": 16}


def question(name: str, sequences: int, seq_len: int, mlp_parts: int = 1) -> Question:
    """Return the step that is asked about."""
    counts = counted(MODELS[name], mlp_parts=mlp_parts)
    server = parse_gpus("8x4090")
    box = replace(server, gpus=server.gpus[:1], links=server.links[:1])
    budgets = Budgets(
        device=int(DEVICE_SHARE * box.gpus[0].memory_bytes), host=int(HOST_SHARE * box.host.memory_bytes)
    )
    return Question(
        model=counts.spec,
        machine=box,
        budgets=budgets,
        options=PlanOptions(home="host", below="host"),
        home="host",
        sequences=sequences,
        seq_len=seq_len,
        workload_of=lambda count: counts.workload(count, seq_len),
    )


def in_full(workload_of: Callable[[int], Workload]) -> Callable[[int], Workload]:
    """Let a recompute be a whole forward."""

    def workload(count: int) -> Workload:
        work = workload_of(count)
        return replace(work, recompute_flops=work.forward_flops)

    return workload


def predicted(asked: Question, way: str) -> dict[str, Any]:
    """Return what the step takes."""
    asked = asked.deciding(activations=WAYS[way])
    if way == FULL:
        asked = replace(asked, workload_of=in_full(asked.workload_of))
    try:
        decision = decide(asked)
    except InfeasiblePlanError as error:
        return {"short_by_bytes": dict(error.short_by)}
    found, layout = predict(decision), decision.plan.layout
    cells = ((unit, m) for unit in layout.keepable[1:] for m in range(layout.num_microbatches))
    choices = Counter(layout.choice(unit, microbatch).value for unit, microbatch in cells)
    return {
        "step_s": found.step_s,
        "microbatches": found.microbatches,
        "bubble": found.bubble,
        "ends_it": found.ends_it,
        "choices": dict(choices),
        "host_bytes": found.total_bytes("host"),
        "usage": dict(found.usage),
    }


def best_of(result: dict[str, Any], name: str, way: str) -> float | None:
    """Return the largest speed-up of a model over its numbers of sequences."""
    rows = [found[way] for key, found in result.items() if key.startswith(name)]
    return max((row["speedup"] for row in rows if "speedup" in row), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 8], help="of a step")
    parser.add_argument("--seq-len", type=int, default=31744)
    parser.add_argument("--output", type=Path, help="keep the result here")
    options = parser.parse_args()
    rows, result = [], {}
    for name in options.models:
        for sequences in options.sequences:
            found = {
                way: predicted(question(name, sequences, options.seq_len, MLP_PARTS.get(way, 1)), way)
                for way in WAYS
            }
            result[f"{name}, {sequences} sequences"] = found
            base = found[FULL].get("step_s")
            for way, row in found.items():
                if "step_s" not in row:
                    lacks = ", ".join(
                        f"{size / 2**30:.1f} GiB {tier}" for tier, size in row["short_by_bytes"].items()
                    )
                    rows.append((f"{name} x{sequences}", way, None, None, None, f"lacks {lacks}"))
                    continue
                if base is not None:  # what does not fit otherwise is not faster than anything
                    row["speedup"] = base / row["step_s"]
                rows.append(
                    (
                        f"{name} x{sequences}",
                        way,
                        f"{row['step_s']:.1f}",
                        f"{row['speedup']:.3f}" if base is not None else "-",
                        f"{row['bubble']:.1%}",
                        ", ".join(f"{count} {choice}" for choice, count in row["choices"].items()),
                    )
                )
    headers = ("model, sequences", "activations", "step, s", "speed-up", "bubble", "choices")
    print_table(headers, rows, f"Sequences of {options.seq_len} tokens on an RTX 4090, predicted")
    best = {
        way: {name: best_of(result, name, way) for name in options.models} for way in ("auto", *MLP_PARTS)
    }
    finish(
        {
            "bench": "long_sequences",
            "seq_len": options.seq_len,
            "best": best,
            "rows": result,
            "machine": machine(),
        },
        options.output,
    )


if __name__ == "__main__":
    main()
