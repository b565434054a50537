"""RAM, its limits, and what may be locked."""

import re
from pathlib import Path
from typing import NamedTuple

from outsize.hardware import cgroup
from outsize.hardware.environment import Environment, read_environment
from outsize.hardware.readings import Fact, Record
from outsize.units import format_bytes


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
        known = [fact.number() for fact in (self.total_bytes, self.cgroup_limit_bytes)]
        return min((int(value) for value in known if value is not None), default=None)

    def free_bytes(self) -> int | None:
        """Return what may still be taken: what is available, within the control group; None where unknown."""
        known = [fact.number() for fact in (self.available_bytes, self.cgroup_free_bytes)]
        return min((int(value) for value in known if value is not None), default=None)


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
    told, tries = (
        "; ".join(part) for part in zip(*((limit.evidence, limit.remedy) for limit in limits), strict=True)
    )
    return f"the driver refused to pin memory: {told}; try {tries}"


def _meminfo(root: Path, name: str, instead: tuple[str, ...] = ()) -> Fact:
    path = root / "proc/meminfo"

    def read() -> int:
        told = dict(re.findall(r"^(\w+):\s*(\d+) kB", path.read_text(), re.MULTILINE))
        names = (name,) if name in told or not instead else instead
        if not told.keys() >= {*names}:
            raise ValueError(f"has no {name}")
        return sum(int(told[each]) for each in names) * 1024

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
