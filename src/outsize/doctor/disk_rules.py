"""What can be wrong with disks."""

from outsize.doctor.facts import Facts, LackingError, lost_share
from outsize.doctor.finding import Seen, worst
from outsize.hardware.machine_file import DiskRates
from outsize.units import format_rate

# A drive whose writes without a pause fall by more than this is no noise.
_SAG = 0.3
_IN_MEMORY = ("tmpfs", "ramfs", "zram")
# No disk that turns reads 0.35 GB/s in order; a plain NVMe drive reads 2.
_TURNING_BYTES_PER_S, _NVME_BYTES_PER_S = 0.35e9, 2e9


def poor_disk(facts: Facts) -> Seen | None:
    """A place for the store that is memory, turns, or goes through the page cache.

    That a drive turns is what virtual ones say too, so its rate must agree.
    """
    for place in facts.machine.inventory.disks:
        if place.file_system.value in _IN_MEMORY:
            return Seen(
                evidence=f"{place.directory} is {place.file_system.value}: what is written there takes RAM",
                expected="a local NVMe",
            )
    for place, disk in zip(facts.machine.inventory.disks, facts.machine.disks, strict=False):
        reads = [depth.read_bytes_per_s.median or 0.0 for depth in disk.depths]
        if place.rotational.value is True and 0 < max(reads, default=0.0) < _TURNING_BYTES_PER_S:
            return Seen(
                evidence=(
                    f"{place.directory} reads {format_rate(max(reads))} and says that it turns "
                    f"({place.model.value or place.device.value})"
                ),
                expected="a local NVMe: 2 GB/s and more",
                gain_share=1 - max(reads) / _NVME_BYTES_PER_S,
            )
        if disk.direct.value is False:
            return Seen(
                evidence=f"{disk.directory}: the file system refuses direct I/O ({disk.direct.source})",
                expected="direct I/O: no copy in the page cache, and a fraction of the processor time",
            )
    return None


def sagging_disk(facts: Facts) -> Seen | None:
    """A drive that writes slower and slower without a pause: its cache is full, or it is hot."""
    disks = facts.machine.disks
    if disks and all(disk.sustained_write_bytes_per_s.median is None for disk in disks):
        raise LackingError("writes without a pause: `outsize probe --full`")
    return worst(_slower(disk) for disk in disks if lost_share(disk.sustained_write_bytes_per_s) > _SAG)


def _slower(disk: DiskRates) -> Seen:
    samples = disk.sustained_write_bytes_per_s.samples
    lost = lost_share(disk.sustained_write_bytes_per_s)
    return Seen(
        evidence=(
            f"{disk.directory}: writes fell by {lost:.0%}, from {format_rate(samples[0])} to "
            f"{format_rate(samples[-1])}, within {len(samples)} samples"
        ),
        expected="the same rate for as long as it writes: a step writes the whole state, again and again",
        gain_share=lost,
    )
