"""``machine.json``: what a probe found, in a form that is checked when it is read back.

Every field that is a number of its own says its unit in its name, and every fact and measurement where it comes
from (`outsize.hardware.cgroup`). A change that an older reader would misread raises `SCHEMA_VERSION`.

Two probes of a machine, measurement by measurement.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ValidationError

from outsize.accelerators import is_accelerator
from outsize.errors import ConfigError
from outsize.hardware.cgroup import Fact, Measurement, Record
from outsize.hardware.gpus import Inventory
from outsize.hardware.link_fit import AllReducePoint, AllReduceRates, LinkFit
from outsize.hardware.topology import NumaRates, Overlap, PeerLink, TogetherRates

SCHEMA_VERSION: Final = 2

Direction = Literal["up", "down", "both"]
Mode = Literal["quick", "full"]


class HostRates(Record):
    """What processor and host memory reach together.

    Attributes:
        dram_copy_bytes_per_s: of ``a = b``, bytes read and bytes written together.
        dram_triad_bytes_per_s: of ``a = b + s * c``, counted the same way; STREAM's definition.
        adamw_params_per_s: parameters that the engine's optimizer steps, by compute dtype.
        numa: copies of memory on each node by the processors of each node; none on a machine of one.
    """

    dram_copy_bytes_per_s: Measurement
    dram_triad_bytes_per_s: Measurement
    adamw_params_per_s: dict[str, Measurement]
    numa: tuple[NumaRates, ...] = ()


class DepthRates(Record):
    """A disk with a number of requests in flight.

    Attributes:
        queue_depth: requests in flight.
        read_bytes_per_s: sequential reads.
        write_bytes_per_s: sequential writes over allocated blocks.
    """

    queue_depth: int
    read_bytes_per_s: Measurement
    write_bytes_per_s: Measurement


class DiskRates(Record):
    """A disk by queue depth.

    Attributes:
        directory: where.
        direct: whether the file system took direct I/O; else the page cache was in between.
        request_bytes: size of one request.
        depths: from the shallowest to the deepest.
        sustained_write_bytes_per_s: of writes without a pause at the deepest; a drive may slow down when its cache is
            full. Samples are in the order of time.
    """

    directory: str
    direct: Fact
    request_bytes: int
    depths: tuple[DepthRates, ...]
    sustained_write_bytes_per_s: Measurement = Measurement.untried()


class LinkPoint(Record):
    """Copies of one size.

    Attributes:
        num_bytes: of one copy; with both directions at once, of each.
        held_out: whether the fit has not seen it.
        copy_s: time of one copy, or of two at once.
    """

    num_bytes: int
    held_out: bool
    copy_s: Measurement


class LinkRates(Record):
    """One way of moving bytes between host and device.

    Attributes:
        path: ``pinned`` or ``pageable`` host memory and a GPU; ``dram copy`` where the CPU is the device.
        direction: ``up`` to the device, ``down`` from it, or ``both`` at once.
        points: from the smallest size to the largest.
        fit: None where nothing was measured.
        note: what the path is, or why there is no fit.
    """

    path: Literal["pinned", "pageable", "dram copy"]
    direction: Direction
    points: tuple[LinkPoint, ...]
    fit: LinkFit | None
    note: str


class DeviceRates(Record):
    """Measured rates of one device: compute, memory and links.

    Attributes:
        device: ``cpu`` or ``cuda:i``.
        name: of the part.
        num_sms: streaming multiprocessors; not measured on a CPU.
        memory_bytes: its memory; on a CPU what this process may use.
        memory_triad_bytes_per_s: of ``a = b + s * c`` in its own memory; on a CPU the host's stands for it.
        matmul_flops_per_s: of large square products, 2 n³ operations each, by dtype.
        attention_flops_per_s: of causal attention forward, 2 s² h d operations, by dtype.
        links: by path and direction.
        pcie_generation_loaded: negotiated while copies were going on.
        pcie_lanes_loaded: the same.
        overlap: of copies and compute; None where an older probe did not try.
        numa: copies from memory of each node; none on a machine of one.
    """

    device: str
    name: str
    num_sms: Fact
    memory_bytes: Fact
    memory_triad_bytes_per_s: Measurement
    matmul_flops_per_s: dict[str, Measurement]
    attention_flops_per_s: dict[str, Measurement]
    links: tuple[LinkRates, ...]
    pcie_generation_loaded: Fact = Fact.unread()
    pcie_lanes_loaded: Fact = Fact.unread()
    overlap: Overlap | None = None
    numa: tuple[NumaRates, ...] = ()

    @property
    def accelerated(self) -> bool:
        """Whether it is an accelerator, with memory of its own."""
        return is_accelerator(self.device)


class DataRates(Record):
    """How fast text becomes tokens, and tokens batches.

    Attributes:
        tokenizer: which one.
        tokenizer_tokens_per_s: text to token ids, by number of threads.
        loader_tokens_per_s: stored tokens to batches of the engine's loader, by number of threads.
    """

    tokenizer: Fact
    tokenizer_tokens_per_s: dict[str, Measurement]
    loader_tokens_per_s: dict[str, Measurement]


class ProbedCodec(Record):
    """What one codec makes of one kind of tensors of a given file.

    Attributes:
        kind: weights, gradients, moments or activations, by the names of the tensors.
        codec: its name.
        dtype: of the elements.
        num_elements: looked at.
        ratio: encoded bytes by raw bytes.
        bound: least ratio of any lossless code of single exponents.
        largest_error: of an element, as a share of the largest magnitude; 0 where lossless.
        relative_error: 2-norm of the error by that of the elements.
        encode_bytes_per_s: of raw bytes, on one core.
        decode_bytes_per_s: the same.
    """

    kind: str
    codec: str
    dtype: str
    num_elements: int
    ratio: Fact
    bound: Fact
    largest_error: Fact
    relative_error: Fact
    encode_bytes_per_s: Measurement
    decode_bytes_per_s: Measurement


class MachineFile(Record):
    """All that a probe found.

    Attributes:
        schema_version: `SCHEMA_VERSION` of the writer.
        created_at: time of the probe, UTC, ISO 8601.
        mode: ``quick`` or ``full``.
        duration_s: how long the probe took.
        inventory: what the machine has.
        host: rates of processor and memory.
        disks: rates of the candidate directories.
        devices: rates of each device; the CPU is one of its own only where there is no GPU.
        together: copies of all GPUs at once; none where there are fewer than two.
        peers: copies between GPUs, each ordered pair.
        all_reduce: sums over several processes; None where it was not tried.
        data: tokenizer and loader; None where an older probe did not try.
        codecs: on the tensors of a given file; none where none was given.
        left_out: parts for which a probe's time did not suffice; empty for none.
    """

    schema_version: Literal[2] = SCHEMA_VERSION
    created_at: str
    mode: Mode
    duration_s: float
    inventory: Inventory
    host: HostRates
    disks: tuple[DiskRates, ...]
    devices: tuple[DeviceRates, ...]
    together: tuple[TogetherRates, ...] = ()
    peers: tuple[PeerLink, ...] = ()
    all_reduce: AllReduceRates | None = None
    data: DataRates | None = None
    codecs: tuple[ProbedCodec, ...] = ()
    left_out: Fact = Fact.unread()

    def to_json(self) -> str:
        """Return the file's text; `parse` reads it back."""
        return self.model_dump_json(indent=1) + "\n"


def parse(text: str) -> MachineFile:
    """Return the machine that ``text`` describes.

    Raises:
        ConfigError: not such a file, or one of another schema version.
    """
    try:
        fields = json.loads(text)
        version = fields["schema_version"]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            "not what `outsize probe` found; write that with `outsize probe --output FILE` (the machine.json of a run "
            "holds the rates of its lanes alone, for `outsize plan`)"
        ) from error
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"this machine.json has schema version {version}, not {SCHEMA_VERSION}; run `outsize probe` again"
        )
    try:
        return MachineFile.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"machine.json: {where}: {first['msg']}; run `outsize probe` again") from error


def read(path: Path) -> MachineFile:
    """Return the machine that the file at ``path`` describes.

    Raises:
        ConfigError: it cannot be read, or see `parse`.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def readings(part: object, name: str = "") -> Iterator[tuple[str, Fact | Measurement]]:
    """Yield every fact and measurement below ``part`` with its dotted name, in the order of the file."""
    children: list[tuple[str, object]] = []
    if isinstance(part, Fact | Measurement):
        yield name, part
    elif isinstance(part, LinkRates):
        # A path is known by what it is: sizes stand for themselves.
        yield from ((f"{name}.{point.num_bytes}.copy_s", point.copy_s) for point in part.points)
    elif isinstance(part, BaseModel):
        children = [(key, getattr(part, key)) for key in type(part).model_fields]
    elif isinstance(part, dict):
        children = [(str(key), value) for key, value in part.items()]
    elif isinstance(part, tuple):
        children = [(_label(value, index), value) for index, value in enumerate(part)]
    for key, value in children:
        yield from readings(value, f"{name}.{key}" if name else key)


def _label(part: object, index: int) -> str:
    match part:
        case DiskRates():
            return part.directory
        case DepthRates():
            return f"depth {part.queue_depth}"
        case DeviceRates():
            return part.device
        case LinkRates():
            return f"{part.path} {part.direction}"
        case NumaRates():
            return f"memory of node {part.memory_node} by {part.by}"
        case TogetherRates():
            return f"{part.device} {part.direction}"
        case PeerLink():
            return f"{part.target} from {part.source}"
        case ProbedCodec():
            return f"{part.codec} {part.kind} {part.dtype}"
        case AllReducePoint():
            return f"{part.num_bytes}"
    return str(index)


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
            old_rate, former_spread = old[name]
            apart = abs(value - old_rate) / old_rate
            changes.append(
                Change(
                    name=name,
                    before=old_rate,
                    now=value,
                    ratio=value / old_rate,
                    is_significant=apart > max(_LEAST_SHARE, spread + former_spread),
                )
            )
    return tuple(changes)


def _rates(probed: MachineFile) -> dict[str, tuple[float, float]]:
    rates = {
        name: (reading.median, reading.spread)
        for part in ("host", "disks", "devices", "together", "peers", "all_reduce", "data", "codecs")
        for name, reading in readings(getattr(probed, part), part)
        if isinstance(reading, Measurement)
        and reading.median is not None
        and not name.endswith((".copy_s", ".seconds"))
    }
    for device in probed.devices:
        for link in device.links:
            if link.fit is not None:
                name = f"devices.{device.device}.links.{link.path} {link.direction}.bytes_per_s"
                rates[name] = (link.fit.bytes_per_s, link.fit.residual_median)
    return rates
