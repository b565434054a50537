"""Rules on links, on what GPUs hang on, and on NCCL's variables (`outsize.hardware.link_fit`): rows and checks."""

from typing import Final

from outsize.doctor import device_rules, finding
from outsize.doctor.finding import Rule, Seen
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


# Rows of the table of `outsize.doctor.rules`.
_MORE_TOKENS = "more tokens per step ({train.tokens_per_step|a larger batch}), where copies matter less"
PROBE_AGAIN = "outsize probe --compare machine.json"
LINK_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        id="link-narrow",
        part="link",
        look=narrow,
        causes=(
            "the slot has fewer lanes than it is long, or shares them with another slot or an M.2 drive",
            "a riser, cable or card that is not seated well: lanes that fail to train are dropped",
            "the firmware splits the slot (bifurcation)",
        ),
        fix="another slot (the board's manual says which has all lanes); seat the card anew; firmware: slot as x16",
        verify="nvidia-smi --query-gpu=pcie.link.width.current,pcie.link.width.max --format=csv",
    ),
    Rule(
        id="link-slow",
        part="link",
        look=slow,
        causes=(
            "the link trained at an older generation: riser, cable, or a setting of the firmware",
            "a switch or bridge above the GPU with a narrower uplink",
            "host memory of another NUMA node, or other traffic while it was probed",
        ),
        fix="compare the generation under load with its maximum; firmware: PCIe generation of the slot",
        verify="nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.gen.max --format=csv while `outsize probe` "
        "runs: an idle link is slow on purpose",
    ),
    Rule(
        id="link-downtrained",
        part="link",
        look=device_rules.downtrained,
        causes=(
            "the firmware sets the generation of the slot, or the board offers less there",
            "a riser or cable that does not carry the higher rate",
            "errors on the link: it falls back and stays there until the next boot",
        ),
        fix="firmware: PCIe generation of the slot; seat the card anew, or another riser; then boot",
        verify=PROBE_AGAIN,
    ),
    Rule(
        id="pinning-refused",
        part="link",
        look=pageable,
        causes=(
            "a limit of locked memory (memlock)",
            "RAM is short, or the control group's limit is reached",
            "WSL2, or a sandbox that hides what the driver needs",
        ),
        fix=(finding.raised_pin_limits, "more free RAM"),
        verify="outsize probe: a fit stands beside the link's pinned path",
    ),
    Rule(
        id="copies-not-hidden",
        part="link",
        look=device_rules.no_overlap,
        causes=(
            "a product and copies that both wait for the GPU's memory",
            "one copy engine for both directions, or a virtual GPU",
            "CUDA_LAUNCH_BLOCKING=1",
        ),
        fix="unset CUDA_LAUNCH_BLOCKING; " + _MORE_TOKENS,
        verify=PROBE_AGAIN,
    ),
    Rule(
        id="copies-contend",
        part="link",
        look=device_rules.contended,
        causes=(
            "several GPUs below one switch or bridge",
            "host memory that cannot serve all of them",
            "one NUMA node that holds all pinned memory",
        ),
        fix="CUDA_VISIBLE_DEVICES: fewer GPUs per switch where there is a choice; memory bound to the GPUs' nodes",
        verify="outsize probe: together in machine.json",
    ),
    Rule(
        id="peer-slow",
        part="link",
        look=device_rules.peer_staged,
        causes=(
            "access control (ACS) or an IOMMU sends peer copies by way of the root complex",
            "NVLink bridges that are not seated",
            "a driver that accepts peer access and stages",
        ),
        fix="nvidia-smi nvlink --status; without virtual machines, ask whoever keeps the firmware about ACS",
        verify="outsize probe: peers in machine.json",
    ),
    Rule(
        id="iommu-translates",
        part="link",
        look=device_rules.translating_iommu,
        causes=("the default of the distribution", "virtual machines that ran here before"),
        fix="ask whoever keeps the machine about iommu=pt on the kernel's command line: advice, nothing is set for you",
        verify="cat /proc/cmdline, then " + PROBE_AGAIN,
    ),
    Rule(
        id="small-copies",
        part="link",
        look=small_copies,
        causes=("units of few parameters: each load is one copy, and pays its fixed cost",),
        fix=(finding.further_ahead, _MORE_TOKENS),
        verify="stall_share and stall_owner in heartbeat.jsonl of the next run",
    ),
    Rule(
        id="copies-pageable",
        part="link",
        look=fell_to_pageable,
        causes=(
            "a limit of locked memory (memlock) below what the run holds in RAM",
            "RAM was short, or the control group's limit was reached, when the run began",
        ),
        fix="ulimit -l unlimited (containers: --ulimit memlock=-1) or a smaller {memory.host_memory}, then start again",
        verify="fallbacks in heartbeat.jsonl of the next run: no `pageable`",
    ),
    Rule(
        id="numa-wrong-node",
        part="link",
        look=wrong_node,
        causes=(
            "bound to processors of another node: taskset, numactl, Slurm, or a container's cpuset; "
            "{a run (memory.numa) never leaves|your program never leaves} those",
        ),
        fix="numactl --cpunodebind=NODE --membind=NODE {outsize train run.yaml|your program}, of the node found",
        verify="outsize probe --compare machine.json under the same numactl",
    ),
    Rule(
        id="numa-far-memory",
        part="link",
        look=device_rules.far_memory,
        causes=(
            "a process that is not bound has its pages on whichever node first writes them: {a run binds itself to the "
            "node of its device (memory.numa) only where processors and memory there suffice|outsize binds no loop}",
        ),
        fix="{leave memory.numa auto; OMP_NUM_THREADS: a node's cores where `numa` in run.json finds too many threads; "
        "else|bind it:} numactl --cpunodebind=NODE --membind=NODE {outsize train run.yaml|your program}",
        verify="numa in run.json, or numastat -p PID: pages on one node",
    ),
    Rule(
        id="nccl-overridden",
        part="link",
        look=overridden,
        causes=("left over from a search for an error", "copied from another machine"),
        fix="unset the variables; set one again only where a benchmark on this machine shows that it helps",
        verify="outsize all-reduce with and without",
    ),
    Rule(
        id="sums-slow",
        part="link",
        look=slow_sums,
        causes=(
            "NCCL takes sockets instead of shared memory or peer copies: a container without /dev/shm, or a variable",
            "GPUs below different processors, and memory of only one of them",
        ),
        fix="NCCL_DEBUG=INFO outsize all-reduce --backend nccl names the transports; docker run --ipc=host",
        verify="outsize all-reduce --output machine.json, then outsize doctor --machine machine.json",
    ),
    Rule(
        id="nccl-misspelt",
        part="link",
        look=misspelt,
        causes=("a typing mistake", "advice that was never true: NCCL_TIMEOUT is no variable"),
        fix="the name in the evidence; a time limit is an argument: torch.distributed.init_process_group(timeout=...)",
        verify="NCCL_DEBUG=INFO names the variables that were read",
    ),
)
