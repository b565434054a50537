"""Convert a probed machine to `hardware.machine_spec.Machine`, which the planner reads; every rate measured."""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from outsize import files
from outsize.errors import ConfigError
from outsize.hardware.cgroup import Measurement
from outsize.hardware.machine_file import DeviceRates, LinkRates, MachineFile, parse
from outsize.hardware.machine_spec import Disk, Figure, Gpu, Host, Link, Machine, Peer, from_json

# The planner multiplies peak by efficiency; a measured product already is what is reached.
_REACHED = Figure(value=1.0, source="the rate beside it is what was reached", measured=True)
_SOURCE = "outsize probe"
# A zettabyte, or as many operations a second.
_MOST = 1e21


def read_machine(path: Path) -> Machine:
    """Return the machine of a file: what ``outsize probe`` wrote, or the description of a `Machine`.

    Raises:
        ConfigError: it cannot be read, is neither of them, or lacks what no plan can do without.
    """
    try:
        text = files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    _check_numbers(text, path)
    # Only a probe's file has a schema; whichever it is, its own reader says what is wrong with it.
    try:
        return machine_of(parse(text)) if '"schema_version"' in text else from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _check_numbers(text: str, path: Path) -> None:
    """Refuse numbers that no machine has: on rates beyond them a step that is simulated does not end."""

    def checked(number: str) -> float:
        value = float(number)
        if not abs(value) <= _MOST:
            raise ConfigError(
                f"{path}: no machine has {number[:20]} of anything; measure it with `outsize probe`"
            )
        return value

    with contextlib.suppress(ValueError, RecursionError):  # no JSON: its own reader says so
        json.loads(text, parse_float=checked, parse_int=checked, parse_constant=checked)


def machine_of(probed: MachineFile, name: str = "this machine") -> Machine:
    """Return what the planner needs of ``probed``; on a machine without a GPU the CPU is the device.

    Raises:
        ConfigError: something that no plan can do without was not measured; says what.
    """
    memory = probed.inventory.memory.usable_bytes()
    if memory is None:
        raise ConfigError(
            "the probe found neither RAM nor a limit of it; no plan can be made for this machine"
        )
    cores = probed.inventory.cpu.num_physical_cores.number() or probed.inventory.cpu.num_usable_cpus.number()
    return Machine(
        name=name,
        gpus=tuple(_gpu(device, probed) for device in probed.devices),
        links=tuple(_link(device) for device in probed.devices),
        host=Host(
            memory_bytes=memory,
            bytes_per_s=_figure(probed.host.dram_triad_bytes_per_s, "DRAM triad"),
            cores=int(cores or 1),
            adamw_params_per_s=_figure(probed.host.adamw_params_per_s["fp32"], "AdamW"),
            flops_per_s=_products(probed),
        ),
        disk=_disk(probed),
        peers=tuple(_peers(probed)),
    )


def _figure(measurement: Measurement, what: str) -> Figure:
    if measurement.median is None:
        raise ConfigError(f"the probe did not measure {what}: {measurement.source}")
    return Figure(value=measurement.median, source=f"{_SOURCE}: {measurement.source}", measured=True)


def _products(probed: MachineFile) -> Figure | None:
    """Return the rate of bf16 products where the CPU is the device, which alone is asked for it."""
    rates = (each.matmul_flops_per_s.get("bf16") for each in probed.devices if not each.accelerated)
    return next(
        (_figure(rate, "bf16") for rate in rates if rate is not None and rate.median is not None), None
    )


def _gpu(device: DeviceRates, probed: MachineFile) -> Gpu:
    rates = {
        dtype: _figure(rate, dtype)
        for dtype, rate in device.matmul_flops_per_s.items()
        if rate.median is not None
    }
    generation, is_card = 0, device.accelerated
    if is_card:
        index = int(device.device.partition(":")[2])
        if index < len(probed.inventory.gpus):
            generation = int(probed.inventory.gpus[index].pcie_generation_max.number() or 0)
    return Gpu(
        name=device.name,
        memory_bytes=int(device.memory_bytes.number() or 0),
        peak_flops_per_s=rates,
        efficiency=_REACHED,
        memory_bytes_per_s=_figure(device.memory_triad_bytes_per_s, f"the memory of {device.device}"),
        pcie_generation=generation,
        is_host=not is_card,
    )


def _link(device: DeviceRates) -> Link:
    up, down = (_best(device.links, direction) for direction in ("up", "down"))
    if up.fit is None or down.fit is None:
        raise ConfigError(f"the probe did not measure the link of {device.device}: {up.note}")
    source = f"{_SOURCE}: {up.path}"
    # What streams is large: the line of the largest sizes has both its numbers, where smaller ones have another.
    latency_s = up.fit.pieces[-1].latency_s if up.fit.pieces else up.fit.latency_s
    return Link(
        up_bytes_per_s=Figure(value=up.fit.bytes_per_s, source=source, measured=True),
        down_bytes_per_s=Figure(value=down.fit.bytes_per_s, source=source, measured=True),
        # A figure is above zero; no copy costs less than a nanosecond.
        latency_s=Figure(value=max(latency_s, 1e-9), source=source, measured=True),
    )


def _peers(probed: MachineFile) -> Iterable[Peer]:
    """Yield which devices copy to which: those whose copies do not go at the rate of two links, one after the other."""
    numbers = {device.device: number for number, device in enumerate(probed.devices)}
    for peer in probed.peers:
        rate, kind = peer.copy_bytes_per_s, peer.by_rate.value
        if peer.by_topology.value == "host-staged" or kind not in ("NVLink", "PCIe peer"):
            continue
        if rate.median is not None and {peer.source, peer.target} <= set(numbers):
            yield Peer(
                source=numbers[peer.source],
                target=numbers[peer.target],
                bytes_per_s=_figure(rate, "copies between GPUs"),
                own_wire=kind == "NVLink",
            )


def _best(links: Iterable[LinkRates], direction: str) -> LinkRates:
    """Return the fastest path: pinned memory where it could be had."""
    candidates = [link for link in links if link.direction == direction]
    return max(candidates, key=lambda link: link.fit.bytes_per_s if link.fit else 0.0)


def _disk(probed: MachineFile) -> Disk | None:
    """Return the first directory whose disk was measured, at its best queue depth."""
    for place, rates in zip(probed.inventory.disks, probed.disks, strict=True):
        reads = [depth.read_bytes_per_s for depth in rates.depths if depth.read_bytes_per_s.median]
        writes = [depth.write_bytes_per_s for depth in rates.depths if depth.write_bytes_per_s.median]
        if reads and writes:
            return Disk(
                capacity_bytes=int(place.free_bytes.number() or 0),
                read_bytes_per_s=_figure(max(reads, key=lambda rate: rate.median or 0.0), "reads"),
                write_bytes_per_s=_figure(max(writes, key=lambda rate: rate.median or 0.0), "writes"),
            )
    return None
