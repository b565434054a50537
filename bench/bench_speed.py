"""How much slower is a streamed step than a resident one, from disk, at a quarter of the training state?

Three runs of the same model on the same tokens, each in processes of its own, in turn: streamed with the home on disk,
resident with activation checkpointing, resident without. Medians over the steps after the second, in which the
optimizer of a streamed run touches its moments for the first time. ``--home host`` streams from host memory.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from outsize.spin import SPIN_TURNS
from outsize.streamed.spec import RunSpec

os.environ.setdefault("GOMP_SPINCOUNT", SPIN_TURNS)  # as `outsize train` does, before torch reads it

sys.path.insert(0, str(Path(__file__).parent))
import common

WARM = 2
VARIANTS = ("streamed", "resident-checkpointed", "resident")


def build(
    directory: Path, layers: int, hidden: int, vocabulary: int, num_tokens: int, dtype: str = "float32"
) -> None:
    """Save a Llama-shaped model with fresh weights in ``dtype``, and random tokens for it."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=-(-hidden * 8 // 3 // 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=vocabulary,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype)).save_pretrained(directory / "model")
    ids = np.random.default_rng(0).integers(0, vocabulary, num_tokens, dtype=np.int32)
    np.save(directory / "tokens.npy", ids)


def settings(args: argparse.Namespace, directory: Path, home: str = "disk") -> list[str]:
    return [
        f"model.path={directory / 'model'}",
        "model.dtype=fp32",
        f"data.path={directory / 'tokens.npy'}",
        "data.format=tokens",
        f"data.seq_len={args.seq_len}",
        f"train.steps={args.steps}",
        f"train.tokens_per_step={args.tokens_per_step}",
        f"train.microbatches={args.microbatches}",
        "optimizer.schedule=constant",
        "memory.device=cpu",
        f"memory.home={home}",
    ]


def streamed(args: argparse.Namespace, directory: Path) -> dict[str, object]:
    """Train streamed; seconds per step come from the heartbeat."""
    from outsize.config import load_config
    from outsize.training.run import train

    run_dir = Path(tempfile.mkdtemp(dir=directory))
    overrides = [
        *settings(args, directory, args.home),
        f"memory.device_memory={args.budget}",
        f"train.run_dir={run_dir}",
    ]
    result = train(load_config(None, overrides))
    beats = [json.loads(line) for line in (run_dir / "heartbeat.jsonl").read_text().splitlines()]
    return {
        "seconds": [beat["seconds"] for beat in beats[WARM:]],
        "losses": [beat["loss"] for beat in beats],
        "stall_share": result.stall_share,
        "stall_owner": result.stall_owner,
        "bytes_read_per_step": beats[-1]["bytes_read"],
        "bytes_written_per_step": beats[-1]["bytes_written"],
    }


def resident(args: argparse.Namespace, directory: Path, checkpointing: bool) -> dict[str, object]:
    """Train the plain PyTorch reference; its loss is the same chunked one."""
    import time

    from outsize.config import load_config
    from outsize.session.job.prepare import prepare
    from outsize.training.resident import ResidentTrainer, materialise
    from outsize.training.run_data import open_dataset

    run_dir = Path(tempfile.mkdtemp(dir=directory))
    config = load_config(None, [*settings(args, directory, args.home), "memory.device_memory=8GiB"])
    prepared = prepare(RunSpec.of(config, run_dir), lambda _: None)
    with open_dataset(config, prepared, run_dir, lambda _: None) as dataset, materialise(prepared) as masters:
        model = prepared.split.model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        trainer = ResidentTrainer(config, prepared.split, masters, prepared.chunk_tokens)
        batches = (dataset.batch(step, config.sequences_per_step) for step in range(args.steps))
        seconds, losses = [], []
        started = time.perf_counter()
        for loss in trainer.steps(batches):
            seconds.append(time.perf_counter() - started)
            losses.append(loss)
            started = time.perf_counter()
    return {"seconds": seconds[WARM:], "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=common.steps_above(WARM), default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget", default="372MiB", help="a quarter of 16 bytes x 97.5M parameters")
    parser.add_argument("--home", choices=("host", "disk"), default="disk")
    parser.add_argument("--dir", type=Path, help="where model and home lie; the current directory by default")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run = streamed if args.child == "streamed" else resident
        options = {} if args.child == "streamed" else {"checkpointing": args.child.endswith("checkpointed")}
        print(json.dumps(run(args, args.dir, **options)))
        return
    with tempfile.TemporaryDirectory(dir=args.dir or Path.cwd(), prefix="bench-speed-") as name:
        directory = Path(name)
        num_tokens = 4 * args.tokens_per_step * args.steps
        build(directory, args.layers, args.hidden, args.vocabulary, num_tokens)
        runs: dict[str, list[dict[str, object]]] = {variant: [] for variant in VARIANTS}
        for _ in range(args.rounds):
            for variant in VARIANTS:
                runs[variant].append(common.run_child(variant, directory))
    report(args, runs)


def report(args: argparse.Namespace, runs: dict[str, list[dict[str, object]]]) -> None:
    spreads = {v: common.Spread.of(s for run in rows for s in run["seconds"]) for v, rows in runs.items()}  # type: ignore[attr-defined]
    checkpointed = spreads["resident-checkpointed"].median
    rows = [
        (v, str(spread), spread.median / checkpointed, spread.median / spreads["resident"].median)
        for v, spread in spreads.items()
    ]
    headers = ("run", "step, s", "to checkpointed", "to resident")
    common.print_table(headers, rows, title=f"Streamed from {args.home} against resident")
    last = runs["streamed"][-1]
    print(f"stall {last['stall_share']:.1%} of the streamed run, mostly for {last['stall_owner']}")
    equal = len({json.dumps(run["losses"]) for rows_ in runs.values() for run in rows_}) == 1
    print(f"losses of all runs equal, bit for bit: {equal}")
    common.finish(
        {
            "bench": "speed",
            "machine": common.machine(),
            "settings": {k: str(v) for k, v in vars(args).items() if k not in ("output", "dir", "child")},
            "step_s": {v: vars(spread) for v, spread in spreads.items()},
            "ratio_to_checkpointed": spreads["streamed"].median / checkpointed,
            "ratio_to_resident": spreads["streamed"].median / spreads["resident"].median,
            "losses_equal": equal,
            **{k: v for k, v in last.items() if k not in ("seconds", "losses")},
        },
        args.output,
    )


if __name__ == "__main__":
    main()
