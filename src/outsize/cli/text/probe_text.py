"""What `outsize probe` prints.

A probed machine in words and columns.

What streaming, several devices and data reach, in rows of name, figure and remark.
"""

from collections.abc import Callable, Iterable, Sequence

from outsize.cli.text.console import columns
from outsize.hardware.cgroup import Fact, Measurement
from outsize.hardware.gpus import GpuFacts
from outsize.hardware.machine_file import Change, DeviceRates, DiskRates, MachineFile, readings
from outsize.hardware.topology import break_even_tokens, starved_share, theory_bytes_per_s
from outsize.units import format_bytes, format_rate, format_seconds

_Row = tuple[str, str, str]
_NOISY = "; noisy, measured twice"
# Tokens that pass through a unit while it is on the device, in the examples of a table.
_TOKENS = (128, 1024, 8192)


def streaming_rows(device: DeviceRates) -> Iterable[_Row]:
    """Yield how copies and compute overlap, and copies from memory of other nodes."""
    name = device.device
    if device.overlap is not None and device.overlap.hidden_share() is not None:
        overlap, slower = device.overlap, device.overlap.slowdown()
        texts = (
            "" if slower is None else f"beside each other: product {slower[0]:.2f}x, copies {slower[1]:.2f}x"
        )
        noisy = _NOISY if overlap.is_noisy() else ""
        yield (f"{name} copies hidden behind a product", f"{overlap.hidden_share():.0%}", texts + noisy)
    for numa in device.numa:
        near = {True: "its own", False: "another one", None: ""}[numa.local]
        yield (f"{name} from memory of node {numa.memory_node}", _rate(numa.copy_bytes_per_s), near)


def ratio_rows(probed: MachineFile, device: DeviceRates) -> Iterable[_Row]:
    """Yield what memory and products are beside the link that feeds them: ratios, and how far compute would starve."""
    fits = [link.fit for link in device.links if link.direction == "up" and link.fit is not None]
    if not fits:
        return
    name, link_bytes_per_s = device.device, max(fit.bytes_per_s for fit in fits)
    memories = {
        "host memory": probed.host.dram_copy_bytes_per_s.median,
        "device memory": device.memory_triad_bytes_per_s.median,
    }
    for memory, rate in memories.items():
        if rate is not None:
            yield (f"{name}: {memory} over link", f"{rate / link_bytes_per_s:.1f} x", format_rate(rate))
    for dtype, weight_bytes in (("bf16", 2), ("fp32", 4)):
        flops = device.matmul_flops_per_s.get(dtype)
        if flops is None or flops.median is None:
            continue
        enough = break_even_tokens(flops.median, link_bytes_per_s, weight_bytes)
        shares = (
            f"{starved_share(tokens, flops.median, link_bytes_per_s, weight_bytes):.0%} at {tokens:,}"
            for tokens in _TOKENS
        )
        text = f"compute starves {', '.join(shares)} tokens per visit"
        yield (f"{name}: {dtype} weights hidden from", f"{enough:,.0f} tokens", text)


def several_rows(probed: MachineFile) -> Iterable[_Row]:
    """Yield copies of all GPUs at once and between them, sums over processes, tokenizer and loader."""
    for rate in probed.together:
        alone = f"{_rate(rate.alone_bytes_per_s)} alone"
        yield (f"{rate.device} {rate.direction} while all copy", _rate(rate.together_bytes_per_s), alone)
    for peer in probed.peers:
        kinds = f"{peer.by_rate.value or 'not known'} by rate, {peer.by_topology.value or 'not known'} by topology"
        yield (f"{peer.target} from {peer.source}", _rate(peer.copy_bytes_per_s), kinds)
    if probed.all_reduce is not None and probed.all_reduce.points:
        sums = probed.all_reduce
        for point in (sums.points[0], sums.points[-1]):
            bus = f"bus bandwidth {_rate(point.bus_bytes_per_s)}"
            size = format_bytes(point.num_bytes)
            seconds = format_seconds(point.seconds.median or 0.0)
            yield (f"all-reduce of {size}, {sums.backend}, {sums.num_ranks} ranks", seconds, bus)
    for codec in probed.codecs:
        ratio, bound, error = (
            fact.number() or 0.0 for fact in (codec.ratio, codec.bound, codec.relative_error)
        )
        loss_text = "lossless" if error == 0 else f"error {error:.2g}"
        rates_text = f"in {_rate(codec.encode_bytes_per_s)}, out {_rate(codec.decode_bytes_per_s)} per core"
        name = f"{codec.codec} on {codec.kind}, {codec.dtype}"
        yield (name, f"{ratio:.3f} of the bytes", f"{loss_text}, bound {bound:.3f}; {rates_text}")
    if probed.data is not None:
        for count, tokens in probed.data.tokenizer_tokens_per_s.items():
            yield (f"tokenizer, threads: {count}", _tokens(tokens), str(probed.data.tokenizer.value or ""))
        for count, tokens in probed.data.loader_tokens_per_s.items():
            yield (f"loader, threads: {count}", _tokens(tokens), "")


def _rate(rate: Measurement) -> str:
    return _throughput(rate)[0]


def _tokens(rate: Measurement) -> str:
    return _count(rate, 1e6, "M tokens/s")[0]


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


def copies_by_size(probed: MachineFile) -> list[str]:
    """Return a table for each device: rates of copies by size, of the points that were timed and not of their fit."""
    lines = []
    for device in probed.devices:
        links = [link for link in device.links if link.points]
        rates: dict[tuple[str, str], dict[int, float]] = {
            (link.path, link.direction): {
                point.num_bytes: point.num_bytes / point.copy_s.median
                for point in link.points
                if point.copy_s.median
            }
            for link in links
        }
        sizes = sorted({size for by_size in rates.values() for size in by_size})
        speedups = [way for way in ("up", "down") if {("pinned", way), ("pageable", way)} <= rates.keys()]
        rows = [
            (
                f"{device.device}, size",
                *(f"{path} {direction}" for path, direction in rates),
                *(f"pinned by pageable, {direction}" for direction in speedups),
            )
        ]
        for size in sizes:
            of_size = [by_size.get(size) for by_size in rates.values()]
            gains = [(rates["pinned", way].get(size), rates["pageable", way].get(size)) for way in speedups]
            rows.append(
                (
                    format_bytes(size),
                    *(_UNKNOWN if rate is None else format_rate(rate) for rate in of_size),
                    *(f"{fast / slow:.2f}x" if fast and slow else _UNKNOWN for fast, slow in gains),
                )
            )
        lines += [*columns(rows), ""]
    return lines[:-1]


def _inventory(probed: MachineFile) -> list[str]:
    cpu, memory, environment = probed.inventory.cpu, probed.inventory.memory, probed.inventory.environment
    native = environment.native
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
        ("C kernels", f"none: {native.source}" if native.value == "none" else _value(native)),
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


def _rows(probed: MachineFile) -> Iterable[tuple[str, ...]]:
    host = probed.host
    yield ("DRAM copy", *_throughput(host.dram_copy_bytes_per_s))
    yield ("DRAM triad", *_throughput(host.dram_triad_bytes_per_s))
    for dtype, rate in host.adamw_params_per_s.items():
        yield (f"AdamW {dtype}", *_count(rate, 1e9, "G parameters/s"))
    for numa in host.numa:
        yield (f"memory of node {numa.memory_node} by {numa.by}", *_throughput(numa.copy_bytes_per_s))
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
            yield (f"{disk.directory}: {kind} {verb}, depth {depth.queue_depth}", *_throughput(rate))
    if disk.sustained_write_bytes_per_s.median is not None:
        yield (
            f"{disk.directory}: {kind} write, without a pause",
            *_throughput(disk.sustained_write_bytes_per_s),
        )


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


def _throughput(rate: Measurement) -> tuple[str, str]:
    return (_UNKNOWN, "") if rate.median is None else (format_rate(rate.median), f"±{rate.spread:.0%}")


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
