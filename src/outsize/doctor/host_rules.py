"""Rows of the rule table for hosts: processors, memory, quotas and disks, and runs that are short of them."""

from outsize.doctor.finding import Seen, num_ranks, worst
from outsize.doctor.run_record import (
    Facts,
    LackingError,
    fit_of,
    is_on_cpu,
    limit,
    lost_share,
    number,
    planned_host_bytes,
    text,
)
from outsize.doctor.run_rules import WORTH
from outsize.hardware.host_memory import IN_MEMORY, pin_limits
from outsize.hardware.machine_file import DiskRates
from outsize.units import format_bytes, format_rate

# A run from before heartbeats counted: below this share of what its threads could use, with a load as high as there
# are processors, it was kept from them.
_STARVED = 0.75
# What a page takes that is read back from swap on a good SSD, where the kernel keeps no account of pressure.
_PAGE_BYTES, _PAGE_S = 4096, 1e-4


def cores_taken(facts: Facts) -> Seen | None:
    """Threads of the run are ready and have no processor, since other processes or the hypervisor's guests have it.

    A heartbeat counts it (``host``).
    """
    run, cpu = facts.run, facts.inventory.cpu
    usable = number(cpu.num_usable_cpus, "usable CPUs")
    own_cores = run.mean("cpu_s") / run.mean("seconds")
    queued, others = run.host_per_s("queued_s"), run.host_per_s("others_cpu_s")
    stolen = run.host_per_s("stolen_cpu_s") or 0.0
    load = cpu.load_average.number()
    began = "" if load is None else f"; load {load:.1f} when the run began"
    had = f"the process had {own_cores:.2g} of {usable:.0f} processors"
    if queued is not None and others is not None:
        lost_cores = others + stolen
        lost = (
            min(queued / (queued + own_cores), lost_cores / (lost_cores + own_cores), queued)
            if queued and lost_cores
            else 0.0
        )
        granted = cpu.quota_cores.number()
        lost = (
            lost if granted is None else min(lost, max(0.0, 1 - own_cores / granted))
        )  # more was never to be had
        beside = "other processes and ranks" if num_ranks(facts) > 1 else "other processes"
        evidence = (
            f"{had}, {beside} {others:.2g}, the hypervisor {stolen:.2g}; its threads were ready and had none "
            f"for {queued:.2g} s per second{began}"
        )
    else:
        if load is None or not is_on_cpu(facts):
            raise LackingError("host in the heartbeat: it is of an older version")
        wanted = min(usable, run.about.get("num_threads") or usable) * run.compute_share
        lost = 1 - own_cores / wanted if load >= usable and own_cores < _STARVED * wanted else 0.0
        evidence = f"{had}; it could have used {wanted:.2g}{began}"
    return _seen(
        lost * _share_of_processors(facts), evidence, "processors that are free when the run needs them"
    )


def throttled(facts: Facts) -> Seen | None:
    """The quota of the control group stops the run again and again."""
    run, cpu = facts.run, facts.inventory.cpu
    stopped, granted = run.host_per_s("throttled_s"), cpu.quota_cores.number()
    if not stopped:
        return None
    own_cores = run.mean("cpu_s") / run.mean("seconds")
    quota = "a quota" if granted is None else f"a quota of {granted:g} cores"
    evidence = f"{quota}: threads ran for {own_cores:.2g} s per second, and were stopped for {stopped:.2g} s"
    lost = stopped / (stopped + own_cores)
    return _seen(lost * _share_of_processors(facts), evidence, "a quota that is not used up")


def swapped(facts: Facts) -> Seen | None:
    """Tasks stand still for memory while the run goes on."""
    run = facts.run
    read, stood = run.host_per_s("swapped_in_bytes"), run.host_per_s("memory_pressure_s")
    if not read and not stood:
        return None
    lost = min(1.0, (read or 0) / _PAGE_BYTES * _PAGE_S) if stood is None else min(1.0, stood)
    faults = run.host_per_s("major_faults") or 0
    evidence = (
        f"{format_bytes(int(read or 0))} per second read back from swap; this process waited for {faults:.0f} pages "
        f"per second; for memory tasks stood still {lost:.0%} of the time"
    )
    return _seen(lost, evidence, "memory that holds the run and all else, so that nothing is read back")


def _share_of_processors(facts: Facts) -> float:
    """Return the share of a step that processors have to work for.

    What waits for the optimizer and for Python, and on a CPU compute and copies. A loader, and what is called between
    steps, may wait for anything.
    """
    run, waits = facts.run, facts.run.waits()
    python = max(0.0, waits.get("python", 0.0) - run.mean("between_s") / run.mean("seconds"))
    share = python + sum(waits.get(cause, 0.0) for cause in ("host", "workers", "ranks"))
    if is_on_cpu(facts):
        share += run.compute_share + waits.get("link", 0.0)
    return min(1.0, share)


def _seen(share: float, evidence: str, expected: str) -> Seen | None:
    if share < WORTH:
        return None
    return Seen(evidence=evidence, expected=expected, gain_share=share)


# Drivers in which the governor `powersave` still raises the clock with the load (kernel: intel_pstate, amd-pstate).
_DYNAMIC_POWERSAVE = ("intel_pstate", "amd-pstate-epp")
# Part of memory that should be available, and part of the last minute that may be lost to its want.
_LEAST_AVAILABLE, _MOST_PRESSURE = 0.1, 0.05
# Of the control group's limit: use beyond it ends in reclaim, and then in a kill.
_FULL = 0.9
# Other work is in the figures when this part of the processors was busy before anything was timed.
_BUSY = 0.5


def group_limit(facts: Facts) -> Seen | None:
    """The control group allows less than the machine has, or is nearly full."""
    memory = facts.inventory.memory
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
    free = memory.cgroup_free_bytes.number()  # with the page cache, which fills any group that reads much
    if used > _FULL * allowed and (free is None or free < (1 - _FULL) * allowed):
        return Seen(
            evidence=f"{evidence} ({used / allowed:.0%}), page cache included",
            expected=f"below {_FULL:.0%}; page cache is given back first, then the kernel kills",
        )
    if allowed < total:
        return Seen(
            severity="info", evidence=evidence, expected="budgets within the limit, which outsize plans with"
        )
    return None


def pinned_memory(facts: Facts) -> Seen | None:
    """A run on a GPU plans for more host memory than the platform allows to be pinned, as far as anyone has seen.

    A low limit of locked memory alone is no finding: NVIDIA's driver pins beyond it on most systems, and the probe
    tries it. Under WSL2 the probe's few megabytes say nothing of what a run needs.
    """
    machine, planned = facts.machine, planned_host_bytes(facts)
    if is_on_cpu(facts) or not any(device.accelerated for device in machine.devices):
        return None
    if planned is None:
        raise LackingError("a run with a plan: outsize doctor RUN")
    pinned = any(
        link.path == "pinned" and link.fit is not None for device in machine.devices for link in device.links
    )
    limits = [
        each
        for each in pin_limits(machine.inventory.memory, machine.inventory.environment)
        if each.num_bytes is None or (not pinned and each.num_bytes < planned)
    ]
    if not limits:
        return None
    evidence = "the probe has pinned a little" if pinned else "the probe has not seen pinned copies"
    rates = [rate for device in machine.devices if (rate := fit_of(device, "pageable", "up")) is not None]
    fallback = f"; what stays pageable is copied at {format_rate(rates[0].bytes_per_s)}" if rates else ""
    return Seen(
        severity="info" if pinned else "warning",
        evidence=f"{'; '.join(each.evidence for each in limits)}; the run plans for {format_bytes(planned)} of host "
        f"memory, and {evidence}{fallback}",
        expected="no limit, or one above the plan",
    )


def swapping(facts: Facts) -> Seen | None:
    """Memory is short, before a run or in it. Pages swapped out long ago, with memory to spare, cost nothing."""
    if facts.recorded is not None and (observation := swapped(facts)) is not None:
        return observation
    memory = facts.inventory.memory
    total, free = number(memory.swap_total_bytes, "swap"), number(memory.swap_free_bytes, "free swap")
    available = number(memory.available_bytes, "available RAM") / number(memory.total_bytes, "RAM")
    pressure = memory.pressure_share.number() or 0.0
    if total - free <= 0 or (available >= _LEAST_AVAILABLE and pressure < _MOST_PRESSURE):
        return None
    return Seen(
        evidence=(
            f"{format_bytes(int(total - free))} swapped out, {available:.0%} of RAM available; in the last minute "
            f"tasks stood still for memory {pressure:.0%} of the time"
        ),
        expected=f"no swap in use, or {_LEAST_AVAILABLE:.0%} of RAM available and no waiting for memory",
        gain_share=pressure or None,
    )


def kernels(facts: Facts) -> Seen | None:
    """The kernels in C cannot be used, and torch ops do their work."""
    native = facts.inventory.environment.native
    if text(native, "C kernels") != "none":
        return None
    return Seen(
        evidence=f"no kernels in C: {native.source}",
        expected="kernels built at install: optimizer steps with small state take a fraction of the time",
    )


def quota(facts: Facts) -> Seen | None:
    """The control group grants fewer cores than threads will start on: all of them stand still when it is used up."""
    if facts.recorded is not None and (observation := throttled(facts)) is not None:
        return observation
    cpu = facts.inventory.cpu
    granted = limit(cpu.quota_cores, "quota")
    usable = number(cpu.num_usable_cpus, "usable CPUs")
    if granted is None or granted >= usable:
        return None
    num_threads = facts.inventory.environment.variables.get("OMP_NUM_THREADS")
    threads = (
        int(str(num_threads.value))
        if num_threads is not None and str(num_threads.value).isdigit()
        else int(usable)
    )
    if threads <= max(1.0, granted):
        return None
    return Seen(
        evidence=f"a quota of {granted:g} cores, {usable:.0f} processors in sight, {threads} threads by default",
        expected=f"no more than {max(1, int(granted))} threads",
    )


def clock_limit(facts: Facts) -> Seen | None:
    """The processor may not use its highest clock."""
    cpu = facts.inventory.cpu
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
        evidence=f"governor {governor} of {driver} holds the clock at {allowed / 1e9:.2f} GHz at most",
        expected=f"{highest / 1e9:.2f} GHz, the highest of this processor",
        gain_share=1 - allowed / highest,
    )


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


# A drive whose writes without a pause fall by more than this is no noise.
_SAG = 0.3
# No disk that turns reads 0.35 GB/s in order; a plain NVMe drive reads 2.
_TURNING_BYTES_PER_S, _NVME_BYTES_PER_S = 0.35e9, 2e9


def poor_disk(facts: Facts) -> Seen | None:
    """A place for the store that is memory, turns, or goes through the page cache.

    That a drive turns is what virtual ones say too, so its rate must agree.
    """
    for place in facts.machine.inventory.disks:
        if place.file_system.value in IN_MEMORY:
            return Seen(
                evidence=f"{place.directory} is {place.file_system.value}: what is written there takes RAM",
                expected="a local NVMe",
            )
    for place, disk in zip(facts.machine.inventory.disks, facts.machine.disks, strict=False):
        reads = [depth.read_bytes_per_s.median or 0.0 for depth in disk.depths]
        if place.rotational.value is True and 0 < max(reads, default=0.0) < _TURNING_BYTES_PER_S:
            return Seen(
                evidence=(
                    f"{place.directory} reads {format_rate(max(reads))} and says that it turns "
                    f"({place.model.value or place.device.value})"
                ),
                expected="a local NVMe: 2 GB/s and more",
                gain_share=1 - max(reads) / _NVME_BYTES_PER_S,
            )
        if disk.direct.value is False:
            return Seen(
                evidence=f"{disk.directory}: the file system refuses direct I/O ({disk.direct.source})",
                expected="direct I/O: no copy in the page cache, and a fraction of the processor time",
            )
    return None


def sagging_disk(facts: Facts) -> Seen | None:
    """A drive that writes slower and slower without a pause: its cache is full, or it is hot."""
    disks = facts.machine.disks
    if disks and all(disk.sustained_write_bytes_per_s.median is None for disk in disks):
        raise LackingError("writes without a pause: `outsize probe --full`")
    return worst(_slower(disk) for disk in disks if lost_share(disk.sustained_write_bytes_per_s) > _SAG)


def _slower(disk: DiskRates) -> Seen:
    samples = disk.sustained_write_bytes_per_s.samples
    lost = lost_share(disk.sustained_write_bytes_per_s)
    return Seen(
        evidence=(
            f"{disk.directory}: writes fell by {lost:.0%}, from {format_rate(samples[0])} to "
            f"{format_rate(samples[-1])}, within {len(samples)} samples"
        ),
        expected="the same rate for as long as it writes: a step writes the whole state, again and again",
        gain_share=lost,
    )
