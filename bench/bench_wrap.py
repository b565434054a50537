"""What does a loop of one's own over `outsize.wrap` cost, against the engine's own trainer?

The same model, batches, budget, slots and optimizer; the trainer walks one program per step and runs head, loss and
backward in one op, the loop asks for forward, backward and step. Each run is a process of its own, in turn; medians
over the steps after the second. Both with the model's own loss, clipping to a norm of 1. Losses are compared as well,
and seconds of processors, which other programs disturb less.

    python bench/bench_wrap.py                       # 34M parameters, home in host memory: under 4 minutes on two cores
    python bench/bench_wrap.py --home disk
"""

import argparse
import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from outsize.streamed.spec import RunSpec

sys.path.insert(0, str(Path(__file__).parent))
import common

VARIANTS = ("trainer", "wrap")
TARGET = 1.05


def settings(args: argparse.Namespace, directory: Path) -> list[str]:
    return [
        f"model.path={directory / 'model'}",
        "model.dtype=fp32",
        f"data.path={directory / 'tokens.npy'}",
        "data.format=tokens",
        f"data.seq_len={args.seq_len}",
        f"train.steps={args.steps}",
        f"train.tokens_per_step={args.tokens_per_step}",
        f"train.microbatches={args.microbatches}",
        "train.loss=model",
        f"train.run_dir={tempfile.mkdtemp(dir=directory)}",
        "optimizer.schedule=constant",
        "optimizer.max_grad_norm=1.0",
        "memory.device=cpu",
        f"memory.home={args.home}",
        f"memory.device_memory={args.budget}",
        f"memory.slots={args.slots}",
    ]


def run(args: argparse.Namespace, directory: Path, variant: str) -> dict[str, Any]:
    """Seconds and losses of each step."""
    from outsize.config import load_config
    from outsize.session.job.prepare import prepare
    from outsize.training.run_data import open_dataset

    config = load_config(None, settings(args, directory))
    run_dir = Path(config.train.run_dir)
    prepared = prepare(RunSpec.of(config, run_dir), lambda _: None)
    with open_dataset(config, prepared, run_dir, lambda _: None) as dataset:
        batches = [dataset.batch(step, config.sequences_per_step) for step in range(args.steps)]
    return (trainer if variant == "trainer" else wrap)(config, prepared, batches, args)


def trainer(config: Any, prepared: Any, batches: Any, args: argparse.Namespace) -> dict[str, Any]:
    from outsize.session.stream import StreamedTrainer

    with StreamedTrainer(prepared, Path(config.train.run_dir) / "store") as streamed:
        streamed.fill()
        outcomes, cpu = [], [time.process_time()]
        for outcome in streamed.steps(batches):
            outcomes.append(outcome)
            cpu.append(time.process_time())
        streamed.settle()
        seconds, losses = [o.seconds for o in outcomes], [o.loss for o in outcomes]
        return {"seconds": seconds, "cpu_s": [b - a for a, b in pairwise(cpu)], "losses": losses}


def wrap(config: Any, prepared: Any, batches: Any, args: argparse.Namespace) -> dict[str, Any]:
    import outsize
    from outsize.optim.rate_groups import decay_parameter_names

    model = outsize.load(
        config.model.path,
        dtype="fp32",
        device="cpu",
        device_memory=args.budget,
        home=args.home,
        microbatches=args.microbatches,
        slots=args.slots,
        store_dir=Path(config.train.run_dir) / "store",
    )
    decaying = decay_parameter_names(model)
    named = list(model.named_parameters())
    optimizer = outsize.AdamW(
        model,
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        groups=[
            {
                "params": [p for n, p in named if n in decaying],
                "weight_decay": config.optimizer.weight_decay,
            },
            {"params": [p for n, p in named if n not in decaying], "weight_decay": 0.0},
        ],
    )
    seconds, losses, cpu = [], [], [time.process_time()]
    for batch in batches:
        started = time.perf_counter()
        loss = model(input_ids=batch.input_ids, labels=batch.labels).loss
        loss.backward()
        outsize.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time())
    outsize.unwrap(model)
    return {"seconds": seconds, "cpu_s": [b - a for a, b in pairwise(cpu)], "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--steps", type=common.steps_above(2), default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--home", choices=("host", "disk"), default="host")
    parser.add_argument("--budget", default="1GiB")
    parser.add_argument("--dir", type=Path, help="where model and home lie; the current directory by default")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run(args, args.dir, args.child)))
        return
    from bench_speed import build

    with tempfile.TemporaryDirectory(dir=args.dir or Path.cwd(), prefix="bench-wrap-") as name:
        directory = Path(name)
        build(directory, args.layers, args.hidden, args.vocabulary, 4 * args.tokens_per_step * args.steps)
        runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
        for _ in range(args.rounds):
            for variant in VARIANTS:
                runs[variant].append(common.run_child(variant, directory))
    report(args, runs)


def report(args: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> None:
    spreads = {v: common.Spread.of(s for run in rows for s in run["seconds"][2:]) for v, rows in runs.items()}
    cpu = {v: common.Spread.of(s for run in rows for s in run["cpu_s"][2:]) for v, rows in runs.items()}
    ratio = spreads["wrap"].median / spreads["trainer"].median
    cpu_ratio = cpu["wrap"].median / cpu["trainer"].median
    rows = [
        (
            v,
            str(spread),
            spread.median / spreads["trainer"].median,
            str(cpu[v]),
            cpu[v].median / cpu["trainer"].median,
        )
        for v, spread in spreads.items()
    ]
    headers = ("run", "step, s", "to the trainer", "of processors, s", "to the trainer")
    common.print_table(headers, rows, title="A loop of one's own")
    losses = {v: rows_[0]["losses"] for v, rows_ in runs.items()}
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    print(f"largest difference of losses: {apart:g}")
    common.finish(
        {
            "bench": "wrap",
            "machine": common.machine(),
            "settings": {k: str(v) for k, v in vars(args).items() if k not in ("output", "dir", "child")},
            "step_s": {v: vars(spread) for v, spread in spreads.items()},
            "ratio": ratio,
            "cpu_s": {v: vars(spread) for v, spread in cpu.items()},
            "cpu_ratio": cpu_ratio,
            "target": TARGET,
            "losses_apart": apart,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
