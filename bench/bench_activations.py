"""What does it cost to recompute what a backward needs, and what is gained by keeping it, budget by budget?

The same model on the same tokens, each run in a process of its own, in turn: streamed from host memory with
``memory.activations`` recompute and auto, at the least budget, at all that everything kept takes, and between; and with
every other choice. Beside them plain PyTorch, resident, with activation checkpointing and without. All losses must be
equal, bit for bit. *recomputed* is the share of units and microbatches of which nothing is kept.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from outsize.streamed.spec import RunSpec

sys.path.insert(0, str(Path(__file__).parent))
import bench_speed
import common

RESIDENT = ("resident-checkpointed", "resident")
SHARES = (0.0, 0.5, 1.0)
# What is kept of all units, at the largest budget; what is offloaded goes from one place in RAM to another.
FORCED = ("keep", "keep-attention", "keep-products", "offload-attention", "offload-products", "offload")


def settings(args: argparse.Namespace, directory: Path) -> list[str]:
    return [*bench_speed.settings(args, directory, "host"), "memory.host_memory=8GiB"]


def plan(args: argparse.Namespace, directory: Path, activations: str, budget: int | str) -> dict[str, int]:
    """Return what a run would set aside, and how much of it is recomputed."""
    from outsize.config import load_config
    from outsize.planner.program.stages import Choice
    from outsize.session.job.prepare import prepare

    overrides = [
        *settings(args, directory),
        f"memory.activations={activations}",
        f"memory.device_memory={budget}",
    ]
    found = prepare(RunSpec.of(load_config(None, overrides), directory / "run"), lambda _: None).plan
    layout = found.layout
    choices = [layout.choice(u, m) for u in layout.keepable for m in range(layout.num_microbatches)]
    recomputed = sum(choice is Choice.RECOMPUTE for choice in choices) / len(choices)
    return {"bytes": found.total_bytes("device"), "recomputed": recomputed}


def least(args: argparse.Namespace, directory: Path) -> dict[str, int]:
    """Return the smallest budget that any plan fits, and what a plan takes that keeps everything."""
    from outsize.errors import InfeasiblePlanError

    whole = plan(args, directory, "keep", "8GiB")["bytes"]
    try:
        return {"least": plan(args, directory, "recompute", "1MiB")["bytes"], "whole": whole}
    except InfeasiblePlanError as error:
        return {"least": 2**20 + error.short_by["device"], "whole": whole}


def streamed(args: argparse.Namespace, directory: Path, activations: str, budget: str) -> dict[str, object]:
    from outsize.config import load_config
    from outsize.training.run import train

    run_dir = Path(tempfile.mkdtemp(dir=directory))
    overrides = [
        *settings(args, directory),
        f"memory.activations={activations}",
        f"memory.device_memory={budget}",
        f"train.run_dir={run_dir}",
    ]
    train(load_config(None, overrides))
    beats = [json.loads(line) for line in (run_dir / "heartbeat.jsonl").read_text().splitlines()]
    return {
        "seconds": [beat["seconds"] for beat in beats[1:]],
        "losses": [beat["loss"] for beat in beats],
        **plan(args, directory, activations, budget),
    }


def child(args: argparse.Namespace) -> dict[str, object]:
    kind, *rest = args.child.split(":")
    if kind == "least":
        return dict(least(args, args.dir))
    if kind in RESIDENT:
        return bench_speed.resident(args, args.dir, kind == "resident-checkpointed")
    return streamed(args, args.dir, kind, rest[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--steps", type=common.steps_above(1), default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dir", type=Path, help="where model and runs lie; the current directory by default")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args)))
        return
    with tempfile.TemporaryDirectory(dir=args.dir or Path.cwd(), prefix="bench-activations-") as name:
        directory = Path(name)
        num_tokens = 4 * args.tokens_per_step * args.steps
        bench_speed.build(directory, args.layers, args.hidden, args.vocabulary, num_tokens)
        ends = common.run_child("least", directory)
        between = [int(ends["least"] + share * (ends["whole"] - ends["least"])) for share in SHARES]
        variants = [f"{kind}:{budget}" for budget in between for kind in ("recompute", "auto")]
        variants += [*(f"{choice}:{between[-1]}" for choice in FORCED), *RESIDENT]
        runs: dict[str, list[dict[str, object]]] = {variant: [] for variant in variants}
        for _ in range(args.rounds):
            for variant in variants:
                runs[variant].append(common.run_child(variant, directory))
    report(args, runs)


def report(args: argparse.Namespace, runs: dict[str, list[dict[str, object]]]) -> None:
    spreads = {v: common.Spread.of(s for run in rows for s in run["seconds"]) for v, rows in runs.items()}  # type: ignore[attr-defined]
    rows, result = [], {}
    for variant, spread in spreads.items():
        kind, _, budget = variant.partition(":")
        last = runs[variant][-1]
        ratios = [spread.median / spreads[name].median for name in RESIDENT]
        size = f"{int(budget) / 2**20:.0f} MiB" if budget else ""
        share = f"{last['recomputed']:.0%}" if "recomputed" in last else ""
        rows.append((kind, size, share, str(spread), *(f"{ratio:.2f}" for ratio in ratios)))
        result[variant] = {
            "step_s": vars(spread),
            "to_checkpointed": ratios[0],
            "to_resident": ratios[1],
            "recomputed": last.get("recomputed"),
        }
    headers = ("activations", "budget", "recomputed", "step, s", "to checkpointed", "to resident")
    common.print_table(headers, rows, title="What backwards need: recomputed, or kept")
    equal = len({json.dumps(run["losses"]) for found in runs.values() for run in found}) == 1
    print(f"losses of all runs equal, bit for bit: {equal}")
    common.finish(
        {
            "bench": "activations",
            "machine": common.machine(),
            "settings": {k: str(v) for k, v in vars(args).items() if k not in ("output", "dir", "child")},
            "runs": result,
            "losses_equal": equal,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
