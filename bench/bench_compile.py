"""What do compiled blocks gain? Resident steps and streamed ones, compiled and as they are, by turns in one process.

Both train the same model on the same tokens. What is compiled is compiled before the first step is timed; how long that
took is told beside, with an empty cache of torch's unless ``--warm`` leaves it as it is.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.streamed.spec import RunSpec

if TYPE_CHECKING:
    from outsize.config import Config

sys.path.insert(0, str(Path(__file__).parent))
import common

MODES = ("off", "blocks")
DTYPES = ("fp32", "bf16")


def config_of(args: argparse.Namespace, mode: str) -> "Config":
    from outsize.config import load_config

    shape, dtype = args.child.split(":")
    overrides = [
        f"model.path={args.dir / shape / 'model'}",
        f"model.dtype={dtype}",
        f"model.compile={mode}",
        f"data.path={args.dir}",
        f"data.seq_len={args.seq_len}",
        f"train.tokens_per_step={args.tokens_per_step}",
        f"train.microbatches={args.microbatches}",
        f"train.steps={args.steps}",
        f"memory.device_memory={args.device_memory}",
        "memory.device=cpu",
        "memory.home=host",
    ]
    return load_config(None, overrides)


def child(args: argparse.Namespace) -> dict[str, object]:
    """Train one shape in one dtype, compiled and not, by turns of a step each."""
    from contextlib import ExitStack

    import torch

    from outsize.data.batch import Batch
    from outsize.session.job.prepare import prepare
    from outsize.session.process_settings import borrowed_torch
    from outsize.session.stream import StreamedTrainer

    found: dict[str, object] = {}
    with ExitStack() as stack:
        stack.enter_context(borrowed_torch(deterministic=True))
        trainers, steppers = {}, {}
        for mode in MODES:
            began_s, said = time.perf_counter(), list[str]()
            prepared = prepare(RunSpec.of(config_of(args, mode), args.dir / f"run-{mode}"), said.append)
            found[f"{mode}_prepare_s"] = time.perf_counter() - began_s
            found[f"{mode}_said"] = [line for line in said if line.startswith("compile: ")]
            trainer = stack.enter_context(StreamedTrainer(prepared, args.dir / f"store-{mode}"))
            trainer.fill()
            trainers[mode] = trainer
            generator = torch.Generator().manual_seed(1)
            size = (args.tokens_per_step // args.seq_len, args.seq_len)
            ids = [torch.randint(0, 8192, size, generator=generator) for _ in range(args.steps)]
            steppers[mode] = trainer.steps([Batch(input_ids=each, labels=each) for each in ids])
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        losses: dict[str, list[float]] = {mode: [] for mode in MODES}
        for number in range(args.steps):
            for mode in MODES if number % 2 else MODES[::-1]:
                began_s = time.perf_counter()
                outcome = next(steppers[mode])
                trainers[mode].settle()
                seconds[mode].append(time.perf_counter() - began_s)
                losses[mode].append(outcome.loss)
    return {**found, "seconds": {mode: taken[2:] for mode, taken in seconds.items()}, "losses": losses}


def run_one(args: argparse.Namespace, directory: Path, what: str) -> dict[str, object]:
    """Run one shape and dtype in a process of its own, with an empty cache of torch's unless it may be warm."""
    environment = dict(os.environ)
    if not args.warm:
        environment["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=directory, prefix="cache-")
    command = [sys.executable, *sys.argv, "--child", what, "--dir", str(directory)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found = common.last_json(done.stdout)
    assert found is not None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["llama-34m", "llama-100m"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--steps", type=common.steps_above(2), default=8)
    parser.add_argument("--device-memory", default="2GiB")
    parser.add_argument("--warm", action="store_true", help="leave torch's cache of compiled code as it is")
    parser.add_argument("--dir", type=Path, help="where model and runs lie; the current directory by default")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args)))
        return
    runs = {}
    with tempfile.TemporaryDirectory(dir=args.dir or Path.cwd(), prefix="bench-compile-") as name:
        directory = Path(name)
        for shape in args.shapes:
            script = Path(__file__).parent / "shapes.py"
            subprocess.run([sys.executable, script, shape, directory / shape], check=True)
            for dtype in args.dtypes:
                runs[f"{shape}:{dtype}"] = run_one(args, directory, f"{shape}:{dtype}")
    report(args, runs)


def report(args: argparse.Namespace, runs: dict[str, dict[str, object]]) -> None:
    rows, result = [], {}
    for what, run in runs.items():
        spreads = {mode: common.Spread.of(run["seconds"][mode]) for mode in MODES}
        pairs = [off / blocks for off, blocks in zip(*(run["seconds"][mode] for mode in MODES), strict=True)]
        gain = common.Spread.of(pairs)
        before = run["blocks_prepare_s"] - run["off_prepare_s"]
        rows.append((what, str(spreads["off"]), str(spreads["blocks"]), str(gain), f"{before:.0f}"))
        result[what] = {
            **{f"{mode}_step_s": vars(spread) for mode, spread in spreads.items()},
            "gain": vars(gain),
            "compile_s": before,
            "said": run["blocks_said"],
            "losses": run["losses"],
        }
    headers = ("model", "as it is, s", "compiled, s", "gain", "compiling, s")
    common.print_table(headers, rows, title="Streamed steps, compiled and not, by turns")
    common.finish(
        {
            "bench": "compile",
            "machine": common.machine(),
            "settings": {k: str(v) for k, v in vars(args).items() if k not in ("output", "dir", "child")},
            "runs": result,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
