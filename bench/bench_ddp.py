"""Which settings of DistributedDataParallel matter? Step time, bytes on the wire and loss of each.

Two ranks on the loopback of this machine train a Llama of 9.0M parameters in fp32, in four microbatches. Every variant
is a run of its own, all of them one after the other, over and over, so that what else the machine does hits all. Bytes
are those that the loopback counted in a whole run, over its steps. ``sync every microbatch`` is not a setting: it is
what accumulation without sync saves.

The loopback is faster than any network. What a variant would take on a slower one follows from its two columns: where
``bytes / bandwidth`` is more than the compute that it hides behind, fewer bytes pay, and else they cost.

    python bench/bench_ddp.py                     # about 4 minutes
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked child must not miss the threads of its parent
sys.path.insert(0, str(Path(__file__).parent))
import bench_speed
import common
from forked import fork_ranks

from outsize.cli import main as cli
from outsize.config import dump_config
from outsize.config.load import parse_config

LAYERS, HIDDEN, VOCABULARY = 5, 320, 4096
SEQ_LEN, SEQUENCES, STEPS, WARM = 128, 8, 8, 2
VARIANTS = {
    "defaults": {},
    "buckets of 1 MiB": {"ddp_bucket_mib": 1.0},
    "buckets of 100 MiB": {"ddp_bucket_mib": 100.0},
    "static graph": {"ddp_static_graph": True},
    "find unused": {"ddp_find_unused": True},
    "fp16": {"ddp_compress": "fp16"},
    "sync every microbatch": {},
}


def write_run(root: Path, name: str, parallel: dict[str, object]) -> Path:
    config = parse_config(
        {
            "model": {"path": str(root / "model"), "dtype": "fp32"},
            "data": {"path": str(root / "tokens.npy"), "seq_len": SEQ_LEN},
            "train": {
                "steps": STEPS,
                "tokens_per_step": SEQUENCES * SEQ_LEN,
                "microbatches": SEQUENCES // 2,
                "run_dir": str(root / name),
            },
            "optimizer": {"lr": 1e-3},
            "memory": {"device": "cpu", "device_memory": "1GiB", "host_memory": "1GiB", "home": "host"},
            "parallel": {"mode": "ddp", **parallel},
        }
    )
    path = root / f"{name}.yaml"
    path.write_text(dump_config(config))
    return path


def run(root: Path, name: str, variant: str) -> tuple[list[float], float, float]:
    """Run a variant; returns seconds of its steps, bytes per step, and its last loss."""
    config = write_run(root, name, VARIANTS[variant])

    def work(rank: int) -> None:
        if variant == "sync every microbatch":
            from torch.nn.parallel import DistributedDataParallel

            DistributedDataParallel.no_sync = lambda self: contextlib.nullcontext()  # type: ignore[method-assign]
        sys.argv = ["outsize", "train", str(config)]
        sys.exit(cli())

    logs = root / f"{name}-logs"
    logs.mkdir()
    before = common.loopback_bytes()
    processes = fork_ranks(2, work, logs)
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        told = "\n".join(path.read_text()[-1500:] for path in sorted(logs.iterdir()))
        raise SystemExit(f"{variant}: {[process.exitcode for process in processes]}\n{told}")
    sent = (common.loopback_bytes() - before) / STEPS
    beats = [json.loads(line) for line in (root / name / "heartbeat.jsonl").read_text().splitlines()]
    return [beat["seconds"] for beat in beats[WARM:]], sent, beats[-1]["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS)[1:], default=list(VARIANTS)[1:])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    variants = ["defaults", *arguments.variants]
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    sent: dict[str, float] = {}
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="outsize-ddp-") as directory:
        root = Path(directory)
        made = common.imported_by(lambda: bench_speed.build(root, LAYERS, HIDDEN, VOCABULARY, 60_000))
        common.import_all([*made, "torch.nn.parallel.distributed"])
        for number in range(arguments.rounds):
            for index, variant in enumerate(variants):
                times, sent[variant], losses[variant] = run(root, f"run-{number}-{index}", variant)
                seconds[variant] += times
    spreads = {variant: common.Spread.of(times) for variant, times in seconds.items()}
    base = spreads["defaults"].median
    common.print_table(
        ("variant", "step s", "against defaults", "MB per step", "last loss"),
        [
            (
                name,
                str(spread),
                f"{spread.median / base:.2f}",
                f"{sent[name] / 1e6:.1f}",
                f"{losses[name]:.5f}",
            )
            for name, spread in spreads.items()
        ],
    )
    common.finish(
        {
            "bench": "ddp",
            "machine": common.machine(),
            "steps": {name: spread.median for name, spread in spreads.items()},
            "against_defaults": {name: spread.median / base for name, spread in spreads.items()},
            "bytes_per_step": sent,
            "last_loss": losses,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
