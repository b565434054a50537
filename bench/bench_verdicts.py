"""Does the report name what limits a run? Sixteen runs with one planted bottleneck each.

Every run is a real one, of a model of four blocks, through the command's own loop; the bottleneck is a delay, a
throttle or a setting that costs several times what the rest of a step does. The verdict is the one at the top of
`outsize report`. A verdict is right where it is the one that the plant stands for; nothing else is looked at. Four
are of the host: other work on the processors, a quota (of a control group that is made for it; where none can be made
it is planted in the record, as swapping is), and data that come slowly. On a machine that other work fills, processors
that it takes are what limits the runs without a wait, and the verdict says so.

    python bench/bench_verdicts.py
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import common

from outsize.data.packed_dataset import PackedDataset
from outsize.data.tokens import ArrayReader
from outsize.planner.program.hazards import Hazards
from outsize.reporting.collect import collect
from outsize.runtime.device.device import EmulatedDevice
from outsize.runtime.ops.checkpoint_ops import StoreOps
from outsize.runtime.ops.optimizer_ops import OptimizerOps
from outsize.storage.disk_file import DirectFile
from outsize.telemetry.counters import HostSampler
from outsize.telemetry.run_reading import HostSample
from outsize.training.run import train
from tiny import tiny_model, tiny_run

TARGET = 15
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
HOST, SLOW_LINK = {"home": "host"}, 0.004  # GB/s: a block of this model takes 40 ms


@contextmanager
def slower(cls: type, name: str, seconds: float, when: Callable[[Any], bool] = lambda _: True):
    """Have a method take longer, where its object is one of those that ``when`` says."""
    former = getattr(cls, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if when(self):
            time.sleep(seconds)
        return former(self, *args, **kwargs)

    with mock.patch.object(cls, name, call):
        yield


def slow_forward(seconds: float) -> AbstractContextManager[Any]:
    """Python in the model's own code that computes nothing."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    return slower(LlamaMLP, "forward", seconds)


@contextmanager
def busy_processors():
    """Have twice as many processes compute as there are processors."""
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(2 * len(os.sched_getaffinity(0)))]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextmanager
def planted_host(**counts: float):
    """Have every look at the host see this, per second."""
    sound = dict.fromkeys(HostSample.model_fields, 0) | {"cpu_s_by_thread": None}

    def sample(_: HostSampler) -> HostSample:
        return HostSample.model_validate({**sound, "span_s": 1.0, **counts})

    with mock.patch.object(HostSampler, "sample", sample):
        yield


@contextmanager
def quota():
    """Move this process into a control group that may use a fifth of a processor."""
    with ExitStack() as stack:
        try:
            stack.enter_context(
                common.control_group("cpu", {"cpu.cfs_quota_us": "20000"}, {"cpu.max": "20000 100000"})
            )
        except OSError as error:
            print(f"no control group can be made ({error}): the quota is planted in the record", flush=True)
            stack.enter_context(planted_host(throttled_s=1.6))
        yield


def slow_worker() -> AbstractContextManager[Any]:
    return slower(EmulatedDevice, "computing", 0.04, lambda device: device.name.endswith(":1"))


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A bottleneck.

    Attributes:
        verdict: id of the rule that should be named.
        memory: section of the configuration.
        train: the same.
        data: the same.
        slowed: what is slower while the run lasts.
        progress_s: what the listener to each step takes.
    """

    verdict: str
    memory: dict[str, Any] = field(default_factory=lambda: dict(HOST))
    train: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    slowed: Callable[[], AbstractContextManager[Any]] = nullcontext
    progress_s: float = 0.0


PLANTS: dict[str, Plant] = {
    "slow link": Plant(
        verdict="link-bound", memory={**HOST, "device": "emulated:1", "link_gb_per_s": SLOW_LINK}
    ),
    "slow link, two workers": Plant(
        verdict="link-bound", memory={**HOST, "device": "emulated:2", "link_gb_per_s": SLOW_LINK}
    ),
    "slow disk, reads": Plant(
        verdict="disk-bound", memory={"home": "disk"}, slowed=lambda: slower(DirectFile, "read_spans", 0.04)
    ),
    "slow disk, writes": Plant(
        verdict="disk-bound", memory={"home": "disk"}, slowed=lambda: slower(DirectFile, "write_spans", 0.04)
    ),
    "slow loader": Plant(verdict="loader-bound", slowed=lambda: slower(PackedDataset, "batch", 0.6)),
    "slow optimizer": Plant(verdict="optimizer-bound", slowed=lambda: slower(OptimizerOps, "step", 0.1)),
    "tiny microbatches": Plant(
        verdict="microbatch-tiny",
        train={"tokens_per_step": 256, "microbatches": 64},
        data={"seq_len": 4},
    ),
    "slow Python between steps": Plant(verdict="host-bound", progress_s=0.6),
    "slow Python that hands out ops": Plant(
        verdict="host-bound", slowed=lambda: slower(Hazards, "dependencies", 0.02)
    ),
    "slow checkpoints": Plant(
        verdict="checkpoint-bound", train={"save_every": 1}, slowed=lambda: slower(StoreOps, "store", 0.2)
    ),
    "one slow worker of two": Plant(
        verdict="worker-bound", memory={**HOST, "device": "emulated:2"}, slowed=slow_worker
    ),
    "busy processors": Plant(verdict="cores-taken", slowed=busy_processors),
    "a quota of processor time": Plant(verdict="cpu-quota", slowed=quota),
    "a host that swaps": Plant(
        verdict="swap-active",
        slowed=lambda: planted_host(swapped_in_bytes=2**26, memory_pressure_s=0.7, major_faults=9_000),
    ),
    "a slow mount of the data": Plant(
        verdict="loader-bound", slowed=lambda: slower(ArrayReader, "read_rows", 0.6)
    ),
    "slow Python in the model": Plant(verdict="compute-slow", slowed=lambda: slow_forward(0.1)),
}


def run(directory: Path, plant: Plant, steps: int) -> dict[str, Any]:
    """Train with the plant, and return what the report says."""
    tiny_model(directory / "model", **SIZES)
    (directory / "data.txt").write_text("\n".join(f"{n} squared is {n * n}" for n in range(5_000)))
    config = tiny_run(
        directory,
        data={"path": str(directory / "data.txt"), "seq_len": 64, **plant.data},
        train={
            "steps": steps,
            "tokens_per_step": 512,
            "microbatches": 2,
            "run_dir": str(directory / "run"),
            **plant.train,
        },
        memory=plant.memory,
    )
    with plant.slowed():
        train(config, progress=lambda _: time.sleep(plant.progress_s))
    found = collect(directory / "run")
    named = found["verdict"]["bottleneck"]
    return {
        "planted": plant.verdict,
        "named": named["id"],
        "right": named["id"] == plant.verdict,
        "evidence": named["evidence"],
        "step_s": found["figures"]["step_s"],
        "compute_share": found["figures"]["compute_share"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", help="part of the name of a plant")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found = {}
    for name, plant in PLANTS.items():
        if arguments.only and arguments.only not in name:
            continue
        with tempfile.TemporaryDirectory() as directory:
            found[name] = run(Path(directory), plant, arguments.steps)
    common.print_table(
        ["planted", "verdict", "right", "step, s", "compute"],
        [
            [name, f["named"], "yes" if f["right"] else "no", f["step_s"], f"{f['compute_share']:.0%}"]
            for name, f in found.items()
        ],
        "One planted bottleneck each",
    )
    right = sum(f["right"] for f in found.values())
    print(f"\nnamed {right} of {len(found)}")
    result = {
        "bench": "verdicts",
        "runs": found,
        "right": right,
        "planted": len(found),
        "target": TARGET,
        "met": right >= TARGET,
        "machine": common.machine(),
    }
    common.finish(result, arguments.output)


if __name__ == "__main__":
    main()
