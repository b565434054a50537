import os
from pathlib import Path

import pytest

from outsize.errors import StorageError
from outsize.storage.directory import Zram, check_not_a_device, zram_below

MIB = 2**20


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """What the kernel says of a zram0 that holds 300 MiB in 280."""
    block = tmp_path / "sys" / "block" / "zram0"
    block.mkdir(parents=True)
    numbers = (300 * MIB, 270 * MIB, 280 * MIB, 0, 280 * MIB, 12, 0, 3, 3)
    (block / "mm_stat").write_text(" ".join(f"{number:8d}" for number in numbers) + "\n")
    (block / "disksize").write_text(f"{1024 * MIB}\n")
    (block / "comp_algorithm").write_text("lzo lzo-rle lz4 [zstd] \n")
    return tmp_path / "sys"


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "zram0").touch()
    return tmp_path / "dev"


def lie_on(sysfs: Path, path: Path, name: str) -> None:
    number = path.stat().st_dev
    block = sysfs / "dev" / "block"
    block.mkdir(parents=True)
    (block / f"{os.major(number)}:{os.minor(number)}").symlink_to(f"../../block/{name}")


def test_it_says_what_it_really_costs(sysfs: Path):
    found = Zram.read("zram0", sysfs)
    assert found.algorithm == "zstd"
    assert found.num_bytes == 1024 * MIB
    assert found.costs() == "zram0 (zstd) holds 300.00 MiB in 280.00 MiB of RAM, 1.07:1"


def test_a_limit_is_told_and_nothing_has_no_ratio(sysfs: Path):
    (sysfs / "block" / "zram0" / "mm_stat").write_text(f"0 0 0 {64 * MIB} 0 0 0\n")
    assert Zram.read("zram0", sysfs).costs() == "zram0 (zstd) holds 0 B in 0 B of RAM of at most 64.00 MiB"


def test_a_home_on_it_is_found_by_its_file_system(sysfs: Path, tmp_path: Path):
    lie_on(sysfs, tmp_path, "zram0")
    found = zram_below(tmp_path / "store" / "home.bin", sysfs=sysfs)
    assert found is not None
    assert found.name == "zram0"


def test_other_disks_are_none(sysfs: Path, tmp_path: Path):
    assert zram_below(tmp_path, sysfs=sysfs) is None
    lie_on(sysfs, tmp_path, "nvme0n1p2")
    assert zram_below(tmp_path, sysfs=sysfs) is None


def test_other_directories_are_not_looked_at(tmp_path: Path, dev: Path):
    nothing = tmp_path / "sys"
    check_not_a_device(tmp_path / "zram0", sysfs=nothing, dev=dev)
    check_not_a_device(dev / "shm", sysfs=nothing, dev=dev)


def test_each_thing_that_is_missing_is_said(sysfs: Path, dev: Path, monkeypatch: pytest.MonkeyPatch):
    """It does not exist, is not configured, may not be written, or is no directory: in the order one would mend it."""
    device, block = dev / "zram0", sysfs / "block" / "zram0"

    def refused() -> str:
        with pytest.raises(StorageError) as caught:
            check_not_a_device(device, sysfs=sysfs, dev=dev)
        return str(caught.value)

    assert "mkfs.ext4" in refused()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "may not be written by this user" in refused()
    monkeypatch.undo()
    (block / "disksize").write_text("0\n")
    assert "is not configured" in refused()
    assert "echo 64G > /sys/block/zram0/disksize" in refused()
    # What is advised is what this kernel offers.
    for offered, best in (
        ("lzo lzo-rle lz4 [zstd]", "zstd"),
        ("[lzo-rle] lzo lz4", "lz4"),
        ("lzo [lz4] lz4hc", "lz4hc"),
        ("[lzo]", "lzo"),
        ("[something-new] other", "something-new"),
    ):
        (block / "comp_algorithm").write_text(f"{offered}\n")
        assert f"echo {best} > /sys/block/zram0/comp_algorithm;" in refused()
    device.unlink()
    assert "udev has not made it" in refused()
    (block / "mm_stat").write_text("nonsense\n")
    assert "does not say what zram0 does" in refused()
    (block / "mm_stat").unlink()
    assert "modprobe zram" in refused()
