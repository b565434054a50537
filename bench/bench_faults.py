"""What does every fault at every operation do to a run? A clear error or a correct result, and nothing left behind.

Four tiny runs of three steps: state on the host, state on disk, resumed from a checkpoint, and from a home on disk.
Every operation of each (calls to the file system and ops of lanes) gets everything that can go wrong there, one at a
time, each in a run of its own; see `outsize.testing.campaign` for what is checked. A worker that hangs is ended and
counted.

    python bench/bench_faults.py                  # a sample spread over all operations, some 4 minutes
    python bench/bench_faults.py --all            # every point, the better part of an hour on two cores
"""

import argparse
import contextlib
import faulthandler
import io
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).parent))
import common

SCENARIOS = ("host", "disk", "resume", "home")
SAMPLE = 130
HANG_S = 60.0


def work(name: str, share: int, num_workers: int, first: int, sample: int | None, late: bool) -> None:
    """Judge this worker's points and print a line for each."""
    import torch

    from outsize.testing.campaign import does_harm, is_noticed, scenario

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="outsize-faults-") as root:
        with contextlib.redirect_stderr(io.StringIO()):
            campaign = scenario(name, Path(root))
        points = campaign.points(is_noticed if late else does_harm)
        if sample is not None:
            points = points[:: max(1, len(points) // sample)]
        print(json.dumps({"points": len(points), "operations": len(campaign.operations)}), flush=True)
        for index in range(first * num_workers + share, len(points), num_workers):
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            key, fault = points[index]
            try:
                verdict = campaign.judge(key, fault)
                found = {"outcome": verdict.outcome, "problems": list(verdict.problems)}
            except Exception as error:
                found = {"outcome": "broken", "problems": [f"{type(error).__name__}: {error}"]}
            print(json.dumps({"kind": key.kind, "at": [*key], "fault": fault, **found}), flush=True)
            faulthandler.cancel_dump_traceback_later()


def run(name: str, num_workers: int, sample: int | None, late: bool) -> dict[str, object]:
    """Judge all points of one scenario."""
    began = time.perf_counter()
    done = [0] * num_workers
    heads: list[dict[str, int]] = []
    lines: list[dict[str, object]] = []

    def start(share: int) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        command = [sys.executable, __file__, "--worker", name, f"{share},{num_workers},{done[share]}"]
        command += ["--sample", str(sample or 0)] + (["--late"] if late else [])
        out = tempfile.TemporaryFile()  # noqa: SIM115 - read when the worker has ended
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT), out

    workers = {share: start(share) for share in range(num_workers)}
    while workers:
        for share, (worker, out) in list(workers.items()):
            worker.wait()
            with out:
                out.seek(0)
                text = out.read().decode()
            head, *rest = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
            heads.append(head)
            lines += rest
            done[share] += len(rest)
            if worker.returncode == 0:
                del workers[share]
            else:  # it hung, or the process died: the point after the last line
                hung = {"kind": "?", "at": [done[share]], "fault": "?", "outcome": "hung"}
                lines.append({**hung, "problems": [text[-3000:]]})
                done[share] += 1
                workers[share] = start(share)
    bad = [line for line in lines if line["problems"]]
    return {
        "operations": heads[0]["operations"],
        "points": len(lines),
        "outcomes": dict(Counter(str(line["outcome"]) for line in lines)),
        "by_kind": dict(Counter(f"{line['kind']} {line['fault']}" for line in lines)),
        "bad": bad,
        "s": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every point, not a sample")
    parser.add_argument("--late", action="store_true", help="late calls and lost syncs too")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="points per scenario")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    sample = None if arguments.all else arguments.sample or None
    if arguments.worker:
        name, place = arguments.worker
        share, num_workers, first = map(int, place.split(","))
        work(name, share, num_workers, first, sample, arguments.late)
        return
    results = {}
    for name in arguments.scenarios:
        results[name] = run(name, arguments.workers, sample, arguments.late)
        for line in results[name]["bad"]:
            print(json.dumps(line), flush=True)
    outcomes = ("equal", "refused", "missed", "hung", "broken")
    rows = [
        (
            name,
            r["operations"],
            r["points"],
            *(r["outcomes"].get(o, 0) for o in outcomes),
            len(r["bad"]),
            r["s"],
        )
        for name, r in results.items()
    ]
    common.print_table(("run", "operations", "points", *outcomes, "bad", "s"), rows, title="Faults")
    common.finish(
        {
            "bench": "faults",
            "machine": common.machine(),
            "exhaustive": sample is None,
            "ok": not any(result["bad"] for result in results.values()),
            "points": sum(result["points"] for result in results.values()),
            "runs": results,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
