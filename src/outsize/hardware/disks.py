"""The disks behind directories: file system, device, space."""

import os
import re
import shutil
from pathlib import Path

from outsize.hardware.readings import Fact, Record


class DiskPlace(Record):
    """A directory that could hold a home, and what lies under it.

    Attributes:
        directory: as an absolute path.
        file_system: its type.
        device: as the kernel mounts it.
        model: of the drive.
        rotational: whether the drive says that it turns.
        total_bytes: size of the file system.
        free_bytes: what is free there for this user.
        writable: whether this user may write there.
    """

    directory: str
    file_system: Fact
    device: Fact
    model: Fact
    rotational: Fact
    total_bytes: Fact
    free_bytes: Fact
    writable: Fact


def read_disk(directory: Path, root: Path) -> DiskPlace:
    """Return what ``root/proc`` and ``root/sys`` say of the file system that holds ``directory``."""
    place = directory.resolve()
    mounts = root / "proc/self/mountinfo"
    queue = Fact.of(mounts, lambda: _mount(mounts, place)[0])
    block = root / "sys/dev/block" / str(queue.value)
    return DiskPlace(
        directory=str(place),
        file_system=Fact.of(mounts, lambda: _mount(mounts, place)[1]),
        device=Fact.of(mounts, lambda: _mount(mounts, place)[2]),
        model=Fact.of(block, lambda: _attribute(block, "device/model")),
        rotational=Fact.of(block, lambda: _attribute(block, "queue/rotational") == "1"),
        total_bytes=Fact.of(place, lambda: shutil.disk_usage(place).total),
        free_bytes=Fact.of(place, lambda: shutil.disk_usage(place).free),
        writable=Fact.of(place, lambda: place.stat() is not None and os.access(place, os.W_OK)),
    )


def _mount(mounts: Path, place: Path) -> tuple[str, str, str]:
    """Return device number, type and source of the file system, see ``proc_pid_mountinfo(5)``."""
    best: tuple[int, int, tuple[str, str, str]] | None = None
    for number, line in enumerate(mounts.read_text().splitlines()):
        left, _, right = line.partition(" - ")
        fields, (kind, source, *_) = left.split(), right.split()
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]))
        if place.is_relative_to(point):
            # The longest path wins; of equal ones the last, which hides the others.
            candidate = (len(point.parts), number, (fields[2], kind, source))
            best = candidate if best is None else max(best, candidate)
    if best is None:
        raise ValueError(f"shows no file system for {place}")
    return best[2]


def _attribute(block: Path, name: str) -> str:
    """Return an attribute of a drive; a partition has it in the directory above."""
    device = block.resolve(strict=True)
    for directory in (device, device.parent):
        if (directory / name).exists():
            return (directory / name).read_text().strip()
    raise ValueError(f"has no {name}")
