"""What can be wrong with host memory, processors, clocks and disks."""

import statistics

from outsize.doctor.facts import (
    Facts,
    LackingError,
    is_on_cpu,
    limit,
    median,
    number,
    planned_host_bytes,
    text,
)
from outsize.doctor.finding import Seen
from outsize.hardware.readings import Measurement
from outsize.units import format_bytes, format_rate

# Drivers in which the governor `powersave` still raises the clock with the load (kernel: intel_pstate, amd-pstate).
_DYNAMIC_POWERSAVE = ("intel_pstate", "amd-pstate-epp")
# Part of memory that should be available, and part of the last minute that may be lost to its want.
_LEAST_AVAILABLE, _MOST_PRESSURE = 0.1, 0.05
# Of the control group's limit: use beyond it ends in reclaim, and then in a kill.
_FULL = 0.9
# A rate that falls through its samples by more than this is no noise, if each third is slower than the one before.
_SAG, _LEAST_SAMPLES = 0.15, 6
_DISK_SAG = 0.3
# Other work is in the figures when this part of the processors was busy before anything was timed.
_BUSY = 0.5
_IN_MEMORY = ("tmpfs", "ramfs", "zram")
# No disk that turns reads 0.35 GB/s in order; a plain NVMe drive reads 2.
_TURNING_BYTES_PER_S, _NVME_BYTES_PER_S = 0.35e9, 2e9
# Between the two of the A100 in arXiv:2307.08691: fused causal attention at a third of peak and more, unfused at a
# tenth and less.
_NO_KERNEL = 0.15


def group_limit(facts: Facts) -> Seen | None:
    """The control group allows less than the machine has, or is nearly full."""
    memory = facts.machine.inventory.memory
    allowed = limit(memory.cgroup_limit_bytes, "limit of the control group")
    if allowed is None:
        return None
    total, used = number(memory.total_bytes, "RAM"), memory.cgroup_usage_bytes.number() or 0.0
    evidence = f"limit {format_bytes(int(allowed))} of {format_bytes(int(total))} RAM, {format_bytes(int(used))} in use"
    planned = planned_host_bytes(facts)
    if planned is not None and planned > allowed:
        return Seen(
            severity="error",
            evidence=f"{evidence}; the run plans for {format_bytes(int(planned))} of it",
            expected="a plan within the limit; beyond it the kernel kills the process",
        )
    if used > _FULL * allowed:
        return Seen(
            severity="warning",
            evidence=f"{evidence} ({used / allowed:.0%}), page cache included",
            expected=f"below {_FULL:.0%}; page cache is given back first, then the kernel kills",
        )
    if allowed < total:
        return Seen(
            severity="info", evidence=evidence, expected="budgets within the limit, which outsize plans with"
        )
    return None


def locked_memory(facts: Facts) -> Seen | None:
    """A run on a GPU plans for more host memory than may be locked, and nobody has seen the driver pin any.

    A low limit alone is no finding: NVIDIA's driver pins beyond it on most systems, and the probe tries it.
    """
    machine, planned = facts.machine, planned_host_bytes(facts)
    if is_on_cpu(facts) or not any(device.device.startswith("cuda") for device in machine.devices):
        return None
    allowed = limit(machine.inventory.memory.memlock_limit_bytes, "limit of locked memory")
    if planned is None:
        raise LackingError("a run with a plan: outsize doctor RUN")
    pinned = any(
        link.path == "pinned" and link.fit is not None for device in machine.devices for link in device.links
    )
    if allowed is None or pinned or planned <= allowed:
        return None
    return Seen(
        severity="warning",
        evidence=(
            f"at most {format_bytes(int(allowed))} may be locked, the run plans for {format_bytes(planned)} of host "
            "memory, and the probe has not seen pinned copies"
        ),
        expected="no limit, or one above the plan",
    )


def sagging_disk(facts: Facts) -> Seen | None:
    """A drive that writes slower and slower without a pause: its cache is full, or it is hot."""
    worst: Seen | None = None
    tried = False
    for disk in facts.machine.disks:
        tried |= disk.sustained_write_bytes_per_s.median is not None
        lost = _lost(disk.sustained_write_bytes_per_s)
        if lost > max(_DISK_SAG, worst.gain_share or 0.0 if worst else 0.0):
            samples = disk.sustained_write_bytes_per_s.samples
            worst = Seen(
                severity="warning",
                evidence=(
                    f"{disk.directory}: writes fell by {lost:.0%}, from {format_rate(samples[0])} to "
                    f"{format_rate(samples[-1])}, within {len(samples)} samples"
                ),
                expected="the same rate for as long as it writes: a step writes the whole state, again and again",
                gain_share=lost,
            )
    if not tried and facts.machine.disks:
        raise LackingError("writes without a pause: `outsize probe --full`")
    return worst


def swapping(facts: Facts) -> Seen | None:
    """Memory is short. Pages that were swapped out long ago, with memory to spare, cost nothing."""
    memory = facts.machine.inventory.memory
    total, free = number(memory.swap_total_bytes, "swap"), number(memory.swap_free_bytes, "free swap")
    available = number(memory.available_bytes, "available RAM") / number(memory.total_bytes, "RAM")
    pressure = memory.pressure_share.number() or 0.0
    if total - free <= 0 or (available >= _LEAST_AVAILABLE and pressure < _MOST_PRESSURE):
        return None
    return Seen(
        severity="warning",
        evidence=(
            f"{format_bytes(int(total - free))} swapped out, {available:.0%} of RAM available; in the last minute "
            f"tasks stood still for memory {pressure:.0%} of the time"
        ),
        expected=f"no swap in use, or {_LEAST_AVAILABLE:.0%} of RAM available and no waiting for memory",
        gain_share=pressure or None,
    )


def kernels(facts: Facts) -> Seen | None:
    """The kernels in C cannot be used, and torch ops do their work."""
    native = facts.machine.inventory.environment.native
    if text(native, "C kernels") != "none":
        return None
    return Seen(
        severity="warning",
        evidence=f"no kernels in C: {native.source}",
        expected="kernels built at install: optimizer steps with small state take a fraction of the time",
    )


def quota(facts: Facts) -> Seen | None:
    """The control group grants fewer cores than threads will start on: all of them stand still when it is used up."""
    cpu = facts.machine.inventory.cpu
    granted = limit(cpu.quota_cores, "quota")
    usable = number(cpu.num_usable_cpus, "usable CPUs")
    if granted is None or granted >= usable:
        return None
    told = facts.machine.inventory.environment.variables.get("OMP_NUM_THREADS")
    threads = int(str(told.value)) if told is not None and str(told.value).isdigit() else int(usable)
    if threads <= max(1.0, granted):
        return None
    return Seen(
        severity="warning",
        evidence=f"a quota of {granted:g} cores, {usable:.0f} processors in sight, {threads} threads by default",
        expected=f"no more than {max(1, int(granted))} threads",
    )


def clock_limit(facts: Facts) -> Seen | None:
    """The processor may not use its highest clock."""
    cpu = facts.machine.inventory.cpu
    driver, _, governor = text(cpu.clock_governor, "governor").partition(" ")
    highest, allowed = (
        number(cpu.clock_max_hz, "highest clock"),
        number(cpu.clock_limit_hz, "limit of the clock"),
    )
    if governor == "powersave" and driver not in _DYNAMIC_POWERSAVE:
        allowed = number(cpu.clock_floor_hz, "least clock")
    if allowed >= highest:
        return None
    return Seen(
        severity="warning",
        evidence=f"governor {governor} of {driver} holds the clock at {allowed / 1e9:.2f} GHz at most",
        expected=f"{highest / 1e9:.2f} GHz, the highest of this processor",
        gain_share=1 - allowed / highest,
    )


def gpu_clocks(facts: Facts) -> Seen | None:
    """A GPU keeps its clock down for heat or power; a cap that somebody set counts as well."""
    for index, gpu in enumerate(facts.machine.inventory.gpus):
        limits = text(gpu.clock_limits, "limits of the clock")
        if not limits:
            continue
        clock, highest = gpu.sm_clock_hz.number(), gpu.sm_clock_max_hz.number()
        known = clock is not None and highest is not None and highest > 0
        told = f" at {(clock or 0) / 1e9:.2f} of {(highest or 0) / 1e9:.2f} GHz" if known else ""
        hard = any(word in limits for word in ("thermal", "slowdown", "brake"))
        return Seen(
            severity="error" if hard else "warning",
            evidence=f"cuda:{index}{told}: {limits}",
            expected="no limit beside idleness",
            gain_share=1 - (clock or 0) / (highest or 1) if known and hard else None,
        )
    return None


def sagging(facts: Facts) -> Seen | None:
    """A device gets slower while it is timed: heat, power, or a virtual machine that has used up its credit."""
    worst: Seen | None = None
    for device in facts.machine.devices:
        for dtype, rate in device.matmul_flops_per_s.items():
            lost = _lost(rate)
            if lost > max(_SAG, worst.gain_share or 0.0 if worst else 0.0):
                worst = Seen(
                    severity="warning",
                    evidence=(
                        f"{device.device} {dtype} products fell by {lost:.0%} within {len(rate.samples)} samples, from "
                        f"{rate.samples[0] / 1e12:.3g} to {rate.samples[-1] / 1e12:.3g} TFLOP/s"
                    ),
                    expected="samples that scatter around one rate",
                    gain_share=lost,
                )
    return worst


def not_quiet(facts: Facts) -> Seen | None:
    """Something else was running when the machine was probed."""
    cpu = facts.machine.inventory.cpu
    load, usable = number(cpu.load_average, "load"), number(cpu.num_usable_cpus, "usable CPUs")
    if load < _BUSY * usable:
        return None
    return Seen(
        severity="info",
        evidence=f"load {load:.1f} on {usable:.0f} processors before anything was timed",
        expected=f"below {_BUSY * usable:.1f}; rates measured beside other work are too low",
    )


def poor_disk(facts: Facts) -> Seen | None:
    """A place for the store that is memory, turns, or goes through the page cache.

    That a drive turns is what virtual ones say too, so its rate must agree.
    """
    for place in facts.machine.inventory.disks:
        if place.file_system.value in _IN_MEMORY:
            return Seen(
                severity="warning",
                evidence=f"{place.directory} is {place.file_system.value}: what is written there takes RAM",
                expected="a local NVMe",
            )
    for place, disk in zip(facts.machine.inventory.disks, facts.machine.disks, strict=False):
        reads = [depth.read_bytes_per_s.median or 0.0 for depth in disk.depths]
        if place.rotational.value is True and 0 < max(reads, default=0.0) < _TURNING_BYTES_PER_S:
            return Seen(
                severity="warning",
                evidence=(
                    f"{place.directory} reads {format_rate(max(reads))} and says that it turns "
                    f"({place.model.value or place.device.value})"
                ),
                expected="a local NVMe: 2 GB/s and more",
                gain_share=1 - max(reads) / _NVME_BYTES_PER_S,
            )
        if disk.direct.value is False:
            return Seen(
                severity="warning",
                evidence=f"{disk.directory}: the file system refuses direct I/O ({disk.direct.source})",
                expected="direct I/O: no copy in the page cache, and a fraction of the processor time",
            )
    return None


def slow_attention(facts: Facts) -> Seen | None:
    """On a GPU a fused kernel comes within a few times of a matrix product; unfused attention does not."""
    for device in facts.machine.devices:
        if not device.device.startswith("cuda"):
            continue
        for dtype in ("bf16", "fp16"):
            if dtype not in device.matmul_flops_per_s or dtype not in device.attention_flops_per_s:
                continue
            product = median(device.matmul_flops_per_s[dtype], f"{dtype} products")
            attention = median(device.attention_flops_per_s[dtype], f"{dtype} attention")
            if attention < _NO_KERNEL * product:
                return Seen(
                    severity="warning",
                    evidence=(
                        f"{device.device} {dtype}: attention at {attention / 1e12:.3g} TFLOP/s, "
                        f"{attention / product:.0%} of a matrix product"
                    ),
                    expected=f"above {_NO_KERNEL:.0%}, as fused kernels reach",
                )
    return None


def _lost(rate: Measurement) -> float:
    """Return the share that the last third of the samples lost to the first, if they fall all the way; else 0."""
    third = len(rate.samples) // 3
    if len(rate.samples) < _LEAST_SAMPLES:
        return 0.0
    parts = (rate.samples[:third], rate.samples[third:-third], rate.samples[-third:])
    first, middle, last = (statistics.median(part) for part in parts)
    return 1 - last / first if first > middle > last else 0.0
