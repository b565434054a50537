"""What a run loses to a host that is short of something: processors that others take, a quota, memory.

A heartbeat counts it (``host``). Shares are of the part of a step that needs processors: what waits for the optimizer
and for Python, and on a CPU compute and copies. A loader, and what is called between steps, may wait for anything.
"""

from outsize.doctor.facts import Facts, LackingError, is_on_cpu, number
from outsize.doctor.finding import Seen
from outsize.doctor.run_rules import WORTH
from outsize.units import format_bytes

# A run from before heartbeats counted: below this share of what its threads could use, with a load as high as there
# are processors, it was kept from them.
_STARVED = 0.75
# What a page takes that is read back from swap on a good SSD, where the kernel keeps no account of pressure.
_PAGE_BYTES, _PAGE_S = 4096, 1e-4


def cores_taken(facts: Facts) -> Seen | None:
    """Threads of the run are ready and have no processor, since other processes or the hypervisor's guests have it."""
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
        evidence = (
            f"{had}, other processes {others:.2g}, the hypervisor {stolen:.2g}; its threads were ready and had none "
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
    """Return the share of a step that processors have to work for."""
    run, waits = facts.run, facts.run.waits()
    python = max(0.0, waits.get("python", 0.0) - run.mean("between_s") / run.mean("seconds"))
    share = python + waits.get("host", 0.0) + waits.get("workers", 0.0)
    if is_on_cpu(facts):
        share += run.compute_share + waits.get("link", 0.0)
    return min(1.0, share)


def _seen(share: float, evidence: str, expected: str) -> Seen | None:
    if share < WORTH:
        return None
    return Seen(evidence=evidence, expected=expected, gain_share=share)
