"""A probed machine in words and columns."""

from collections.abc import Callable, Iterable, Sequence

from outsize.cli.text.columns import columns
from outsize.cli.text.probe_rows import ratio_rows, several_rows, streaming_rows
from outsize.hardware.cgroup import Fact, Measurement
from outsize.hardware.gpus import GpuFacts
from outsize.hardware.machine_file import Change, DeviceRates, DiskRates, MachineFile, readings
from outsize.hardware.topology import theory_bytes_per_s
from outsize.units import format_bytes, format_rate, format_seconds

_UNKNOWN = "not measured"


def describe(probed: MachineFile) -> str:
    """Return what was found, and in the end what could not be measured and why."""
    lines = [*_inventory(probed), "", *columns(_rows(probed))]
    missing = _missing(probed)
    if missing:
        lines += ["", "not measured:", *missing]
    if probed.left_out.value:
        lines += ["", f"left out, {probed.left_out.source}: {probed.left_out.value}"]
    lines.append(f"\n{probed.mode} probe in {format_seconds(probed.duration_s)}")
    return "\n".join(lines)


def describe_changes(changes: Sequence[Change]) -> str:
    """Return the rates that differ beyond their spread, the largest change first."""
    worst_first = sorted(
        (change for change in changes if change.is_significant), key=lambda change: -abs(change.ratio - 1)
    )
    rows = [
        (change.name, f"{change.before:.4g} -> {change.now:.4g}", f"{change.ratio:.2f}x")
        for change in worst_first
    ]
    return "\n".join(
        ["", f"{len(worst_first)} of {len(changes)} rates differ by more than their spread", *columns(rows)]
    )


def _inventory(probed: MachineFile) -> list[str]:
    cpu, memory, environment = probed.inventory.cpu, probed.inventory.memory, probed.inventory.environment
    rows = [
        (
            "CPU",
            f"{_value(cpu.model)}, {_value(cpu.num_physical_cores)} cores, {_value(cpu.num_usable_cpus)} usable",
        ),
        ("quota", _limit(cpu.quota_cores, lambda cores: f"{cores:g} cores")),
        ("SIMD", _value(cpu.simd)),
        ("RAM", f"{_bytes(memory.total_bytes)}, {_bytes(memory.available_bytes)} available"),
        ("RAM limit", _limit(memory.cgroup_limit_bytes, lambda size: format_bytes(int(size)))),
        ("swap", _bytes(memory.swap_total_bytes)),
        ("memlock", _limit(memory.memlock_limit_bytes, lambda size: format_bytes(int(size)))),
        ("NUMA nodes", str(len(cpu.numa_nodes))),
        ("container", _value(environment.container)),
        ("VM", _value(environment.virtual_machine)),
        ("C kernels", _native(environment.native)),
    ]
    rows += [
        (
            "disk",
            f"{disk.directory}: {_value(disk.file_system)} on {_value(disk.device)}, {_bytes(disk.free_bytes)} free",
        )
        for disk in probed.inventory.disks
    ]
    rows += [
        ("GPU", f"{_value(gpu.name)}, {_bytes(gpu.memory_total_bytes)}, driver {_value(gpu.driver)}")
        for gpu in probed.inventory.gpus
    ]
    return columns(rows)


def _native(fact: Fact) -> str:
    return f"none: {fact.source}" if fact.value == "none" else _value(fact)


def _rows(probed: MachineFile) -> Iterable[tuple[str, ...]]:
    host = probed.host
    yield ("DRAM copy", *_rate(host.dram_copy_bytes_per_s))
    yield ("DRAM triad", *_rate(host.dram_triad_bytes_per_s))
    for dtype, rate in host.adamw_params_per_s.items():
        yield (f"AdamW {dtype}", *_count(rate, 1e9, "G parameters/s"))
    yield ("AdamW fp32 beside copies", *_count(host.adamw_beside_copies_params_per_s, 1e9, "G parameters/s"))
    yield ("copies beside AdamW", *_rate(host.copies_beside_adamw_bytes_per_s))
    for cost in host.pinning:
        chosen = (
            ""
            if cost.taken_bytes.value is None
            else f"{_bytes(cost.taken_bytes)} for {format_bytes(cost.asked_bytes)}"
        )
        yield (f"{cost.way}, per GB", _seconds(cost.pin_s_per_gb), chosen)
    for numa in host.numa:
        yield (f"memory of node {numa.memory_node} by {numa.by}", *_rate(numa.copy_bytes_per_s))
    for disk in probed.disks:
        yield from _disk_rows(disk)
    for index, device in enumerate(probed.devices):
        yield from _device_rows(device)
        yield from _link_rows(device, probed.inventory.gpus[index : index + 1])
        yield from ratio_rows(probed, device)
        yield from streaming_rows(device)
    yield from several_rows(probed)


def _disk_rows(disk: DiskRates) -> Iterable[tuple[str, ...]]:
    if disk.direct.value is None:
        yield (f"disk of {disk.directory}", _UNKNOWN, "")
        return
    kind = "direct" if disk.direct.value else "buffered"
    for depth in disk.depths:
        for verb, rate in (("read", depth.read_bytes_per_s), ("write", depth.write_bytes_per_s)):
            yield (f"{disk.directory}: {kind} {verb}, depth {depth.queue_depth}", *_rate(rate))
    if disk.sustained_write_bytes_per_s.median is not None:
        yield (f"{disk.directory}: {kind} write, without a pause", *_rate(disk.sustained_write_bytes_per_s))


def _device_rows(device: DeviceRates) -> Iterable[tuple[str, ...]]:
    for what, rates in (("matmul", device.matmul_flops_per_s), ("attention", device.attention_flops_per_s)):
        for dtype, rate in rates.items():
            yield (f"{device.device} {what} {dtype}", *_count(rate, 1e12, "TFLOP/s"))


def _link_rows(device: DeviceRates, gpus: Sequence[GpuFacts]) -> Iterable[tuple[str, ...]]:
    """Return a row for each link, with its share of what the bus carries in theory where that is known."""
    theory = _theory_bytes_per_s(device, gpus)
    for link in device.links:
        name = f"{device.device} link, {link.path}, {link.direction}"
        if link.fit is None:
            yield (name, _UNKNOWN, "")
            continue
        error = (
            ""
            if link.fit.held_out_median is None
            else f"off by {link.fit.held_out_median:.0%} on held-out sizes"
        )
        if link.fit.pieces:
            knees = ", ".join(format_bytes(piece.num_bytes) for piece in link.fit.pieces[1:])
            error = f"another line from {knees} on; {error}"
        if theory is not None:
            error = f"{link.fit.bytes_per_s / theory:.0%} of {format_rate(theory)} in theory; {error}"
        fit = f"{link.fit.latency_s * 1e6:.1f} us + {format_rate(link.fit.bytes_per_s)}"
        yield (name, f"{fit} each way" if link.direction == "both" else fit, error)


def _theory_bytes_per_s(device: DeviceRates, gpus: Sequence[GpuFacts]) -> float | None:
    """Return what the link carries as negotiated under load; where that was not read, at its highest generation."""
    generation, lanes = device.pcie_generation_loaded.number(), device.pcie_lanes_loaded.number()
    if gpus and (generation is None or lanes is None):
        generation, lanes = gpus[0].pcie_generation_max.number(), gpus[0].pcie_lanes.number()
    if generation is None or lanes is None:
        return None
    try:
        return theory_bytes_per_s(int(generation), int(lanes))
    except ValueError:
        return None


def _rate(rate: Measurement) -> tuple[str, str]:
    return (_UNKNOWN, "") if rate.median is None else (format_rate(rate.median), f"±{rate.spread:.0%}")


def _seconds(duration: Measurement) -> str:
    return _UNKNOWN if duration.median is None else format_seconds(duration.median)


def _count(rate: Measurement, factor: float, unit: str) -> tuple[str, str]:
    if rate.median is None:
        return _UNKNOWN, ""
    return f"{rate.median / factor:.3g} {unit}", f"±{rate.spread:.0%}"


def _missing(probed: MachineFile) -> list[str]:
    """Return one line for each thing that is not measured, those with the same reason together."""
    names: dict[str, list[str]] = {}
    for name, reading in readings(probed):
        if reading.status == _UNKNOWN:
            names.setdefault(reading.source, []).append(name)
    for device in probed.devices:
        for link in device.links:
            if link.fit is None:
                names.setdefault(link.note, []).append(
                    f"devices.{device.device}.links.{link.path} {link.direction}"
                )
    return [
        f"  {', '.join(group[:3])}{f' and {len(group) - 3} more' if len(group) > 3 else ''}: {why}"
        for why, group in names.items()
    ]


def _value(fact: Fact) -> str:
    return _UNKNOWN if fact.value is None else str(fact.value)


def _bytes(fact: Fact) -> str:
    number = fact.number()
    return _UNKNOWN if number is None else format_bytes(int(number))


def _limit(fact: Fact, show: Callable[[float], str]) -> str:
    number = fact.number()
    if number is not None:
        return show(number)
    return _UNKNOWN if fact.status == _UNKNOWN else "no limit"
