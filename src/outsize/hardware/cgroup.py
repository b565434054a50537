"""Readings of the host: how a fact is recorded, and the limits that a control group sets.

Limits of the control group that the process lives in: quota of processor time, limit of memory.

A container sees the processors and the memory of its host, and is stopped or killed at these limits instead. Limits
of parent groups hold as well, so the tightest one on the way up counts. Both versions of the hierarchy are read, see
``cgroups(7)``: version 2 has one tree, version 1 one tree for each controller.

The two kinds of numbers in ``machine.json``: facts, which somebody reports, and measurements, which are timed.

Both say where they come from, and one that could not be had says why instead of standing at zero.
"""

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Base of all parts of the file: frozen, and no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Fact(Record):
    """Something that the kernel, the driver or a library reports; the unit is in the name of the field.

    Attributes:
        value: None where it could not be had, and where there is no such thing (a limit that is not set).
        status: ``reported``, ``assumed`` or ``not measured``.
        source: where it was read, what was assumed, or why there is no value.
    """

    value: bool | int | float | str | None
    status: Literal["reported", "assumed", "not measured"]
    source: str

    @classmethod
    def read(cls, value: bool | int | float | str | None, source: str) -> Self:
        """Return what ``source`` reports."""
        return cls(value=value, status="reported", source=source)

    @classmethod
    def absent(cls, why: str) -> Self:
        """Return a fact that could not be had."""
        return cls(value=None, status="not measured", source=why)

    @classmethod
    def of(cls, source: object, read: Callable[[], bool | int | float | str | None]) -> Self:
        """Return what ``read()`` gives, or why it gave nothing: a machine may lack any source."""
        try:
            return cls.read(read(), str(source))
        except (OSError, LookupError, ValueError) as error:
            return cls.absent(f"{source}: {explain(error)}")

    @classmethod
    def unread(cls) -> Self:
        """Return what stands for a fact that older probes did not look for."""
        return cls.absent("this machine.json is of a probe that did not read it; run `outsize probe` again")

    def number(self) -> float | None:
        """Return the value as a number; None where there is none."""
        return float(self.value) if isinstance(self.value, int | float) else None


class Measurement(Record):
    """Something that was timed here, several times; the unit is in the name of the field.

    Attributes:
        median: of the samples; None where nothing was measured.
        spread: half the distance between the extremes, as a share of the median.
        samples: every value, in the order in which they were taken.
        status: ``measured`` or ``not measured``.
        source: how it was measured, or why it was not.
    """

    median: float | None
    spread: float
    samples: tuple[float, ...]
    status: Literal["measured", "not measured"]
    source: str

    @classmethod
    def of(cls, samples: Iterable[float], source: str) -> Self:
        """Return the summary of ``samples``.

        Raises:
            ValueError: there are none, or one is not above zero.
        """
        values = tuple(samples)
        if not values or min(values) <= 0:
            raise ValueError(f"{source}: need samples above zero, not {values}")
        median = statistics.median(values)
        spread = (max(values) - min(values)) / 2 / median
        return cls(median=median, spread=spread, samples=values, status="measured", source=source)

    @classmethod
    def absent(cls, why: str) -> Self:
        """Return a measurement that was not made."""
        return cls(median=None, spread=0.0, samples=(), status="not measured", source=why)

    @classmethod
    def untried(cls) -> Self:
        """Return what stands for a measurement that older probes did not make."""
        return cls.absent(
            "this machine.json is of a probe that did not measure it; run `outsize probe` again"
        )


def explain(error: BaseException) -> str:
    """Return why something could not be had, in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# Version 1 writes "no limit" as the largest multiple of a page in 63 bits; no machine has as much as half of it.
_V1_NO_LIMIT_BYTES = 2**62


def memory_limit_bytes(root: Path) -> Fact:
    """Return the least limit of memory on the way up; the value is None where none is set."""
    return _tightest(root, "memory", _memory_limit)


def memory_usage_bytes(root: Path) -> Fact:
    """Return what the process's own group uses, page cache included."""
    groups = _groups(root, "memory")
    return Fact.of(groups[0], lambda: _memory_usage(groups[0])) if groups else Fact.absent(_no_groups(root))


def memory_free_bytes(root: Path) -> Fact:
    """Return the least that a group on the way up may still take; the value is None where none has a limit.

    A parent's use is that of all groups below it. Page cache does not count as used: the kernel gives it back before it
    kills.
    """
    return _tightest(root, "memory", _memory_free)


def cpu_quota_cores(root: Path) -> Fact:
    """Return how many cores' worth of time the group may take; the value is None where no quota is set."""
    return _tightest(root, "cpu", _cpu_quota)


def throttled_s(root: Path) -> Fact:
    """Return for how long quotas have stopped the group so far, added up over processors: of the group most stopped."""
    groups = _groups(root, "cpu")
    if not groups:
        return Fact.absent(_no_groups(root))
    return Fact.of(groups[0] / "cpu.stat", lambda: max(map(_throttled_s, groups)))


def _throttled_s(group: Path) -> float:
    """Return what version 2 writes in us, and version 1 in ns; a group without a quota may write nothing."""
    file = group / "cpu.stat"
    fields = dict(line.split() for line in file.read_text().splitlines()) if file.exists() else {}
    return int(fields.get("throttled_usec", 0)) / 1e6 + int(fields.get("throttled_time", 0)) / 1e9


def _tightest(root: Path, controller: str, limit_of: Callable[[Path], float | None]) -> Fact:
    groups = _groups(root, controller)
    if not groups:
        return Fact.absent(_no_groups(root))
    try:
        limits = [(limit, group) for group in groups if (limit := limit_of(group)) is not None]
    except (OSError, ValueError) as error:
        return Fact.absent(f"{groups[0]}: {explain(error)}")
    if not limits:
        return Fact.read(None, f"{groups[0]}: no limit is set")
    limit, group = min(limits)
    return Fact.read(limit, str(group))


def _no_groups(root: Path) -> str:
    return f"{root / 'proc/self/cgroup'}: no control group is visible"


def _groups(root: Path, controller: str) -> list[Path]:
    """Return the directories of the process's group and its parents, the innermost first; none where hidden."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        unified = (mount / "cgroup.controllers").exists()
        for number, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
            is_first_version = controller in controllers.split(",")
            if is_first_version or (number == "0" and unified):
                base = mount / controller if is_first_version else mount
                # In a container the path may be that of the host, of which only the top is mounted here, or lead out
                # of what is mounted.
                inner = base if ".." in path else base / path.strip("/")
                ways = (inner, *inner.parents)
                return [group for group in ways if group.is_relative_to(base) and group.is_dir()]
    except OSError:
        return []
    return []


def _memory_limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        if (group / name).exists():
            text = (group / name).read_text().strip()
            return None if text == "max" or int(text) >= _V1_NO_LIMIT_BYTES else int(text)
    return None


def _memory_usage(group: Path) -> int | None:
    for name in ("memory.current", "memory.usage_in_bytes"):
        if (group / name).exists():
            return int((group / name).read_text())
    return None


def _memory_free(group: Path) -> float | None:
    limit = _memory_limit(group)
    return None if limit is None else max(0, limit - max(0, (_memory_usage(group) or 0) - _page_cache(group)))


def _page_cache(group: Path) -> int:
    if not (group / "memory.stat").exists():
        return 0
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    # In version 1 only the totals include the groups below.
    return sum(
        int(fields.get(f"total_{kind}", fields.get(kind, 0))) for kind in ("active_file", "inactive_file")
    )


def _cpu_quota(group: Path) -> float | None:
    if (group / "cpu.max").exists():
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    if (group / "cpu.cfs_quota_us").exists():
        quota_us = int((group / "cpu.cfs_quota_us").read_text())
        return None if quota_us <= 0 else quota_us / int((group / "cpu.cfs_period_us").read_text())
    return None
