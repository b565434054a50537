"""Rows of the rule table for devices: clocks and rates, slow compute, and copies that something else slows."""

import statistics

from outsize.doctor.finding import Seen, worst
from outsize.doctor.host_rules import cores_taken, throttled
from outsize.doctor.run_record import Facts, LackingError, lost_share, median, number, text
from outsize.hardware.cgroup import Measurement
from outsize.hardware.gpus import GpuFacts
from outsize.hardware.topology import NumaRates, slower_than_fp32
from outsize.units import format_rate, format_seconds

# A rate that falls through its samples by more than this is no noise, if each third is slower than the one before.
_SAG = 0.15
# Between the two of the A100 in arXiv:2307.08691: fused causal attention at a third of peak and more, unfused at a
# tenth and less.
_NO_KERNEL = 0.15


def gpu_clocks(facts: Facts) -> Seen | None:
    """A GPU keeps its clock down for heat or power; a cap that somebody set counts as well."""
    for index, gpu in enumerate(facts.machine.inventory.gpus):
        limits = text(gpu.clock_limits, "limits of the clock")
        if not limits:
            continue
        clock, highest = gpu.sm_clock_hz.number(), gpu.sm_clock_max_hz.number()
        has_clocks = clock is not None and highest is not None and highest > 0
        clocks_text = f" at {(clock or 0) / 1e9:.2f} of {(highest or 0) / 1e9:.2f} GHz" if has_clocks else ""
        hard = any(word in limits for word in ("thermal", "slowdown", "brake"))
        return Seen(
            severity="error" if hard else "warning",
            evidence=f"cuda:{index}{clocks_text}: {limits}",
            expected="no limit beside idleness",
            gain_share=1 - (clock or 0) / (highest or 1) if has_clocks and hard else None,
        )
    return None


def sagging(facts: Facts) -> Seen | None:
    """A device gets slower while it is timed: heat, power, or a virtual machine that has used up its credit."""
    return worst(
        _slower(f"{device.device} {dtype}", rate)
        for device in facts.machine.devices
        for dtype, rate in device.matmul_flops_per_s.items()
        if lost_share(rate) > _SAG
    )


def _slower(what: str, rate: Measurement) -> Seen:
    lost = lost_share(rate)
    return Seen(
        evidence=(
            f"{what} products fell by {lost:.0%} within {len(rate.samples)} samples, from "
            f"{rate.samples[0] / 1e12:.3g} to {rate.samples[-1] / 1e12:.3g} TFLOP/s"
        ),
        expected="samples that scatter around one rate",
        gain_share=lost,
    )


def slow_attention(facts: Facts) -> Seen | None:
    """On a GPU a fused kernel comes within a few times of a matrix product; unfused attention does not."""
    for device in facts.machine.devices:
        if not device.accelerated:
            continue
        for dtype in ("bf16", "fp16"):
            if dtype not in device.matmul_flops_per_s or dtype not in device.attention_flops_per_s:
                continue
            product = median(device.matmul_flops_per_s[dtype], f"{dtype} products")
            attention = median(device.attention_flops_per_s[dtype], f"{dtype} attention")
            if attention < _NO_KERNEL * product:
                return Seen(
                    evidence=(
                        f"{device.device} {dtype}: attention at {attention / 1e12:.3g} TFLOP/s, "
                        f"{attention / product:.0%} of a matrix product"
                    ),
                    expected=f"above {_NO_KERNEL:.0%}, as fused kernels reach",
                )
    return None


# Below this many tokens per visit of a weight, reading it takes longer than multiplying by it: FLOP/s over bytes/s,
# times bytes per weight, over the 2 FLOPs per token. 10 to 20 on a CPU, 100 to 300 on GPUs of today in bf16.
_ENOUGH_TOKENS = 128
# Share of the peak that blocks of a model reach where they are large enough; data sheets' peaks are hard to come by.
_EFFICIENT = 0.3
# Share of a step that compute takes longer than alone: units are timed for a moment, to a tenth.
_SLOWED = 0.15


def tiny_microbatch(facts: Facts) -> Seen | None:
    """Compute is far below what the device can do, since a microbatch has few tokens for the weights that it reads."""
    efficiency, tokens = _efficiency(facts), facts.run.about.get("tokens_per_microbatch")
    if tokens is None:
        raise LackingError("tokens_per_microbatch in run.json: it is of an older version")
    if efficiency >= _EFFICIENT or tokens >= _ENOUGH_TOKENS:
        return None
    return Seen(
        evidence=(
            f"{tokens} tokens per microbatch; compute reaches {efficiency:.1%} of the device's peak while it works, "
            f"{facts.run.compute_share:.0%} of a step"
        ),
        expected=f"{_ENOUGH_TOKENS} tokens per microbatch or more",
        gain_share=1 - efficiency / _EFFICIENT,
    )


def slow_compute(facts: Facts) -> Seen | None:
    """Compute is far below what the device can do, and not for want of tokens."""
    efficiency, tokens = _efficiency(facts), facts.run.about.get("tokens_per_microbatch", 0)
    if efficiency >= _EFFICIENT / 4 or tokens < _ENOUGH_TOKENS or _is_starved(facts):
        return None
    return Seen(
        evidence=(
            f"compute reaches {efficiency:.1%} of the device's peak while it works, "
            f"{facts.run.compute_share:.0%} of a step, with {tokens} tokens per microbatch"
        ),
        expected=f"{_EFFICIENT:.0%} and more with so many tokens",
        gain_share=1 - efficiency / _EFFICIENT,
    )


def slowed_compute(facts: Facts) -> Seen | None:
    """Compute takes longer than its units took alone, and no other process is why."""
    run = facts.run
    if all(step.get("slowed_s") is None for step in run.steps):
        raise LackingError("slowed_s in the heartbeat: units were not timed, or it is of an older version")
    share = run.mean("slowed_s") / run.mean("seconds")
    if share < _SLOWED or _is_starved(facts):
        return None
    beside = sum(seconds for name, seconds in run.threads_per_s().items() if _is_beside(name))
    faults, kernel = run.host_per_s("minor_faults") or 0.0, run.host_per_s("kernel_cpu_s") or 0.0
    return Seen(
        evidence=(
            f"compute takes {format_seconds(run.mean('slowed_s'))} of a step longer than its units took alone; "
            f"per second other lanes had {beside:.2g} s of a processor, {faults:,.0f} pages were handed out, and the "
            f"system's kernel took {kernel:.2g} s"
        ),
        expected=f"compute that is slowed for less than {_SLOWED:.0%} of a step",
        gain_share=share,
    )


def _is_starved(facts: Facts) -> bool:
    """Return whether other processes or a quota are known to keep the run from its processors."""
    try:
        return bool(cores_taken(facts) or throttled(facts))
    except LackingError:
        return False


def _is_beside(thread: str) -> bool:
    return thread == "host" or (":" in thread and not thread.startswith("compute:"))


def slow_dtype(facts: Facts) -> Seen | None:
    """A processor without products of 16 bits takes the time of fp32 ones and of converting to them."""
    about, dtype = facts.run.about, facts.run.about.get("dtype")
    if "fp32_flops_per_s" not in about:
        raise LackingError("fp32_flops_per_s in run.json: it is of an older version")
    rate, fp32_rate = about.get("peak_flops_per_s") or 0.0, about["fp32_flops_per_s"] or 0.0
    slower = slower_than_fp32(rate, fp32_rate)
    if slower is None:
        return None
    return Seen(
        evidence=f"products in {dtype} reach {rate / 1e9:.3g} GFLOP/s on this processor, in fp32 {fp32_rate / 1e9:.3g}",
        expected=f"a processor that multiplies {dtype} (AMX, AVX-512 BF16, or a GPU), or fp32",
        gain_share=1 - 1 / slower,
    )


def _efficiency(facts: Facts) -> float:
    efficiency = facts.run.efficiency
    if efficiency is None:
        raise LackingError("mfu in the heartbeat: FLOPs of the model or peak of the device are not known")
    return efficiency


# Marks below which something is worth saying: of a copy alone while all devices copy; of local memory by remote; of the
# shorter of copy and product that the longer hides.
_TOGETHER, _REMOTE, _HIDDEN = 0.75, 0.85, 0.5


def downtrained(facts: Facts) -> Seen | None:
    """While copies go on, the link runs at a lower generation or with fewer lanes than GPU and slot can have."""
    has_retrained = False
    for device in facts.machine.devices:
        if not device.accelerated:
            continue
        gpu = _gpu(facts, device.device)
        loaded = (
            device.pcie_generation_loaded,
            device.pcie_lanes_loaded,
            gpu.pcie_generation_max,
            gpu.pcie_lanes_max,
        )
        if any(fact.value is None for fact in loaded):
            continue
        has_retrained = True
        generation, lanes, most_generation, most_lanes = (int(number(fact, "link")) for fact in loaded)
        if generation >= most_generation and lanes >= most_lanes:
            continue
        lost = 1 - lanes / most_lanes * 0.5 ** (most_generation - generation)
        return Seen(
            evidence=f"{device.device} under load: generation {generation} x{lanes}",
            expected=f"generation {most_generation} x{most_lanes}, which GPU and slot can negotiate",
            gain_share=lost,
        )
    if not has_retrained and facts.machine.inventory.gpus:
        raise LackingError("generation and lanes under load: `outsize probe` with NVML")
    return None


def contended(facts: Facts) -> Seen | None:
    """All GPUs copying at once get less than each alone: by measurement, whatever the bus looks like."""
    together = facts.machine.together
    if not together:
        if len(facts.machine.inventory.gpus) > 1:
            raise LackingError("copies of all GPUs at once: run `outsize probe` again")
        return None
    worst = min(
        together,
        key=lambda rate: (
            median(rate.together_bytes_per_s, "copies at once") / median(rate.alone_bytes_per_s, "copies")
        ),
    )
    alone, shared = worst.alone_bytes_per_s.median or 1.0, worst.together_bytes_per_s.median or 0.0
    if shared >= _TOGETHER * alone:
        return None
    total = sum(
        rate.together_bytes_per_s.median or 0.0 for rate in together if rate.direction == worst.direction
    )
    return Seen(
        evidence=(
            f"{worst.device} {worst.direction}: {format_rate(shared)} while all copy, {format_rate(alone)} alone; all "
            f"together {format_rate(total)}"
        ),
        expected=f"at least {_TOGETHER:.0%} of the rate alone",
        gain_share=1 - shared / alone,
    )


def far_memory(facts: Facts) -> Seen | None:
    """Memory of another node is slower, and nothing binds the process to one: its pages lie on either."""
    machine = facts.machine
    if len(machine.inventory.cpu.numa_nodes) < 2:
        return None
    groups: dict[str, list[NumaRates]] = {}
    for rate in (*machine.host.numa, *(rate for device in machine.devices for rate in device.numa)):
        groups.setdefault(rate.by, []).append(rate)
    if not groups:
        raise LackingError("copies of memory on each NUMA node: run `outsize probe` again")
    worst: Seen | None = None
    for by, rates in groups.items():
        near = _median_of(rates, local=True)
        far = _median_of(rates, local=False)
        if near is None or far is None or far >= _REMOTE * near:
            continue
        # Half of the pages are far where nothing binds them.
        gain = 0.5 * (1 - far / near)
        if worst is None or gain > (worst.gain_share or 0.0):
            worst = Seen(
                evidence=f"{by}: {format_rate(near)} from memory of its own node, {format_rate(far)} from the other",
                expected="memory of the node that copies it: pages lie where they were first written",
                gain_share=gain,
            )
    return worst


def no_overlap(facts: Facts) -> Seen | None:
    """Copies and compute, begun together, take nearly as long as one after the other."""
    for device in facts.machine.devices:
        if not device.accelerated:
            continue  # on a CPU both are the work of the same cores
        if device.overlap is None:
            raise LackingError("copies beside compute: run `outsize probe` again")
        hidden = device.overlap.hidden_share()
        if hidden is None:
            raise LackingError(f"copies beside compute: {device.overlap.both_s.source}")
        if hidden >= _HIDDEN:
            continue
        return Seen(
            evidence=(
                f"{device.device}: product {_ms(device.overlap.matmul_s.median)}, copies "
                f"{_ms(device.overlap.copy_s.median)}, both at once {_ms(device.overlap.both_s.median)}: "
                f"{max(0.0, hidden):.0%} hidden"
            ),
            expected=f"at least {_HIDDEN:.0%} of the shorter one hidden behind the other",
            gain_share=(_HIDDEN - max(0.0, hidden)) / 2,
        )
    return None


def peer_staged(facts: Facts) -> Seen | None:
    """A link between GPUs that should be direct reaches no more than copies by way of the host."""
    machine = facts.machine
    if not machine.peers:
        if len(machine.inventory.gpus) > 1:
            raise LackingError("copies between GPUs: run `outsize probe` again")
        return None
    order = ("host-staged", "PCIe peer", "NVLink")
    for peer in machine.peers:
        if peer.by_topology.value is None or peer.by_rate.value is None:
            continue
        by_driver, reached = str(peer.by_topology.value), str(peer.by_rate.value)
        if order.index(reached) < order.index(by_driver):
            return Seen(
                evidence=(
                    f"{peer.target} from {peer.source}: {by_driver} by the driver, "
                    f"{format_rate(median(peer.copy_bytes_per_s, 'copies'))} measured, as {reached} "
                    f"({peer.by_rate.source})"
                ),
                expected=f"the rate of {by_driver}",
            )
    return None


def translating_iommu(facts: Facts) -> Seen | None:
    """An IOMMU that translates every access of devices, on a machine with GPUs that is no virtual one. Advice only."""
    machine = facts.machine
    if not machine.inventory.gpus:
        return None
    environment = machine.inventory.environment
    iommu = text(environment.iommu, "IOMMU")
    names = iommu.split()
    passing = "iommu=pt" in names or "iommu.passthrough=1" in names
    virtual = environment.virtual_machine.value not in (None, "none seen")
    if iommu == "none" or passing or virtual or not any("=" not in name for name in names):
        return None
    return Seen(
        severity="info",
        evidence=f"IOMMU: {iommu}, without iommu=pt: accesses of devices are translated",
        expected=(
            "iommu=pt on a machine without virtual machines, where copies of devices need no translation; what that "
            "brings is to be measured"
        ),
    )


def _gpu(facts: Facts, device: str) -> GpuFacts:
    index = int(device.partition(":")[2])
    if index >= len(facts.machine.inventory.gpus):
        raise LackingError(f"GPUs by NVML: {facts.machine.inventory.num_gpus.source}")
    return facts.machine.inventory.gpus[index]


def _median_of(rates: list[NumaRates], *, local: bool) -> float | None:
    speeds = [
        rate.copy_bytes_per_s.median
        for rate in rates
        if rate.local is local and rate.copy_bytes_per_s.median is not None
    ]
    return statistics.median(speeds) if speeds else None


def _ms(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{seconds * 1e3:.3g} ms"
