"""Sums over several processes, started by torchrun: gloo anywhere, that of the devices where each rank has one.

`measure_all_reduce` starts the ranks on this machine, each of them ``outsize all-reduce``, which over several machines
torchrun starts on each.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from outsize.accelerators import CPU, VENDORS, Devices, kind_here, synchronize
from outsize.errors import StorageError
from outsize.hardware.collectives import AllReduceRates, summarize
from outsize.storage.directory import temporary_directory
from outsize.units import format_bytes

_SMALLEST_BYTES = 2**10
_NUM_SAMPLES = 7
# Ranks that hang are ended after this; on a machine that is busy with other things, starting them alone took 2 minutes.
_START_S = 600.0
_END_S = 45.0
# An interpreter that has imported torch, with room for other builds of it: 240 MiB were seen.
_PROCESS_BYTES = 400 * 2**20


def ranks_and_backend(num_ranks: int | None, num_devices: int, num_cpus: int) -> tuple[int, str]:
    """Return how many processes of this machine sum, and through what: that of the devices where each can have one.

    Args:
        num_ranks: as asked for; None for one on each device, or on each of up to four processors.
        num_devices: accelerators that may be used.
        num_cpus: processors that may be used.
    """
    ranks = num_ranks or (num_devices if num_devices > 1 else min(4, num_cpus))
    return ranks, (device_backend() if ranks <= num_devices else "") or "gloo"


def device_backend() -> str:
    """Return what sums over the accelerators of this machine; empty where there is none that torch names."""
    kind = kind_here()
    return "" if kind is None else VENDORS[kind].backend


def measure_all_reduce(
    num_ranks: int, bytes_max: int, *, backend: str = "gloo", free_bytes: int | None = None
) -> AllReduceRates:
    """Return the times of sums over ``num_ranks`` processes of this machine.

    Args:
        num_ranks: processes; any backend but gloo needs a device for each.
        bytes_max: the largest sum, on each rank; 0 measures nothing.
        backend: ``gloo``, or that of the devices: ``nccl``, ``xccl``, ``hccl``.
        free_bytes: memory that the processes may take together; None where it is not known.
    """
    if bytes_max < _SMALLEST_BYTES:
        return _nothing(backend, num_ranks, "a quick probe starts no processes: outsize all-reduce")
    if num_ranks < 2:
        return _nothing(backend, num_ranks, "a sum over ranks needs two of them: one GPU, or one processor")
    needed = num_ranks * (_PROCESS_BYTES + 2 * bytes_max)
    if free_bytes is not None and free_bytes < needed:
        return _nothing(
            backend, num_ranks, f"{num_ranks} processes need {format_bytes(needed)} of free memory"
        )
    try:
        with temporary_directory() as directory:
            output = directory / "out.json"
            done = _launch(backend, num_ranks, bytes_max, output)
            result = json.loads(output.read_text(encoding="utf-8")) if output.exists() else None
    except (OSError, StorageError, ValueError, subprocess.TimeoutExpired) as error:
        return _nothing(backend, num_ranks, f"torchrun: {error}")
    if result is None:
        lines = done.stderr.strip().splitlines()
        return _nothing(backend, num_ranks, f"torchrun: {lines[-1] if lines else 'no rank answered'}")
    return AllReduceRates.model_validate(result)


def _launch(backend: str, num_ranks: int, bytes_max: int, output: Path) -> "subprocess.CompletedProcess[str]":
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"),
        *("-m", "outsize", "all-reduce", "--backend", backend, "--output", str(output)),
        *("--bytes-max", str(bytes_max)),
    ]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as torchrun:
        try:
            stdout, stderr = torchrun.communicate(timeout=_START_S)
        except BaseException:
            _end(torchrun)
            raise
    return subprocess.CompletedProcess(command, torchrun.returncode, stdout, stderr)


def _end(torchrun: "subprocess.Popen[str]") -> None:
    """Terminate torchrun with its ranks; a kill would leave ranks waiting for each other."""
    torchrun.terminate()
    try:
        torchrun.wait(_END_S)
    except subprocess.TimeoutExpired:
        torchrun.kill()


def _nothing(backend: str, num_ranks: int, why: str) -> AllReduceRates:
    return AllReduceRates(backend=backend, num_ranks=num_ranks, points=(), fit=None, note=why)


def time_as_rank(backend: str, bytes_max: int) -> AllReduceRates:
    """Time sums from 1 KiB to ``bytes_max`` with the other ranks that torchrun has started.

    Every round goes through all sizes, and the slowest rank counts.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    try:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        chosen = CPU if backend == "gloo" else Devices(kind_here() or "cpu", (local,))
        device = chosen.torch_device
        if chosen.accelerated:
            torch.accelerator.set_device_index(device)
        sizes = [_SMALLEST_BYTES << power for power in range((bytes_max // _SMALLEST_BYTES).bit_length())]
        values = torch.ones(bytes_max // 4, device=device)
        samples: dict[int, list[float]] = {size: [] for size in sizes}
        for index in range(_NUM_SAMPLES + 1):
            for size in sizes:
                part = values[: size // 4].fill_(1.0)
                count = 8 if size <= 2**16 else 1
                dist.barrier()
                started = time.perf_counter()
                for _ in range(count):
                    dist.all_reduce(part)
                synchronize(device)
                took = torch.tensor((time.perf_counter() - started) / count, device=device)
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                if index > 0:
                    samples[size].append(float(took))
        return summarize(
            {size: tuple(times) for size, times in samples.items()},
            backend=backend,
            num_ranks=dist.get_world_size(),
            note=f"torchrun, fp32, {_NUM_SAMPLES} samples of each size, the slowest rank of each",
        )
    finally:
        dist.destroy_process_group()
