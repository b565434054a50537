from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outsize.config import MemoryConfig
from outsize.errors import ConfigError, StorageError
from outsize.train import machine as module
from outsize.train.machine import available_ram_bytes, choose_device, choose_dtype, describe_machine

GIB = 2**30


@pytest.fixture(autouse=True)
def eight_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 8 GiB of free RAM, 100 GiB of free disk and no GPU."""
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * GIB))
    monkeypatch.setattr(module, "_CGROUP_LIMIT", Path("/nonexistent"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


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
    assert choose_device(name) == expected


def test_all_gpus_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert choose_device("cuda:all") == "cuda:0,1,2"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        choose_device("cuda:all")


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == "cuda:0"


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
    assert choose_dtype(name, device) == expected


@pytest.mark.parametrize(
    ("limit", "usage", "expected"),
    [("max", 0, 8), (6 * GIB, 2 * GIB, 4), (GIB, 2 * GIB, 0), (99 * GIB, 0, 8)],
)
def test_the_limit_of_the_control_group_counts(
    limit: object, usage: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in (("_CGROUP_LIMIT", limit), ("_CGROUP_USAGE", usage)):
        (tmp_path / name).write_text(f"{value}\n")
        monkeypatch.setattr(module, name, tmp_path / name)
    assert available_ram_bytes() == expected * GIB


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
    found = describe_machine(MemoryConfig(**memory), GIB, tmp_path)
    assert (found.home, found.below) == (home, below)


@pytest.mark.parametrize(("state_gib", "home"), [(1, "host"), (6, "host"), (7, "disk")])
def test_auto_takes_the_disk_when_the_state_does_not_fit_the_host(state_gib: int, home: str, tmp_path: Path):
    assert describe_machine(MemoryConfig(device="cpu"), state_gib * GIB, tmp_path).home == home


def test_the_host_budget_decides_where_it_is_given(tmp_path: Path):
    small = MemoryConfig(device="cpu", host_memory="512MiB")
    assert describe_machine(small, GIB, tmp_path).home == "disk"


def test_budgets_are_shares_of_what_is_free_unless_given(tmp_path: Path):
    free = describe_machine(MemoryConfig(device="cpu"), GIB, tmp_path / "not" / "yet" / "there")
    assert free.device_bytes + free.host_bytes <= 1.2 * 8 * GIB
    assert free.disk_bytes == int(100 * GIB * module.DISK_SHARE)
    given = MemoryConfig(device="cpu", device_memory="1GiB", host_memory="2GiB", disk_memory="3GiB")
    found = describe_machine(given, GIB, tmp_path)
    assert (found.device_bytes, found.host_bytes, found.disk_bytes) == (GIB, 2 * GIB, 3 * GIB)


def test_a_gpu_s_budget_is_a_share_of_its_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    answer: Callable[[int], tuple[int, int]] = lambda index: (asked.append(index), (10 * GIB, 24 * GIB))[1]  # noqa: E731
    monkeypatch.setattr(torch.cuda, "mem_get_info", answer)
    found = describe_machine(MemoryConfig(device="cuda:2"), GIB, tmp_path)
    assert found.device_bytes == int(10 * GIB * module.DEVICE_SHARE)
    assert asked == [2]


def test_a_home_is_no_zram_device():
    """On this machine there is no such device; others are in tests/storage/test_zram.py."""
    for place in (Path("/dev/zram98765"), Path("/dev/zram98765/home.bin")):
        with pytest.raises(StorageError, match="there is no zram98765 on this machine"):
            describe_machine(MemoryConfig(device="cpu", home="disk"), GIB, place)
