"""Does a run of several processes survive the loss of any of them, at any moment?

One process imports everything and computes nothing. It forks the ranks of a run, as torchrun would start them, and
kills one of them, drawn at random, at a random moment: while they meet, while the model is measured, anywhere in the
steps, inside a checkpoint, at the end. Two things must follow:

- a clean stop: every other rank ends by itself with status 2, and says which rank is lost;
- an exact resume: ranks that are started again go on from what all had saved, and the run ends as one that nothing
  happened to, bit for bit: weights, optimizer state, and the loss of every step. Then the next run begins.

At last the newest unfinished state is gone on with by other numbers of ranks, which sum in another order: their losses
must agree within fp32 tolerance.

    python bench/bench_node_kill.py                  # 20 kills of 2 ranks: about 3 minutes
    python bench/bench_node_kill.py --ranks 3 --kills 20
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked child must not miss the threads of its parent
sys.path.insert(0, str(Path(__file__).parent))
import bench_speed
import common
from forked import fork_ranks

from outsize.cli import main as cli
from outsize.config import dump_config
from outsize.config.load import parse_config

LAYERS, HIDDEN, VOCABULARY = 2, 64, 97
SEQ_LEN, SEQUENCES, MICROBATCHES = 16, 12, 12
STEPS, SAVE_EVERY = 12, 3
# Ranks are lost after this long without a heartbeat; a connection that breaks is noticed at once and judged in 3 s.
TIMEOUT_S, END_S = 8.0, 120.0
TOLERANCE = 1e-4


@dataclass
class Tally:
    """What all kills came to."""

    kills: int = 0
    clean: int = 0
    ended: int = 0
    equal: int = 0
    stop_s: list[float] = field(default_factory=list)
    where: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def write_run(root: Path, name: str, size: int) -> Path:
    """Write a configuration with as many microbatches in all, whatever the number of ranks."""
    config = parse_config(
        {
            "model": {"path": str(root / "model"), "dtype": "fp32"},
            "data": {"path": str(root / "tokens.npy"), "seq_len": SEQ_LEN},
            "train": {
                "steps": STEPS,
                "tokens_per_step": SEQUENCES * SEQ_LEN,
                "microbatches": MICROBATCHES // size,
                "run_dir": str(root / name),
                "resume": "auto",
                "save_every": SAVE_EVERY,
            },
            "optimizer": {"lr": 1e-3},
            "memory": {"device": "cpu", "home": "host", "device_memory": "64MiB", "host_memory": "64MiB"},
            "parallel": {"timeout_s": TIMEOUT_S},
        }
    )
    path = root / f"{name}-{size}.yaml"
    path.write_text(dump_config(config))
    return path


def prepare(root: Path) -> None:
    """Write the model and tokens, and train once alone."""
    bench_speed.build(root, LAYERS, HIDDEN, VOCABULARY, 20_000)
    with contextlib.suppress(SystemExit):
        sys.argv = ["outsize", "train", str(write_run(root, "alone", 1))]
        cli()


def run(root: Path, config: Path, size: int, restarts: int, kill: tuple[int, float] | None = None):
    """Run ranks to their end, ``kill`` (rank, after how many seconds) on the way; returns statuses and seconds to stop.

    Seconds are from the kill until the last rank has ended; of ranks that do not end, infinite.
    """

    def work(rank: int) -> None:
        sys.argv = ["outsize", "train", str(config)]
        sys.exit(cli())

    logs = root / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    processes = fork_ranks(size, work, logs, restarts=restarts)
    began = time.monotonic()
    if kill is not None:
        rank, delay = kill
        processes[rank].join(delay)
        if processes[rank].exitcode is None:
            os.kill(processes[rank].pid, signal.SIGKILL)
        began = time.monotonic()
    for process in processes:
        process.join(max(began + END_S - time.monotonic(), 0.1))
    stuck = [process for process in processes if process.exitcode is None]
    for process in stuck:
        process.kill()
        process.join()
    return [p.exitcode for p in processes], float("inf") if stuck else time.monotonic() - began


def digest(run_dir: Path) -> dict[str, str]:
    """Hash what a run came to; of a step that was trained twice the second time counts."""
    checkpoint = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
    found = {
        str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in checkpoint.rglob("*.safetensors")
    }
    return found | {f"loss {step}": repr(loss) for step, loss in losses(run_dir).items()}


def losses(run_dir: Path) -> dict[int, float]:
    beats = []
    for line in (run_dir / "heartbeat.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):  # the kill came in the middle of it
            beats.append(json.loads(line))
    return {beat["step"]: beat["loss"] for beat in beats}


def judge(root: Path, codes: list[int], lost: int, tally: Tally, stop_s: float) -> None:
    """Say whether the others stopped cleanly."""
    tally.kills += 1
    wrong = []
    for rank, code in enumerate(codes):
        if rank == lost:
            continue
        told = (root / "logs" / f"{rank}.txt").read_text()
        named = re.findall(r"LostRankError: .*?rank (\d+)", told)
        if code != 2 or str(lost) not in named:
            wrong.append(f"kill {tally.kills} of rank {lost}: rank {rank} ended with {code}: {told[-300:]!r}")
    tally.clean += not wrong
    tally.stop_s.append(stop_s)
    tally.failures += wrong


def step_reached(run_dir: Path) -> str:
    path = run_dir / "heartbeat.jsonl"
    return f"step {max(losses(run_dir), default=0)}" if path.exists() else "before the first step"


def campaign(root: Path, size: int, kills: int, seed: int, whole_s: float, expected) -> Tally:
    """Kill until enough kills are done, and let the last run come to its end."""
    tally, drawn, number, restarts = Tally(), random.Random(seed), 0, 0
    config = write_run(root, f"kill-{number}", size)
    while tally.kills < kills or restarts:
        run_dir = root / f"kill-{number}"
        lost = drawn.randrange(size)
        kill = (lost, drawn.uniform(0.0, whole_s)) if tally.kills < kills else None
        codes, stop_s = run(root, config, size, restarts, kill)
        others_ended = not any(code for rank, code in enumerate(codes) if rank != lost)
        if codes[lost] == -signal.SIGKILL and not others_ended:
            tally.where[step_reached(run_dir)] += 1
            judge(root, codes, lost, tally, stop_s)
            restarts += 1
            print(
                f"kill {tally.kills}: rank {lost} at {step_reached(run_dir)}, stop {stop_s:.1f} s", flush=True
            )
            continue
        # Who is killed on its way out, after the last barrier, is no loss to the others: the run must be whole.
        tally.ended += 1
        if not others_ended or codes[lost] not in (0, -signal.SIGKILL):
            tally.failures.append(
                f"a run ended with {codes}: {(root / 'logs' / '0.txt').read_text()[-300:]!r}"
            )
        elif digest(run_dir) == expected:
            tally.equal += 1
        else:
            tally.failures.append(f"run {number} ended otherwise")
        number, restarts = number + 1, 0
        config = write_run(root, f"kill-{number}", size)
    return tally


def other_sizes(root: Path, size: int, expected: dict[int, float]) -> list[str]:
    """Go on with other numbers of ranks from a checkpoint in the middle; returns what went wrong."""
    wrong = []
    for other in [n for n in (1, 2, 3) if n != size]:
        name = f"other-{other}"
        shutil.copytree(root / "half", root / name)
        codes, _ = run(root, write_run(root, name, other), other, 0)
        found = losses(root / name) if not any(codes) else {}
        close = [abs(found.get(step, 1e9) - loss) <= TOLERANCE for step, loss in expected.items()]
        if not all(close):
            wrong.append(f"{other} ranks after {size}: {codes}, losses {found}")
    return wrong


def half_done(root: Path, size: int, whole_s: float) -> None:
    """Leave a run directory whose ranks were lost after a checkpoint."""
    config, delay = write_run(root, "half", size), whole_s
    for _ in range(20):
        shutil.rmtree(root / "half", ignore_errors=True)
        run(root, config, size, 0, (0, delay))
        pointer = root / "half" / "checkpoints" / "latest"
        saved = pointer.read_text().strip() if pointer.exists() else "none"
        if saved not in ("none", f"step-{STEPS:08}"):
            return
        delay *= 1.15 if saved == "none" else 0.9
    raise SystemExit("no run could be killed between its first and its last checkpoint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    size = arguments.ranks
    with tempfile.TemporaryDirectory(prefix="outsize-node-kill-") as directory:
        root = Path(directory)
        common.import_all(common.imported_by(lambda: prepare(root)))
        began = time.monotonic()
        codes, _ = run(root, write_run(root, "whole", size), size, 0)
        whole_s = time.monotonic() - began
        if any(codes):
            raise SystemExit(f"the reference ended with {codes}: {(root / 'logs' / '0.txt').read_text()}")
        tally = campaign(root, size, arguments.kills, arguments.seed, whole_s, digest(root / "whole"))
        half_done(root, size, whole_s * 0.8)
        others = other_sizes(root, size, losses(root / "whole"))
    common.print_table(
        ("ranks", "kills", "clean stops", "runs ended", "of them equal", "other N", "stop s"),
        [
            (
                size,
                tally.kills,
                tally.clean,
                tally.ended,
                tally.equal,
                "close" if not others else "NOT",
                str(common.Spread.of(tally.stop_s or [0.0])),
            )
        ],
    )
    for line in (*tally.failures, *others):
        print(line)
    good = not tally.failures and not others
    common.finish(
        {
            "bench": "node_kill",
            "machine": common.machine(),
            "ranks": size,
            "kills": tally.kills,
            "clean_stops": tally.clean,
            "runs_ended": tally.ended,
            "runs_equal": tally.equal,
            "other_numbers_of_ranks_agree": not others,
            "stop_s_max": max(tally.stop_s, default=0.0),
            "killed_at": dict(tally.where),
            "good": good,
        },
    )
    sys.exit(not good)


if __name__ == "__main__":
    main()
