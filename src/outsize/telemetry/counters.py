"""Counters read once a step: those of the GPU driver and those of the kernel.

What the driver says of GPUs once per step, by nvidia-ml-py where that is installed.

Everything asked here answers within some microseconds. ``nvmlDeviceGetPcieThroughput`` is not asked: it watches the
bus for 20 ms, which would be felt. The counters of bytes sent and received are read instead; where a driver lacks
them the field is null.

What the kernel says of a host that is short of processors or of memory, beside what the process itself counts.

A look costs about 1 ms, so steps that are shorter than `LEAST_S` share one. Any source may be missing (a sandbox, a
kernel without pressure figures); then its field is null.
"""

import contextlib
import os
import re
import resource
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outsize.errors import Closing
from outsize.hardware import cgroup
from outsize.hardware.gpus import clock_limits
from outsize.telemetry.run_reading import GpuSample, HostSample

# From nvml.h: nvmlClockType_t, nvmlTemperatureSensors_t, NVML_FI_DEV_PCIE_COUNT_TX_BYTES and RX.
_SM_CLOCK, _CHIP = 1, 0
_SENT, _RECEIVED = 197, 198


class GpuSampler(Closing):
    """Samples some GPUs; a context manager. Without NVML, or without GPUs to sample, it samples nothing.

    Args:
        uuids: of the GPUs by the number that the run knows them by, e.g. ``GPU-8f0c…``.
        load_nvml: returns the module ``pynvml``, or raises ImportError.
    """

    def __init__(self, uuids: Mapping[int, str], load_nvml: Callable[[], Any]) -> None:
        self._nvml: Any = None
        self._handles: dict[int, Any] = {}
        self._counted: dict[tuple[int, int], int] = {}
        if not uuids:
            return
        try:
            nvml = load_nvml()
        except ImportError:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return
        self._nvml = nvml
        for index, uuid in uuids.items():
            with contextlib.suppress(nvml.NVMLError):
                self._handles[index] = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def sample(self) -> tuple[GpuSample, ...]:
        """Return what each GPU is doing now."""
        return tuple(self._sample(index, handle) for index, handle in self._handles.items())

    def close(self) -> None:
        """Let the driver go; idempotent."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None
            self._handles.clear()

    def _sample(self, index: int, handle: Any) -> GpuSample:
        def ask(function: str, convert: Callable[[Any], Any], *arguments: Any) -> Any:
            # A driver or a virtual GPU may lack any of them, and an old nvidia-ml-py the function itself.
            try:
                return convert(getattr(self._nvml, function)(handle, *arguments))
            except (self._nvml.NVMLError, AttributeError, OSError):
                return None

        return GpuSample(
            index=index,
            sm_clock_hz=ask("nvmlDeviceGetClockInfo", lambda mhz: int(mhz) * 10**6, _SM_CLOCK),
            utilisation_share=ask("nvmlDeviceGetUtilizationRates", lambda rates: rates.gpu / 100),
            memory_used_bytes=ask("nvmlDeviceGetMemoryInfo", lambda memory: int(memory.used)),
            power_w=ask("nvmlDeviceGetPowerUsage", lambda milliwatts: milliwatts / 1e3),
            temperature_c=ask("nvmlDeviceGetTemperature", int, _CHIP),
            pcie_sent_bytes=self._since(index, handle, _SENT),
            pcie_received_bytes=self._since(index, handle, _RECEIVED),
            clock_limits=ask("nvmlDeviceGetCurrentClocksThrottleReasons", clock_limits),
        )

    def _since(self, index: int, handle: Any, field: int) -> int | None:
        """Return how far a counter of bytes came since the last sample; None for the first, and where there is none."""
        try:
            (value,) = self._nvml.nvmlDeviceGetFieldValues(handle, [field])
            if value.nvmlReturn != 0:
                return None
            now = int(value.value.ullVal)
        except (self._nvml.NVMLError, AttributeError, OSError, ValueError):
            return None
        before = self._counted.get((index, field))
        self._counted[index, field] = now
        return None if before is None or now < before else now - before


LEAST_S = 0.2
# Threads that are not Python's: those of torch's kernels, of autograd and of other libraries.
NATIVE = "native"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Columns of a processor in /proc/stat, see proc_stat(5): user, nice, system, irq, softirq; then steal.
_BUSY, _STOLEN = (1, 2, 3, 6, 7), 8


class HostSampler:
    """Samples the host, each time since the time before."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._looked_s = time.monotonic()
        self._before = self._counters()
        self._threads = self._times_by_thread()

    def sample(self) -> HostSample | None:
        """Return what was counted since the last look; None where that is too short ago."""
        span_s = time.monotonic() - self._looked_s
        if span_s < LEAST_S:
            return None
        self._looked_s += span_s
        before, self._before = self._before, self._counters()
        since = {
            name: None if now is None or (earlier := before[name]) is None else max(0.0, now - earlier)
            for name, now in self._before.items()
        }
        own_s, busy_s, swapped = since.pop("own_s"), since.pop("busy_s"), since.pop("swapped_in_pages")
        cpu_s, queued_s = self._times_of_threads()
        return HostSample(
            span_s=span_s,
            cpu_s_by_thread=cpu_s,
            queued_s=queued_s,
            others_cpu_s=None if busy_s is None else max(0.0, busy_s - (own_s or 0.0)),
            swapped_in_bytes=None if swapped is None else int(swapped) * resource.getpagesize(),
            major_faults=int(since.pop("major_faults") or 0),
            minor_faults=int(since.pop("minor_faults") or 0),
            **since,
        )

    def _counters(self) -> dict[str, float | None]:
        proc = self._root / "proc"
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "own_s": used.ru_utime + used.ru_stime,
            "kernel_cpu_s": used.ru_stime,
            "busy_s": _known(lambda: self._processor_s(*_BUSY)),
            "stolen_cpu_s": _known(lambda: self._processor_s(_STOLEN)),
            "throttled_s": cgroup.throttled_s(self._root).number(),
            "memory_pressure_s": _known(
                lambda: _counted(proc / "pressure/memory", r"some .*total=(\d+)") / 1e6
            ),
            "swapped_in_pages": _known(lambda: _counted(proc / "vmstat", r"pswpin (\d+)")),
            "major_faults": used.ru_majflt,
            "minor_faults": used.ru_minflt,
        }

    def _processor_s(self, *columns: int) -> float:
        """Return seconds of the processors that this process may use."""
        usable = {f"cpu{index}" for index in os.sched_getaffinity(0)}
        lines = [line.split() for line in (self._root / "proc/stat").read_text().splitlines()]
        ticks = [int(line[column]) for line in lines if line[0] in usable for column in columns]
        if not ticks:
            raise ValueError("names no processor that may be used")
        return sum(ticks) / _TICKS_PER_S

    def _times_of_threads(self) -> tuple[dict[str, float] | None, float | None]:
        """Return since the last look the processor s of threads by name, and the s that all of them were queued."""
        before, self._threads = self._threads, self._times_by_thread()
        if not self._threads:
            return None, None
        names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
        cpu_s: dict[str, float] = {}
        queued_s = 0.0
        for number, (cpu_ns, queued_ns) in self._threads.items():
            # The number of a thread that has ended may be that of a new one.
            former_cpu_ns, former_queued_ns = before.get(number, (0, 0))
            name = names.get(number, NATIVE)
            cpu_s[name] = cpu_s.get(name, 0.0) + max(0, cpu_ns - former_cpu_ns) / 1e9
            queued_s += max(0, queued_ns - former_queued_ns) / 1e9
        return cpu_s, queued_s

    def _times_by_thread(self) -> dict[str, tuple[int, int]]:
        """Return ns that each thread had a processor, and that it was ready to run and had none; empty unless told."""
        times = {}
        for thread in (self._root / "proc/self/task").glob("[0-9]*"):
            try:
                cpu_ns, queued_ns, _ = (thread / "schedstat").read_text().split()
                times[thread.name] = int(cpu_ns), int(queued_ns)
            except (OSError, ValueError):
                continue  # it has ended, or there is no such file
        return times


def _known(read: Callable[[], float]) -> float | None:
    try:
        return read()
    except (OSError, ValueError, IndexError):
        return None


def _counted(path: Path, pattern: str) -> float:
    match = re.search(f"^{pattern}", path.read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f"{path} does not tell")
    return float(match[1])
