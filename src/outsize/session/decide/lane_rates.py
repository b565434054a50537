"""Rates of links, of the host's optimizer and of codecs, timed on this machine.

What the lanes of a run reach, before its first step: part of a second of `outsize.probing`, in the run's budget.

A run that has trained here before has better figures, from its own trace: ``machine.json`` in its directory, which
``outsize plan --machine`` reads too.
"""

import contextlib
import itertools
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from torch import Tensor

from outsize.accelerators import Devices, synchronize
from outsize.codecs.codec import DTYPE_NAME, Codec, open_codec
from outsize.codecs.transport import PIECE_ELEMENTS, PIECES_AT_ONCE, CodecRates, Transport
from outsize.errors import ConfigError
from outsize.group.group import Pace
from outsize.hardware.cards import COPY_LATENCY_S, NVME
from outsize.hardware.cgroup import Measurement
from outsize.hardware.from_probe import read_machine
from outsize.hardware.machine_spec import Disk, Figure, Gpu, Host, Link, Machine
from outsize.model.sizes.model_spec import ITEMSIZE, UnitSpec
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.memory.memory_table import home_bytes
from outsize.planner.memory.step_bytes import encoded_planes
from outsize.planner.program.program import Lane
from outsize.planner.simulate.costs import ADAMW_BYTES, STEP_PACE, UnitTimes
from outsize.planner.simulate.gpu_times import Trace
from outsize.probing.compute import measure_adamw, measure_device_memory, measure_products
from outsize.probing.data_probe import measure_disk
from outsize.probing.effort import QUICK, Effort, within_memory
from outsize.probing.host_probe import measure_dram
from outsize.probing.link import PathKind, measure_links
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.session.job.machine import Pairs, measured_peers, peers_of
from outsize.session.job.prepare import Job

MACHINE_FILE = "machine.json"
MIB = 2**20
SHORT = replace(
    QUICK,
    sample_s=0.01,
    num_samples_min=2,
    array_bytes=32 * MIB,
    plane_bytes=16 * MIB,
    disk_bytes=32 * MIB,
    disk_s=0.05,
    queue_depths=(4,),
    copy_bytes_max=64 * MIB,
    num_copy_rounds=3,
    copy_s=0.3,
)
# Less state than this stays in the caches of a disk and its file system; what a run reads of it is not timed.
SMALL_STATE_BYTES = 64 * MIB
# A copy within memory moves each byte twice, and a call of torch's costs as much as any other.
_CALL_S = Figure(value=1e-5, source="assumed: a call of torch")
_REACHED = Figure(value=1.0, source="the rate beside it is what was reached", measured=True)


def lane_rates(
    prepared: Job, directory: Path, times: UnitTimes, flops: tuple[float, ...], pace: Pace
) -> Machine:
    """Return the machine of a run, its rates timed just now.

    Args:
        prepared: the run.
        directory: of its home; for large states the nearest one that exists is written to, and nothing stays there.
        times: of its units.
        flops: of a forward of each of them, in the same microbatch.
        pace: of the ranks that time their lanes at the same time.

    Raises:
        OutsizeError: something could not be measured.
    """
    machine, dtype = prepared.machine, prepared.split.spec.dtype
    state, units = prepared.plan.state, prepared.split.spec.units
    state_bytes = sum(home_bytes(unit, state) for unit in units)
    # Within the budgets; and a small model lives in caches, as small arrays do.
    effort = within_memory(SHORT, min(machine.device_bytes, machine.host_bytes, 8 * state_bytes))
    pace.meet("host memory")
    copy, triad = (_figure(rate, "DRAM") for rate in measure_dram(effort))
    pace.meet("links")
    each = machine.devices.each
    links = {device: _link(prepared, device, copy, effort) for device in dict.fromkeys(each)}
    total = psutil.virtual_memory().total
    peak = reached_flops_per_s(times, flops)
    gpus = {device: _gpu(device, dtype, peak, triad, effort, total) for device in links}
    gpus = {device: _multiplying(gpu, device, effort, state, units) for device, gpu in gpus.items()}
    uses_disk, small = "disk" in (machine.home, machine.below), state_bytes < SMALL_STATE_BYTES
    pace.meet("optimizer")
    adamw = _adamw(effort, state, units)
    iterations = state.newton_schulz
    products = _figure(measure_products(effort, units, iterations), "products") if iterations else None
    pace.meet("disk")
    return Machine(
        name=str(machine.devices),
        gpus=tuple(gpus[device] for device in each),
        links=tuple(links[device] for device in each),
        host=Host(
            memory_bytes=total,
            bytes_per_s=triad,
            cores=psutil.cpu_count(logical=False) or 1,
            adamw_params_per_s=adamw,
            flops_per_s=products,
        ),
        disk=(NVME if small else _disk(directory, effort)) if uses_disk else None,
        # Also those that this plan has no room for: another one, with a codec, may.
        peers=measured_peers(prepared.config.memory.peer_gb_per_s, machine.devices, _pairs(prepared)),
    )


def _pairs(prepared: Job) -> Pairs:
    """Return the workers of which one copies to the other."""
    config = prepared.config
    rate, activations = config.memory.peer_gb_per_s, config.transport.activations
    return peers_of(config.parallel.handover, activations, rate, prepared.machine.devices)


def _adamw(effort: Effort, state: StateLayout, units: Sequence[UnitSpec]) -> Figure:
    """Return the rate of AdamW over plain fp32, told by the bytes that a step moves from that over this run's state."""
    layout = replace(state, num_moments=2, state_of=(), temporaries=0, newton_schulz=0)
    figure = _figure(measure_adamw(effort, layout, units), "AdamW")
    moved = layout.step_bytes / STEP_PACE[layout.moments]
    return replace(figure, value=figure.value * moved / ADAMW_BYTES)


def kept_rates(run_dir: Path, prepared: Job) -> Machine | None:
    """Return the rates that a run on this machine left in ``run_dir``; None where there are none that serve."""
    path = run_dir / MACHINE_FILE
    if not path.is_file():
        return None
    with contextlib.suppress(ConfigError):
        machine = read_machine(path)
        same = (
            machine.name == str(prepared.machine.devices)
            and machine.host.memory_bytes == psutil.virtual_memory().total
        )
        disk = machine.disk is not None or "disk" not in (prepared.machine.home, prepared.machine.below)
        memory = prepared.config.memory
        limited = memory.link_gb_per_s is not None or memory.peer_gb_per_s is not None
        peers = all(machine.peer(*pair) is not None for pair in _pairs(prepared))
        if same and disk and peers and not limited:
            return machine
    return None


def reached_flops_per_s(times: UnitTimes, flops: tuple[float, ...]) -> Figure:
    """Return the rate of the forwards that multiply matrices, taken together."""
    pairs = [
        (work, seconds) for work, seconds in zip(flops, times.forward_s, strict=True) if work and seconds
    ]
    work, seconds = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (1.0, 1.0)
    return Figure(value=work / seconds, source="forwards of units, timed", measured=True)


def _gpu(device: Devices, dtype: str, peak: Figure, triad: Figure, effort: Effort, total: int) -> Gpu:
    accelerated = device.accelerated
    memory = _figure(measure_device_memory(device, effort), "device memory") if accelerated else triad
    return Gpu(
        name=str(device),
        memory_bytes=device.properties[0].total_memory if accelerated else total,
        peak_flops_per_s={dtype: peak},
        efficiency=_REACHED,
        memory_bytes_per_s=memory,
        pcie_generation=0,
        is_host=not accelerated,
    )


def _multiplying(
    gpu: Gpu, device: Devices, effort: Effort, state: StateLayout, units: Sequence[UnitSpec]
) -> Gpu:
    """Return ``gpu`` with what it reaches of products of Muon, where it has a processor of its own and they matter."""
    if not state.newton_schulz or not device.accelerated:
        return gpu
    rate = measure_products(effort, units, state.newton_schulz, device)
    return replace(gpu, products_per_s=_figure(rate, "products"))


def _link(prepared: Job, device: Devices, copy: Figure, effort: Effort) -> Link:
    limit = prepared.config.memory.link_gb_per_s
    if device.accelerated:
        copies = _copies(device, effort, "pinned") or _copies(device, effort, "pageable")
        if copies is None:
            raise ConfigError(f"the link of {device} could not be measured")
        *rates, latency = copies
    else:
        rates = [_measured(copy.value / 2, "copies within memory")] * 2
        latency = _CALL_S
    if limit is not None:
        rates = [_measured(min(rate.value, limit * 1e9), "memory.link_gb_per_s") for rate in rates]
        latency = COPY_LATENCY_S
    return Link(up_bytes_per_s=rates[0], down_bytes_per_s=rates[1], latency_s=latency)


def with_rates(machine: Machine, trace: Trace) -> Machine:
    """Return ``machine`` with the rates that its lanes had in ``trace``; others stay."""

    def rate(name: str, before: Figure, unit: float = 1.0) -> Figure:
        value = trace.rates.get(name)
        return before if value is None else _traced(value / unit)

    def computed(peak: Figure) -> Figure:
        return _traced(peak.value / trace.compute_share)

    links = tuple(
        replace(
            link,
            up_bytes_per_s=rate(Lane("up", worker), link.up_bytes_per_s),
            down_bytes_per_s=rate(Lane("down", worker), link.down_bytes_per_s),
        )
        for worker, link in enumerate(machine.links)
    )
    gpus = tuple(
        replace(gpu, peak_flops_per_s={d: computed(peak) for d, peak in gpu.peak_flops_per_s.items()})
        for gpu in machine.gpus
    )
    peers = tuple(
        replace(peer, bytes_per_s=rate(Lane("peer", peer.source, peer.target), peer.bytes_per_s))
        for peer in machine.peers
    )
    host = machine.host
    host = replace(host, adamw_params_per_s=rate("optimizer", host.adamw_params_per_s, ADAMW_BYTES))
    disk = machine.disk
    if disk is not None:
        disk = replace(
            disk,
            read_bytes_per_s=rate("disk read", disk.read_bytes_per_s),
            write_bytes_per_s=rate("disk write", disk.write_bytes_per_s),
        )
    return replace(machine, gpus=gpus, links=links, peers=peers, host=host, disk=disk)


def _traced(value: float) -> Figure:
    return Figure(value=value, source="the first steps of a run", measured=True)


def _copies(device: Devices, effort: Effort, path: PathKind) -> list[Figure] | None:
    """Return the rates up and down and the latency of copies of memory that is pinned, or is not."""
    up, down = (rates.fit for rates in itertools.islice(measure_links(device, effort, path), 2))
    if up is None or down is None:
        return None
    values = (up.bytes_per_s, down.bytes_per_s, max(up.latency_s, 1e-9))
    return [_measured(value, f"{path} copies") for value in values]


def partly_pinned(machine: Machine, devices: Devices, share: float) -> Machine:
    """Return the rates of a machine where the driver has pinned a ``share`` of what crosses, as copies tell."""
    links = list(machine.links)
    for index, (link, device) in enumerate(zip(machine.links, devices.each, strict=True)):
        if link.up_bytes_per_s.source == "pinned copies":  # else steps have told, or none is
            pageable = _copies(device, replace(SHORT, copy_bytes_max=8 * MIB), "pageable")
            if pageable is not None:
                up, down, _ = (rate.value for rate in pageable)
                links[index] = link.partly_pinned(
                    share, up, down, f"copies, {share:.0%} of them pinned", True
                )
    return replace(machine, links=tuple(links))


def _disk(directory: Path, effort: Effort) -> Disk:
    existing = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    depth = measure_disk(existing, effort).depths[0]
    return Disk(
        capacity_bytes=shutil.disk_usage(existing).free,
        read_bytes_per_s=_figure(depth.read_bytes_per_s, "reads"),
        write_bytes_per_s=_figure(depth.write_bytes_per_s, "writes"),
    )


def _figure(measurement: Measurement, what: str) -> Figure:
    if measurement.median is None:
        raise ConfigError(f"{what} could not be measured: {measurement.source}")
    return _measured(measurement.median, f"a short calibration: {measurement.source}")


def _measured(value: float, source: str) -> Figure:
    return Figure(value=value, source=source, measured=True)


REPEATS = 3
HOME = "cpu"
# Of the normal weights that are measured; any deviation gives the same exponents but for a shift.
DEVIATION = 0.02


def codec_rates(prepared: Job, transport: Transport) -> CodecRates | None:
    """Measure the codec of weights on a piece of normal ones; None where they go as they are."""
    if transport.is_raw("weights"):
        return None
    spec = prepared.split.spec
    sizes = [(numel, dtype) for unit in spec.units for _, numel, dtype in encoded_planes(unit, spec.dtype)]
    numel, dtype = max(sizes)
    at_once = min(PIECES_AT_ONCE, -(-numel // PIECE_ELEMENTS))
    return _rates_of(open_codec(transport.weights), _sample(numel, dtype), HOME, _device(prepared), at_once)


def crossing_rates(prepared: Job, transport: Transport) -> dict[str, CodecRates]:
    """Measure the codecs of gradients and activations, which encode on the device, as far as these go encoded."""
    spec, device = prepared.split.spec, _device(prepared)
    samples = {
        "gradients": (max(unit.numel for unit in spec.units), "fp32", HOME),
        "activations": (max(prepared.measured.boundary_bytes) // ITEMSIZE[spec.dtype], spec.dtype, device),
    }
    return {
        crossing: _rates_of(open_codec(transport.spec(crossing).name), _sample(numel, dtype), device, decoder)
        for crossing, (numel, dtype, decoder) in samples.items()
        if numel and not transport.is_raw(crossing)
    }


def _device(prepared: Job) -> str:
    """Return where torch computes for the run: its first device."""
    return str(prepared.machine.devices.torch_device)


def _sample(numel: int, dtype: str) -> Tensor:
    source = torch.randn(min(numel, PIECE_ELEMENTS), generator=torch.Generator().manual_seed(0))
    return (source * DEVIATION).to(TORCH_DTYPE[dtype])


def _rates_of(codec: Codec, sample: Tensor, encoder: str, decoder: str, at_once: int = 1) -> CodecRates:
    """Return what ``codec`` reaches on ``sample``, in bytes of it, encoding on one device and decoding on another.

    As many of its encodings are decoded ``at_once``.
    """
    source = sample.to(encoder)
    room = torch.empty(
        codec.spec.max_bytes(sample.numel(), DTYPE_NAME[sample.dtype]), dtype=torch.uint8, device=encoder
    )
    size = codec.encode(source, room)  # of a device, the first one compiles and allocates
    there = torch.empty(at_once * room.numel(), dtype=torch.uint8, device=decoder)
    there.view(at_once, -1)[:, :size] = room[:size].to(decoder)
    into = torch.empty(at_once * sample.numel(), dtype=sample.dtype, device=decoder)

    def decode() -> None:
        codec.decode_pieces(there, [size] * at_once, into, sample.numel())

    decode()
    return CodecRates(
        encode_bytes_per_s=sample.nbytes / _best_s(lambda: codec.encode(source, room), encoder),
        decode_bytes_per_s=into.nbytes / _best_s(decode, decoder),
    )


def _best_s(work: Callable[[], object], device: str) -> float:
    def done() -> None:
        work()
        synchronize(device)

    return min(_seconds(done) for _ in range(REPEATS))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return max(time.perf_counter() - started, 1e-9)
