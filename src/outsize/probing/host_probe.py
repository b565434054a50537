"""Host memory and the optimizer that it bounds: copy, triad, AdamW parameters per second."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from outsize.accelerators import Devices
from outsize.hardware.machine_file import HostRates
from outsize.hardware.readings import Measurement
from outsize.model.sizes.model_spec import UnitSpec
from outsize.probing.compute import finisher
from outsize.probing.effort import Effort
from outsize.probing.optimizer_probe import measure_adamw
from outsize.probing.timing import sample
from outsize.runtime.device.driver import pinner_of
from outsize.storage.arena import Arena
from outsize.units import format_bytes

_SCALAR = 3.0  # of STREAM's triad
_BESIDE_BYTES = 16 * 2**20


def measure_dram(effort: Effort) -> tuple[Measurement, Measurement]:
    """Return what ``a = b`` and ``a = b + s * c`` move in host memory, bytes per second, reads and writes together.

    As in STREAM (McCalpin) the write-allocate read of ``a`` is not counted, and the numbers are fp64.
    """
    with Arena() as arena:
        a, b, c = (arena.take(effort.array_bytes, "DRAM array").view(torch.float64).fill_(1.0) for _ in "abc")
        how = f"fp64 arrays of {format_bytes(effort.array_bytes)}, {torch.get_num_threads()} threads"
        copies = sample(
            lambda: a.copy_(b),
            **effort.sampling(),
        )
        triads = sample(
            lambda: torch.add(b, c, alpha=_SCALAR, out=a),
            **effort.sampling(),
        )
        return (
            Measurement.of((2 * effort.array_bytes / s for s in copies), f"torch copy_, {how}"),
            Measurement.of((3 * effort.array_bytes / s for s in triads), f"torch.add with alpha, {how}"),
        )


def measure_adamw_beside(device: Devices, effort: Effort) -> tuple[Measurement, Measurement]:
    """Return the parameters per second of the fp32 step while copies go both ways, and the bytes per second of those.

    Args:
        device: whose link the copies take; on a CPU they are copies from memory to memory.
        effort: how long.
    """
    copied, num_bytes = 0, min(_BESIDE_BYTES, effort.copy_bytes_max)
    stop = threading.Event()

    def copy_on() -> float:
        """Copy until told to stop; return the seconds."""
        nonlocal copied
        with Arena(pinner=pinner_of(device)) as arena:
            host, back = (arena.take(num_bytes, "copies beside the optimizer").fill_(1) for _ in range(2))
            other = torch.empty_like(host, device=device.torch_device).fill_(1)
            finish = finisher(device)
            finish()
            started = time.perf_counter()
            while not stop.is_set():
                other.copy_(host, non_blocking=True)
                back.copy_(other, non_blocking=True)
                finish()
                copied += 2 * num_bytes
            return time.perf_counter() - started

    with ThreadPoolExecutor(1, "probe-beside") as thread:
        copying = thread.submit(copy_on)
        try:
            rate = measure_adamw(effort, "fp32")
        finally:
            stop.set()
        seconds = copying.result()
    how = f"copies of {format_bytes(num_bytes)} up to {device} and down again"
    beside = rate.model_copy(update={"source": f"{rate.source}, beside {how}"})
    if copied == 0:
        return beside, Measurement.absent("no copy ended beside the optimizer")
    return beside, Measurement.of([copied / seconds], f"{how}, both directions added")


def measure_host(effort: Effort, units: Sequence[UnitSpec] = ()) -> HostRates:
    """Return the rates of processor and host memory; what is timed beside copies comes later, or not at all.

    Args:
        effort: how long and how large.
        units: of a model, for the optimizer; see `measure_adamw`.
    """
    copy, triad = measure_dram(effort)
    later = Measurement.absent("left out: the time did not suffice")
    return HostRates(
        adamw_beside_copies_params_per_s=later,
        copies_beside_adamw_bytes_per_s=later,
        dram_copy_bytes_per_s=copy,
        dram_triad_bytes_per_s=triad,
        adamw_params_per_s={dtype: measure_adamw(effort, dtype, units) for dtype in ("fp32", "bf16")},
    )
