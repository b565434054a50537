"""What the kernel says of a host that is short of processors or of memory, beside what the process itself counts.

A look costs about 1 ms, so steps that are shorter than `LEAST_S` share one. Any source may be missing (a sandbox, a
kernel without pressure figures); then its field is null.
"""

import os
import re
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

from outsize.hardware import cgroup
from outsize.telemetry.heartbeat_schema import HostSample

LEAST_S = 0.2
# Threads that are not Python's: those of torch's kernels, of autograd and of other libraries.
NATIVE = "native"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Columns of a processor in /proc/stat, see proc_stat(5): user, nice, system, irq, softirq; then steal.
_BUSY, _STOLEN = (1, 2, 3, 6, 7), 8


class HostSampler:
    """Samples the host, each time since the time before.

    Args:
        root: where ``proc`` and ``sys`` are.
    """

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
            name: None if now is None or (former := before[name]) is None else max(0.0, now - former)
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
        found = {}
        for thread in (self._root / "proc/self/task").glob("[0-9]*"):
            try:
                cpu_ns, queued_ns, _ = (thread / "schedstat").read_text().split()
                found[thread.name] = int(cpu_ns), int(queued_ns)
            except (OSError, ValueError):
                continue  # it has ended, or there is no such file
        return found


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
