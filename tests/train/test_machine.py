from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hardware.fake_machine import build
from outsize.accelerators import Devices, choose_device
from outsize.config import MemoryConfig
from outsize.errors import ConfigError, StorageError
from outsize.hardware.host_memory import read_host_memory
from outsize.session.job import machine as module
from outsize.session.job.machine import RunMachine, available_ram_bytes, describe_machine
from outsize.streamed.spec import choose_dtype, devices_of, dtype_chosen
from outsize.training.run import train
from tiny import tiny_run

GIB = 2**30


def machine_of(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: dict[str, object],
    free: str = "MemAvailable: 8388608",
) -> None:
    """Have the process see control groups, by path below ``root``."""
    ram = {"proc/meminfo": f"MemTotal: {10 * 2**20} kB\n{free} kB\n"}
    build(root, ram, {name: f"{text}\n" for name, text in groups.items()})
    monkeypatch.setattr(module, "read_host_memory", lambda _: read_host_memory(root))


@pytest.fixture(autouse=True)
def eight_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 8 of 10 GiB of RAM free, 100 of 200 GiB of disk and no GPU."""
    machine_of(tmp_path / "machine", monkeypatch, {})
    disk = SimpleNamespace(free=100 * GIB, total=200 * GIB)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: disk)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def described(memory: MemoryConfig, state_bytes: int, store_dir: Path) -> RunMachine:
    return describe_machine(memory, devices_of(memory), state_bytes, store_dir)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("auto", "cpu"),
        ("cpu", "cpu"),
        ("cuda", "cuda:0"),
        ("cuda:3", "cuda:3"),
        ("emulated", "emulated:1"),
        ("emulated:2", "emulated:2"),
    ],
)
def test_devices_are_resolved(name: str, expected: str):
    assert str(choose_device(name)) == expected


def test_all_gpus_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert str(choose_device("cuda:all")) == "cuda:0,1,2"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        choose_device("cuda:all")


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert str(choose_device("auto")) == "cuda:0"


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("auto", "cpu", "fp32"),
        ("auto", "emulated:1", "fp32"),
        ("auto", "cuda:1", "bf16"),
        ("fp16", "cpu", "fp16"),
    ],
)
def test_dtypes_are_resolved(name: str, device: str, expected: str):
    assert choose_dtype(name, Devices.parse(device)) == expected


V2 = {"proc/self/cgroup": "0::/jobs/mine", "sys/fs/cgroup/cgroup.controllers": "cpu memory"}
V1 = {"proc/self/cgroup": "7:cpu,cpuacct:/\n4:memory:/jobs/mine\n0::/"}
TOP, MIDDLE, OWN = (f"sys/fs/cgroup{path}/memory" for path in ("", "/jobs", "/jobs/mine"))
V1_TOP, V1_OWN = (f"sys/fs/cgroup/memory{path}/memory" for path in ("", "/jobs/mine"))
UNLIMITED = 2**63 - 4096
CACHE = f"anon 7\ninactive_file {GIB}\nactive_file {GIB}"

GROUPS: dict[str, tuple[dict[str, object], float]] = {
    "none": ({}, 8),
    "no limit": ({**V2, f"{TOP}.max": "max", f"{OWN}.max": "max", f"{OWN}.current": GIB}, 8),
    "its own": ({**V2, f"{OWN}.max": 6 * GIB, f"{OWN}.current": 2 * GIB}, 4),
    "that of its parent": ({**V2, f"{OWN}.max": "max", f"{MIDDLE}.max": GIB, f"{MIDDLE}.current": GIB // 2}, 0.5),
    "the tighter of two": (
        {
            **V2, f"{OWN}.max": 2 * GIB, f"{OWN}.current": 0,
            f"{MIDDLE}.max": 5 * GIB, f"{MIDDLE}.current": 4 * GIB,  # the siblings' use
        },
        1,
    ),
    "the only one that a container sees": ({**V2, f"{TOP}.max": 3 * GIB, f"{TOP}.current": GIB}, 2),
    "outside of what is mounted": (
        {**V2, "proc/self/cgroup": "0::/../../host/job", f"{TOP}.max": GIB, f"{TOP}.current": 0},
        1,
    ),
    "above what is free": ({**V2, f"{OWN}.max": 99 * GIB, f"{OWN}.current": 0}, 8),
    "used up": ({**V2, f"{OWN}.max": GIB, f"{OWN}.current": 2 * GIB}, 0),
    "page cache": ({**V2, f"{OWN}.max": 4 * GIB, f"{OWN}.current": 3 * GIB, f"{OWN}.stat": CACHE}, 3),
    "version 1": ({**V1, f"{V1_OWN}.limit_in_bytes": 2 * GIB, f"{V1_OWN}.usage_in_bytes": GIB}, 1),
    "version 1, of its parent": (
        {
            **V1, f"{V1_OWN}.limit_in_bytes": UNLIMITED, f"{V1_OWN}.usage_in_bytes": GIB,
            f"{V1_TOP}.limit_in_bytes": 5 * GIB, f"{V1_TOP}.usage_in_bytes": 2 * GIB,
        },
        3,
    ),
    "version 1, no limit": ({**V1, f"{V1_OWN}.limit_in_bytes": UNLIMITED}, 8),
    "version 1, page cache": (
        {
            **V1, f"{V1_OWN}.limit_in_bytes": 4 * GIB, f"{V1_OWN}.usage_in_bytes": 3 * GIB,
            f"{V1_OWN}.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\ntotal_active_file 0",
        },
        2,
    ),
}  # fmt: skip


def test_what_is_free_and_what_is_cached_stand_for_what_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    machine_of(tmp_path / "machine", monkeypatch, {}, f"MemFree: {2**20} kB\nCached: {2**21}")
    assert available_ram_bytes() == 3 * GIB


@pytest.mark.parametrize("case", GROUPS)
def test_the_limit_of_the_control_groups_counts(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whichever of them has it, in either version; a run that plans for more is killed."""
    groups, expected_gib = GROUPS[case]
    machine_of(tmp_path / "machine", monkeypatch, groups)
    assert available_ram_bytes() == expected_gib * GIB
    if expected_gib:
        budgets = described(MemoryConfig(device="cpu"), 1, tmp_path)
        assert budgets.host_bytes == int(expected_gib * GIB * module.HOST_SHARE)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"host_memory": "500GiB"}, r"host_memory: 500.00 GiB are more .*: 10.00 GiB of RAM; give less"),
        ({"device_memory": "11GiB"}, "device_memory: 11.00 GiB are more .*: 10.00 GiB of RAM"),
        ({"device": "emulated:4", "device_memory": "3GiB"}, "2.50 GiB of RAM, which 4 devices share"),
        ({"disk_memory": "1TiB"}, "disk_memory: 1.00 TiB are more .*: 200.00 GiB of disk at "),
    ],
)
def test_a_budget_beyond_the_machine_is_refused(memory: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        described(MemoryConfig(**{"device": "cpu", **memory}), GIB, tmp_path)


def test_a_budget_beyond_the_control_group_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    machine_of(tmp_path / "machine", monkeypatch, {**V2, f"{MIDDLE}.max": GIB, f"{MIDDLE}.current": 0})
    with pytest.raises(
        ConfigError, match=r"1.00 GiB of memory, the limit of the control group .*/jobs; give"
    ):
        described(MemoryConfig(device="cpu", host_memory="2GiB"), GIB, tmp_path)


def test_a_budget_beyond_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gpus(monkeypatch, (8, 9), (8, 9))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 * GIB, (24 >> index) * GIB))
    described(MemoryConfig(device="cuda:0", device_memory="24GiB"), GIB, tmp_path)
    for device, there in (("cuda:0,1", "12.00 GiB of memory on"), ("cuda:0,0", "12.00 GiB of memory on")):
        with pytest.raises(ConfigError, match=there):
            described(MemoryConfig(device=device, device_memory="20GiB"), GIB, tmp_path)


@pytest.mark.parametrize(
    ("memory", "home", "below"),
    [
        ({"device": "cpu", "home": "host"}, "host", "host"),
        ({"device": "cpu", "home": "disk"}, "disk", "disk"),
        ({"device": "emulated:1", "home": "disk"}, "disk", "host"),
        ({"device": "cuda:0", "home": "disk", "device_memory": GIB}, "disk", "host"),
        ({"device": "cuda:0", "home": "host", "device_memory": GIB}, "host", "host"),
    ],
)
def test_the_tier_below_the_device(memory: dict, home: str, below: str, tmp_path: Path):
    found = described(MemoryConfig(**memory), GIB, tmp_path)
    assert (found.home, found.below) == (home, below)


def test_a_gpu_that_is_not_there_is_an_error_with_advice(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cuda:0, but torch .* sees 0 CUDA devices; use --device cpu, or "):
        described(MemoryConfig(device="cuda"), GIB, tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_run_on_a_gpu_that_is_not_there_is_refused_where_its_memory_was_named(tmp_path: Path):
    memory = {"device": "cuda:0", "home": "host", "device_memory": "512MiB"}
    with pytest.raises(ConfigError, match=r"torch .* sees 0 CUDA devices"):
        train(tiny_run(tmp_path, memory=memory))


@pytest.mark.parametrize(("state_gib", "home"), [(1, "host"), (6, "host"), (7, "disk")])
def test_auto_takes_the_disk_when_the_state_does_not_fit_the_host(state_gib: int, home: str, tmp_path: Path):
    assert described(MemoryConfig(device="cpu"), state_gib * GIB, tmp_path).home == home


def test_the_host_budget_decides_where_it_is_given(tmp_path: Path):
    small = MemoryConfig(device="cpu", host_memory="512MiB")
    assert described(small, GIB, tmp_path).home == "disk"


def test_budgets_are_shares_of_what_is_free_unless_given(tmp_path: Path):
    free = described(MemoryConfig(device="cpu"), GIB, tmp_path / "not" / "yet" / "there")
    assert free.device_bytes + free.host_bytes <= 1.2 * 8 * GIB
    assert free.disk_bytes == int(100 * GIB * module.DISK_SHARE)
    given = MemoryConfig(device="cpu", device_memory="1GiB", host_memory="2GiB", disk_memory="3GiB")
    found = described(given, GIB, tmp_path)
    assert (found.device_bytes, found.host_bytes, found.disk_bytes) == (GIB, 2 * GIB, 3 * GIB)


def test_a_gpu_s_budget_is_a_share_of_its_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    answer: Callable[[int], tuple[int, int]] = lambda index: (asked.append(index), (10 * GIB, 24 * GIB))[1]  # noqa: E731
    gpus(monkeypatch, *[(8, 9)] * 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", answer)
    found = described(MemoryConfig(device="cuda:2"), GIB, tmp_path)
    assert found.device_bytes == int(10 * GIB * module.DEVICE_SHARE)
    assert asked == [2]


def test_a_home_is_no_zram_device():
    """On this machine there is no such device; others are in tests/storage/test_zram.py."""
    for place in (Path("/dev/zram98765"), Path("/dev/zram98765/home.bin")):
        with pytest.raises(StorageError, match="there is no zram98765 on this machine"):
            described(MemoryConfig(device="cpu", home="disk"), GIB, place)


def gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int], **properties: Any) -> None:
    """Have torch see GPUs of such compute capabilities, which have 10 of 24 GiB free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))


@pytest.mark.parametrize(
    ("device", "scaled", "expected"),
    [
        ("cuda:0", True, "bf16"),
        ("cuda:1", True, "fp16"),
        ("cuda:0,1", True, "fp16"),
        ("cuda:1", False, "fp32"),
    ],
)
def test_auto_is_bf16_only_where_it_is_multiplied(
    device: str, scaled: bool, expected: str, monkeypatch: pytest.MonkeyPatch
):
    """An H100 beside a T4; without a loss scale fp16 would lose gradients."""
    gpus(monkeypatch, (9, 0), (7, 5))
    devices = Devices.parse(device)
    assert choose_dtype("auto", devices, scaled=scaled) == expected
    assert choose_dtype("bf16", devices, scaled=scaled) == "bf16"
    said = dtype_chosen("auto", expected, devices)
    assert (said is None) == (expected != "fp16")


def test_rocm_multiplies_bf16_whatever_its_number(monkeypatch: pytest.MonkeyPatch):
    gpus(monkeypatch, (7, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert choose_dtype("auto", Devices.parse("cuda:0")) == "bf16"


def test_a_device_that_does_not_tell_what_is_free_has_what_the_process_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Intel's desktop GPUs: torch raises, with and without a budget."""

    def raises(index: int) -> tuple[int, int]:
        raise RuntimeError(
            "The device (Intel(R) Arc(TM) B580 Graphics) doesn't support querying the available free memory."
        )

    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "mem_get_info", raises)
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda index: 2 * GIB)
    monkeypatch.setattr(
        torch.xpu, "get_device_properties", lambda index: SimpleNamespace(total_memory=12 * GIB)
    )
    found = described(MemoryConfig(device="xpu"), GIB, tmp_path)
    assert found.device_bytes == int(10 * GIB * module.DEVICE_SHARE)
    with pytest.raises(ConfigError, match=r"12.00 GiB of memory on xpu:0"):
        described(MemoryConfig(device="xpu", device_memory="13GiB"), GIB, tmp_path)


@pytest.mark.parametrize("word", ["is_integrated", "is_integrated_gpu"])
@pytest.mark.parametrize("given", [{}, {"device_memory": "2GiB"}, {"host_memory": "5GiB"}])
def test_memory_that_host_and_device_share_is_given_once(
    word: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """GB10, MI300A and graphics within a CPU: 8 of 10 GiB of RAM are free, and all budgets are parts of them."""
    gpus(monkeypatch, (12, 1), **{word: True})
    pool = int(8 * GIB * module.DEVICE_SHARE)
    found = described(MemoryConfig(device="cuda", **given), GIB, tmp_path)
    assert found.is_shared
    assert found.device_bytes > 0
    assert pool - 1 <= found.device_bytes + found.host_bytes <= pool
    for key, text in given.items():
        assert getattr(found, f"{key[:-7]}_bytes") == int(text[0]) * GIB
    with pytest.raises(ConfigError, match=r"5.00 GiB of RAM, which cuda:0 shares with host_memory"):
        described(MemoryConfig(device="cuda", host_memory="5GiB", device_memory="6GiB"), GIB, tmp_path)


def test_memory_of_a_card_of_its_own_is_beside_the_host_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gpus(monkeypatch, (8, 9), is_integrated=0)
    found = described(MemoryConfig(device="cuda"), GIB, tmp_path)
    assert (found.is_shared, found.device_bytes) == (False, int(10 * GIB * module.DEVICE_SHARE))


def test_what_repeating_bits_costs_on_a_gpu_is_said():
    assert "train.deterministic=false" in (module.determinism_said(True, Devices.parse("cuda")) or "")
    for deterministic, device in ((False, "cuda"), (True, "cpu"), (True, "emulated:2")):
        assert module.determinism_said(deterministic, Devices.parse(device)) is None
