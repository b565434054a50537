"""What do codecs on the link bring where the link is the bottleneck, and does the simulator say so beforehand?

A bf16 model on one emulated device whose link is slow enough that raw streaming waits for it: with most of it frozen,
where only weights go up, and with all of it trained, where gradients come down as well. Raw and encoded runs of a
configuration follow one another in one process. Target: lossless at least 1.3 times as fast where weights are all that
crosses, predictions within 10 % (median).

    OMP_NUM_THREADS=1 python bench/bench_transport.py [--steps N] [--output FILE]
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outsize.streamed.spec import RunSpec

sys.path.insert(0, str(Path(__file__).parent))
import bench_speed
import bench_truth
import common
import torch

from outsize.config import load_config
from outsize.session.job.prepare import Job, prepare
from outsize.session.stream import StreamedTrainer
from outsize.training.forecast import forecast
from outsize.training.run_data import open_dataset

LAYERS, HIDDEN, VOCABULARY, SEQ_LEN = 8, 512, 4096, bench_truth.SEQ_LEN
FROZEN = '["*embed_tokens*", "*layers.[0-6].*"]'
NUM_UNTIMED = 2  # steps that warm up


@dataclass(frozen=True)
class Case:
    name: str
    link_gb_per_s: float
    freeze: str = "[]"
    transport: dict[str, str] = field(default_factory=dict)

    @property
    def codecs(self) -> str:
        return ", ".join(f"{crossing} {codec}" for crossing, codec in self.transport.items()) or "raw"


CASES = (
    Case("frozen", 0.015, FROZEN),
    Case("frozen", 0.015, FROZEN, {"weights": "lossless4"}),
    Case("frozen", 0.015, FROZEN, {"weights": "lossless3"}),
    Case("trained", 0.04),
    Case("trained", 0.04, transport={"weights": "lossless3"}),
    Case("trained", 0.04, transport={"weights": "lossless3", "gradients": "lossless3"}),
    Case("trained", 0.04, transport={"weights": "lossless3", "gradients": "int8-stochastic"}),
    Case("trained", 0.04, transport={"weights": "lossless3", "gradients": "int4-stochastic"}),
)


def prepared_for(case: Case, directory: Path, steps: int) -> Job:
    settings = [
        f"model.path={directory / 'model'}",
        "model.dtype=bf16",
        f"model.freeze={case.freeze}",
        f"data.path={directory / 'tokens.npy'}",
        "data.format=tokens",
        f"data.seq_len={SEQ_LEN}",
        f"train.steps={steps}",
        f"train.tokens_per_step={SEQ_LEN}",
        "memory.device=emulated:1",
        "memory.device_memory=1GiB",
        "memory.host_memory=4GiB",
        "memory.home=host",
        "memory.slots=3",
        f"memory.link_gb_per_s={case.link_gb_per_s}",
        *(f"transport.{crossing}={codec}" for crossing, codec in case.transport.items()),
    ]
    return prepare(RunSpec.of(load_config(None, settings), directory), lambda _: None)


def run(
    prepared: Job, directory: Path, steps: int
) -> tuple[list[float], list[float], dict[str, int], dict[str, int]]:
    """Seconds of each step but the first `NUM_UNTIMED`; losses; bytes of all on the wire, and as they are used."""
    config = prepared.config
    with tempfile.TemporaryDirectory(dir=directory) as store:
        with open_dataset(config, prepared, Path(store), lambda _: None) as dataset:
            batches = [dataset.batch(step, config.sequences_per_step) for step in range(steps)]
        with StreamedTrainer(prepared, Path(store)) as trainer:
            trainer.fill()
            outcomes = list(trainer.steps(batches))
            trainer.settle()
            moved = trainer.engine.moved()
    wire = {lane: each.wire for lane, each in moved.items()}
    logical = {lane: each.logical for lane, each in moved.items()}
    return [o.seconds for o in outcomes][NUM_UNTIMED:], [o.loss for o in outcomes], wire, logical


def figures(case: Case, directory: Path, steps: int) -> dict[str, Any]:
    """Return what was predicted and measured of a case."""
    prepared = prepared_for(case, directory, steps)
    expected = forecast(prepared, directory, lambda line: print(line, file=sys.stderr))
    if expected is None:
        raise SystemExit(f"{case.name}, {case.codecs}: no prediction")
    seconds, losses, wire, logical = run(prepared, directory, steps)
    measured = statistics.median(seconds)
    print(f"{case.name}, {case.codecs}: {measured:.3f} s", file=sys.stderr)
    return {
        "case": case.name,
        "codecs": case.codecs,
        "exact": prepared.plan.transport.exact,
        "losses": losses,
        "measured_s": measured,
        "predicted_s": expected.step_s,
        "error": expected.step_s / measured - 1,
        "wire_bytes": wire,
        "logical_bytes": logical,
    }


def against_raw(results: list[dict[str, Any]]) -> None:
    """Add to each result how it compares with the first of its case, whose crossings are raw."""
    raw: dict[str, dict[str, Any]] = {}
    for result in results:
        first = raw.setdefault(result["case"], result)
        result["losses_equal_raw"] = result["losses"] == first["losses"]
        result["speedup"] = first["measured_s"] / result["measured_s"]
        result["predicted_speedup"] = first["predicted_s"] / result["predicted_s"]


def show(results: list[dict[str, Any]]) -> None:
    common.print_table(
        (
            "configuration",
            "codecs",
            "wire / logical up",
            "down",
            "step s",
            "predicted",
            "error",
            "x raw",
            "losses",
        ),
        [
            (
                r["case"],
                r["codecs"],
                *(
                    f"{r['wire_bytes'][lane] / max(r['logical_bytes'][lane], 1):.3f}"
                    for lane in ("up:w0", "down:w0")
                ),
                f"{r['measured_s']:.3f}",
                f"{r['predicted_s']:.3f}",
                f"{r['error']:+.1%}",
                f"{r['speedup']:.2f}",
                "equal" if r["losses_equal_raw"] else "differ",
            )
            for r in results
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=common.steps_above(NUM_UNTIMED), default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        bench_speed.build(directory, LAYERS, HIDDEN, VOCABULARY, 50_000)
        results = [figures(case, directory, args.steps) for case in CASES]
    against_raw(results)
    show(results)
    errors = [abs(r["error"]) for r in results]
    common.finish(
        {
            "bench": "transport",
            "machine": common.machine(),
            "cases": results,
            "median_error": statistics.median(errors),
            "worst_error": max(errors),
        },
        args.output,
    )


if __name__ == "__main__":
    main()
