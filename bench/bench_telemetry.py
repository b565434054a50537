"""What does it cost that a run tells what it does? The share of a step that telemetry takes, and what its books come
to.

Runs of the command's own loop in this process; what a step's record and its line in the heartbeat take is timed around
them, on the thread that the next step waits for. The smallest run has steps of some hundredths of a second, far
shorter than any that is worth training: the worst case. Also: the idle time of compute that is booked on causes, over
the idle time that there was, in the worst step of all.

    python bench/bench_telemetry.py
"""

import argparse
import json
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import common

from outsize.training.loop import TIMELINE_STEP
from outsize.training.measures import Accounts
from outsize.training.records import Heartbeat
from outsize.training.run import train
from tiny import tiny_model, tiny_run

TARGET_SHARE, TARGET_BOOKED = 0.01, 0.02
# What a run is: sizes of its model, tokens per step, microbatches, and sections of its configuration.
RUNS: dict[str, tuple[dict[str, int], int, int, dict[str, Any]]] = {
    "1 block, 32 wide, 64 tokens, host": ({}, 64, 2, {"home": "host"}),
    "8 blocks, 128 wide, 2,048 tokens, disk": (
        {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 8},
        2048,
        4,
        {"home": "disk"},
    ),
    "8 blocks, 128 wide, 2,048 tokens, 2 workers": (
        {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 8},
        2048,
        4,
        {"device": "emulated:2", "home": "host"},
    ),
    "8 blocks, 384 wide, 2,048 tokens, host": (
        {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8},
        2048,
        4,
        {"home": "host"},
    ),
}


@contextmanager
def timed(cls: type, name: str, into: list[float]):
    """Add what every call of a method takes to ``into``."""
    former = getattr(cls, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return former(*args, **kwargs)
        finally:
            into.append(time.perf_counter() - began)

    with mock.patch.object(cls, name, call):
        yield


def booked_error(beat: dict[str, Any]) -> float:
    """How far the causes of a step are from its idle time, in the lane where they are farthest."""
    return max(
        abs(sum(s for owners in beat["waits_s"][lane].values() for s in owners.values()) / idle_s - 1)
        for lane, idle_s in beat["idle_s"].items()
    )


def measure(directory: Path, name: str, steps: int) -> dict[str, Any]:
    sizes, tokens, microbatches, memory = RUNS[name]
    tiny_model(directory / "model", **sizes)
    (directory / "data.txt").write_text("\n".join(f"{n} squared is {n * n}" for n in range(20_000)))
    settings = {"steps": steps, "tokens_per_step": tokens, "microbatches": microbatches}
    config = tiny_run(
        directory,
        data={"path": str(directory / "data.txt"), "seq_len": 16 if tokens < 100 else 64},
        train={**settings, "run_dir": str(directory / "run")},
        memory=memory,
    )
    records: list[float] = []
    beats: list[float] = []
    with timed(Accounts, "record", records), timed(Heartbeat, "beat", beats):
        train(config)
    lines = [json.loads(line) for line in (directory / "run" / "heartbeat.jsonl").read_text().splitlines()]
    # The first step warms up; the third and the last write a timeline.
    counted = [index for index in range(1, steps - 1) if index != TIMELINE_STEP]
    step = common.Spread.of(lines[index]["seconds"] for index in counted)
    cost = common.Spread.of(records[index] + beats[index] for index in counted)
    return {
        "step_s": step.median,
        "telemetry_s": cost.median,
        "share": cost.median / step.median,
        "line_bytes": len(json.dumps(lines[-1])),
        "worst_booked_error": max(
            booked_error(lines[index]) for index in range(1, steps - 1) if lines[index]["waits_s"]
        ),
        "steps": len(counted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found = {}
    for name in RUNS:
        with tempfile.TemporaryDirectory() as directory:
            found[name] = measure(Path(directory), name, arguments.steps)
    common.print_table(
        ["run", "step, ms", "telemetry, ms", "share", "not booked", "line, bytes"],
        [
            [
                name,
                1e3 * f["step_s"],
                1e3 * f["telemetry_s"],
                f"{f['share']:.2%}",
                f"{f['worst_booked_error']:.1e}",
                f["line_bytes"],
            ]
            for name, f in found.items()
        ],
        "Telemetry beside the step it tells of",
    )
    largest = found[list(RUNS)[-1]]
    result = {
        "bench": "telemetry",
        "runs": found,
        "target_share": TARGET_SHARE,
        "target_booked_error": TARGET_BOOKED,
        "met": largest["share"] <= TARGET_SHARE
        and all(f["worst_booked_error"] <= TARGET_BOOKED for f in found.values()),
        "machine": common.machine(),
    }
    common.finish(result, arguments.output)


if __name__ == "__main__":
    main()
