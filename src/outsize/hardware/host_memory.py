"""Host as software meets it: memory and its limits, disks, container, versions.

RAM, its limits, and what may be locked.

The disks behind directories: file system, device, space.

What the machine runs in and on: container, virtual machine, versions.
"""

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from outsize.hardware import cgroup
from outsize.hardware.cgroup import Fact, Record
from outsize.native.library import available, level, reason
from outsize.units import format_bytes

# File systems whose files take RAM.
IN_MEMORY = ("tmpfs", "ramfs", "zram")


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


_PACKAGES = ("outsize", "torch", "transformers", "tokenizers", "safetensors", "numpy", "nvidia-ml-py")
# Of variables that set threads, allocators, devices and communication; no others are looked at.
_PREFIXES = (
    "NCCL_",
    "TORCH_NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_NUM_",
    "CUDA_VISIBLE_",
    "CUDA_LAUNCH_",
    "PYTORCH_",
    "MALLOC_",
)


class Environment(Record):
    """Surroundings of the process; hints, since neither a container nor a virtual machine has to show itself.

    Attributes:
        container: which sign of a container was found; ``none seen`` else.
        virtual_machine: which sign of a hypervisor was found; ``none seen`` else.
        kernel: release of the kernel.
        python: version of the interpreter.
        packages: versions of what a run uses.
        iommu: IOMMUs at work, and what the kernel was told about them; ``none`` where there are none.
        variables: environment variables that libraries of a run listen to.
        native: instruction set of the kernels in C; ``none`` where they cannot be used, and why.
    """

    container: Fact
    virtual_machine: Fact
    kernel: Fact
    python: Fact
    packages: dict[str, Fact]
    iommu: Fact = Fact.unread()
    variables: dict[str, Fact] = Field(default_factory=dict)
    native: Fact = Fact.unread()


def read_environment(root: Path, variables: Mapping[str, str]) -> Environment:
    """Return the surroundings that ``root`` and the environment ``variables`` show."""
    release = root / "proc/sys/kernel/osrelease"
    return Environment(
        container=_container(root),
        virtual_machine=_virtual_machine(root),
        kernel=Fact.of(release, lambda: release.read_text().strip()),
        python=Fact.read(platform.python_version(), "the interpreter"),
        packages={name: Fact.of("installed packages", lambda n=name: _version(n)) for name in _PACKAGES},  # type: ignore[misc]
        iommu=Fact.of(root / "sys/class/iommu", lambda: _iommu(root)),
        variables={
            name: Fact.read(value, "the environment")
            for name, value in sorted(variables.items())
            if name.startswith(_PREFIXES)
        },
        native=Fact.read(level(), "outsize.native") if available() else Fact.read("none", str(reason())),
    )


@cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"{package} is not installed") from None


def _container(root: Path) -> Fact:
    groups = root / "proc/self/cgroup"
    try:
        for name in (".dockerenv", "run/.containerenv"):
            if (root / name).exists():
                return Fact.read("container", str(root / name))
        text = groups.read_text()
    except OSError as error:
        return Fact.absent(f"{groups}: {error.strerror}")
    for word in ("docker", "kubepods", "containerd", "lxc", "podman"):
        if word in text:
            return Fact.read(word, str(groups))
    return Fact.read("none seen", f"{root / '.dockerenv'}, {groups}")


def _virtual_machine(root: Path) -> Fact:
    release, info = root / "proc/sys/kernel/osrelease", root / "proc/cpuinfo"
    vendor = root / "sys/class/dmi/id/sys_vendor"
    try:
        if release.exists() and "microsoft" in release.read_text().lower():
            return Fact.read("WSL", str(release))
        if "hypervisor" in info.read_text(errors="replace").split():
            name = vendor.read_text().strip() if vendor.exists() else ""
            return Fact.read(name or "hypervisor", f"{info}, {vendor}")
    except OSError as error:
        return Fact.absent(f"{info}: {error.strerror}")
    return Fact.read("none seen", str(info))


def _iommu(root: Path) -> str:
    names = sorted(path.name for path in (root / "sys/class/iommu").iterdir())
    command_line = root / "proc/cmdline"
    words = command_line.read_text().split() if command_line.exists() else []
    return " ".join([*names, *(word for word in words if "iommu" in word)]) or "none"


class HostMemory(Record):
    """Host memory of the machine and this process's share of it.

    Attributes:
        total_bytes: RAM of the machine.
        available_bytes: what the kernel could give without swapping.
        cgroup_limit_bytes: limit of the control group; None for none.
        cgroup_usage_bytes: what the group uses now.
        cgroup_free_bytes: what it may still take, within the limits of its parents as well; None for no limit.
        swap_total_bytes: swap space.
        swap_free_bytes: unused swap space.
        memlock_limit_bytes: what a process may lock, and so pin; None for no limit.
        pressure_share: share of the last minute, 0 to 1, in which some task stood still for want of memory.
    """

    total_bytes: Fact
    available_bytes: Fact
    cgroup_limit_bytes: Fact
    cgroup_usage_bytes: Fact
    swap_total_bytes: Fact
    swap_free_bytes: Fact
    memlock_limit_bytes: Fact
    pressure_share: Fact = Fact.unread()
    cgroup_free_bytes: Fact = Fact.unread()

    def usable_bytes(self) -> int | None:
        """Return the least of RAM and the limit of the control group; None where neither is known."""
        limits = [fact.number() for fact in (self.total_bytes, self.cgroup_limit_bytes)]
        return min((int(value) for value in limits if value is not None), default=None)

    def free_bytes(self) -> int | None:
        """Return what may still be taken: what is available, within the control group; None where unknown."""
        limits = [fact.number() for fact in (self.available_bytes, self.cgroup_free_bytes)]
        return min((int(value) for value in limits if value is not None), default=None)


def read_host_memory(root: Path) -> HostMemory:
    """Return the memory that ``root/proc`` and ``root/sys`` describe."""
    return HostMemory(
        total_bytes=_meminfo(root, "MemTotal"),
        # Kernels before 3.14, and some that stand in for one, do not say what is available.
        available_bytes=_meminfo(root, "MemAvailable", instead=("MemFree", "Cached")),
        cgroup_limit_bytes=cgroup.memory_limit_bytes(root),
        cgroup_usage_bytes=cgroup.memory_usage_bytes(root),
        cgroup_free_bytes=cgroup.memory_free_bytes(root),
        swap_total_bytes=_meminfo(root, "SwapTotal"),
        swap_free_bytes=_meminfo(root, "SwapFree"),
        memlock_limit_bytes=Fact.of(root / "proc/self/limits", lambda: _memlock(root / "proc/self/limits")),
        pressure_share=Fact.of(
            root / "proc/pressure/memory", lambda: _pressure(root / "proc/pressure/memory")
        ),
    )


class PinLimit(NamedTuple):
    """What a platform allows a driver to pin.

    Attributes:
        num_bytes: at most; None where nobody says how many.
        evidence: what limits it.
        remedy: what raises the limit.
    """

    num_bytes: int | None
    evidence: str
    remedy: str


def pin_limits(memory: HostMemory, environment: Environment) -> tuple[PinLimit, ...]:
    """Return what limits pinned memory, the platform first; none where only RAM does.

    NVIDIA's driver pins beyond ``ulimit -l`` on most systems: only trying tells.
    """
    limits = []
    if environment.virtual_machine.value == "WSL":
        limits.append(
            PinLimit(
                None,
                "under WSL2 the driver pins part of RAM only, and does not say how much",
                "more memory for WSL2: memory=... under [wsl2] of .wslconfig, then wsl --shutdown; or plain Linux",
            )
        )
    locked, group = memory.memlock_limit_bytes.number(), memory.cgroup_free_bytes.number()
    if locked is not None:
        boxed = environment.container.value not in (None, "none seen")
        limits.append(
            PinLimit(
                int(locked),
                f"at most {format_bytes(int(locked))} may be locked (ulimit -l)",
                "start the container with --ulimit memlock=-1"
                if boxed
                else "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)",
            )
        )
    if group is not None:
        limits.append(
            PinLimit(
                int(group),
                f"the control group allows {format_bytes(int(group))} more",
                "a higher limit of memory (docker run --memory, Slurm --mem)",
            )
        )
    return tuple(limits)


def refused_pin(root: Path) -> str:
    """Return why a driver may have refused to pin, and what to try, as far as ``root`` tells."""
    limits = pin_limits(read_host_memory(root), read_environment(root, {}))
    if not limits:
        return "the driver refused to pin memory, though nothing limits it here; free RAM may be short"
    answer, tries = (
        "; ".join(part) for part in zip(*((limit.evidence, limit.remedy) for limit in limits), strict=True)
    )
    return f"the driver refused to pin memory: {answer}; try {tries}"


def _meminfo(root: Path, name: str, instead: tuple[str, ...] = ()) -> Fact:
    path = root / "proc/meminfo"

    def read() -> int:
        fields = dict(re.findall(r"^(\w+):\s*(\d+) kB", path.read_text(), re.MULTILINE))
        names = (name,) if name in fields or not instead else instead
        if not fields.keys() >= {*names}:
            raise ValueError(f"has no {name}")
        return sum(int(fields[each]) for each in names) * 1024

    return Fact.of(path, read)


def _memlock(limits: Path) -> int | None:
    match = re.search(r"^Max locked memory\s+(\S+)", limits.read_text(), re.MULTILINE)
    if match is None:
        raise ValueError("has no 'Max locked memory'")
    return None if match[1] == "unlimited" else int(match[1])


def _pressure(file: Path) -> float:
    match = re.search(r"^some .*\bavg60=([\d.]+)", file.read_text(), re.MULTILINE)
    if match is None:
        raise ValueError("has no 'some avg60'")
    return float(match[1]) / 100
