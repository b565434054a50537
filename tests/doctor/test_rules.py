"""Every rule with a record that shows it; the sound records show none of them."""

from pathlib import Path

import pytest

from doctor import records
from doctor.records import (
    cpu_machine,
    device,
    gpu,
    gpu_machine,
    host,
    numa_rates,
    overlap,
    peers,
    run,
    step,
    sums,
    together,
    told,
)
from hardware.fake_machine import link, measured
from outsize.config import load_config
from outsize.doctor.examine import examine
from outsize.doctor.finding import compressed_exchange, is_on_cpu_alone
from outsize.doctor.rules import RULES
from outsize.doctor.run_record import Facts, is_on_cpu
from outsize.hardware.cgroup import Fact

GIB = 2**30


def refused(index=0):
    sound = device(index)
    none = link("up", path="pinned").model_copy(
        update={"fit": None, "note": "the driver refused to pin memory"}
    )
    return sound.model_copy(update={"links": (none, sound.links[2])})


def disk_place(found, **changes):
    (place,) = found.inventory.disks
    place = place.model_copy(update={name: records.fact(value) for name, value in changes.items()})
    return found.model_copy(update={"inventory": found.inventory.model_copy(update={"disks": (place,)})})


def buffered(found):
    (disk,) = found.disks
    return found.model_copy(update={"disks": (disk.model_copy(update={"direct": records.fact(False)}),)})


def reading(found, bytes_per_s):
    (disk,) = found.disks
    depths = [depth.model_copy(update={"read_bytes_per_s": measured(bytes_per_s)}) for depth in disk.depths]
    return found.model_copy(update={"disks": (disk.model_copy(update={"depths": tuple(depths)}),)})


def writing(found, *samples):
    (disk,) = found.disks
    disk = disk.model_copy(update={"sustained_write_bytes_per_s": measured(*samples)})
    return found.model_copy(update={"disks": (disk,)})


def with_host(found, **changes):
    return found.model_copy(update={"host": found.host.model_copy(update=changes)})


def unlinked(found):
    """A machine whose links nobody has tried."""
    devices = tuple(device.model_copy(update={"links": ()}) for device in found.devices)
    return found.model_copy(update={"devices": devices})


def variables(**told):
    return {"environment__variables": {name: records.fact(value) for name, value in told.items()}}


def starved(directory, cpu__quota_cores=None, **changes):
    """A run on a CPU that says what its machine is."""
    about = told(cpu_machine(directory, cpu__load_average=5.9, cpu__quota_cores=cpu__quota_cores))
    return run(directory / "run", config={"memory": {"device": "cpu"}}, about=about, **changes)


# id of the rule -> (its severity, what its evidence must say, the machine or run that shows it).
SHOWN = {
    "link-narrow": ("warning", "x8", lambda d: gpu_machine(d, gpus=(gpu(pcie_lanes=8), gpu(1)))),
    "link-slow": (
        "warning",
        "12.00 GB/s of pinned copies, 38% of the 31.51 GB/s of its lanes, as much as generation 3 gives",
        lambda d: gpu_machine(d, devices=(device(up=12e9), device(1))),
    ),
    "pinning-refused": ("error", "64.00 KiB", lambda d: gpu_machine(d, devices=(refused(), device(1)))),
    "copies-pageable": (
        "error",
        "3 requests for pinned memory stayed pageable in this run",
        lambda d: run(d, fallbacks={"pageable": 3}),
    ),
    "numa-wrong-node": (
        "warning",
        "node 1 (CPUs 2-3); this process may only run on 0-1",
        lambda d: gpu_machine(d, cpu__usable_cpus="0-1"),
    ),
    "cgroup-memory": (
        "warning",
        "3.90 GiB in use (97%)",
        lambda d: cpu_machine(
            d, memory__cgroup_limit_bytes=4 * GIB, memory__cgroup_usage_bytes=int(3.9 * GIB)
        ),
    ),
    "swap-active": (
        "warning",
        "1.00 GiB swapped out, 5% of RAM available",
        lambda d: cpu_machine(
            d,
            memory__swap_total_bytes=2 * GIB,
            memory__swap_free_bytes=GIB,
            memory__available_bytes=int(0.4 * GIB),
            memory__pressure_share=0.2,
        ),
    ),
    "cpu-quota": (
        "warning",
        "quota of 1.5 cores, 4 processors in sight, 4 threads",
        lambda d: cpu_machine(d, cpu__quota_cores=1.5),
    ),
    "cores-taken": (
        "warning",
        "had 0.4 of 4 processors, other processes 3.4, the hypervisor 0.1; its threads were ready and had none for 1.5",
        lambda d: starved(d, cpu_s=0.8, host=host(queued_s=3.0, others_cpu_s=6.8, stolen_cpu_s=0.2)),
    ),
    "native-missing": (
        "warning",
        "no kernels in C: by the test",
        lambda d: cpu_machine(d, environment__native="none"),
    ),
    "cpu-clock-limited": (
        "warning",
        "powersave of acpi-cpufreq holds the clock at 0.80 GHz",
        lambda d: cpu_machine(d, cpu__clock_governor="acpi-cpufreq powersave"),
    ),
    "gpu-throttled": (
        "error",
        "cuda:0 at 0.60 of 1.98 GHz: hardware thermal slowdown",
        lambda d: gpu_machine(
            d, gpus=(gpu(clock_limits="hardware thermal slowdown", sm_clock_hz=600 * 10**6), gpu(1))
        ),
    ),
    "rate-sags": (
        "warning",
        "fell by 39%",
        lambda d: gpu_machine(
            d, devices=(device(matmul=(4e14, 3.9e14, 3.2e14, 3e14, 2.5e14, 2.3e14)), device(1))
        ),
    ),
    "probe-not-quiet": ("info", "load 3.5 on 4", lambda d: cpu_machine(d, cpu__load_average=3.5)),
    "disk-unsuitable": ("warning", "is tmpfs", lambda d: disk_place(cpu_machine(d), file_system="tmpfs")),
    "attention-unfused": (
        "warning",
        "5% of a matrix product",
        lambda d: gpu_machine(d, devices=(device(attention=2e13), device(1))),
    ),
    "nccl-overridden": (
        "warning",
        "NCCL_P2P_DISABLE=1",
        lambda d: gpu_machine(d, **variables(NCCL_P2P_DISABLE="1")),
    ),
    "sums-slow": (
        "warning",
        "sums over 2 GPUs: 2.00 GB/s on each link, where copies reach",
        lambda d: gpu_machine(d).model_copy(update={"all_reduce": sums(2e9)}),
    ),
    "nccl-misspelt": (
        "warning",
        "NCCL_TIMEOUT is none of NCCL's; NCCL_SOCKET_IFNAMES is none of NCCL's; NCCL_SOCKET_IFNAME is",
        lambda d: gpu_machine(
            d, **variables(NCCL_TIMEOUT="1800", NCCL_SOCKET_IFNAMES="eth0", NCCL_DEBUG="WARN")
        ),
    ),
    "small-copies": (
        "warning",
        "50% of their time is the fixed cost",
        lambda d: (cpu_machine(d), run(d / "run", plan={"bytes_per_step": {"up": 40 * 10**5}})),
    ),
    "loader-bound": ("warning", "40% of a step", lambda d: run(d, data_s=0.8, stall_s={"up:w0": 0.8})),
    "host-bound": ("warning", "40 ops, 50 ms each", lambda d: run(d, stall_s={"dispatch": 0.5})),
    "optimizer-bound": (
        "warning",
        "30% of a step of 2.0 s compute waits for the optimizer",
        lambda d: run(d, stall_s={"host": 0.6}),
    ),
    "disk-bound": (
        "warning",
        "reads 1.86 GiB at 2.00 GB/s while busy, writes 953.67 MiB at 3.33 GB/s while busy",
        lambda d: run(
            d, stall_s={"read": 0.6}, busy_s={"read": 1.0}, bytes_read=2 * 10**9, bytes_written=10**9
        ),
    ),
    "link-bound": (
        "warning",
        "up 20.00 GB/s while busy",
        lambda d: run(d, stall_s={"up:w0": 0.6}),
    ),
    "worker-bound": (
        "warning",
        "busy: compute:w0 1.4 s, compute:w1 1.9 s",
        lambda d: run(d, stall_s={"compute:w1": 0.6}, busy_s={"compute:w1": 1.9}),
    ),
    "rank-bound": (
        "warning",
        "40% of a step of 2.0 s compute waits for the other 1 of 2 ranks",
        lambda d: run(
            d,
            about={"num_ranks": 2},
            waits_s={"compute:w0": {"ranks": {"net:reduce": 0.8}, "python": {"none": 0.02}}},
        ),
    ),
    "checkpoint-bound": (
        "warning",
        "40% of a step of 2.0 s compute waits for a checkpoint",
        lambda d: run(d, waits_s={"compute:w0": {"checkpoint": {"store": 0.8}, "python": {"none": 0.02}}}),
    ),
    "microbatch-tiny": (
        "warning",
        "4 tokens per microbatch; compute reaches 2.0% of the device's peak",
        lambda d: run(d, about={"tokens_per_microbatch": 4}, mfu=0.02, stall_s={}),
    ),
    "compute-slow": (
        "warning",
        "compute reaches 2.0% of the device's peak while it works, 99% of a step, with 2048 tokens",
        lambda d: run(d, mfu=0.02, stall_s={}),
    ),
    "compute-slowed": (
        "warning",
        "compute takes 600 ms of a step longer than its units took alone; per second other lanes had 0.35 s of a "
        "processor, 50,000 pages were handed out, and the system's kernel took 0.2 s",
        lambda d: starved(
            d,
            slowed_s=0.6,
            host=host(
                cpu_s_by_thread={
                    "compute:w0": 1.8,
                    "host": 0.4,
                    "up:w0": 0.3,
                    "native": 1.7,
                    "MainThread": 0.1,
                },
                minor_faults=100_000,
                kernel_cpu_s=0.4,
            ),
        ),
    ),
    "dtype-slow": (
        "warning",
        "products in bf16 reach 20 GFLOP/s on this processor, in fp32 90",
        lambda d: run(d, about={"dtype": "bf16", "peak_flops_per_s": 2e10, "fp32_flops_per_s": 9e10}),
    ),
    "compute-bound": ("good", "compute works 98% of a step and waits 2.0%", run),
    "steps-uneven": (
        "warning",
        "3 of 11 steps took over 1.5 times",
        lambda d: run(d, [step(n, seconds=9.0 if n % 4 == 0 else 2.0) for n in range(1, 13)]),
    ),
    "memory-above-plan": (
        "warning",
        "grew from",
        lambda d: run(d, [step(n, rss_bytes=(5 + n) * GIB) for n in range(1, 13)]),
    ),
    "link-downtrained": (
        "warning",
        "cuda:1 under load: generation 3 x16",
        lambda d: gpu_machine(d, devices=(device(), device(1, generation=3))),
    ),
    "copies-not-hidden": (
        "warning",
        "product 10 ms, copies 10 ms, both at once 19.5 ms: 5% hidden",
        lambda d: gpu_machine(d, devices=(device(hidden=overlap(both=0.0195)), device(1))),
    ),
    "copies-contend": (
        "warning",
        "cuda:0 up: 12.50 GB/s while all copy, 25.00 GB/s alone; all together 25.00 GB/s",
        lambda d: gpu_machine(d).model_copy(update={"together": together(share=0.5)}),
    ),
    "numa-far-memory": (
        "warning",
        "node 0: 20.00 GB/s from memory of its own node, 12.00 GB/s from the other",
        lambda d: with_host(cpu_machine(d), numa=numa_rates("node 0", far=0.6)),
    ),
    "peer-slow": (
        "warning",
        "cuda:0 from cuda:1: NVLink by the driver, 9.00 GB/s measured, as host-staged",
        lambda d: gpu_machine(d).model_copy(
            update={"peers": peers(said="NVLink", reached="host-staged", rate=9e9)}
        ),
    ),
    "iommu-translates": (
        "info",
        "IOMMU: dmar0 intel_iommu=on, without iommu=pt",
        lambda d: gpu_machine(d, environment__iommu="dmar0 intel_iommu=on"),
    ),
    "pinning-limited": (
        "warning",
        "at most 64.00 KiB may be locked (ulimit -l); the run plans for 5.00 GiB",
        lambda d: (unlinked(gpu_machine(d)), run(d / "run")),
    ),
    "disk-sags": (
        "warning",
        "writes fell by 74%, from 2.30 GB/s to 500.00 MB/s",
        lambda d: writing(cpu_machine(d), 2.3e9, 2.2e9, 2e9, 9e8, 8e8, 7e8, 6e8, 5.8e8, 5e8),
    ),
    "step-superlinear": (
        "warning",
        "4096 tokens per step take 977 us per token, 2048 take 488: 2 times the tokens, 4 times the step",
        lambda d: Facts(
            recorded=run(d / "large", seconds=4.0), others=(run(d / "small", tokens=2048, seconds=1.0),)
        ),
    ),
    "allocator-fragmented": (
        "warning",
        "torch holds 3.00 GiB of a GPU between steps, 50% more than the 2.00 GiB",
        lambda d: run(d, device_bytes={"cuda:0": GIB, "cuda:1": 3 * GIB}),
    ),
}


def facts_of(record):
    match record:
        case Facts():
            return record
        case (machine, recorded):
            return Facts(probed=machine, recorded=recorded)
        case records.MachineFile():
            return Facts(probed=record)
    return Facts(recorded=record)


def found(record):
    return {finding.id: finding for finding in examine(facts_of(record)).findings}


def test_python_between_steps_is_told_apart(tmp_path):
    waits = {"compute:w0": {"between steps": {"none": 0.9}, "python": {"none": 0.1}}}
    finding = found(run(tmp_path, waits_s=waits, between_s=0.9))["host-bound"]
    assert "900 ms of it lie between steps" in finding.evidence


def test_every_rule_has_a_record_that_shows_it():
    assert SHOWN.keys() == {rule.id for rule in RULES}
    assert len(RULES) == len({rule.id for rule in RULES})


@pytest.mark.parametrize("rule", SHOWN)
def test_a_rule_is_shown_with_its_evidence(rule, tmp_path):
    severity, evidence, make = SHOWN[rule]
    finding = found(make(tmp_path))[rule]
    assert finding.severity == severity
    assert evidence in finding.evidence
    for text in (finding.expected, finding.fix, finding.gain, finding.verify, *finding.causes):
        assert text
    assert finding.gain_share is None or 0 < finding.gain_share <= 1


def test_the_codec_that_ranks_are_advised_is_one_that_a_configuration_takes(tmp_path):
    advice = compressed_exchange(Facts(recorded=SHOWN["rank-bound"][2](tmp_path)))
    setting = advice.split(",")[0].replace(": ", "=")
    assert (
        load_config(None, ["model.path=m", "data.path=d", setting], environ={}).parallel.gradients == "int8"
    )


def test_sound_records_show_nothing_and_leave_nothing_unjudged(tmp_path):
    machine, recorded = gpu_machine(tmp_path), run(tmp_path / "run")
    smaller = run(tmp_path / "smaller", tokens=2048, seconds=1.05)
    report = examine(Facts(probed=machine, recorded=recorded, others=(smaller,)))
    assert [finding.id for finding in report.findings] == ["compute-bound"]
    assert report.not_judged == ()
    assert report.num_passed == len(RULES) - 1
    assert found(cpu_machine(tmp_path)) == {}


@pytest.mark.parametrize(
    ("rule", "record"),
    [
        # Pages that went to swap long ago, with memory to spare, cost nothing.
        ("swap-active", lambda d: cpu_machine(d, memory__swap_free_bytes=0)),
        # Virtual drives say that they turn.
        ("disk-unsuitable", lambda d: disk_place(cpu_machine(d), rotational=True)),
        # Sockets are all that gloo has; what it reaches says nothing of the GPUs.
        ("sums-slow", lambda d: gpu_machine(d).model_copy(update={"all_reduce": sums(2e9, "gloo")})),
        # A quota with as many threads is no trouble.
        ("cpu-quota", lambda d: cpu_machine(d, cpu__quota_cores=2, **variables(OMP_NUM_THREADS="2"))),
        # powersave of these drivers raises the clock with the load.
        ("cpu-clock-limited", lambda d: cpu_machine(d, cpu__clock_governor="amd-pstate-epp powersave")),
        # memlock alone says nothing: the driver pins, or it does not.
        ("pinning-refused", lambda d: gpu_machine(d, memory__memlock_limit_bytes=65536)),
        # An unknown name that is near none may be one of a plugin.
        ("nccl-misspelt", lambda d: gpu_machine(d, **variables(NCCL_EXAMPLE_PLUGIN_KEY="1"))),
        # Slow attention on a CPU is no missing kernel.
        ("attention-unfused", cpu_machine),
        ("rate-sags", lambda d: gpu_machine(d, devices=(device(matmul=(4e14, 3e14, 4e14) * 2), device(1)))),
        ("compute-bound", lambda d: run(d, stall_s={"host": 0.6})),
        ("memory-above-plan", lambda d: run(d, config={"memory": {"device": "cpu"}})),
        # One link of a machine that nobody asked under load says nothing of the other.
        ("link-downtrained", lambda d: gpu_machine(d, devices=(device(generation=5), device(1)))),
        # Copies and products of a CPU are the work of the same cores.
        ("copies-not-hidden", cpu_machine),
        ("copies-not-hidden", lambda d: gpu_machine(d, devices=(device(hidden=overlap(both=0.014)),) * 2)),
        ("copies-contend", lambda d: gpu_machine(d).model_copy(update={"together": together(share=0.8)})),
        ("numa-far-memory", lambda d: with_host(cpu_machine(d), numa=numa_rates("node 0", far=0.9))),
        # Staged by the driver's own word is no surprise; faster than it says is none either.
        ("peer-slow", lambda d: gpu_machine(d).model_copy(update={"peers": peers(said="host-staged")})),
        ("peer-slow", lambda d: gpu_machine(d).model_copy(update={"peers": peers(reached="NVLink")})),
        ("iommu-translates", lambda d: gpu_machine(d, environment__iommu="dmar0 intel_iommu=on iommu=pt")),
        # A virtual machine needs it; without a GPU it does not matter.
        (
            "iommu-translates",
            lambda d: gpu_machine(d, environment__iommu="dmar0", environment__virtual_machine="KVM"),
        ),
        ("iommu-translates", lambda d: cpu_machine(d, environment__iommu="dmar0 intel_iommu=on")),
        # The driver has pinned, whatever the limit says; a plan below the limit is none above it.
        ("pinning-limited", lambda d: (gpu_machine(d), run(d / "run"))),
        (
            "pinning-limited",
            lambda d: (
                unlinked(gpu_machine(d, memory__memlock_limit_bytes=8 * GIB)),
                run(d / "run"),
            ),
        ),
        ("pinning-limited", lambda d: (cpu_machine(d), run(d / "run", config={"memory": {"device": "cpu"}}))),
        # A group that leaves more than the plan takes.
        (
            "pinning-limited",
            lambda d: (
                unlinked(gpu_machine(d, memory__memlock_limit_bytes=None, memory__cgroup_free_bytes=8 * GIB)),
                run(d / "run"),
            ),
        ),
        # One slow sample is no sag.
        ("disk-sags", lambda d: writing(cpu_machine(d), 2e9, 2e9, 5e8, 2e9, 2e9, 2e9)),
        (
            "step-superlinear",
            lambda d: Facts(recorded=run(d / "large"), others=(run(d / "small", tokens=1024, seconds=1.0),)),
        ),
        ("copies-pageable", lambda d: run(d, fallbacks={"pageable": 0, "buffered": 2})),
        (
            "copies-pageable",
            lambda d: run(d, config={"memory": {"device": "cpu"}}, fallbacks={"pageable": 3}),
        ),
        ("allocator-fragmented", lambda d: run(d, device_bytes={"cuda:0": int(2.2 * GIB)})),
        (
            "allocator-fragmented",
            lambda d: run(d, config={"memory": {"device": "cpu"}}, device_bytes={"cuda:0": 9 * GIB}),
        ),
    ],
)
def test_what_looks_like_it_and_is_not(rule, record, tmp_path):
    assert rule not in found(record(tmp_path))


def test_what_limits_pinned_memory_is_named_with_what_copies_take_then(tmp_path):
    """Under WSL2 a plan is beyond what the probe has seen; in a container others are to be asked."""
    wsl = gpu_machine(tmp_path, environment__virtual_machine="WSL", memory__memlock_limit_bytes=None)
    finding = found((wsl, run(tmp_path / "run")))["pinning-limited"]
    assert finding.severity == "info"
    assert "under WSL2 the driver pins part of RAM only" in finding.evidence
    assert "the run plans for 5.00 GiB of host memory, and the probe has pinned a little" in finding.evidence
    assert "what stays pageable is copied at" in finding.evidence
    assert ".wslconfig" in finding.fix
    assert "ulimit" not in finding.fix
    boxed = gpu_machine(
        tmp_path,
        environment__container="docker",
        devices=(refused(), refused(1)),
        memory__cgroup_free_bytes=GIB,
    )
    finding = found((boxed, run(tmp_path / "run")))["pinning-limited"]
    assert finding.severity == "warning"
    assert "the control group allows 1.00 GiB more" in finding.evidence
    assert "--ulimit memlock=-1" in finding.fix
    assert "--ulimit memlock=-1" in found((boxed, run(tmp_path / "run")))["pinning-refused"].fix


def test_other_ways_to_the_same_finding(tmp_path):
    assert "direct I/O" in found(buffered(cpu_machine(tmp_path)))["disk-unsuitable"].evidence
    turning = reading(disk_place(cpu_machine(tmp_path), rotational=True), 2e8)
    assert "reads 200.00 MB/s and says that it turns" in found(turning)["disk-unsuitable"].evidence
    assert found(cpu_machine(tmp_path, memory__cgroup_limit_bytes=GIB))["cgroup-memory"].severity == "info"
    cached = {
        "cgroup_limit_bytes": 4 * GIB,
        "cgroup_usage_bytes": int(3.9 * GIB),
        "cgroup_free_bytes": 3 * GIB,
    }
    full_of_files = cpu_machine(tmp_path, **{f"memory__{name}": size for name, size in cached.items()})
    assert found(full_of_files)["cgroup-memory"].severity == "info"
    small = cpu_machine(tmp_path, memory__cgroup_limit_bytes=4 * GIB)
    report = found((small, run(tmp_path / "run")))
    assert report["cgroup-memory"].severity == "error"
    assert "plans for 5.00 GiB" in report["cgroup-memory"].evidence
    assert "memory.home: disk" in report["cgroup-memory"].fix
    large = run(tmp_path / "run", config={"memory": {"device": "cpu"}}, rss_bytes=9 * GIB)
    assert "9.00 GiB resident; 7.00 GiB planned" in found(large)["memory-above-plan"].evidence
    assert found(gpu_machine(tmp_path, **variables(NCCL_BLOCKING_WAIT="1")))["nccl-misspelt"].evidence == (
        "NCCL_BLOCKING_WAIT is now called TORCH_NCCL_BLOCKING_WAIT"
    )


@pytest.mark.parametrize(
    ("rule", "changes", "evidence"),
    [
        # A quota that was used up is told of the run itself, whatever threads a probe saw.
        (
            "cpu-quota",
            {"host": host(throttled_s=5.6)},
            "ran for 1.9 s per second, and were stopped for 2.8 s",
        ),
        # Threads are stopped on one processor of several, and what they wait for is not what limits the run.
        (
            "cpu-quota",
            {"host": host(throttled_s=1.6), "cpu_s": 0.36, "stall_s": {"dispatch": 0.6}},
            "ran for 0.18 s per second, and were stopped for 0.8 s",
        ),
        (
            "swap-active",
            {"host": host(swapped_in_bytes=200 * 2**20, memory_pressure_s=1.0, major_faults=2000)},
            "100.00 MiB per second read back from swap; this process waited for 1000 pages per second",
        ),
        # A kernel without figures of pressure: pages take what they take.
        (
            "swap-active",
            {"host": host(swapped_in_bytes=40 * 2**20, memory_pressure_s=None)},
            "for memory tasks stood still 51% of the time",
        ),
        # A run from before heartbeats counted is judged by load and processor time.
        (
            "cores-taken",
            {"host": None, "cpu_s": 0.8},
            "had 0.4 of 4 processors; it could have used 3.9; load 5.9 when the run began",
        ),
    ],
)
def test_a_host_that_is_short_of_something_is_seen_in_the_run(rule, changes, evidence, tmp_path):
    report = examine(Facts(recorded=starved(tmp_path, **changes)))
    assert report.bottleneck.id == rule
    assert evidence in report.bottleneck.evidence


@pytest.mark.parametrize(
    "changes",
    [
        # Others use processors that the run does not need.
        {"host": host(queued_s=0.02, others_cpu_s=4.0)},
        # Threads of the run itself stand in each other's way.
        {"host": host(queued_s=6.0, others_cpu_s=0.05), "cpu_s": 7.8},
        # A model whose own code sleeps is not kept from anything.
        {"host": host(queued_s=0.1, others_cpu_s=7.0), "cpu_s": 0.1},
        {"host": None, "cpu_s": 7.6},
        # A quota of one core that is used up, beside other work.
        {"host": host(queued_s=5.0, others_cpu_s=5.8), "cpu_s": 1.9, "cpu__quota_cores": 1.0},
    ],
    ids=["idle-processors", "own-threads", "sleeps", "older-and-busy", "quota"],
)
def test_a_run_that_has_its_processors_is_not_starved(changes, tmp_path):
    assert "cores-taken" not in found(starved(tmp_path, **changes))


def test_compute_that_a_quota_stops_is_not_called_slow(tmp_path):
    stopped = starved(tmp_path, cpu__quota_cores=0.2, mfu=0.002, host=host(throttled_s=1.6), stall_s={})
    assert "compute-slow" not in found(stopped)
    assert examine(Facts(recorded=stopped)).bottleneck.id == "cpu-quota"


@pytest.mark.parametrize("said", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("chosen", ["cpu", "emulated:2", "cuda:0"])
def test_a_verdict_is_of_the_device_that_was_chosen(said, chosen, tmp_path):
    """Whatever the configuration leaves open: where compute is threads, others that take the cores are the cause."""
    about = told(cpu_machine(tmp_path, cpu__load_average=5.9)) | {"device": chosen}
    recorded = run(
        tmp_path / "run",
        config={"memory": {"device": said}},
        about=about,
        cpu_s=0.8,
        host=host(queued_s=3.0, others_cpu_s=6.8),
    )
    computes_on_threads = chosen != "cuda:0"
    report = examine(Facts(recorded=recorded))
    assert (report.bottleneck is not None and report.bottleneck.id == "cores-taken") is computes_on_threads
    assert is_on_cpu(Facts(recorded=recorded)) is computes_on_threads
    assert is_on_cpu_alone(Facts(recorded=recorded)) is (chosen == "cpu")


def test_compute_that_others_slow_is_put_down_to_them(tmp_path):
    others = host(queued_s=3.0, others_cpu_s=6.8)
    assert "compute-slowed" not in found(starved(tmp_path, cpu_s=0.8, slowed_s=0.6, host=others))


def test_what_pageable_copies_cost_is_told_where_both_were_measured(tmp_path):
    staged = device().model_copy(
        update={
            "links": (
                link("up", path="pinned", bytes_per_s=24e9),
                link("up", path="pageable", bytes_per_s=6e9),
            )
        }
    )
    machine = gpu_machine(tmp_path, devices=(staged, device(1)))
    finding = found((machine, run(tmp_path / "run", fallbacks={"pageable": 1})))["copies-pageable"]
    assert "pageable copies reach 25% of the rate of pinned ones here" in finding.evidence
    assert finding.gain_share > 0
    old = [step(number) for number in range(1, 13)]
    for line in old:
        del line["fallbacks"]
    report = examine(Facts(recorded=run(tmp_path / "old", old)))
    assert "fallbacks" in {entry.id: entry.lacks for entry in report.not_judged}["copies-pageable"]


def test_rates_of_a_run_stand_beside_those_of_the_probe(tmp_path):
    machine = gpu_machine(tmp_path)
    waits = run(tmp_path / "run", stall_s={"up:w0": 0.6}, bytes_up=24 * 10**9)
    assert (
        "96% of the 25.00 GB/s that the probe reached: at its limit"
        in found((machine, waits))["link-bound"].evidence
    )
    reads = run(tmp_path / "run", stall_s={"read": 0.25}, bytes_read=15 * 10**7, bytes_written=6 * 10**8)
    told = found((machine, reads))["disk-bound"].evidence
    assert (
        "reads 143.05 MiB at 500.00 MB/s while busy (25% of the 2.00 GB/s that the probe reached: not at"
        in told
    )
    # Writes are held to what writes reach, and not added to reads.
    assert "at 2.00 GB/s while busy (67% of the 3.00 GB/s" in told


def test_longer_sequences_are_named_where_they_may_be_the_cause(tmp_path):
    long = run(tmp_path / "long", seconds=4.0, config={"data": {"seq_len": 4096}})
    short = run(tmp_path / "short", tokens=2048, seconds=1.0)
    told = examine(Facts(recorded=short, others=(long,))).findings
    assert "sequences of ['2048', '4096'] tokens" in {f.id: f for f in told}["step-superlinear"].evidence


@pytest.mark.parametrize(
    ("rule", "lacks"),
    [
        (
            "link-downtrained",
            {"devices": (device().model_copy(update={"pcie_lanes_loaded": Fact.unread()}),)},
        ),
        ("copies-contend", {"together": ()}),
        ("peer-slow", {"peers": ()}),
        ("copies-not-hidden", {"devices": (device().model_copy(update={"overlap": None}),)}),
    ],
)
def test_what_was_not_measured_is_not_judged(rule, lacks, tmp_path):
    report = examine(Facts(probed=gpu_machine(tmp_path).model_copy(update=lacks)))
    assert rule in {entry.id for entry in report.not_judged}


def test_what_an_older_probe_did_not_read_is_not_judged(tmp_path):
    machine = gpu_machine(tmp_path)
    old = machine.inventory.cpu.model_copy(update={"clock_governor": Fact.unread()})
    inventory = machine.inventory.model_copy(update={"cpu": old})
    (entry,) = [
        entry
        for entry in examine(Facts(probed=machine.model_copy(update={"inventory": inventory}))).not_judged
        if entry.id == "cpu-clock-limited"
    ]
    assert "run `outsize probe` again" in entry.lacks


def test_the_documentation_tells_every_rule():
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    rows = [
        line.split("`")[1] for line in page.partition("## Rules")[2].splitlines() if line.startswith("| `")
    ]
    assert sorted(rows) == sorted(SHOWN)
