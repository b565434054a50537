"""What the rules look at: a probed machine, a recorded run, or both."""

import statistics
from dataclasses import dataclass

from outsize.doctor.run_record import RunRecord
from outsize.hardware.cgroup import Fact, Measurement
from outsize.hardware.gpus import Inventory
from outsize.hardware.link_fit import LinkFit
from outsize.hardware.machine_file import DeviceRates, LinkRates, MachineFile

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
