"""What does it cost to commit every step? Steps of the disk home with commits against the same steps in place.

With commits a step writes beside what is committed, every granule that is written or read has a checksum, and a COMMIT
syncs, writes its record and syncs again. In place it does none of that. Two trainers of the same model live in one
process and take turns, a few steps each, in both orders; both end with the same weights.

Disks are noisy: beside seconds it counts processor seconds, and says what part of them checksums are: the bytes that a
step moves over what one core hashes.

    python bench/bench_commit.py                    # 50M parameters, 2,048 tokens per step, some 4 minutes
"""

import argparse
import contextlib
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from outsize.streamed.spec import RunSpec

sys.path.insert(0, str(Path(__file__).parent))
import common
from bench_speed import build

from outsize.config import Config
from outsize.config.load import parse_config
from outsize.model.sizes.model_spec import GRANULE_ELEMENTS
from outsize.runtime.device.heap import begin_run, own_process, set_thresholds
from outsize.session.job.prepare import prepare
from outsize.session.process_settings import borrowed_torch
from outsize.session.stream import StreamedTrainer
from outsize.storage.disk_file import DEFAULT_REQUEST_BYTES
from outsize.storage.record import HASH, checksum
from outsize.training.run_data import open_dataset

TARGET = 1.05
VARIANTS = ("step", "none")
# Steps go to two sides in turn: after these every byte of both has been written once, and no extent is new to the disk.
WARM_STEPS = 3
HASHED_BYTES = 256 * 2**20


def config_of(args: argparse.Namespace, directory: Path, commits: str) -> Config:
    return parse_config(
        {
            "model": {"path": str(directory / "model"), "dtype": args.dtype},
            "data": {"path": str(directory / "tokens.npy"), "format": "tokens", "seq_len": args.seq_len},
            "train": {
                "steps": 10_000,
                "tokens_per_step": args.tokens_per_step,
                "microbatches": args.microbatches,
                "run_dir": str(directory / f"run-{commits}"),
            },
            "optimizer": {"schedule": "constant"},
            "memory": {"device": "cpu", "home": "disk", "device_memory": args.budget, "commits": commits},
        }
    )


class Contender:
    """A trainer that takes a few steps when it is its turn."""

    def __init__(
        self, stack: contextlib.ExitStack, args: argparse.Namespace, directory: Path, commits: str
    ) -> None:
        config = config_of(args, directory, commits)
        run_dir = Path(config.train.run_dir or "")
        run_dir.mkdir()
        prepared = prepare(RunSpec.of(config, run_dir), lambda _: None)
        self._config = config
        self._dataset = stack.enter_context(open_dataset(config, prepared, run_dir, lambda _: None))
        begin_run(heap=prepared.heap)
        self.trainer = stack.enter_context(
            StreamedTrainer(prepared, run_dir / "store", home_file=run_dir / "store" / "home.bin")
        )
        self.trainer.fill()
        self._step = 0
        self.commit_s = self.cpu_s = 0.0

    def run(self, num_steps: int) -> float:
        """Take ``num_steps`` steps and settle; return seconds per step."""
        steps = range(self._step, self._step + num_steps)
        batches = [self._dataset.batch(step, self._config.sequences_per_step) for step in steps]
        self.trainer.take_timeline()
        used, began = time.process_time(), time.perf_counter()
        for _ in self.trainer.steps(batches, self._step):
            pass
        self.trainer.settle()
        seconds, used = time.perf_counter() - began, time.process_time() - used
        self.cpu_s = used / num_steps
        self._step += num_steps
        events = self.trainer.take_timeline().events
        self.commit_s = sum(e.end_s - e.start_s for e in events if str(e.op) == "COMMIT") / num_steps
        return seconds / num_steps

    def digest(self) -> str:
        """Hash of all weights."""
        digest = hashlib.sha256()
        for unit in self.trainer.spec.units:
            for name, tensor in sorted(self.trainer.read_unit(unit).items()) if unit.tensors else ():
                digest.update(name.encode())
                digest.update(tensor.contiguous().view(-1).numpy().tobytes())
        return digest.hexdigest()


def hash_rate(granule_bytes: int) -> float:
    """Bytes per processor second that one core hashes of requests that it has just been given, granule by granule."""
    source = memoryview(os.urandom(DEFAULT_REQUEST_BYTES))
    request = memoryview(bytearray(DEFAULT_REQUEST_BYTES))
    best = 0.0
    for _ in range(3):
        used = 0.0
        for _ in range(HASHED_BYTES // DEFAULT_REQUEST_BYTES):
            request[:] = source
            began = time.thread_time()
            for at in range(0, len(request), granule_bytes):
                checksum(request[at : at + granule_bytes])
            used += time.thread_time() - began
        best = max(best, HASHED_BYTES / used)
    return best


def compete(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Let the two take turns."""
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    cpu_s: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    commits: list[float] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(borrowed_torch(deterministic=True))
        own_process()  # as `outsize train` does
        set_thresholds(heap=False)
        contenders = {variant: Contender(stack, args, directory, variant) for variant in VARIANTS}
        for contender in contenders.values():
            contender.run(WARM_STEPS)
        for turn in range(args.rounds):
            for variant in VARIANTS if turn % 2 else reversed(VARIANTS):
                seconds[variant].append(contenders[variant].run(args.steps))
                cpu_s[variant].append(contenders[variant].cpu_s)
            commits.append(contenders["step"].commit_s)
        same = len({contender.digest() for contender in contenders.values()}) == 1
        traffic = contenders["step"].trainer.prepared.plan.traffic
    ratios = [one / other for one, other in zip(seconds["step"], seconds["none"], strict=True)]
    spreads = {variant: common.Spread.of(values) for variant, values in seconds.items()}
    rows = [(f"memory.commits={v}", s.median, s.low, s.high) for v, s in spreads.items()]
    common.print_table(("", "s per step", "low", "high"), rows, title="A step of the disk home")
    ratio = common.Spread.of(ratios)
    cpu = {variant: common.Spread.of(values).median for variant, values in cpu_s.items()}
    rates = {size: hash_rate(size) for size in (65_536 * 4, GRANULE_ELEMENTS * 4)}
    hashed = traffic.disk_read + traffic.disk_written
    hash_s = hashed / rates[GRANULE_ELEMENTS * 4]
    print(f"processor seconds per step: {cpu['step']:.2f} with commits, {cpu['none']:.2f} in place")
    print(
        f"{HASH}: {', '.join(f'{rate / 1e9:.1f} GB/s a core by {size // 1024} KiB' for size, rate in rates.items())}; "
        f"{hashed / 1e9:.2f} GB per step are {hash_s:.3f} processor seconds"
    )
    print(f"with commits / in place: {ratio}, of pairs {', '.join(f'{r:.3f}' for r in ratios)}")
    return {
        "seconds": seconds,
        "ratio": ratio.median,
        "ratios": ratios,
        "commit_s": common.Spread.of(commits).median,
        "bytes_written_per_step": traffic.disk_written,
        "cpu_s": cpu,
        "hash": HASH,
        "hash_bytes_per_s": {str(size): rate for size, rate in rates.items()},
        "hash_bytes_per_step": hashed,
        "hash_share_of_cpu": hash_s / cpu["none"],
        "same_weights": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="per turn")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--budget", default="512MiB")
    parser.add_argument("--dir", type=Path, help="where the homes lie; the current directory by default")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir or Path.cwd(), prefix="bench-commit-") as name:
        directory = Path(name)
        build(directory, args.layers, args.hidden, args.vocabulary, 200_000)
        result = compete(args, directory)
    common.finish(
        {
            "bench": "commit",
            "machine": common.machine(),
            "tokens_per_step": args.tokens_per_step,
            "target": TARGET,
            **result,
            "ok": result["ratio"] <= TARGET and result["same_weights"],
        },
        args.output,
    )


if __name__ == "__main__":
    main()
