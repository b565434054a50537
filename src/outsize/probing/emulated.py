"""Emulated devices: they compute as the CPU does, and their link is held to a rate, which is what they report."""

from outsize.hardware.link_fit import fit_link
from outsize.hardware.machine_file import DeviceRates, Direction, LinkPoint, LinkRates
from outsize.hardware.readings import Fact, Measurement
from outsize.probing.effort import Effort, sample
from outsize.probing.link import sizes
from outsize.runtime.device.device import EmulatedDevice
from outsize.storage.arena import Arena

_BYTES_MAX = 16 * 2**20


def measure_emulated(
    cpu: DeviceRates, num_devices: int, link_bytes_per_s: float | None, effort: Effort
) -> tuple[DeviceRates, ...]:
    """Return ``num_devices`` emulated devices: the rates of ``cpu``, behind links that are held to a rate.

    Args:
        cpu: what the machine's own processors reach.
        num_devices: how many share them.
        link_bytes_per_s: of each link and direction; None for links without a throttle.
        effort: how long.
    """
    links = _links(link_bytes_per_s, effort)
    measurement = (
        "outsize's emulation" if link_bytes_per_s is not None else "outsize's emulation: no throttle is set"
    )
    return tuple(
        cpu.model_copy(
            update={
                "device": f"emulated:{index}",
                "name": f"emulated on {cpu.name}, which {num_devices} share",
                "links": links,
                "throttle_bytes_per_s": Fact.read(link_bytes_per_s, measurement),
            }
        )
        for index in range(num_devices)
    )


def _links(link_bytes_per_s: float | None, effort: Effort) -> tuple[LinkRates, ...]:
    """Time copies through the emulated link; up and down are the same to it."""
    most = min(_BYTES_MAX, effort.copy_bytes_max)
    with Arena() as arena:
        source, target = (arena.take(most, "end of the emulated link").fill_(1) for _ in range(2))
        device = EmulatedDevice("emulated:1", None, link_bytes_per_s)
        points = [
            LinkPoint(
                num_bytes=num_bytes,
                held_out=held_out,
                copy_s=Measurement.of(
                    sample(
                        lambda size=num_bytes: device.copy(target[:size], source[:size]),  # type: ignore[misc]
                        seconds=0.0,
                        num_min=effort.num_samples_min,
                        until_s=effort.until_s,
                    ),
                    "copies through the emulated link",
                ),
            )
            for num_bytes, held_out in sizes(most)
        ]
        device.close()
    times = {
        held_out: {p.num_bytes: p.copy_s.median or 0.0 for p in points if p.held_out is held_out}
        for held_out in (False, True)
    }
    rate = "no throttle" if link_bytes_per_s is None else f"held to {link_bytes_per_s / 1e9:g} GB/s"
    directions: tuple[Direction, ...] = ("up", "down")
    return tuple(
        LinkRates(
            path="emulated",
            direction=direction,
            points=tuple(points),
            fit=fit_link(times[False], times[True]),
            note=f"emulated: {rate} in each direction",
        )
        for direction in directions
    )
