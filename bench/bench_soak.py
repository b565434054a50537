"""Does a long run keep its memory, its files and its threads? A thousand steps of a tiny model, one process per home.

Resident memory is compared between two windows of steps, around step 100 and at the end, and so are the descriptors and
threads that are counted after every step. A checkpoint is saved every 50 steps, so all windows have some.

    python bench/bench_soak.py                    # some 3 minutes
    python bench/bench_soak.py --steps 10000
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import common

HOMES = ("host", "disk")
WARM_STEPS = 100
WINDOW_STEPS = 50
COUNTED_STEPS = 200
TARGET_GROWTH = 0.01


def soak(home: str, steps: int) -> dict[str, Any]:
    """Train in this process, and say what it held after each step."""
    import torch

    from outsize.training.run import train
    from tiny import tiny_run

    torch.set_num_threads(1)
    rss: list[int] = []
    files: list[int] = []
    threads: list[int] = []

    def look(_: object) -> None:
        rss.append(common.rss_bytes())
        files.append(len(os.listdir("/proc/self/fd")))
        threads.append(threading.active_count())

    with tempfile.TemporaryDirectory(prefix="outsize-soak-") as root:
        memory = {"home": home, "offload": True}
        train(tiny_run(Path(root), train={"steps": steps, "save_every": 50}, memory=memory), progress=look)
    early = statistics.median(rss[WARM_STEPS : WARM_STEPS + WINDOW_STEPS])
    late = statistics.median(rss[-WINDOW_STEPS:])
    return {
        "steps": len(rss),
        "rss_early_bytes": early,
        "rss_late_bytes": late,
        "rss_peak_bytes": max(rss),
        "growth": late / early - 1,
        # A checkpoint on its way has a file open; between them there is none.
        "files": [min(part) for part in (files[WARM_STEPS:][:COUNTED_STEPS], files[-COUNTED_STEPS:])],
        "threads": [max(part) for part in (threads[WARM_STEPS:][:COUNTED_STEPS], threads[-COUNTED_STEPS:])],
        "rss_every_100_bytes": rss[::100],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--homes", nargs="+", choices=HOMES, default=HOMES)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(soak(arguments.worker, arguments.steps)))
        return
    results = {}
    for home in arguments.homes:
        command = [sys.executable, __file__, "--worker", home, "--steps", str(arguments.steps)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
        )
        found = common.last_json(done.stdout)
        assert found is not None
        results[home] = found
    rows = [
        (
            home,
            r["steps"],
            r["rss_early_bytes"] / 2**20,
            r["rss_late_bytes"] / 2**20,
            100 * r["growth"],
            str(r["files"]),
            str(r["threads"]),
        )
        for home, r in results.items()
    ]
    headers = ("home", "steps", "RSS early, MiB", "RSS late, MiB", "growth, %", "files", "threads")
    common.print_table(headers, rows, title="Soak")
    ok = all(
        r["growth"] <= TARGET_GROWTH and len(set(r["files"])) == 1 and len(set(r["threads"])) == 1
        for r in results.values()
    )
    common.finish(
        {
            "bench": "soak",
            "machine": common.machine(),
            "target_growth": TARGET_GROWTH,
            "ok": ok,
            "homes": results,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
