"""The fault that costs most comes first, among whatever else there is to say."""

import contextlib
import re
from inspect import signature

import pytest

import outsize
from doctor.records import (
    cpu_machine,
    device,
    fact,
    gpu,
    gpu_machine,
    numa_rates,
    overlap,
    peers,
    run,
    step,
    together,
)
from hardware.fake_machine import measured, no_nvml, probed
from outsize.config import MemoryConfig
from outsize.doctor.examine import examine
from outsize.doctor.finding import Remedy, Rule, Seen, in_words_of
from outsize.doctor.rules import RULES
from outsize.doctor.run_record import Facts, LackingError
from outsize.hardware.cgroup import Measurement
from outsize.hardware.gpus import take_inventory
from outsize.hardware.machine_file import MachineFile, parse

GIB = 2**30
# What every composed machine has beside its fault: worth knowing, no trouble.
NOISE = {
    "cpu__load_average": 3.0,
    "memory__cgroup_limit_bytes": 7 * GIB,
    "cpu__clock_limit_hz": 3_900 * 10**6,
    "environment__variables": {"NCCL_DEBUG": fact("WARN"), "OMP_NUM_THREADS": fact("4")},
}


def gpus(directory, *first, **changes):
    shared = {"pci_path": "pci0000:00/0000:00:01.0/x", "peer": "not supported"}
    return gpu_machine(
        directory,
        gpus=(gpu(**shared | dict(*first)), gpu(1, **shared)),
        **NOISE | changes,
    )


def with_devices(found, one):
    return found.model_copy(update={"devices": (one, device(1))})


def composed(directory):
    """Machines and runs, each with one fault beside the noise: its id, and the record."""
    d = directory
    noisy = gpus(d)
    far = noisy.model_copy(
        update={"host": noisy.host.model_copy(update={"numa": numa_rates("node 1", far=0.3)})}
    )
    sagging = noisy.disks[0].model_copy(
        update={"sustained_write_bytes_per_s": measured(2e9, 2e9, 1e9, 9e8, 4e8, 3e8)}
    )
    # Without a figure a fault stands behind those that have one: here the clock of the processor is as it should be.
    quiet = gpus(d, cpu__clock_limit_hz=4_000 * 10**6)
    staged = quiet.model_copy(update={"peers": peers(said="NVLink", reached="host-staged", rate=9e9)})
    growing = run(d / "k", [step(n, rss_bytes=(5 + n) * GIB) for n in range(1, 13)])
    return [
        ("link-narrow", Facts(probed=gpus(d, {"pcie_lanes": 4}))),
        ("link-slow", Facts(probed=with_devices(noisy, device(up=6e9)))),
        ("gpu-throttled", Facts(probed=gpus(d, {"clock_limits": "power brake", "sm_clock_hz": 4 * 10**8}))),
        ("rate-sags", Facts(probed=with_devices(noisy, device(matmul=(4e14, 4e14, 3e14, 3e14, 2e14, 2e14))))),
        ("cpu-clock-limited", Facts(probed=cpu_machine(d, **NOISE | {"cpu__clock_limit_hz": 10**9}))),
        ("loader-bound", Facts(probed=noisy, recorded=run(d / "a", data_s=0.9, stall_s={"up:w0": 1.1}))),
        ("host-bound", Facts(probed=noisy, recorded=run(d / "b", stall_s={"dispatch": 0.7, "up:w0": 0.25}))),
        ("optimizer-bound", Facts(probed=noisy, recorded=run(d / "c", stall_s={"host": 0.7, "up:w0": 0.25}))),
        (
            "disk-bound",
            Facts(
                probed=noisy, recorded=run(d / "e", stall_s={"read": 0.9, "host": 0.3}, busy_s={"read": 1.4})
            ),
        ),
        ("link-bound", Facts(probed=noisy, recorded=run(d / "f", stall_s={"up:w0": 0.9, "dispatch": 0.21}))),
        ("link-downtrained", Facts(probed=with_devices(noisy, device(generation=2)))),
        ("copies-not-hidden", Facts(probed=with_devices(noisy, device(hidden=overlap(both=0.02))))),
        ("copies-contend", Facts(probed=noisy.model_copy(update={"together": together(share=0.4)}))),
        ("numa-far-memory", Facts(probed=far)),
        ("disk-sags", Facts(probed=noisy.model_copy(update={"disks": (sagging,)}))),
        ("peer-slow", Facts(probed=staged)),
        (
            "step-superlinear",
            Facts(
                probed=noisy,
                recorded=run(d / "g", seconds=6.0, stall_s={"up:w0": 0.9}),
                others=(run(d / "h", tokens=1024, seconds=0.6, stall_s={"up:w0": 0.1}),),
            ),
        ),
        (
            "allocator-fragmented",
            Facts(probed=quiet, recorded=run(d / "i", device_bytes={"cuda:0": 6 * GIB})),
        ),
        (
            "worker-bound",
            Facts(
                probed=noisy, recorded=run(d / "j", stall_s={"compute:w1": 0.8}, busy_s={"compute:w1": 1.9})
            ),
        ),
        ("memory-above-plan", Facts(probed=quiet, recorded=growing)),
    ]


def test_the_planted_fault_comes_first_in_nine_of_ten(tmp_path):
    first = [(planted, examine(facts).findings[0].id) for planted, facts in composed(tmp_path)]
    assert len(first) == 20
    assert len({planted for planted, _ in first}) == 20
    assert sum(planted == told for planted, told in first) >= 18, first


def share_computed(workers: int, ahead: int, batch_s: float, rest_s: float) -> float:
    """Of the time of steps, in a clock of its own: threads make batches, at most so many ahead of the step."""
    ready, free, end = [], [0.0] * workers, 0.0
    ends = []
    for number in range(64):
        begun = max(min(free), ends[number - ahead] if number >= ahead else 0.0)
        free[free.index(min(free))] = begun + batch_s
        ready.append(begun + batch_s)
        end = max(end, ready[-1]) + rest_s
        ends.append(end)
    return 32 * rest_s / (ends[-1] - ends[-33])


def test_a_starved_loader_is_mended_by_what_the_doctor_names(tmp_path):
    """From 38 % of the time computing to 87 % and more, by threads named from what steps and batches took."""
    assert share_computed(1, 2, 1.0, 0.38) == pytest.approx(0.38)
    starved = run(tmp_path, data_s=1.24, seconds=2.0, stall_s={"up:w0": 1.24})
    (found,) = (one for one in examine(Facts(recorded=starved)).findings if one.id == "loader-bound")
    (remedy,) = found.remedies
    workers, ahead = (int(setting.partition("=")[2]) for setting in remedy.setting.split())
    assert (workers, ahead) == (3, 4)
    assert share_computed(workers, ahead, 2.0, 0.76) > 0.87


def test_composed_machines_have_more_to_say(tmp_path):
    assert all(len(examine(facts).findings) >= 3 for _, facts in composed(tmp_path))


def rule(name, severity, gain, part="run"):
    seen = Seen(severity=severity, evidence="x", expected="x", gain_share=gain)
    return Rule(id=name, part=part, look=lambda _: seen, causes=("x",), fix="x", verify="x")


def test_order_is_trouble_first_then_gain_then_severity():
    rules = [
        rule("good", "good", 0.9),
        rule("unknown", "warning", None),
        rule("unknown error", "error", None),
        rule("small", "error", 0.1),
        rule("large", "warning", 0.5),
        rule("info", "info", None),
    ]
    told = [finding.id for finding in examine(Facts(), rules).findings]
    assert told == ["large", "small", "unknown error", "unknown", "good", "info"]


def test_a_run_says_how_much_of_a_step_a_part_is(tmp_path):
    half = rule("half", "warning", 0.5, part="link")
    (alone,) = examine(Facts(probed=gpu_machine(tmp_path)), [half]).findings
    assert alone.gain == "up to 50% of the time on the link"
    (within,) = examine(Facts(recorded=run(tmp_path / "run", stall_s={"up:w0": 0.8})), [half]).findings
    assert within.gain == "up to 20% of a step"
    assert within.gain_share == pytest.approx(0.2)


def test_a_machine_that_shows_nothing_is_answered(tmp_path):
    """No /proc, no /sys, no NVML, nothing timed: what can be said is what is lacking."""
    absent = Measurement.absent("no memory")
    found = probed(tmp_path, tmp_path / "absent")
    (cpu,) = found.devices
    bare = found.model_copy(
        update={
            "inventory": take_inventory([], root=tmp_path, load_nvml=no_nvml, variables={}),
            "host": found.host.model_copy(update={"dram_copy_bytes_per_s": absent}),
            "disks": (),
            "devices": (cpu.model_copy(update={"links": (), "matmul_flops_per_s": {"fp32": absent}}),),
        }
    )
    report = examine(Facts(probed=bare))
    assert report.findings == ()
    lacking = {entry.id: entry.lacks for entry in report.not_judged}
    assert "no such file" in lacking["swap-active"]
    assert "outsize doctor RUN" in lacking["link-bound"]
    assert {"cpu-quota", "cgroup-memory", "probe-not-quiet", "cpu-clock-limited"} <= lacking.keys()


def test_one_core_and_little_memory_is_answered(tmp_path):
    small = cpu_machine(
        tmp_path,
        cpu__num_usable_cpus=1,
        memory__total_bytes=2**29,
        memory__available_bytes=2**27,
        memory__swap_total_bytes=0,
        memory__swap_free_bytes=0,
    )
    assert examine(Facts(probed=small)).findings == ()


def test_a_file_of_an_older_probe_is_read(tmp_path):
    machine = gpu_machine(tmp_path)
    told = machine.model_dump(mode="json")
    for name in (
        "usable_cpus",
        "load_average",
        "clock_governor",
        "clock_floor_hz",
        "clock_limit_hz",
        "clock_max_hz",
    ):
        del told["inventory"]["cpu"][name]
    del told["inventory"]["memory"]["pressure_share"]
    for name in ("iommu", "variables"):
        del told["inventory"]["environment"][name]
    for entry in told["inventory"]["gpus"]:
        for name in ("pci_path", "sm_clock_hz", "sm_clock_max_hz", "clock_limits", "peers"):
            del entry[name]
    report = examine(Facts(probed=parse(MachineFile.model_validate(told).to_json())))
    assert report.findings == ()
    assert "gpu-throttled" in {entry.id for entry in report.not_judged}


@pytest.mark.parametrize(
    "changes",
    [
        {"stall_s": {"up:w0": 0.6}},
        {"stall_s": {"host": 0.6}},
        {"stall_s": {"read": 0.6}, "busy_s": {"read": 1.0}, "plan": {"home": "disk"}},
        {"data_s": 0.9, "seconds": 2.0, "stall_s": {}},
        {"stall_s": {"dispatch": 0.6}},
        {"mfu": 0.02, "stall_s": {}},
        {"mfu": 0.02, "stall_s": {}, "about": {"tokens_per_microbatch": 4}},
        {"waits_s": {"compute:w0": {"checkpoint": {"store": 0.8}, "python": {"none": 0.02}}}},
    ],
    ids=["link", "optimizer", "disk", "loader", "python", "compute", "tiny", "checkpoint"],
)
def test_a_loop_of_the_users_own_is_advised_what_it_has(tmp_path, changes):
    """It has no configuration: arguments of `outsize.wrap`, a loader and a trainer of its own."""
    about = {"wrapped": True, **changes.pop("about", {})}
    report = examine(Facts(recorded=run(tmp_path, about=about, config={}, **changes)))
    assert report.bottleneck is not None
    for finding in report.findings:
        advice = " ".join((finding.evidence, *finding.causes, finding.fix))
        assert not re.search(
            r"\b(data|train|memory|model|transport|eval|optimizer)\.[a-z_]+",
            advice.replace("optimizer.step()", ""),
        )
        assert not re.search(r"--set|outsize train|its batch", advice)
        assert not finding.remedies


@pytest.mark.parametrize("home", ["host", "disk"])
def test_every_rule_speaks_to_a_loop_of_the_users_own_in_its_terms(tmp_path, home):
    """Those that no record here shows, too: no key of a configuration, and only arguments that `outsize.wrap` has."""
    plan = {
        "home": home,
        "workers": 1,
        "microbatches": 4,
        "prefetch_depth": 1,
        "activations": [["recompute"]],
    }
    facts = Facts(recorded=run(tmp_path, about={"wrapped": True}, config={}, plan=plan))
    taken = {*signature(outsize.wrap).parameters, *MemoryConfig.model_fields} - {"numa"}  # binds none
    for rule in RULES:
        fixes = (rule.fix,) if isinstance(rule.fix, str) else rule.fix
        steps = []
        for fix in fixes:
            with contextlib.suppress(LackingError):
                steps.append(fix(facts) if callable(fix) else fix)
        for advice in filter(None, (*rule.causes, *steps)):
            words = in_words_of(facts, advice.words if isinstance(advice, Remedy) else advice)
            assert not re.search(r"[{}|]|\boutsize train", words), rule.id
            plain = words.replace("optimizer.step()", "").replace("torch.profiler", "")
            assert not re.search(
                r"\b(data|train|memory|model|transport|parallel|eval|optimizer|telemetry)\.[a-z_]+", plain
            ), rule.id
            assert set(re.findall(r"(\w+) of outsize\.wrap", words)) <= taken, rule.id
