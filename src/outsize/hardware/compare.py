"""Two probes of a machine, measurement by measurement."""

from dataclasses import dataclass

from outsize.hardware.machine_file import MachineFile, readings
from outsize.hardware.readings import Measurement

# Below this no difference is told from noise, however narrow the samples: two probes minutes apart differ by as much.
_LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One rate, then and now.

    Attributes:
        name: dotted, as in the file.
        before: median of the old probe.
        now: median of this one.
        ratio: ``now / before``.
        is_significant: whether they lie further apart than both spreads together, and than 5 %.
    """

    name: str
    before: float
    now: float
    ratio: float
    is_significant: bool


def compare(before: MachineFile, now: MachineFile) -> tuple[Change, ...]:
    """Return every rate that both have; links by their fitted bandwidth."""
    old, new = _rates(before), _rates(now)
    changes = []
    for name, (value, spread) in new.items():
        if name in old:
            former, former_spread = old[name]
            apart = abs(value - former) / former
            changes.append(
                Change(
                    name=name,
                    before=former,
                    now=value,
                    ratio=value / former,
                    is_significant=apart > max(_LEAST_SHARE, spread + former_spread),
                )
            )
    return tuple(changes)


def _rates(found: MachineFile) -> dict[str, tuple[float, float]]:
    """Return median and spread of each rate by its name."""
    rates = {
        name: (reading.median, reading.spread)
        for part in ("host", "disks", "devices", "together", "peers", "all_reduce", "data", "codecs")
        for name, reading in readings(getattr(found, part), part)
        if isinstance(reading, Measurement)
        and reading.median is not None
        and not name.endswith((".copy_s", ".seconds"))
    }
    for device in found.devices:
        for link in device.links:
            if link.fit is not None:
                name = f"devices.{device.device}.links.{link.path} {link.direction}.bytes_per_s"
                rates[name] = (link.fit.bytes_per_s, link.fit.residual_median)
    return rates
