"""How near does the simulator come to measured steps, from lane rates of a short calibration?

The calibration is `outsize.probe` (host memory, optimizer, disk) and the time of each unit of a model, forward and
backward, on one microbatch of random tokens. Then, for each configuration, the plan of the run is simulated with those
rates, and the run is made. Nothing of a run goes into its prediction. Emulated links have the rate that they are given.

    OMP_NUM_THREADS=1 python bench/bench_truth.py

One compute thread leaves a core for what goes on beside it; the simulator knows no shared cores.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_speed
import common
import torch

from outsize.config import load_config
from outsize.hardware.from_probe import machine_of
from outsize.hardware.spec import Figure, Link, Machine
from outsize.model.walk import Boundaries
from outsize.planner.costs import UnitTimes, cost_model
from outsize.planner.simulate import simulate
from outsize.probe.effort import QUICK
from outsize.probe.run import probe
from outsize.runtime.head_loss import chunked_head_loss, shift_labels
from outsize.runtime.microbatch import MicrobatchRun
from outsize.train.prepare import Prepared, prepare
from outsize.train.resident import materialise
from outsize.train.sources import open_dataset
from outsize.train.stream import StreamedTrainer

SIMULATED_STEPS = 6
REPEATS = 4
MODELS = {"small": (6, 256, 4096), "wide": (4, 512, 4096)}
SEQ_LEN = 256


@dataclass(frozen=True)
class Case:
    """A configuration; ``tight`` is a share of what its roomy plan takes on the device."""

    model: str
    device: str
    home: str
    microbatches: int
    sequences: int
    link_gb_per_s: float | None = None
    tight: float | None = None

    @property
    def name(self) -> str:
        link = f", {self.link_gb_per_s:g} GB/s" if self.link_gb_per_s else ""
        budget = f", budget x {self.tight:g}" if self.tight else ""
        return f"{self.model}, {self.device}, {self.home}, {self.sequences}/{self.microbatches}{link}{budget}"


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
)


def prepared_for(case: Case, directory: Path, steps: int) -> Prepared:
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
        "memory.host_memory=4GiB",
    ]
    if case.link_gb_per_s:
        settings.append(f"memory.link_gb_per_s={case.link_gb_per_s}")

    def with_memory(device_memory: str) -> Prepared:
        config = load_config(None, [*settings, f"memory.device_memory={device_memory}"])
        return prepare(config, directory, lambda _: None)

    roomy = with_memory("2GiB")
    return with_memory(str(int(case.tight * roomy.plan.total_bytes("device")))) if case.tight else roomy


def unit_times(prepared: Prepared) -> UnitTimes:
    """Time each unit on one microbatch; of units of one kind the median counts for all."""
    model, spec = prepared.split.model, prepared.split.spec
    config, last = prepared.config, prepared.split.spec.num_streamed - 1
    rows = -(-config.sequences_per_step // config.train.microbatches)
    ids = torch.randint(0, 1000, (rows, SEQ_LEN))
    seconds: dict[tuple[str, str], list[float]] = {}

    def timed(kind: str, what: str, work: object) -> None:
        started = time.perf_counter()
        work()  # type: ignore[operator]
        seconds.setdefault((kind, what), []).append(time.perf_counter() - started)

    with materialise(prepared), Boundaries(prepared.split.modules) as boundaries:
        model.train()
        for repeat in range(REPEATS):
            run = MicrobatchRun(model, {"input_ids": ids}, (True,) * (last + 1), lambda unit, glue: None)

            def head(run: MicrobatchRun = run) -> None:
                hidden = run.head_input(last)
                targets, count = shift_labels(ids), prepared.chunk_tokens or SEQ_LEN
                _, gradient = chunked_head_loss(
                    boundaries.forwards[last], hidden, targets, ids.numel(), count
                )
                run.backward_from_head_input(last, gradient)

            for unit in range(last):
                forward = boundaries.forwards[unit]
                timed(spec.units[unit].kind, "forward", lambda u=unit, f=forward, r=run: r.forward(u, f))
            timed("head", "backward", head)
            for unit in reversed(range(last)):
                forward = boundaries.forwards[unit]
                timed(spec.units[unit].kind, "backward", lambda u=unit, f=forward, r=run: r.backward(u, f))
            run.close()
            if repeat == 0:
                seconds.clear()  # first calls allocate
    median = {key: statistics.median(values) for key, values in seconds.items()} | {("head", "forward"): 0.0}
    kinds = [unit.kind for unit in spec.units[: last + 1]]
    return UnitTimes(
        forward_s=tuple(median[kind, "forward"] for kind in kinds),
        backward_s=tuple(median[kind, "backward"] for kind in kinds),
    )


def predicted_s(prepared: Prepared, times: UnitTimes, machine: Machine) -> float:
    """Simulate the plan of a run."""
    plan, rate = prepared.plan, prepared.config.memory.link_gb_per_s
    link = machine.links[0]
    if rate:
        figure = Figure(value=rate * 1e9, source="emulated", measured=True)
        link = Link(up_bytes_per_s=figure, down_bytes_per_s=figure, latency_s=link.latency_s)
    workers = plan.layout.num_workers
    machine = replace(machine, gpus=machine.gpus[:1] * workers, links=(link,) * workers)
    costs = cost_model(
        machine,
        prepared.split.spec,
        plan.layout,
        times,
        prepared.measured.boundary_bytes,
        home=plan.home,
        below=plan.below,
        tile_elements=plan.tile_elements,
    )
    programs = list(itertools.islice(itertools.cycle(plan.programs), SIMULATED_STEPS))
    return simulate(programs, plan.layout, costs, below=plan.below).step_s


def measured_s(prepared: Prepared, directory: Path, steps: int) -> list[float]:
    """Seconds of each step but the first two."""
    config = prepared.config
    with tempfile.TemporaryDirectory(dir=directory) as store:
        with open_dataset(config, prepared, Path(store), lambda _: None) as dataset:
            batches = [dataset.batch(step, config.sequences_per_step) for step in range(steps)]
        with StreamedTrainer(prepared, Path(store)) as trainer:
            trainer.fill()
            seconds = [outcome.seconds for outcome in trainer.steps(batches)]
            trainer.settle()
    return seconds[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dir", type=Path, help="where models and homes lie; best on a disk")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, results = [], []
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        directory = Path(name)
        for model, (layers, hidden, vocabulary) in MODELS.items():
            (directory / model).mkdir()
            bench_speed.build(directory / model, layers, hidden, vocabulary, 200_000)
        machine = machine_of(probe(QUICK, [directory]))
        for case in CASES:
            prepared = prepared_for(case, directory, args.steps)
            prediction = predicted_s(prepared, unit_times(prepared), machine)
            seconds = measured_s(prepared, directory, args.steps)
            measured = statistics.median(seconds)
            error = prediction / measured - 1
            print(f"{case.name}: {prediction:.3f} s, measured {measured:.3f} s", file=sys.stderr)
            rows.append((case.name, f"{prediction:.3f}", f"{measured:.3f}", f"{error:+.1%}"))
            results.append(
                {
                    "case": case.name,
                    "predicted_s": prediction,
                    "measured_s": measured,
                    "spread_s": [min(seconds), max(seconds)],
                    "error": error,
                }
            )
    common.print_table(("configuration", "predicted s", "measured s", "error"), rows)
    errors = [abs(result["error"]) for result in results]
    common.finish(
        {
            "bench": "truth",
            "machine": common.machine(),
            "cases": results,
            "median_error": statistics.median(errors),
            "worst_error": max(errors),
        },
        args.output,
    )


if __name__ == "__main__":
    main()
