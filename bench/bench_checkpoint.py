"""What does saving a checkpoint cost, beside training and as a pause, and what would deltas save of its bytes?

Blocks of steps in turn, in one process: without a checkpoint, with one written beside them, with one that the steps
wait for. What a block takes longer than the one without is the cost of a checkpoint; amortised, it is a share of the
minutes between two of them. The seconds per GB say what that is for a model of any size on this disk.

The second part trains a small model in fp32, then fine-tunes it at 1e-5, and asks what lossless compression (zstandard
1 of byte planes) leaves of each plane: alone, as XOR with the same plane some steps before, and for masters as XOR with
their own bf16 weights.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outsize.streamed.spec import RunSpec

sys.path.insert(0, str(Path(__file__).parent))
import bench_speed
import common

TARGET = 0.03
DISTANCES = (1, 10, 100, 400)


# --- what it costs --------------------------------------------------------------------------------


def cost(args: argparse.Namespace, directory: Path, home: str, dtype: str) -> dict[str, Any]:
    """Measure blocks of steps with and without a checkpoint."""
    from outsize.checkpoint.checkpoint_state import describe, latest
    from outsize.checkpoint.saver import DEFAULT_MINUTES, Saver
    from outsize.config import load_config
    from outsize.session.job.prepare import prepare
    from outsize.session.run_state import Position
    from outsize.session.stream import StreamedTrainer
    from outsize.training.run_data import open_dataset

    run_dir = Path(tempfile.mkdtemp(dir=directory))
    overrides = [*bench_speed.settings(args, directory), "memory.device_memory=4GiB", "train.save_every=1"]
    overrides += [f"model.dtype={dtype}", f"memory.home={home}", "train.save_total_limit=1"]
    config = load_config(None, overrides)
    prepared = prepare(RunSpec.of(config, run_dir), lambda _: None)
    step = 0
    with (
        open_dataset(config, prepared, run_dir, lambda _: None) as dataset,
        StreamedTrainer(prepared, run_dir / "store") as trainer,
    ):
        trainer.fill()

        def state_of(position: Position) -> dict[str, Any]:
            scale = trainer.loss_scale
            return describe(position, config, dtype, scale, dataset.num_sequences, "bench")

        def block(after_first: Callable[[Saver, Position], None] | None) -> float:
            nonlocal step
            saver = Saver(
                trainer, run_dir, config.train, commits=True, state_of=state_of, announce=lambda _: None
            )
            batches = (dataset.batch(step + n, config.sequences_per_step) for n in range(args.steps))
            began = time.perf_counter()
            position = Position(step + 1, 0, 0)
            for outcome in trainer.steps(batches, step):
                if outcome.number == step and after_first is not None:
                    after_first(saver, position)
            trainer.settle()
            if after_first is not None:
                saver.finish(position)
            step += args.steps
            return time.perf_counter() - began

        kinds: dict[str, Callable[[Saver, Position], None] | None] = {
            "without": None,
            "beside": Saver.between_steps,
            "paused": Saver.finish,
        }
        block(None)
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(args.rounds):
            for kind, after_first in kinds.items():
                seconds[kind].append(block(after_first))
        saved = latest(run_dir)
        assert saved is not None
        num_bytes = sum(path.stat().st_size for path in saved.rglob("*.safetensors"))
    spreads = {kind: common.Spread.of(values) for kind, values in seconds.items()}
    without = spreads["without"].median
    extra = {kind: spreads[kind].median - without for kind in ("beside", "paused")}
    parameters_at_target = (
        TARGET * DEFAULT_MINUTES * 60 / max(extra["beside"], 1e-9) * prepared.split.spec.num_parameters
    )
    return {
        "home": home,
        "dtype": dtype,
        "step_s": without / args.steps,
        "block_s": {kind: vars(spread) for kind, spread in spreads.items()},
        "checkpoint_bytes": num_bytes,
        "bytes_per_parameter": num_bytes / prepared.split.spec.num_parameters,
        "extra_s": extra,
        "extra_s_per_gb": {kind: value / num_bytes * 1e9 for kind, value in extra.items()},
        "amortised_share": {kind: value / (DEFAULT_MINUTES * 60) for kind, value in extra.items()},
        "beside_to_paused": common.ratio(extra["beside"], extra["paused"]),
        # A model so large that its checkpoints cost the target at the default cadence.
        "parameters_at_target": parameters_at_target if extra["beside"] > 0 else None,
    }


# --- what deltas would save -----------------------------------------------------------------------


def deltas(pretrain_steps: int) -> list[dict[str, Any]]:
    """Fine-tune a small model and measure what is left of its planes, by the steps between two snapshots."""
    import glob
    import os

    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    files = sorted(glob.glob(os.path.dirname(os.__file__) + "/*.py"))[:60]
    text = np.frombuffer(b"".join(Path(file).read_bytes() for file in files), np.uint8).astype(np.int64)
    data = torch.from_numpy(text)

    def train(steps: int) -> None:
        for _ in range(steps):
            starts = torch.randint(0, len(data) - 64, (8,)).tolist()
            ids = torch.stack([data[start : start + 64] for start in starts])
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()

    def snapshot() -> dict[str, torch.Tensor]:
        def flat(of: Callable[[torch.nn.Parameter], torch.Tensor]) -> torch.Tensor:
            return torch.cat([of(p).detach().reshape(-1) for p in parameters]).clone()

        master = flat(lambda p: p)
        moments = {name: flat(lambda p, n=name: optimizer.state[p][n]) for name in ("exp_avg", "exp_avg_sq")}
        return {"weights, bf16": master.to(torch.bfloat16), "masters, fp32": master, **moments}

    train(pretrain_steps)
    for group in optimizer.param_groups:
        group["lr"] = 1e-5
    train(pretrain_steps // 2)
    before, done, rows = snapshot(), 0, []
    for distance in DISTANCES:
        train(distance - done)
        done = distance
        now = snapshot()
        upper = now["weights, bf16"].view(torch.int16).to(torch.int32) << 16
        for plane, values in now.items():
            integers = torch.int16 if values.itemsize == 2 else torch.int32
            row = {
                "plane": plane,
                "steps": distance,
                "alone": _left(values),
                "xor_former": _left(values.view(integers) ^ before[plane].view(integers)),
                "xor_own_weights": None,
            }
            if plane.startswith("masters"):
                row["xor_own_weights"] = _left(values.view(torch.int32) ^ upper)
            rows.append(row)
    return rows


def _left(values: Any) -> float:
    """Share of the bytes that zstandard leaves, each byte of the elements in a plane of its own."""
    import torch
    import zstandard

    planes = values.view(torch.uint8).numpy().reshape(-1, values.itemsize).T.copy()
    return (
        sum(len(zstandard.ZstdCompressor(level=1).compress(plane.tobytes())) for plane in planes)
        / planes.size
    )


# --- report ---------------------------------------------------------------------------------------


def show(found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    common.print_table(
        (
            "home, dtype",
            "step, s",
            "bytes/param",
            "beside, s/GB",
            "paused, s/GB",
            "beside/paused",
            "at 3 %, params",
        ),
        [
            (
                f"{f['home']}, {f['dtype']}",
                f["step_s"],
                f["bytes_per_parameter"],
                f["extra_s_per_gb"]["beside"],
                f["extra_s_per_gb"]["paused"],
                f["beside_to_paused"],
                f["parameters_at_target"],
            )
            for f in found
        ],
        title="A checkpoint beside training, and as a pause",
    )
    common.print_table(
        ("plane", "steps apart", "alone", "xor former", "xor own weights"),
        [tuple(row.values()) for row in rows],
        title="Share of the bytes that zstandard leaves",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--tokens-per-step", type=int, default=1024)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pretrain-steps", type=int, default=250)
    parser.add_argument("--cases", nargs="*", default=["host:fp32", "host:bf16", "disk:fp32"])
    parser.add_argument("--dir", type=Path, help="where everything lies; the current directory by default")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir or Path.cwd(), prefix="bench-checkpoint-") as name:
        directory = Path(name)
        num_tokens = args.tokens_per_step * args.steps * (3 * args.rounds + 2)
        bench_speed.build(directory, args.layers, args.hidden, args.vocabulary, num_tokens)
        found = [cost(args, directory, *case.split(":")) for case in args.cases]
    rows = deltas(args.pretrain_steps)
    show(found, rows)
    worst = max(f["amortised_share"]["beside"] for f in found)
    common.finish(
        {
            "bench": "checkpoint",
            "machine": common.machine(),
            "settings": {k: str(v) for k, v in vars(args).items() if k not in ("output", "dir")},
            "amortised_share": worst,
            "target_met": worst <= TARGET,
            "cost": found,
            "deltas": rows,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
