"""Does a model train whose state is larger than the machine's memory, in a third of that memory?

A Llama of 2.26B parameters in bf16 has 25.2 GiB of weights, masters and moments: more than a machine of 24 GiB has. It
is trained from disk by `outsize.train`, in a process whose control group may use 8 GiB, page cache included. Then the
same steps are made with another budget and another limit, so other activations are recomputed and other units wait in
memory. Losses and all weights of both must be equal, bit for bit: a resident run, which would settle it, does not fit.

    python bench/bench_larger.py --dir DISK          # root, for the control group; 70 GiB of disk, 15 minutes
"""

import argparse
import hashlib
import json
import tempfile
from pathlib import Path

import bench_speed
import common

GIB = 2**30
LAYERS, HIDDEN, VOCABULARY, SEQ_LEN = 42, 2048, 32000, 256
# Variants: memory that the control group may use, and the device's budget of it.
LIMITS = {"8 GiB": (8 * GIB, "3GiB"), "6 GiB": (6 * GIB, "2GiB")}


def trained(directory: Path, limit_bytes: int, device_memory: str, steps: int) -> dict[str, object]:
    """Train within ``limit_bytes`` and return what the run came to, with a checksum of the weights it ends with."""
    from outsize.config import load_config
    from outsize.training.run import train

    settings = (
        f"model.path={directory / 'model'}",
        "model.dtype=bf16",
        f"data.path={directory / 'tokens.npy'}",
        "data.format=tokens",
        f"data.seq_len={SEQ_LEN}",
        f"train.steps={steps}",
        f"train.tokens_per_step={4 * SEQ_LEN}",
        "train.microbatches=2",
        "memory.commits=none",
        "memory.home=disk",
        f"memory.device_memory={device_memory}",
    )
    first = {"memory.limit_in_bytes": str(limit_bytes)}
    second = {"memory.max": str(limit_bytes), "memory.swap.max": "0"}
    with (
        common.control_group("memory", first, second) as group,
        tempfile.TemporaryDirectory(dir=directory) as run_dir,
    ):
        config = load_config(None, [*settings, f"train.run_dir={run_dir}"])
        result = train(config, announce=lambda line: print(line, flush=True))
        beats = [json.loads(line) for line in (Path(run_dir) / "heartbeat.jsonl").read_text().splitlines()]
        peak = next(
            path for name in ("memory.max_usage_in_bytes", "memory.peak") if (path := group / name).exists()
        )
        assert result.export_dir is not None
        return {
            "state_bytes": sum(json.loads((Path(run_dir) / "plan.json").read_text())["home_bytes"].values()),
            "limit_bytes": limit_bytes,
            "group_peak_bytes": int(peak.read_text()),
            "peak_rss_bytes": result.peak_rss_bytes,
            "budget_bytes": result.budget_bytes,
            "losses": [beat["loss"] for beat in beats],
            "seconds": [beat["seconds"] for beat in beats],
            "predicted_step_s": result.predicted_step_s,
            "bytes_read_per_step": beats[-1]["bytes_read"],
            "bytes_written_per_step": beats[-1]["bytes_written"],
            "stall_share": result.stall_share,
            "stall_owner": result.stall_owner,
            "weights_sha256": checksum(Path(result.export_dir)),
        }


def checksum(model: Path) -> str:
    """Return one checksum of all weights of a saved model, read in pieces."""
    digest = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            while piece := file.read(2**24):
                digest.update(piece)
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--steps", type=common.steps_above(1), default=3)
    parser.add_argument("--dir", type=Path, help="where model and homes lie; best on a disk")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", choices=LIMITS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(trained(args.dir, *LIMITS[args.child], args.steps)))
        return
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-larger-") as name:
        directory = Path(name)
        tokens = 8 * SEQ_LEN * args.steps
        bench_speed.build(directory, args.layers, HIDDEN, VOCABULARY, tokens, "bfloat16")
        runs = {limit: common.run_child(limit, directory) for limit in LIMITS}
    report(args, runs)


def report(args: argparse.Namespace, runs: dict[str, dict[str, object]]) -> None:
    rows = []
    for limit, run in runs.items():
        step = common.Spread.of(run["seconds"][1:])
        rows.append(
            (limit, run["peak_rss_bytes"] / GIB, str(step), run["predicted_step_s"], run["stall_share"])
        )
    common.print_table(("may use", "peak resident, GiB", "step, s", "predicted, s", "waited"), rows)
    first, *others = runs.values()
    same = {key: all(run[key] == first[key] for run in others) for key in ("losses", "weights_sha256")}
    print(f"losses equal: {same['losses']}; weights equal: {same['weights_sha256']}")
    common.finish(
        {
            "bench": "larger",
            "machine": common.machine(),
            "steps": args.steps,
            "runs": runs,
            "losses_equal": same["losses"],
            "weights_equal": same["weights_sha256"],
        },
        args.output,
    )


if __name__ == "__main__":
    main()
