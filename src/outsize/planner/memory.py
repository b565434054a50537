"""What a step holds in each tier, class by class, and what crosses the links in one step; all exact sums.

Bytes per parameter at home, the gradient plane included:

========  ===================================================================  =====
compute   planes                                                               bytes
========  ===================================================================  =====
fp32      weights 4, exp_avg 4, exp_avg_sq 4, gradient 4                          16
bf16      weights 2, master 4, exp_avg 4, exp_avg_sq 4, gradient 4                18
fp16      the same                                                                18
frozen    weights only                                                        4 or 2
========  ===================================================================  =====

A home that commits holds all of them but the gradient twice, 28 and 32 bytes, and two commit records before them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from outsize.codecs.transport import Transport
from outsize.codecs.wire import EXACT, Wire
from outsize.model.spec import ITEMSIZE, ModelSpec, UnitSpec
from outsize.optim.shares import home_granule
from outsize.optim.spec import (
    bytes_per_parameter,
    commit_record_bytes,
    committed_bytes,
    planes_for,
    step_read_planes,
    step_write_planes,
)
from outsize.planner.layout import StepLayout
from outsize.planner.liveness import Live
from outsize.planner.net_memory import net_bytes
from outsize.planner.ops import Kind, Op
from outsize.planner.program import Program
from outsize.planner.transport import (
    activation_bytes,
    device_bytes,
    gradient_bytes,
    host_bytes,
    load_bytes,
    packed_bytes,
)
from outsize.units import align_up

Tier = Literal["host", "disk"]

NO_CODECS = Transport()
# A record as it is written, the tables of both sides that it is made from, and a copy while it is.
COMMIT_COPIES = 4
# Extents of `storage.scratch` are whole sectors.
_EXTENT_BYTES = 4096
# Direct reads gain little beyond it, see bench/bench_disk.py, and a checkpoint is in no hurry.
STORE_BUFFER_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What computing the model takes besides its weights, as measured or estimated for one step.

    Attributes:
        boundary_bytes: bytes of the input of each streamed unit for one microbatch, the largest over microbatches.
        forward_workspace_bytes: by unit kind, the most that its forward allocates.
        backward_workspace_bytes: by unit kind, the most that its recompute and backward allocate.
        saved_bytes: by streamed unit, what its backward needs of its forward besides its input, for one microbatch; 0
            for the last, whose backward follows at once. Empty: unknown, and so never kept.
        recompute_s: by streamed unit, how long its recompute takes beside the others', in any unit.
        shared_bytes: ids, labels, masks and the like, for all microbatches.
        fixed_bytes: whatever else lies on the device throughout.
    """

    boundary_bytes: tuple[int, ...]
    forward_workspace_bytes: Mapping[str, int] = field(default_factory=dict)
    backward_workspace_bytes: Mapping[str, int] = field(default_factory=dict)
    saved_bytes: tuple[int, ...] = ()
    recompute_s: tuple[float, ...] = ()
    shared_bytes: int = 0
    fixed_bytes: int = 0

    @property
    def workspace_bytes(self) -> int:
        """The most that any unit allocates while it runs; units run one after the other."""
        return max(
            (*self.forward_workspace_bytes.values(), *self.backward_workspace_bytes.values()), default=0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that cross links in one step.

    Attributes:
        up: towards the device, from the tier below it.
        down: away from the device.
        disk_read: from disk, wherever to.
        disk_written: to disk, wherever from.
    """

    up: int = 0
    down: int = 0
    disk_read: int = 0
    disk_written: int = 0


def home_bytes(unit: UnitSpec, dtype: str, own_elements: int | None = None) -> int:
    """Return the bytes of ``unit`` at home: weights, and where it trains master, moments and gradient.

    Of several nodes each has all weights, and the others of ``own_elements`` only.
    """
    if not unit.trainable:
        return unit.link_bytes(dtype)
    own = unit.numel if own_elements is None else own_elements
    state = own * (bytes_per_parameter(dtype) - ITEMSIZE[dtype])
    return unit.numel * ITEMSIZE[dtype] + state + sum(part.home_bytes for part in unit.frozen)


def store_buffer_bytes(model: ModelSpec, home: Tier) -> int:
    """Return what units pass through on their way from ``home`` to a checkpoint: a host home lends them as they lie."""
    largest = max(unit.gradient_bytes + unit.weight_bytes(model.dtype) for unit in model.units)
    return min(STORE_BUFFER_BYTES, largest) if home == "disk" else 0


def _device_table(demand: Demand, layout: StepLayout, activations: Live) -> dict[str, int]:
    """Return what the device holds besides optimizer tiles, in bytes by class."""
    resident = 0
    if layout.rest is not None:
        resident = layout.weight_bytes[layout.rest]
        resident += layout.gradient_bytes[layout.rest] * layout.rest_trains
    return {
        "weight slots": sum(layout.slot_bytes),
        "gradient accumulators": sum(layout.accumulator_bytes),
        "resident": resident,
        "activations": activations.device_bytes,
        "workspace": demand.workspace_bytes,
        "shared": demand.shared_bytes,
        "fixed": demand.fixed_bytes,
    }


def _scratch_bytes(layout: StepLayout, boundary_bytes: Sequence[int]) -> int:
    """Return what the room for saved activations takes: equal extents, each as large as the largest needs."""
    largest = max((boundary_bytes[unit] for unit in layout.offload), default=0)
    return len(layout.offload) * layout.num_microbatches * align_up(largest, _EXTENT_BYTES)


def memory_table(
    model: ModelSpec,
    demand: Demand,
    layout: StepLayout,
    activations: Live,
    *,
    home: Tier,
    below: Tier,
    tile_elements: int,
    host_buffer_bytes: int,
    transport: Transport = NO_CODECS,
    wire: Wire = EXACT,
) -> dict[str, dict[str, int]]:
    """Return bytes by tier and class; classes without bytes are left out.

    Buffers for tiles, whole units, other nodes and checkpoints lie in host memory, which is the device's own where the
    disk is below it.
    """
    table: dict[str, dict[str, int]] = {"device": {}, "host": {}, "disk": {}}
    table["device"] = _device_table(demand, layout, activations)
    ring = layout.num_tile_buffers * tile_elements * bytes_per_parameter(model.dtype)
    buffers = table["device" if below == "disk" else "host"]
    buffers["optimizer tiles"] = ring
    buffers["checkpoint buffer"] = store_buffer_bytes(model, home)
    if layout.commits:
        record = commit_record_bytes(model, home_granule(model, tile_elements, layout.num_nodes))
        buffers["commits"] = COMMIT_COPIES * record
    table["device"]["codecs"] = device_bytes(transport, model, demand.boundary_bytes)
    table["host"]["encoded weights"] = host_bytes(transport, model)
    buffers["host buffers"] = layout.num_host_buffers * host_buffer_bytes
    buffers |= net_bytes(model, layout, wire, home)
    table[below]["saved activations"] = _scratch_bytes(layout, demand.boundary_bytes)
    own = layout.own_elements or tuple(unit.numel for unit in model.units)
    table[home]["home"] = sum(home_bytes(unit, model.dtype, own[unit.index]) for unit in model.units)
    if home == "host":
        table["host"]["home"] -= packed_bytes(transport, model)
    if layout.commits:
        kept = sum(committed_bytes(unit, model.dtype, own[unit.index]) for unit in model.units)
        table[home]["home"] = kept + 2 * commit_record_bytes(model)
    return {tier: {name: size for name, size in found.items() if size} for tier, found in table.items()}


def count_traffic(
    program: Program,
    model: ModelSpec,
    layout: StepLayout,
    boundary_bytes: tuple[int, ...],
    *,
    home: Tier,
    below: Tier,
    tile_elements: int,
    transport: Transport = NO_CODECS,
) -> Traffic:
    """Return the bytes that ``program`` moves, counted op by op."""
    moved: Counter[str] = Counter()
    planes = planes_for(model.dtype)
    read_bytes = sum(planes[plane] for plane in step_read_planes(model.dtype))
    written_bytes = sum(planes[plane] for plane in step_write_planes(model.dtype))

    def elements(op: Op) -> int:
        unit = op.unit or 0
        numel = layout.own_elements[unit] if layout.own_elements else model.units[unit].numel
        return min(tile_elements, numel - (op.tile or 0) * tile_elements)

    for op in program:
        unit = op.unit or 0
        loaded = model.units[unit].link_bytes(model.dtype)
        on_disk = below == "disk" and home == "disk"
        if op.kind is Kind.LOAD:
            moved["up"] += load_bytes(transport, model.units[unit], model.dtype)
            moved["disk_read"] += loaded * on_disk
        elif op.kind is Kind.SUM:
            moved["up"] += layout.gradient_bytes[unit]
        elif op.kind is Kind.GRAD:
            moved["down"] += gradient_bytes(transport, layout.gradient_bytes[unit])
            moved["disk_written"] += layout.gradient_bytes[unit] * on_disk
        elif op.kind in (Kind.SAVE, Kind.SEND):
            moved["down"] += activation_bytes(transport, boundary_bytes[unit], model.dtype)
            moved["disk_written"] += boundary_bytes[unit] * (below == "disk")
        elif op.kind in (Kind.FETCH, Kind.RECV):
            moved["up"] += activation_bytes(transport, boundary_bytes[unit], model.dtype)
            moved["disk_read"] += boundary_bytes[unit] * (below == "disk")
        elif op.kind is Kind.READ and op.tile is None:
            moved["disk_read"] += loaded
        elif op.kind is Kind.READ:
            moved["disk_read"] += elements(op) * read_bytes
        elif op.kind is Kind.WRITE and op.tile is None:
            moved["disk_written"] += layout.gradient_bytes[unit]
        elif op.kind is Kind.WRITE:
            moved["disk_written"] += elements(op) * written_bytes
    return Traffic(**moved)
