"""What does every fault at every operation do to a run? A clear error or a correct result, and nothing left behind.

Four tiny runs of three steps: state on the host, state on disk, resumed from a checkpoint, and from a home on disk.
Then seven other commands: verify, score, score of logits, generate, serve, export, report.
Every operation of each (calls to the file system and ops of lanes) gets everything that can go wrong there, one at a
time, each in a run of its own; see `crash.campaign` for what is checked. A worker that hangs is ended and
counted. Then whole commands whose words do not arrive, or that are told to end: see `crash.tellers`.

    python bench/bench_faults.py                  # four points of every kind, the same ones each time, some 4 minutes
    python bench/bench_faults.py --all --late     # every point, two hours on two cores
    python bench/bench_faults.py --all --late --shard 1/4 --journal faults    # a quarter; and so on to 4/4

Every verdict goes to a journal as soon as it is known. With ``--journal`` the same command goes on where it was cut
off, and the result is that of all shards whose journals lie in the directory: the last one has the whole.
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
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import common

SCENARIOS = (
    "host",
    "disk",
    "resume",
    "home",
    "verify",
    "score",
    "logits",
    "generate",
    "serve",
    "export",
    "report",
)
OUTCOMES = ("equal", "refused", "missed", "hung", "broken")
EACH = 4
HANG_S = 300.0


# --- one worker -----------------------------------------------------------------------------------


def work(args: argparse.Namespace, name: str, share: int, num_shares: int, journal: Path) -> None:
    """Judge this worker's points that the journal does not know yet, and write a line for each."""
    import torch

    from crash.campaign import does_harm, is_noticed, scenario
    from crash.commands import COMMANDS, CommandCampaign

    torch.set_num_threads(1)
    known = {line["point"] for line in read_journal(journal) if "outcome" in line}
    with tempfile.TemporaryDirectory(prefix="outsize-faults-") as root, journal.open("a") as out:
        with contextlib.redirect_stderr(io.StringIO()):
            made = CommandCampaign if name in COMMANDS else scenario
            campaign = made(name, Path(root))
        points = {
            f"{' '.join(map(str, key))} {fault}": (key, fault) for key, fault in campaign.points(is_noticed)
        }
        if not args.late:
            harmful = {f"{' '.join(map(str, key))} {fault}" for key, fault in campaign.points(does_harm)}
            points = {text: point for text, point in points.items() if text in harmful}
        drawn = draw(points, args.each)
        ours = [text for text in drawn if place_of(text) % num_shares == share]
        head = {"points": ours, "operations": len(campaign.operations)}
        write(out, {**head, "commit": common.machine()["commit"]})
        for text in ours:
            if text in known:
                continue
            key, fault = points[text]
            write(out, {"point": text})
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            try:
                verdict = campaign.judge(key, fault)
                found = {"outcome": verdict.outcome, "problems": list(verdict.problems)}
            except Exception as error:
                found = {"outcome": "broken", "problems": [f"{type(error).__name__}: {error}"]}
            write(out, {"point": text, "kind": f"{key.kind} {fault}", **found})
            faulthandler.cancel_dump_traceback_later()


def draw(points: dict[str, Any], each: int) -> list[str]:
    """Return ``each`` points of every kind of operation and fault, all for 0.

    By their names, not their order: threads come by in another one in every process.
    """
    num_drawn: Counter[tuple[str, str]] = Counter()
    drawn = []
    for text in sorted(points, key=place_of):
        key, fault = points[text]
        num_drawn[key.kind, fault] += 1
        if not each or num_drawn[key.kind, fault] <= each:
            drawn.append(text)
    return drawn


def place_of(point: str) -> int:
    """Where a point comes among all, at random but the same everywhere."""
    return zlib.crc32(point.encode())


def write(out: IO[str], line: dict[str, Any]) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a journal; the last one may have been cut off."""
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


# --- all workers ----------------------------------------------------------------------------------


def run(args: argparse.Namespace, name: str, directory: Path) -> None:
    """Have workers judge this shard's points of one scenario."""
    shard, num_shards = map(int, args.shard.split("/"))
    num_shares = num_shards * args.workers
    shares = [(shard - 1) * args.workers + worker for worker in range(args.workers)]

    def start(share: int) -> tuple[subprocess.Popen[bytes], IO[bytes], Path]:
        journal = directory / f"{name}-{share + 1}-of-{num_shares}.jsonl"
        command = [sys.executable, __file__, "--worker", name, str(share), str(num_shares), str(journal)]
        command += ["--each", str(args.each)] + (["--late"] if args.late else [])
        out = tempfile.TemporaryFile()  # noqa: SIM115 - read when the worker has ended
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT), out, journal

    workers = {share: start(share) for share in shares}
    while workers:
        for share, (worker, out, journal) in list(workers.items()):
            worker.wait()
            with out:
                out.seek(0)
                text = out.read().decode()[-3000:]
            if worker.returncode == 0:
                del workers[share]
                continue
            begun = [line["point"] for line in read_journal(journal) if "point" in line]
            if not begun:
                raise SystemExit(f"a worker of {name} did not come to its first point:\n{text}")
            with journal.open("a") as lines:  # it hung, or the process died
                write(lines, {"point": begun[-1], "kind": "?", "outcome": "hung", "problems": [text]})
            workers[share] = start(share)


def judge_tellers(directory: Path) -> list[dict[str, Any]]:
    """Judge every teller that the journal does not know yet, and return what is known of all."""
    from crash.tellers import TELLERS, Stage

    journal = directory / "tellers.jsonl"
    known = {line["teller"]: line for line in read_journal(journal)}
    with tempfile.TemporaryDirectory(prefix="outsize-faults-") as root, journal.open("a") as out:
        stage = Stage(Path(root))
        for name in TELLERS:
            if name not in known:
                said, problems = stage.judge(name)
                known[name] = {"teller": name, "said": said, "problems": problems}
                write(out, {**known[name], "commit": common.machine()["commit"]})
    return [{key: known[name][key] for key in ("teller", "said", "problems")} for name in TELLERS]


def result_of(name: str, directory: Path) -> dict[str, Any]:
    """What all journals of a scenario say together."""
    verdicts: dict[str, dict[str, Any]] = {}
    points: set[str] = set()
    operations = 0
    commits: set[str] = set()
    for path in sorted(directory.glob(f"{name}-*-of-*.jsonl")):
        for line in read_journal(path):
            if "outcome" in line:
                verdicts[line["point"]] = line
            elif "operations" in line:
                points |= set(line["points"])
                operations = max(operations, line["operations"])
                commits.add(str(line.get("commit")))
    return {
        "commits": sorted(commits),
        "operations": operations,
        "points": len(verdicts),
        "left": len(points - verdicts.keys()),
        "outcomes": dict(Counter(line["outcome"] for line in verdicts.values())),
        "by_kind": dict(sorted(Counter(line["kind"] for line in verdicts.values()).items())),
        "bad": [line for line in verdicts.values() if line["problems"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every point, not a sample")
    parser.add_argument("--late", action="store_true", help="late calls and lost syncs too")
    parser.add_argument("--each", type=int, default=EACH, help="points of each kind and scenario; 0 is all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shard", default="1/1", help="which part of how many, e.g. 2/4")
    parser.add_argument("--journal", type=Path, help="directory of the journals; a temporary one by default")
    parser.add_argument("--report", action="store_true", help="run nothing, say what the journals say")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--no-tellers", action="store_true", help="faults of single calls alone")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.each = 0 if args.all else args.each
    if args.worker:
        name, share, num_shares, journal = args.worker
        work(args, name, int(share), int(num_shares), Path(journal))
        return
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        directory = args.journal or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        for name in args.scenarios if not args.report else ():
            run(args, name, directory)
        results = {name: result_of(name, directory) for name in args.scenarios}
        tellers = [] if args.no_tellers else judge_tellers(directory)
    bad_tellers = [line for line in tellers if line["problems"]]
    for line in [*(line for result in results.values() for line in result["bad"]), *bad_tellers]:
        print(json.dumps(line), flush=True)
    rows = [
        (
            name,
            r["operations"],
            r["points"],
            r["left"],
            *(r["outcomes"].get(o, 0) for o in OUTCOMES),
            len(r["bad"]),
        )
        for name, r in results.items()
    ]
    common.print_table(("run", "operations", "points", "left", *OUTCOMES, "bad"), rows, title="Faults")
    left = sum(result["left"] for result in results.values())
    common.finish(
        {
            "bench": "faults",
            "machine": common.machine(),
            "exhaustive": not args.each and not left,
            "late_and_lost": args.late,
            "ok": not bad_tellers and not any(result["bad"] for result in results.values()),
            "kinds": len({kind for result in results.values() for kind in result["by_kind"]}),
            "tellers": {"judged": len(tellers), "bad": bad_tellers},
            "points": sum(result["points"] for result in results.values()),
            "left": left,
            "runs": results,
            "s": time.perf_counter() - began,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
