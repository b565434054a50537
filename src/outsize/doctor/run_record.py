"""Read the records of a run and of a probed machine into the facts that rules are given.

A stall is booked on the lane that the compute lane waited for last, and that lane may have been waiting itself: with a
slow loader the first forward waits for a load that waits for the step to begin. So `RunRecord.waits` shares out all
time in which the compute lane did nothing:

1. the wait for the batch was measured by itself (``data_s``). It is taken off the time that no stall holds, and
   then off the stalls that exceed most what their lane was busy;
2. of what is left, a lane is believed for no longer than it was busy in that step;
3. the rest goes to the lanes that were busy for longer than they were waited for, the busiest first: the lane that was
   waited for waited for one of them;
4. what is left then, what was booked as ``dispatch``, and what no stall holds is Python's: no op was under way.

From schema 4 on the run itself follows waits back to their causes (``waits_s``), in every step or in one of several,
and nothing is shared out.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from outsize.errors import ConfigError
from outsize.hardware.cgroup import Fact, Measurement
from outsize.hardware.gpus import Inventory
from outsize.hardware.link_fit import LinkFit
from outsize.hardware.machine_file import DeviceRates, LinkRates, MachineFile
from outsize.telemetry.run_reading import READABLE, as_a_run, lines_of, read_mapping, step_of

# The newest lines are judged: what the run is doing now.
KEPT_LINES = 500
# Steps longer than this many medians were interrupted by something else, a checkpoint for example.
_TYPICAL = 2.0
_COMPUTE = "compute:w0"
# Causes of `outsize.planner.simulate.stalls` that say by themselves what was waited for; with the others the lane
# says it.
_CAUSES = {
    "disk": "disk",
    "commit": "disk",
    "checkpoint": "checkpoint",
    "optimizer": "host",
    "workers": "workers",
    "ranks": "ranks",
    "loader": "data",
    "between steps": "python",
    "python": "python",
}
_KINDS = {
    "up": "link",
    "down": "link",
    "host": "host",
    "read": "disk",
    "write": "disk",
    "store": "disk",
    "commit": "disk",
    "compute": "workers",
    "net": "ranks",
}


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run as it was recorded.

    Attributes:
        directory: where.
        steps: the newest lines of the heartbeat, the first left out where there are more: it warms up.
        plan: ``plan.json``; empty where there is none.
        config: ``config.yaml``; empty where there is none.
        about: ``run.json``; empty where there is none.
        inventory: what the machine had when the run began; None where ``run.json`` does not tell.
    """

    directory: str
    steps: tuple[Mapping[str, Any], ...]
    plan: Mapping[str, Any]
    config: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)
    inventory: Inventory | None = None

    @property
    def device(self) -> str:
        """The devices that the run chose; only a run without ``run.json`` leaves it at its configuration's ``auto``."""
        return str(self.about.get("device") or self.config.get("memory", {}).get("device", "auto"))

    @cached_property
    def typical(self) -> tuple[Mapping[str, Any], ...]:
        """The steps that nothing interrupted."""
        limit = _TYPICAL * statistics.median(step["seconds"] for step in self.steps)
        return tuple(step for step in self.steps if step["seconds"] <= limit)

    def mean(self, name: str) -> float:
        """Return the mean of a field over the typical steps; 0 where the heartbeat is too old to have it."""
        return statistics.fmean(step.get(name) or 0.0 for step in self.typical)

    def host_per_s(self, name: str) -> float | None:
        """Return a count of ``host`` per second, over all steps that were looked at; None where none tells."""
        looks = [look for step in self.steps if (look := step.get("host")) and look.get(name) is not None]
        span_s = sum(look["span_s"] for look in looks)
        return sum(look[name] for look in looks) / span_s if span_s else None

    def threads_per_s(self) -> dict[str, float]:
        """Return seconds of a processor that threads had per second, by name, over all steps that were looked at."""
        looks = [look for step in self.steps if (look := step.get("host")) and look.get("cpu_s_by_thread")]
        totals: defaultdict[str, float] = defaultdict(float)
        for look in looks:
            for name, seconds in look["cpu_s_by_thread"].items():
                totals[name] += seconds
        span_s = sum(look["span_s"] for look in looks)
        return {name: seconds / span_s for name, seconds in totals.items()}

    def lane_s(self, name: str) -> dict[str, float]:
        """Return mean seconds per typical step by lane, of ``busy_s`` or ``stall_s``."""
        totals: defaultdict[str, float] = defaultdict(float)
        for step in self.typical:
            for lane, seconds in step[name].items():
                totals[lane] += seconds
        return {lane: seconds / len(self.typical) for lane, seconds in totals.items()}

    def kind_of(self, lane: str) -> str:
        """Return what a lane spends its time on; with a disk below the device, up and down are the disk's."""
        kind = _KINDS.get(lane.partition(":")[0], "python")
        return "disk" if kind == "link" and self.plan.get("below") == "disk" else kind

    def waits(self) -> dict[str, float]:
        """Return shares of a step, 0 to 1, that compute of the first worker waited, by cause, the longest first.

        Causes are ``link``, ``disk``, ``host`` (the optimizer), ``workers`` (compute of the others), ``ranks`` (other
        processes), ``data``, ``checkpoint`` and ``python``.
        """
        return self._waits

    @cached_property
    def _waits(self) -> dict[str, float]:
        booked = [step for step in self.typical if step.get("waits_s")]
        causes = self._followed_s(booked) if booked else self._shared_out_s()
        seconds = self.mean("seconds")
        shares = {cause: min(1.0, waited_s / seconds) for cause, waited_s in causes.items() if waited_s > 0}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def _followed_s(self, booked: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        """Return mean seconds by cause of the steps in which the run has followed them."""
        causes: defaultdict[str, float] = defaultdict(float)
        for step in booked:
            for cause, owners in step["waits_s"][_COMPUTE].items():
                for owner, seconds in owners.items():
                    causes[_CAUSES.get(cause) or self.kind_of(owner)] += seconds / len(booked)
        return causes

    def _shared_out_s(self) -> Mapping[str, float]:
        """Return mean seconds by cause, shared out as the module says."""
        busy_s, stall_s, seconds = self.lane_s("busy_s"), self.lane_s("stall_s"), self.mean("seconds")
        outside_s = max(0.0, seconds - busy_s.get(_COMPUTE, 0.0) - sum(stall_s.values()))
        data_s = min(self.mean("data_s"), outside_s + sum(stall_s.values()))
        causes = defaultdict(float, data=data_s, python=max(0.0, outside_s - data_s))
        rest_s = max(0.0, data_s - outside_s)
        for lane in sorted(stall_s, key=lambda name: busy_s.get(name, 0.0) - stall_s[name]):
            taken_s = min(rest_s, stall_s[lane])
            stall_s[lane] -= taken_s
            rest_s -= taken_s

        causes["python"] += sum(stalled_s for lane, stalled_s in stall_s.items() if lane not in busy_s)
        believed_s = {lane: min(stall_s.get(lane, 0.0), busy) for lane, busy in busy_s.items()}
        for lane, stalled_s in believed_s.items():
            causes[self.kind_of(lane)] += stalled_s
        left_s = sum(stall_s.get(lane, 0.0) - stalled_s for lane, stalled_s in believed_s.items())
        unused_s = {lane: busy_s[lane] - believed_s[lane] for lane in busy_s if lane != _COMPUTE}
        for lane in sorted(unused_s, key=lambda name: -unused_s[name]):
            taken_s = min(left_s, unused_s[lane])
            causes[self.kind_of(lane)] += taken_s
            left_s -= taken_s
        causes["python"] += left_s
        return causes

    @property
    def compute_share(self) -> float:
        """Share of a step in which the compute lane worked."""
        return self.lane_s("busy_s").get(_COMPUTE, 0.0) / self.mean("seconds")

    @property
    def efficiency(self) -> float | None:
        """FLOPs of the model over what the device promises in the time that compute lanes worked; None if not known."""
        busy_s = [s for lane, s in self.lane_s("busy_s").items() if lane.startswith("compute")]
        if not sum(busy_s) or not all(step.get("mfu") for step in self.typical):
            return None
        return self.mean("mfu") * self.mean("seconds") / (sum(busy_s) / len(busy_s))


def read_run(directory: Path) -> RunRecord:
    """Return the run of a directory; it may still be going on.

    Raises:
        ConfigError: there is no run, none of its steps has ended, or it is of a version that does not tell enough.
    """
    with as_a_run(directory):
        return record_of(directory, _lines(directory / "heartbeat.jsonl"))


def record_of(directory: Path, lines: Iterable[Mapping[str, Any]]) -> RunRecord:
    """Return the run whose newest lines of the heartbeat are these; a step that was repeated counts as it ended last.

    Raises:
        ConfigError: none of them tells the time of each lane.
    """
    records: list[Mapping[str, Any]] = []
    schema = None
    for line in lines:
        schema = line.get("schema")
        if schema not in READABLE or not line.get("busy_s") or "stall_s" not in line or not line["seconds"]:
            continue
        while records and records[-1]["step"] >= line["step"]:
            records.pop()
        records.append(line)
    if not records and schema is None:
        raise ConfigError(f"{directory / 'heartbeat.jsonl'}: no step has ended yet; ask again later")
    if not records:
        raise ConfigError(
            f"{directory}: schema {schema} of the heartbeat does not tell the time of each lane; train some steps "
            "with this version of outsize into another train.run_dir"
        )
    about = read_mapping(directory / "run.json")
    return RunRecord(
        directory=str(directory),
        steps=tuple(records[1:] or records),
        plan=read_mapping(directory / "plan.json"),
        config=read_mapping(directory / "config.yaml"),
        about=about,
        inventory=_inventory(about),
    )


def _inventory(about: Mapping[str, Any]) -> Inventory | None:
    try:
        return Inventory.model_validate(about["machine"])
    except (KeyError, ValidationError):
        return None


def _lines(heartbeat: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the newest lines that tell of a step."""
    newest = deque(enumerate(lines_of(heartbeat), 1), maxlen=KEPT_LINES + 1)
    if newest and not newest[-1][1].endswith(b"\n"):
        newest.pop()  # being written
    steps = [(number, step_of(line)) for number, line in list(newest)[-KEPT_LINES:]]
    if steps and not any(step for _, step in steps):
        raise ConfigError(
            f"{heartbeat}, line {steps[0][0]}: not a step of a run, as all others; take them out"
        )
    yield from (step for _, step in steps if step is not None)


# Fewer tell no trend.
_LEAST_SAMPLES = 6


class LackingError(Exception):
    """The record does not hold what a rule needs; the message says what. Never leaves this room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The record.

    Attributes:
        probed: what `outsize probe` found; None where no machine is known.
        recorded: what a run wrote; None where there is none.
        others: other runs of the same model, to compare it with.
    """

    probed: MachineFile | None = None
    recorded: RunRecord | None = None
    others: tuple[RunRecord, ...] = ()

    @property
    def machine(self) -> MachineFile:
        """The machine.

        Raises:
            LackingError: none is known.
        """
        if self.probed is None:
            raise LackingError("a machine: --machine machine.json")
        return self.probed

    @property
    def inventory(self) -> Inventory:
        """What the machine of the run has, as it was when the run began; else what the probe found.

        Raises:
            LackingError: neither is known.
        """
        inventory = None if self.recorded is None else self.recorded.inventory
        return self.machine.inventory if inventory is None else inventory

    @property
    def run(self) -> RunRecord:
        """The run.

        Raises:
            LackingError: none is known.
        """
        if self.recorded is None:
            raise LackingError("a run directory: outsize doctor RUN")
        return self.recorded


def number(fact: Fact, what: str) -> float:
    """Return the value of ``fact``.

    Raises:
        LackingError: it has none.
    """
    value = fact.number()
    if value is None:
        raise LackingError(f"{what}: {fact.source}")
    return value


def text(fact: Fact, what: str) -> str:
    """Return the value of ``fact`` as text.

    Raises:
        LackingError: it has none.
    """
    if fact.value is None:
        raise LackingError(f"{what}: {fact.source}")
    return str(fact.value)


def limit(fact: Fact, what: str) -> float | None:
    """Return a limit; None where none is set.

    Raises:
        LackingError: it is not known whether there is one.
    """
    if fact.status == "not measured":
        raise LackingError(f"{what}: {fact.source}")
    return fact.number()


def median(measurement: Measurement, what: str) -> float:
    """Return the median.

    Raises:
        LackingError: nothing was measured.
    """
    if measurement.median is None:
        raise LackingError(f"{what}: {measurement.source}")
    return measurement.median


def link_of(device: DeviceRates, path: str, direction: str) -> LinkRates | None:
    """Return one of the links of ``device``; None where the probe has not tried it."""
    return next((link for link in device.links if (link.path, link.direction) == (path, direction)), None)


def fit_of(device: DeviceRates, path: str, direction: str) -> LinkFit | None:
    """Return the fit of one of the links of ``device``; None where there is none."""
    link = link_of(device, path, direction)
    return None if link is None else link.fit


def planned_host_bytes(facts: Facts) -> int | None:
    """Return what a run plans to hold in RAM; on a CPU the device's memory is RAM too. None where that is not known."""
    if facts.recorded is None or "memory_bytes" not in facts.recorded.plan:
        return None
    memory = facts.recorded.plan["memory_bytes"]
    tiers = ("host", "device") if is_on_cpu(facts) else ("host",)
    return sum(int(size) for tier in tiers for size in memory[tier].values())


def is_on_cpu(facts: Facts) -> bool:
    """Whether a run computes on the CPU, as far as its record tells."""
    if facts.recorded is None:
        return False
    device = facts.recorded.device
    if device == "auto":
        # Only a CPU has the disk as the tier next to it.
        probed = facts.probed is not None and any(each.device == "cpu" for each in facts.probed.devices)
        return probed or facts.recorded.plan.get("below") == "disk"
    return device == "cpu" or device.startswith("emulated")


def lost_share(rate: Measurement) -> float:
    """Return the share that the last third of the samples lost to the first, if they fall all the way; else 0."""
    third = len(rate.samples) // 3
    if len(rate.samples) < _LEAST_SAMPLES:
        return 0.0
    parts = (rate.samples[:third], rate.samples[third:-third], rate.samples[-third:])
    first, middle, last = (statistics.median(part) for part in parts)
    return 1 - last / first if first > middle > last else 0.0
