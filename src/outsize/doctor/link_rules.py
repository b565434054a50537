"""Rules on links, on what GPUs hang on, and on NCCL's variables.

What can be wrong with links and with what the GPUs hang on.

What is wrong with the variables of NCCL that a machine has set; what they are is in `outsize.hardware.link_fit`.
"""

from outsize.doctor.finding import Seen
from outsize.doctor.run_record import Facts, LackingError, fit_of, is_on_cpu, link_of, number, text
from outsize.hardware.cpu import listed
from outsize.hardware.gpus import GpuFacts
from outsize.hardware.link_fit import misspelt_variables, overriding_variables
from outsize.hardware.machine_file import DeviceRates
from outsize.hardware.topology import SOUND_SHARE, theory_bytes_per_s
from outsize.units import format_bytes, format_rate

# Below this share of theory something is wrong.
_WRONG = 0.65
# Shares of copy time that the fixed cost of a copy may take before larger copies are worth it.
_SMALL = 0.2


def narrow(facts: Facts) -> Seen | None:
    """The link has fewer lanes than GPU and slot could have. Lanes do not change while a GPU is idle, clocks do."""
    worst: Seen | None = None
    for index, gpu in _gpus(facts):
        lanes, most = number(gpu.pcie_lanes, "lanes"), number(gpu.pcie_lanes_max, "most lanes")
        lost = 1 - lanes / most
        if lost > (worst.gain_share or 0.0 if worst else 0.0):
            worst = Seen(
                evidence=f"cuda:{index} ({text(gpu.name, 'name')}) is linked by x{lanes:.0f}",
                expected=f"x{most:.0f}, which GPU and slot can negotiate",
                gain_share=lost,
            )
    return worst


def slow(facts: Facts) -> Seen | None:
    """Pinned copies stay far below what the negotiated lanes carry at the generation that GPU and slot can do."""
    worst: Seen | None = None
    for index, gpu in _gpus(facts):
        theory = _theory_bytes_per_s(gpu)
        for direction in ("up", "down"):
            fit = fit_of(_device(facts, index), "pinned", direction)
            if fit is None or fit.bytes_per_s >= _WRONG * theory:
                continue
            gain = 1 - fit.bytes_per_s / (SOUND_SHARE * theory)
            if worst is None or gain > (worst.gain_share or 0.0):
                worst = Seen(
                    evidence=(
                        f"cuda:{index} {direction}: {format_rate(fit.bytes_per_s)} of pinned copies, "
                        f"{fit.bytes_per_s / theory:.0%} of the {format_rate(theory)} of its lanes"
                        f"{_as_generation(fit.bytes_per_s, gpu)}"
                    ),
                    expected=f"about {format_rate(SOUND_SHARE * theory)}: {SOUND_SHARE:.0%} of theory",
                    gain_share=gain,
                )
    return worst


def pageable(facts: Facts) -> Seen | None:
    """The driver has not pinned memory, so copies are staged and do not overlap with compute."""
    for index, _ in _gpus(facts):
        device = _device(facts, index)
        pinned, staged = link_of(device, "pinned", "up"), fit_of(device, "pageable", "up")
        if pinned is None or pinned.fit is not None or staged is None:
            continue
        memlock = facts.machine.inventory.memory.memlock_limit_bytes.number()
        locked = "no limit known" if memlock is None else f"at most {format_bytes(int(memlock))}"
        try:
            sound = SOUND_SHARE * _theory_bytes_per_s(facts.machine.inventory.gpus[index])
            gain = max(0.0, 1 - staged.bytes_per_s / sound)
        except LackingError:
            gain = None
        return Seen(
            severity="error",
            evidence=(
                f"cuda:{index}: no pinned copy was possible ({pinned.note}); pageable ones reach "
                f"{format_rate(staged.bytes_per_s)}; memlock: {locked}"
            ),
            expected="pinned copies, which need no staging and go on beside compute",
            gain_share=gain,
        )
    return None


def fell_to_pageable(facts: Facts) -> Seen | None:
    """A run on a GPU copies from memory that should be pinned and is not, as its own heartbeat counts."""
    counted = facts.run.steps[-1].get("fallbacks")
    if counted is None:
        raise LackingError("fallbacks in the heartbeat: of an older version")
    if not counted.get("pageable") or is_on_cpu(facts):
        return None
    gain = None
    if facts.probed is not None and facts.probed.devices:
        pinned, staged = (fit_of(facts.probed.devices[0], path, "up") for path in ("pinned", "pageable"))
        if pinned is not None and staged is not None and staged.bytes_per_s < pinned.bytes_per_s:
            gain = 1 - staged.bytes_per_s / pinned.bytes_per_s
    rates = "" if gain is None else f"; pageable copies reach {1 - gain:.0%} of the rate of pinned ones here"
    return Seen(
        severity="error",
        evidence=f"{counted['pageable']} requests for pinned memory stayed pageable in this run{rates}",
        expected="none: pageable copies are staged by the driver, and compute waits for them",
        gain_share=gain,
    )


def small_copies(facts: Facts) -> Seen | None:
    """The fixed cost of a copy takes a good part of the link's time, at the mean size of a load of this run."""
    plan, devices = facts.run.plan, facts.machine.devices
    loads = sum(op.startswith("LOAD ") for op in plan.get("program", ()))
    if not loads or not devices:
        raise LackingError("plan.json with a program, and a device that was probed")
    fit = fit_of(devices[0], "pinned", "up") or fit_of(devices[0], "dram copy", "up")
    if fit is None:
        raise LackingError("a link that was measured: `outsize probe`")
    size = plan["bytes_per_step"]["up"] / loads
    share = fit.latency_s / fit.copy_s(int(size))
    if share < _SMALL:
        return None
    return Seen(
        evidence=(
            f"{loads} loads of {format_bytes(int(size))} in a step; at {fit.latency_s * 1e6:.1f} us each, "
            f"{share:.0%} of their time is the fixed cost of a copy"
        ),
        expected=f"below {_SMALL:.0%}",
        gain_share=share,
    )


def wrong_node(facts: Facts) -> Seen | None:
    """The process may not run on any processor of the node that its GPU hangs on."""
    cpu = facts.machine.inventory.cpu
    if len(cpu.numa_nodes) < 2:
        return None
    usable = listed(text(cpu.usable_cpus, "usable CPUs"))
    for index, gpu in _gpus(facts):
        node = next(
            (node for node in cpu.numa_nodes if node.index == number(gpu.numa_node, "NUMA node")), None
        )
        if node is None or usable & listed(text(node.cpus, f"CPUs of node {node.index}")):
            continue
        return Seen(
            evidence=(
                f"cuda:{index} hangs on NUMA node {node.index} (CPUs {node.cpus.value}); this process may only run on "
                f"{cpu.usable_cpus.value}"
            ),
            expected="processors and host memory of the GPU's own node",
        )
    return None


def _gpus(facts: Facts, least: int = 1) -> list[tuple[int, GpuFacts]]:
    """Return the GPUs; none on a machine of fewer than ``least``, where there is nothing to judge."""
    gpus = facts.machine.inventory.gpus
    if not gpus and any(device.accelerated for device in facts.machine.devices):
        raise LackingError(f"GPUs by NVML: {facts.machine.inventory.num_gpus.source}")
    return list(enumerate(gpus)) if len(gpus) >= least else []


def _device(facts: Facts, index: int) -> DeviceRates:
    for device in facts.machine.devices:
        if device.device == f"cuda:{index}":
            return device
    raise LackingError(f"links of cuda:{index}: not probed")


def _theory_bytes_per_s(gpu: GpuFacts) -> float:
    generation, lanes = number(gpu.pcie_generation_max, "PCIe generation"), number(gpu.pcie_lanes, "lanes")
    try:
        return theory_bytes_per_s(int(generation), int(lanes))
    except ValueError as error:
        raise LackingError(str(error)) from None


def _as_generation(bytes_per_s: float, gpu: GpuFacts) -> str:
    """Return a remark where the rate is that of an older generation."""
    lanes = int(number(gpu.pcie_lanes, "lanes"))
    for generation in range(int(number(gpu.pcie_generation_max, "generation")) - 1, 0, -1):
        theory = theory_bytes_per_s(generation, lanes)
        if _WRONG * theory <= bytes_per_s <= theory:
            return f", as much as generation {generation} gives"
    return ""


# Of the slowest link of the GPUs; a ring over PCIe that goes by way of host memory reaches about half of it.
_SUM_SHARE = 0.4


def overridden(facts: Facts) -> Seen | None:
    """A variable that switches a path off or fixes a choice of NCCL."""
    names = overriding_variables(_variables(facts))
    if not names:
        return None
    return Seen(evidence="; ".join(names), expected="NCCL's own choice by what it finds")


def misspelt(facts: Facts) -> Seen | None:
    """A variable that looks like one of NCCL's and is none: it has no effect."""
    names = misspelt_variables(_variables(facts))
    if not names:
        return None
    return Seen(evidence="; ".join(names), expected="names that NCCL reads")


def slow_sums(facts: Facts) -> Seen | None:
    """Sums over GPUs reach far less on each link than copies do: NCCL goes by way of sockets, or of another node."""
    machine = facts.machine
    if len(machine.inventory.gpus) < 2:
        return None
    sums = machine.all_reduce
    if sums is None or sums.fit is None or sums.backend != "nccl":
        raise LackingError("sums over the GPUs: outsize all-reduce --output machine.json")
    fits = [fit for device in machine.devices if (fit := fit_of(device, "pinned", "down")) is not None]
    if not fits:
        raise LackingError("copies of the GPUs: outsize probe --output machine.json")
    link_bytes_per_s = min(fit.bytes_per_s for fit in fits)
    if sums.fit.bytes_per_s >= _SUM_SHARE * link_bytes_per_s:
        return None
    return Seen(
        severity="warning",
        evidence=(
            f"sums over {sums.num_ranks} GPUs: {format_rate(sums.fit.bytes_per_s)} on each link, where copies reach "
            f"{format_rate(link_bytes_per_s)}"
        ),
        expected=f"{_SUM_SHARE:.0%} of what copies reach, or more",
        gain_share=1 - sums.fit.bytes_per_s / (_SUM_SHARE * link_bytes_per_s),
    )


def _variables(facts: Facts) -> dict[str, str]:
    variables = facts.machine.inventory.environment.variables
    return {name: str(fact.value) for name, fact in variables.items()}
