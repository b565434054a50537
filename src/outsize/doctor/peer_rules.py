"""What can be wrong with copies beside something else: compute, other GPUs, another NUMA node, an IOMMU in between."""

import statistics

from outsize.doctor.facts import Facts, LackingError, median, number, text
from outsize.doctor.finding import Seen
from outsize.hardware.gpus import GpuFacts
from outsize.hardware.streaming import NumaRates
from outsize.units import format_bytes, format_rate

# Marks below which something is worth saying: of a copy alone while all devices copy; of local memory by remote; of the
# shorter of copy and product that the longer hides.
_TOGETHER, _REMOTE, _HIDDEN = 0.75, 0.85, 0.5
# Bytes that pinning takes beyond those asked for, as a share.
_WASTE = 0.2


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


def rounded_up(facts: Facts) -> Seen | None:
    """Pinned memory that is rounded up to a power of two: what torch's own allocator does with ``pin_memory``."""
    costs = {cost.way: cost for cost in facts.machine.host.pinning}
    if not any(device.accelerated for device in facts.machine.devices):
        return None
    if "torch pin_memory" not in costs:
        raise LackingError("what pinning takes: run `outsize probe` again")
    cost = costs["torch pin_memory"]
    taken_bytes = number(cost.taken_bytes, "what torch took")
    waste = taken_bytes / cost.asked_bytes - 1
    if waste < _WASTE:
        return None
    return Seen(
        severity="info",
        evidence=(
            f"torch's pin_memory took {format_bytes(int(taken_bytes))} for {format_bytes(cost.asked_bytes)}: "
            f"{waste:.0%} more"
        ),
        expected="the bytes that were asked for; outsize's own buffers are pinned exactly",
    )


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
