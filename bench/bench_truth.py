"""How near does the simulator come to measured steps, from lane rates of a short calibration?

The calibration is that of `outsize train` (`outsize.training.forecast`): part of a second for host memory, optimizer
and disk, and the time of each unit of a model, forward and backward, on a few random tokens. Then, for each
configuration, the plan of the run is simulated with those rates, and the run is made. Nothing of a run goes into its
prediction. Emulated links have the rate that they are given. Beside it: what a run expects after its own first steps.

    OMP_NUM_THREADS=1 python bench/bench_truth.py
    python bench/bench_truth.py --large              # over a billion parameters: 24 GiB of RAM, 50 GiB of disk, 25 min
    python bench/bench_truth.py --large --busy 1     # beside another job

Small models: one compute thread leaves a core for what goes on beside it. Large ones compute on all threads.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outsize.streamed.spec import RunSpec

sys.path.insert(0, str(Path(__file__).parent))
import bench_speed
import common
import torch

from outsize.config import load_config
from outsize.runtime.device.heap import begin_run, own_process
from outsize.session.job.prepare import Job, prepare
from outsize.session.stream import StreamedTrainer
from outsize.training.forecast import Forecast, forecast
from outsize.training.run_data import open_dataset

# Layers, width, vocabulary. The 1.57B model's state is as large as the RAM of a machine of 24 GiB.
MODELS = {"small": (6, 256, 4096), "wide": (4, 512, 4096)}
LARGE_MODELS = {"1.06B": (18, 2048, 32000), "1.57B": (28, 2048, 32000)}
SEQ_LEN = 256


@dataclass(frozen=True)
class Case:
    """A configuration; ``tight`` is a share of what its roomy plan takes on the device.

    Steps go in rounds of ``in_a_round`` microbatches; None leaves these to the planner. The first ``cold`` steps of
    ``steps`` do not count.
    """

    model: str
    device: str
    home: str
    microbatches: int
    sequences: int
    link_gb_per_s: float | None = None
    tight: float | None = None
    method: str = "full"
    device_memory: str = "2GiB"
    host_memory: str = "4GiB"
    cold: int = 3
    in_a_round: int | None = None

    @property
    def name(self) -> str:
        link = f", {self.link_gb_per_s:g} GB/s" if self.link_gb_per_s else ""
        budget = f", budget x {self.tight:g}" if self.tight else ""
        method = ", LoRA" if self.method == "lora" else ""
        cut = f"{self.sequences}/{self.microbatches}" + (f" by {self.in_a_round}" if self.in_a_round else "")
        return f"{self.model}{method}, {self.device}, {self.home}, {cut}{link}{budget}"


CASES = (
    Case("small", "cpu", "host", 1, 4),
    Case("small", "cpu", "host", 4, 8),
    Case("small", "cpu", "disk", 4, 8),
    Case("wide", "cpu", "disk", 2, 4),
    Case("wide", "cpu", "disk", 2, 4, tight=0.7),
    Case("small", "emulated:1", "host", 4, 8, link_gb_per_s=1.0),
    Case("small", "emulated:1", "host", 2, 4, link_gb_per_s=0.05),
    Case("wide", "emulated:1", "host", 2, 4, link_gb_per_s=0.1),
    Case("small", "emulated:1", "disk", 4, 8, link_gb_per_s=0.2),
    Case("small", "emulated:2", "host", 4, 8, link_gb_per_s=1.0),
    Case("wide", "emulated:2", "host", 4, 4, link_gb_per_s=0.1),
    Case("small", "cpu", "host", 8, 16, in_a_round=2),
    Case("wide", "cpu", "disk", 4, 8, in_a_round=2),
    Case("small", "emulated:1", "host", 8, 16, link_gb_per_s=0.1, in_a_round=2),
    Case("small", "emulated:2", "host", 8, 16, link_gb_per_s=1.0, in_a_round=2),
)
LARGE_CASES = tuple(
    Case(model, "cpu", home, 2, 4, method=method, device_memory="3GiB", host_memory="18GiB", cold=1)
    for model, home, method in (
        ("1.06B", "host", "full"),
        ("1.57B", "disk", "full"),
        ("1.57B", "host", "lora"),
    )
)


def prepared_for(case: Case, directory: Path, steps: int) -> Job:
    settings = [
        f"model.path={directory / case.model / 'model'}",
        "model.dtype=fp32",
        f"data.path={directory / case.model / 'tokens.npy'}",
        "data.format=tokens",
        f"data.seq_len={SEQ_LEN}",
        f"train.steps={steps}",
        f"train.tokens_per_step={case.sequences * SEQ_LEN}",
        f"train.microbatches={case.microbatches}",
        f"memory.device={case.device}",
        f"memory.home={case.home}",
        f"memory.host_memory={case.host_memory}",
        f"train.method={case.method}",
    ]
    if case.in_a_round:
        settings.append(f"train.round_microbatches={case.in_a_round}")
    if case.link_gb_per_s:
        settings.append(f"memory.link_gb_per_s={case.link_gb_per_s}")

    def with_memory(device_memory: str) -> Job:
        config = load_config(None, [*settings, f"memory.device_memory={device_memory}"])
        return prepare(RunSpec.of(config, directory), lambda _: None)

    roomy = with_memory(case.device_memory)
    return with_memory(str(int(case.tight * roomy.plan.total_bytes("device")))) if case.tight else roomy


def measured_s(
    prepared: Job, directory: Path, steps: int, cold: int, expected: Forecast
) -> tuple[list[float], float]:
    """Return the seconds of each step but the first ``cold``, and what the trace of those said of the others."""
    config = prepared.config
    with tempfile.TemporaryDirectory(dir=directory) as store:
        with open_dataset(config, prepared, Path(store), lambda _: None) as dataset:
            batches = [dataset.batch(step, config.sequences_per_step) for step in range(steps)]
        own_process()
        begin_run(heap=prepared.heap)  # as `outsize train` does
        with StreamedTrainer(prepared, Path(store)) as trainer:
            trainer.fill()
            seconds = []
            for outcome in trainer.steps(batches):
                seconds.append(outcome.seconds)
                expected.step_ended(outcome.window, trainer.take_timeline())
            trainer.settle()
    return seconds[cold:], expected.step_s


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep ``count`` processors busy with something else."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def print_note(line: str) -> None:
    print(line, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=common.steps_above(3), help="9, or 4 of a large model, unless told")
    parser.add_argument(
        "--large", action="store_true", help="models of over a billion parameters instead of small ones"
    )
    parser.add_argument("--busy", type=int, default=0, help="processors that something else keeps busy")
    parser.add_argument("--dir", type=Path, help="where models and homes lie; best on a disk")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    steps = args.steps or (4 if args.large else 9)
    if not args.large:
        torch.set_num_threads(1)
    rows, results = [], []
    with tempfile.TemporaryDirectory(dir=args.dir) as name, busy(args.busy):
        directory = Path(name)
        for model, (layers, hidden, vocabulary) in (LARGE_MODELS if args.large else MODELS).items():
            (directory / model).mkdir()
            bench_speed.build(directory / model, layers, hidden, vocabulary, 200_000)
        for case in LARGE_CASES if args.large else CASES:
            prepared = prepared_for(case, directory, steps)
            expected = forecast(prepared, directory, print_note)
            if expected is None:
                raise SystemExit(1)
            prediction = expected.step_s
            seconds, recalibrated = measured_s(prepared, directory, steps, case.cold, expected)
            measured = statistics.median(seconds)
            error = prediction / measured - 1
            print(f"{case.name}: {prediction:.3f} s, measured {measured:.3f} s", file=sys.stderr)
            again = recalibrated / measured - 1
            rows.append((case.name, f"{prediction:.3f}", f"{measured:.3f}", f"{error:+.1%}", f"{again:+.1%}"))
            results.append(
                {
                    "case": case.name,
                    "predicted_s": prediction,
                    "measured_s": measured,
                    "spread_s": [min(seconds), max(seconds)],
                    "error": error,
                    "recalibrated_s": recalibrated,
                    "recalibrated_error": recalibrated / measured - 1,
                }
            )
    common.print_table(("configuration", "predicted s", "measured s", "error", "from its trace"), rows)
    errors = [abs(result["error"]) for result in results]
    later = [abs(result["recalibrated_error"]) for result in results]
    common.finish(
        {
            "bench": "truth",
            "machine": common.machine(),
            "busy": args.busy,
            "cases": results,
            "median_error": statistics.median(errors),
            "worst_error": max(errors),
            "recalibrated_median_error": statistics.median(later),
            "recalibrated_worst_error": max(later),
        },
        args.output,
    )


if __name__ == "__main__":
    main()
