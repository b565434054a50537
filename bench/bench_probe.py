"""Does ``outsize probe`` say what independent programs say, and what a training run does?

DRAM: STREAM's triad in C, compiled here by gcc with OpenMP, and the probe's take turns, with arrays of the same size
and as many threads. Disk: fio and the probe take turns, with requests of the same size, direct I/O, as many threads
(fio's ``psync``: its ``libaio`` hands requests over from one thread, which at 4 MiB is work) and the same order of
offsets; where fio is not installed, a plain loop of ``preadv`` and ``pwritev`` takes its place, and the table says
so. At depth 1 fio fills one buffer again and again, which stays in the cache, and the probe 64 MiB, as streaming
does. AdamW: the optimizer lane of a training run (a Llama of some 40M parameters, few tokens, state in host memory, a
norm that no gradient reaches, since clipping is one more pass over it) in fp32 and in bf16, with the next step held
back until the optimizer has ended, against the probe's rate over that model's units, and over blocks of its own.
Link: how far the fit lies from copies of sizes that it has not seen. Time: whole quick probes, each in a fresh process.

A ratio is the median over the rounds of each round's own: what the machine does meanwhile meets both.

    python bench/bench_probe.py --dir /path/on/the/disk               # about 4 minutes on two quiet cores
"""

import argparse
import itertools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from outsize.spin import SPIN_TURNS
from outsize.streamed.spec import RunSpec

os.environ.setdefault("GOMP_SPINCOUNT", SPIN_TURNS)  # as `outsize train` does, before torch reads it

import torch
from bench_speed import build
from common import Spread, finish, machine, print_table

from outsize.config import load_config
from outsize.hardware.machine_file import parse
from outsize.probing.compute import measure_adamw
from outsize.probing.data_probe import measure_disk
from outsize.probing.effort import QUICK, Effort
from outsize.probing.host_probe import measure_dram
from outsize.session.job.prepare import prepare
from outsize.session.stream import StreamedTrainer
from outsize.storage.disk_file import DEFAULT_REQUEST_BYTES
from outsize.training.measures import lane_times
from outsize.training.run_data import open_dataset

# As the engine's buffers have: requests into small pages are cut up, which halves the rate of direct I/O.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# J. McCalpin's triad: 24 bytes per element, fp64, write-allocate not counted. Every repetition is printed.
STREAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <omp.h>
int main(int argc, char **argv) {
    long n = atol(argv[1]), repeats = atol(argv[2]);
    double *a, *b, *c;
    if (posix_memalign((void **)&a, 1 << 21, n * 8) || posix_memalign((void **)&b, 1 << 21, n * 8) ||
        posix_memalign((void **)&c, 1 << 21, n * 8)) return 1;
    #pragma omp parallel for schedule(static)
    for (long i = 0; i < n; i++) { a[i] = 1.0; b[i] = 2.0; c[i] = 0.0; }
    for (long k = 0; k < repeats + 1; k++) {
        double started = omp_get_wtime();
        #pragma omp parallel for schedule(static)
        for (long i = 0; i < n; i++) a[i] = b[i] + 3.0 * c[i];
        double seconds = omp_get_wtime() - started;
        if (k) printf("%.9g\n", 24.0 * n / seconds);
    }
    return a[n / 2] == 2.0 ? 0 : 1;
}
"""


def compile_stream(directory: Path) -> Path | None:
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    source, program = directory / "stream.c", directory / "stream"
    source.write_text(STREAM)
    # The plain flags of STREAM's own makefile.
    subprocess.run([compiler, "-O3", "-march=native", "-fopenmp", source, "-o", program], check=True)
    return program


def stream_rates(program: Path, effort: Effort, repeats: int) -> list[float]:
    done = subprocess.run(
        [program, str(effort.array_bytes // 8), str(repeats)],
        capture_output=True,
        text=True,
        check=True,
        env={"OMP_NUM_THREADS": str(torch.get_num_threads()), **HUGE_PAGES},
    )
    return [float(line) for line in done.stdout.split()]


def compare_dram(effort: Effort, rounds: int) -> dict[str, Any]:
    """Return both medians over all rounds; each round runs both."""
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    with tempfile.TemporaryDirectory(prefix="bench-probe-") as directory:
        program = compile_stream(Path(directory))
        for _ in range(rounds):
            ours.append(list(measure_dram(effort)[1].samples))
            if program is not None:
                theirs.append(stream_rates(program, effort, repeats=40))
    if program is None:
        print("gcc is not installed: no STREAM to compare with")
    return _pair(ours, theirs)


def fio_rate(
    fio: str, path: Path, effort: Effort, depth: int, kind: str, *, seconds: float | None = None
) -> float:
    """Return bytes per second of ``depth`` threads, each of which moves every depth-th request; one pass without
    ``seconds``.
    """
    skip = f":{(depth - 1) * DEFAULT_REQUEST_BYTES}" if depth > 1 else ""
    duration = [] if seconds is None else ["--ramp_time=200ms", f"--runtime={seconds}", "--time_based"]
    done = subprocess.run(
        [
            fio,
            "--name=probe",
            f"--filename={path}",
            f"--rw={kind}{skip}",
            f"--bs={DEFAULT_REQUEST_BYTES}",
            "--ioengine=psync",
            "--thread",
            f"--numjobs={depth}",
            f"--offset_increment={DEFAULT_REQUEST_BYTES}",
            "--group_reporting",
            "--direct=1",
            "--iomem_align=2m",
            f"--size={effort.disk_bytes - (depth - 1) * DEFAULT_REQUEST_BYTES}",
            "--output-format=json",
            *duration,
        ],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **HUGE_PAGES},
    )
    return float(json.loads(done.stdout)["jobs"][0][kind]["bw_bytes"])


def plain_rate(path: Path, effort: Effort, depth: int, kind: str, *, seconds: float | None = None) -> float:
    """Return what `fio_rate` returns, by ``depth`` threads that each read or write every depth-th request."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    num_requests = effort.disk_bytes // DEFAULT_REQUEST_BYTES
    buffer = mmap.mmap(-1, depth * DEFAULT_REQUEST_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    buffer.write(os.urandom(2**20) * (len(buffer) // 2**20))
    call = os.pwritev if kind == "write" else os.preadv
    stop = None if seconds is None else time.perf_counter() + seconds

    def work(first: int) -> int:
        part = memoryview(buffer)[first * DEFAULT_REQUEST_BYTES : (first + 1) * DEFAULT_REQUEST_BYTES]
        done = 0
        for index in itertools.count(first, depth):
            if index >= num_requests and stop is None:
                break
            if stop is not None and time.perf_counter() >= stop:
                break
            call(descriptor, [part], index % num_requests * DEFAULT_REQUEST_BYTES)
            done += DEFAULT_REQUEST_BYTES
        return done

    try:
        started = time.perf_counter()
        with ThreadPoolExecutor(depth) as threads:
            done = sum(threads.map(work, range(depth)))
        return done / (time.perf_counter() - started)
    finally:
        os.close(descriptor)


def compare_disk(directory: Path, effort: Effort, rounds: int, fio: str | None) -> dict[str, Any]:
    """Return reads and writes by queue depth, the probe's and those of fio or of the plain loop."""
    measure = partial(fio_rate, fio) if fio is not None else plain_rate
    ours: dict[tuple[str, int], list[list[float]]] = {}
    theirs: dict[tuple[str, int], list[list[float]]] = {}
    for _ in range(rounds):
        for depth in measure_disk(directory, effort).depths:
            for kind, rate in (("read", depth.read_bytes_per_s), ("write", depth.write_bytes_per_s)):
                if rate.median is None:
                    raise SystemExit(f"{directory}: {rate.source}")
                ours.setdefault((kind, depth.queue_depth), []).append([rate.median])
        with tempfile.TemporaryDirectory(prefix="bench-probe-", dir=directory) as scratch:
            path = Path(scratch) / "file"
            # A write fills the file, so that no read is of a hole.
            measure(path, effort, 1, "write")
            for kind, queue_depth in ours:
                rate_of_other = measure(path, effort, queue_depth, kind, seconds=effort.disk_s)
                theirs.setdefault((kind, queue_depth), []).append([rate_of_other])
    return {f"{kind} depth {depth}": _pair(ours[kind, depth], theirs[kind, depth]) for kind, depth in ours}


def compare_adamw(directory: Path, dtype: str, rounds: int, steps: int) -> dict[str, Any]:
    """Return parameters per second of the probe's step and of a training run's, with nothing beside them."""
    names = ("probe", "probe, own blocks", "run")
    rates: dict[str, list[list[float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="bench-probe-", dir=directory) as scratch:
        home = Path(scratch)
        build(home, layers=10, hidden=512, vocabulary=8192, num_tokens=200_000)
        overrides = [
            f"model.path={home / 'model'}",
            f"model.dtype={dtype}",
            f"data.path={home / 'tokens.npy'}",
            "data.format=tokens",
            "data.seq_len=16",
            f"train.steps={steps * rounds}",
            "train.tokens_per_step=16",
            "train.microbatches=1",
            f"train.run_dir={home / 'run'}",
            "optimizer.schedule=constant",
            "optimizer.max_grad_norm=1e9",
            "memory.device=cpu",
            "memory.home=host",
            "memory.device_memory=2GiB",
        ]
        config = load_config(None, overrides)
        prepared = prepare(RunSpec.of(config, home / "run"), lambda _: None)
        with (
            open_dataset(config, prepared, home / "run", lambda _: None) as dataset,
            StreamedTrainer(prepared, home / "store") as trainer,
        ):
            trainer.fill()
            batches = [dataset.batch(step, 1) for step in range(steps * rounds)]
            num_parameters = prepared.split.spec.num_trainable
            for index in range(rounds):
                first = steps * index
                seconds = stepping_s(trainer, batches[first : first + steps], first)
                rates["run"].append([num_parameters / each for each in seconds])
                rates["probe"].append(list(measure_adamw(QUICK, dtype, prepared.split.spec.units).samples))
                rates["probe, own blocks"].append(list(measure_adamw(QUICK, dtype).samples))
    return {
        f"AdamW {dtype} alone": _pair(rates["probe"], rates["run"], "params_per_s"),
        f"AdamW {dtype} alone, own blocks": _pair(rates["probe, own blocks"], rates["run"], "params_per_s"),
    }


def stepping_s(trainer: StreamedTrainer, batches: list[Any], first: int) -> list[float]:
    """Return the seconds of the optimizer lane in each step but the first two."""
    found = []
    for index, _ in enumerate(trainer.steps(batches, first)):
        trainer.settle()
        took = lane_times(trainer.take_timeline()).update_s
        if index > 1:
            found.append(took)
    trainer.settle()
    trainer.take_timeline()
    return found


def _pair(ours: list[list[float]], theirs: list[list[float]], unit: str = "bytes_per_s") -> dict[str, Any]:
    """Return medians over all rounds, and the ratio: of each round's medians, the median over the rounds."""
    probe = Spread.of(itertools.chain(*ours))
    other = Spread.of(itertools.chain(*theirs)) if theirs else None
    ratios = [
        statistics.median(mine) / statistics.median(its) for mine, its in zip(ours, theirs, strict=False)
    ]
    return {
        f"probe_{unit}": probe.median,
        "probe_spread": probe.relative,
        f"other_{unit}": other.median if other else None,
        "other_spread": other.relative if other else None,
        "ratio": statistics.median(ratios) if ratios else None,
        "ratio_low": min(ratios, default=None),
        "ratio_high": max(ratios, default=None),
    }


def whole_probe(directory: Path) -> dict[str, Any]:
    """Run a quick probe in a fresh process; return its wall time, its links, and what it left behind."""
    before = set(directory.iterdir())
    command = [sys.executable, "-m", "outsize", "probe", "--quick", "--json", "--directory", str(directory)]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall_s = time.perf_counter() - started
    found = parse(done.stdout)
    links = {
        f"{device.device} {link.path} {link.direction}": link.fit.held_out_median
        for device in found.devices
        for link in device.links
        if link.fit is not None
    }
    left = sorted(str(path) for path in set(directory.iterdir()) - before if "outsize-probe" in path.name)
    return {"wall_s": wall_s, "held_out_median_error": links, "files_left": left}


def _gigabytes(value: float | None) -> str | None:
    return None if value is None else f"{value / 1e9:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of training in each round, held back or not")
    parser.add_argument("--fio", default=shutil.which("fio"), help="the program, where it is not on the path")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    effort = replace(QUICK, disk_s=1.0, disk_bytes=1024 * 2**20)
    dram = compare_dram(effort, arguments.rounds)
    if arguments.fio is None:
        print("fio is not installed: a plain loop of direct reads and writes takes its place")
    adamw = {
        name: pair
        for dtype in ("fp32", "bf16")
        for name, pair in compare_adamw(arguments.dir, dtype, arguments.rounds, arguments.steps).items()
    }
    disk = compare_disk(arguments.dir, effort, arguments.rounds, arguments.fio)
    runs = [whole_probe(arguments.dir) for _ in range(arguments.rounds)]

    rows = [
        [
            name,
            _gigabytes(pair["probe_bytes_per_s"]),
            _gigabytes(pair["other_bytes_per_s"]),
            pair["ratio"],
            pair["ratio_low"],
            pair["ratio_high"],
        ]
        for name, pair in {"DRAM triad": dram, **disk}.items()
    ]
    disk_by = "fio" if arguments.fio is not None else "plain loop"
    print_table(
        ["GB/s", "probe", f"STREAM, {disk_by}", "ratio", "low", "high"],
        rows,
        title="The same machine by other programs",
    )
    rows = [
        [
            name,
            _gigabytes(pair["probe_params_per_s"]),
            _gigabytes(pair["other_params_per_s"]),
            pair["ratio"],
            pair["ratio_low"],
            pair["ratio_high"],
        ]
        for name, pair in adamw.items()
    ]
    print_table(["G parameters/s", "probe", "training run", "ratio", "low", "high"], rows)
    held_out = {
        name: statistics.median(run["held_out_median_error"][name] for run in runs)
        for name in runs[0]["held_out_median_error"]
    }
    print_table(["link", "median error on sizes not seen"], [[k, f"{v:.1%}"] for k, v in held_out.items()])
    print(f"\nquick probe: {Spread.of(run['wall_s'] for run in runs)} s")
    finish(
        {
            "benchmark": "probe",
            "machine": machine(),
            "fio": arguments.fio is not None,
            "dram_triad": dram,
            "adamw": adamw,
            "disk": disk,
            "held_out_median_error": held_out,
            "quick_wall_s": [run["wall_s"] for run in runs],
            "files_left": [path for run in runs for path in run["files_left"]],
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
