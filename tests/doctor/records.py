"""Records of a sound machine and a sound run, and the changes that plant one fault."""

import json

from hardware.fake_machine import SERVER, build, link, measured, probed
from outsize.doctor.run_record import read_run
from outsize.hardware.cgroup import Fact
from outsize.hardware.gpus import GpuFacts, Inventory
from outsize.hardware.link_fit import summarize
from outsize.hardware.machine_file import DeviceRates, MachineFile
from outsize.hardware.topology import NumaRates, Overlap, PeerLink, TogetherRates

GIB = 2**30


def fact(value):
    return Fact.read(value, "by the test")


def gpu(index=0, **changes):
    facts = {
        "name": "Example GPU",
        "capability": "9.0",
        "memory_total_bytes": 80 * GIB,
        "memory_free_bytes": 79 * GIB,
        "pcie_generation": 1,  # idle
        "pcie_generation_max": 4,
        "pcie_lanes": 16,
        "pcie_lanes_max": 16,
        "numa_node": index,
        "driver": "555.1",
        "pci_path": f"pci0000:{index}0/0000:{index}0:01.0/0000:{index}1:00.0",
        "sm_clock_hz": 345 * 10**6,
        "sm_clock_max_hz": 1980 * 10**6,
        "clock_limits": "",
    } | changes
    other = str(1 - index)
    return GpuFacts(
        **{name: fact(value) for name, value in facts.items() if name not in ("peer", "nvlink")},
        peers={other: fact(facts.get("peer", "ok"))},
        peer_nvlinks={other: fact(facts.get("nvlink", "not supported"))},
        ancestors={other: fact("one host bridge")},
        num_nvlinks=fact(0),
    )


def overlap(*, matmul=0.01, copy=0.01, both=0.011):
    """A product and copies that hide each other."""
    return Overlap(
        what="by the test",
        matmul_s=measured(matmul),
        copy_s=measured(copy),
        both_s=measured(both),
        matmul_beside_s=measured(both),
        copy_beside_s=measured(both),
    )


def numa_rates(by, *, far=0.95, rate=20e9):
    own = 0 if by in ("node 0", "cuda:0") else 1
    return tuple(
        NumaRates(
            memory_node=node,
            by=by,
            local=node == own,
            copy_bytes_per_s=measured(rate if node == own else far * rate),
        )
        for node in (0, 1)
    )


def together(*, share=1.0):
    return tuple(
        TogetherRates(
            device=f"cuda:{index}",
            direction=direction,
            alone_bytes_per_s=measured(25e9),
            together_bytes_per_s=measured(share * 25e9),
        )
        for direction in ("up", "down")
        for index in (0, 1)
    )


def peers(*, said="PCIe peer", reached="PCIe peer", rate=20e9):
    return tuple(
        PeerLink(
            source=f"cuda:{1 - index}",
            target=f"cuda:{index}",
            by_topology=fact(said),
            by_rate=fact(reached),
            copy_bytes_per_s=measured(rate),
        )
        for index in (0, 1)
    )


def device(index=0, *, up=25e9, pageable=6e9, matmul=(4e14,) * 6, attention=2e14, generation=4, hidden=None):
    return DeviceRates(
        device=f"cuda:{index}",
        name="Example GPU",
        num_sms=fact(132),
        memory_bytes=fact(80 * GIB),
        memory_triad_bytes_per_s=measured(3e12),
        matmul_flops_per_s={"bf16": measured(*matmul)},
        attention_flops_per_s={"bf16": measured(attention)},
        links=(
            link("up", path="pinned", bytes_per_s=up),
            link("down", path="pinned", bytes_per_s=25e9),
            link("up", path="pageable", bytes_per_s=pageable),
        ),
        pcie_generation_loaded=fact(generation),
        pcie_lanes_loaded=fact(16),
        overlap=hidden or overlap(),
        numa=numa_rates(f"cuda:{index}", rate=25e9),
    )


def cpu_machine(root, **changes):
    """A sound machine without GPU; ``changes`` by dotted name below the inventory."""
    tree = {
        **SERVER,
        "proc/self/status": "Cpus_allowed_list:\t0-3\n",
        "proc/loadavg": "0.10 0.10 0.10 1/100 1\n",
        "proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
        "proc/cmdline": "quiet\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "intel_pstate\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq": "800000\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "4000000\n",
        "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "4000000\n",
        "sys/class/iommu/none": "",
    }
    found = probed(build(root, tree), root)
    environment = found.inventory.environment.model_copy(update={"variables": {}, "native": fact("avx2")})
    memory = found.inventory.memory.model_copy(
        update={"cgroup_limit_bytes": fact(None), "swap_free_bytes": fact(2**20)}
    )
    cpu = found.inventory.cpu.model_copy(update={"quota_cores": fact(None)})
    inventory = {**dict(found.inventory), "cpu": cpu, "environment": environment, "memory": memory}
    host = found.host.model_copy(update={"numa": numa_rates("node 0") + numa_rates("node 1")})
    disks = tuple(
        disk.model_copy(update={"sustained_write_bytes_per_s": measured(*[2e9] * 9)}) for disk in found.disks
    )
    sound = {"inventory": Inventory(**inventory), "host": host, "disks": disks}
    return changed(found.model_copy(update=sound), **changes)


def gpu_machine(root, *, gpus=None, devices=None, **changes):
    """A sound machine of two GPUs, each on a node and a bridge of its own."""
    found = cpu_machine(root, **changes)
    gpus = gpus or (gpu(0), gpu(1))
    inventory = found.inventory.model_copy(update={"gpus": gpus, "num_gpus": fact(len(gpus))})
    sound = {
        "inventory": inventory,
        "devices": devices or (device(0), device(1)),
        "together": together(),
        "peers": peers(),
        "all_reduce": sums(2e10),
    }
    return found.model_copy(update=sound)


def sums(bytes_per_s, backend="nccl"):
    """Sums over two ranks whose links carry so much."""
    seconds = {size: (1e-5 + size / bytes_per_s,) * 3 for size in (2**10, 2**14, 2**18, 2**22, 2**26)}
    return summarize(seconds, backend=backend, num_ranks=2, note="")


def changed(found: MachineFile, **changes):
    """Return the machine with ``memory__swap_free_bytes=0`` and the like below its inventory."""
    inventory = found.inventory
    for name, value in changes.items():
        part, _, field = name.partition("__")
        entry = value if isinstance(value, dict | tuple) else fact(value)
        inventory = inventory.model_copy(
            update={part: getattr(inventory, part).model_copy(update={field: entry})}
        )
    return found.model_copy(update={"inventory": inventory})


def host(**changes):
    """What the kernel counted over a step of 2 s of a machine that has enough of everything."""
    return {
        "span_s": 2.0,
        "queued_s": 0.02,
        "others_cpu_s": 0.1,
        "stolen_cpu_s": 0.0,
        "throttled_s": 0.0,
        "memory_pressure_s": 0.0,
        "swapped_in_bytes": 0,
        "major_faults": 0,
        **changes,
    }


def told(machine):
    """What ``run.json`` says of a machine."""
    return {"machine": machine.inventory.model_dump(mode="json"), "num_threads": 4}


def step(number, **changes):
    """A step of 2 s that computes but for its stalls and 15 ms that no op accounts for."""
    stall_s = changes.pop("stall_s", {"up:w0": 0.02, "dispatch": 0.005})
    computed_s = changes.get("seconds", 2.0) - sum(stall_s.values()) - 0.015
    busy_s = {"compute:w0": computed_s, "up:w0": 1.0, "down:w0": 0.5, "host": 0.8, "read": 0.3, "write": 0.3}
    return {
        "schema": 3,
        "step": number,
        "seconds": 2.0,
        "tokens": 4096,
        "bytes_up": 20 * 10**9,
        "bytes_down": 10 * 10**9,
        "bytes_read": 0,
        "bytes_written": 0,
        "update_s": 0.8,
        "data_s": 0.0,
        "cpu_s": 3.8,
        "slowed_s": 0.05,
        "host": host(),
        "mfu": 0.35,
        "rss_bytes": 6 * GIB,
        "device_bytes": {"cuda:0": 2 * GIB},
        "fallbacks": {},
        "busy_s": busy_s | changes.pop("busy_s", {}),
        "stall_s": stall_s,
        **changes,
    }


def run(directory, steps=None, *, plan=None, config=None, about=None, count=12, **changes):
    """Write and read a run; ``changes`` are those of every step."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = steps or [step(number, **changes) for number in range(1, count + 1)]
    (directory / "heartbeat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = {
        "below": "host",
        "memory_bytes": {"device": {"slots": 2 * GIB}, "host": {"home": 5 * GIB}, "disk": {}},
        "bytes_per_step": {"up": 20 * 10**9},
        "program": [f"LOAD {unit}@w0.0" for unit in range(40)],
    } | (plan or {})
    (directory / "plan.json").write_text(json.dumps(told))
    settings = {
        "model": {"attention": "auto"},
        "data": {"seq_len": 2048},
        "memory": {"device": "cuda"},
    } | (config or {})
    (directory / "config.yaml").write_text(json.dumps(settings))
    (directory / "run.json").write_text(
        json.dumps({"tokens_per_microbatch": 2048, "fp32_flops_per_s": None} | (about or {}))
    )
    return read_run(directory)
