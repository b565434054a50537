"""What a step holds in each tier, class by class, and what crosses the links in one step; all exact sums.

Bytes per parameter at home:

========  =====================================================================  ==============
compute   planes                                                                 bytes
========  =====================================================================  ==============
fp32      weights 4, exp_avg 4, exp_avg_sq 4, gradient 4                         16
bf16      weights 2, master 4, exp_avg 4, exp_avg_sq 4, gradient 4               18
fp16      the same                                                               18
split     bf16 weights 2, master_low 2, master_ties 1/8 instead of 6             16.13
split24   bf16 weights 2, master_low 1 instead of 6                              15
moments   bf16 or int8 instead of 8, and no ties                                 4 or 2.03
moment    of SGD and Lion, exp_avg alone                                         half of it
factors   of Adafactor: mean squares of rows and columns instead                 a few thousandths
gradient  bf16, or none at home: clipped by unit or not at all                   2 or 0
frozen    weights only                                                           4 or 2
========  =====================================================================  ==============

So split masters take 12.13 without gradients at home, 6.03 with 8-bit moments, and 5.03 where they are of 24 bits. A
home that commits holds all but the gradient twice, and two commit records before them.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from outsize.codecs.transport import EXACT, Transport, Wire
from outsize.model.sizes.model_spec import ModelSpec
from outsize.optim.optimizer_spec import (
    GRADIENT,
    MASTER,
    MASTER_LOW,
    MASTER_TIES,
    UPDATE_TILE_ELEMENTS,
    WEIGHTS,
    State,
    StateLayout,
    layout_of,
)
from outsize.optim.shares import commit_record_bytes, committed_bytes, home_bytes, home_granule
from outsize.planner.memory.step_bytes import Live, net_bytes, packed_bytes, packed_bytes_of
from outsize.planner.program.stages import Choice, Extent, KeptBytes, bytes_of
from outsize.planner.program.step_layout import StepLayout
from outsize.units import align_up

Tier = Literal["host", "disk"]

NO_CODECS = Transport()
PRODUCTS = "products of Muon"
# A record as it is written, the tables of both sides that it is made from, and a copy while it is.
COMMIT_COPIES = 4
_CLASS_OF = {
    WEIGHTS: "weights",
    MASTER: "master weights",
    MASTER_LOW: "master weights",
    MASTER_TIES: "master weights",
    GRADIENT: "gradients",
}
# Extents of `storage.scratch` are whole sectors.
_EXTENT_BYTES = 4096
# Tensors of what a forward kept lie in one extent, each on a sector of its own; so many where nobody has counted them.
DEFAULT_PARTS = 64
# What a step on the device makes of an element beside its planes: the gradient in fp32, the master where it is split,
# and what tells ties of its halves apart without a wait of the host.
UPDATE_TEMPORARY_BYTES = 18
# Direct reads gain little beyond it, see bench/bench_disk.py, and a checkpoint is in no hurry.
STORE_BUFFER_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What computing the model takes besides its weights, as measured or estimated for one step.

    Attributes:
        boundary_bytes: bytes of the input of each streamed unit for one microbatch, the largest over microbatches.
        forward_workspace_bytes: by unit kind, the most that its forward allocates.
        backward_workspace_bytes: by unit kind, the most that its recompute and backward allocate.
        saved_bytes: by streamed unit, what its backward needs of its forward besides its input, for one microbatch; of
            the last in a step that is cut only. Empty: unknown, and so never kept.
        recompute_s: by streamed unit, seconds that its recompute takes.
        selected_bytes: the same as ``saved_bytes`` of what attention, or attention and products, returned.
        selected_s: the same as ``recompute_s``, of the part of a recompute that is spared where these were kept.
        least_selected_s: the least of it that is worth looking at each operation of a unit.
        num_saved: by streamed unit, tensors that its forward makes for its backward; empty where it is unknown.
        shared_bytes: ids, labels, masks and the like, for one microbatch.
        fixed_bytes: whatever else lies on the device throughout.
        stream_bytes: the same where one more stream multiplies, of its library's workspace.
        bounce_bytes: the same, of buffers for what moves between the device and a disk right below it.
        spare_bytes: what the device should have to spare besides; given up where even the smallest plan leaves none.
        rest_users: units whose backward adds to the gradient of a rest that trains.
    """

    boundary_bytes: tuple[int, ...]
    forward_workspace_bytes: Mapping[str, int] = field(default_factory=dict)
    backward_workspace_bytes: Mapping[str, int] = field(default_factory=dict)
    saved_bytes: tuple[int, ...] = ()
    recompute_s: tuple[float, ...] = ()
    selected_bytes: KeptBytes = field(default_factory=dict)
    selected_s: Mapping[Extent, Sequence[float]] = field(default_factory=dict)
    least_selected_s: float = 0.0
    num_saved: tuple[int, ...] = ()
    shared_bytes: int = 0
    fixed_bytes: int = 0
    stream_bytes: int = 0
    bounce_bytes: int = 0
    spare_bytes: int = 0
    rest_users: frozenset[int] = frozenset()

    @property
    def kept_bytes(self) -> KeptBytes:
        """What forwards of each extent keep, as far as it is known."""
        by_extent = {Extent.WHOLE: self.saved_bytes} if self.saved_bytes else {}
        return {**self.selected_bytes, **by_extent}

    def spared_s(self, extent: Extent, unit: int) -> float:
        """Return what keeping ``extent`` spares the backward of ``unit``; 0 where it is not worth it."""
        recompute_s = self.recompute_s[unit] if self.recompute_s else 0.0
        if extent is Extent.WHOLE:
            return recompute_s
        seconds = min(recompute_s, self.selected_s[extent][unit]) if extent in self.selected_s else 0.0
        return seconds if seconds >= self.least_selected_s else 0.0

    def extent_bytes(self, choice: Choice, unit: int) -> int:
        """Return the room below the device that what ``choice`` keeps of ``unit`` takes for a microbatch."""
        parts = self.num_saved[unit] if self.num_saved else DEFAULT_PARTS
        return align_up(bytes_of(choice, unit, self.kept_bytes), _EXTENT_BYTES) + parts * _EXTENT_BYTES

    @property
    def workspace_bytes(self) -> int:
        """The most that any unit allocates while it runs; units run one after the other."""
        return max(
            (*self.forward_workspace_bytes.values(), *self.backward_workspace_bytes.values()), default=0
        )

    @property
    def largest_kind(self) -> str | None:
        """The kind of the unit that allocates it; None where none is known."""
        both = [*self.forward_workspace_bytes.items(), *self.backward_workspace_bytes.items()]
        return max(both, key=lambda item: item[1])[0] if both else None


__all__ = [
    "Demand",
    "Tier",
    "by_class",
    "home_bytes",
    "memory_table",
    "store_buffer_bytes",
]


def by_class(
    model: ModelSpec,
    state: State,
    *,
    commits: bool = False,
    share_elements: Sequence[int] = (),
    full_planes: Collection[str] = (WEIGHTS,),
    transport: Transport = NO_CODECS,
    resident: Collection[int] = (),
) -> dict[str, int]:
    """Return the bytes of all planes at home by what they are for people; ``commits`` says that it keeps most twice.

    Of several nodes each has ``full_planes`` as they are, and the others of ``share_elements`` elements of each unit.
    Weights that do not train lie in host memory as ``transport`` sends them; what trains of ``resident`` units lies on
    the device.
    """
    layout, parts = layout_of(state), Counter[str]()
    for unit in model.units:
        planes = layout.planes if unit.trainable else {WEIGHTS: layout.planes[WEIGHTS]}
        planes = {} if unit.index in resident else planes
        for name, plane in planes.items():
            twice = commits and unit.trainable and name != GRADIENT
            numel = share_elements[unit.index] if share_elements and name not in full_planes else unit.numel
            parts[_CLASS_OF.get(name, "optimizer state")] += (1 + twice) * plane.bytes_of(unit, numel)
        parts["weights"] -= packed_bytes_of(transport, unit, WEIGHTS, model.dtype)
        for part in unit.frozen:
            parts["frozen weights"] += part.home_bytes
            parts["frozen weights"] -= packed_bytes_of(transport, unit, part.plane, model.dtype)
    return dict(parts)


def products_bytes(model: ModelSpec, state: StateLayout, demand: Demand) -> int:
    """Return what products of Muon take on each device: two rooms, and what their stream does; 0 on the host."""
    room = state.products_room(model)
    return 2 * room + demand.stream_bytes if room else 0


def store_buffer_bytes(model: ModelSpec, home: Tier) -> int:
    """Return what units pass through on their way from ``home`` to a checkpoint: a host home lends them as they lie."""
    largest = max(unit.gradient_bytes + unit.weight_bytes(model.dtype) for unit in model.units)
    return min(STORE_BUFFER_BYTES, largest) if home == "disk" else 0


def resident_state_bytes(model: ModelSpec, state: StateLayout, resident: Collection[int]) -> int:
    """Return what the device holds of ``resident`` units besides their weights and gradients."""
    names = tuple(name for name in state.write_planes if name != WEIGHTS)
    return sum(state.bytes_of(model.units[unit], names=names) for unit in resident)


def update_workspace_bytes(model: ModelSpec, state: StateLayout, resident: Collection[int]) -> int:
    """Return the most that a step of one of ``resident`` units allocates on the device."""
    largest = max((model.units[unit].numel for unit in resident), default=0)
    return UPDATE_TEMPORARY_BYTES * min(largest, UPDATE_TILE_ELEMENTS)


def _device_table(
    demand: Demand, layout: StepLayout, activations: Live, below: Tier, updates: tuple[int, int]
) -> dict[str, int]:
    """Return what the device holds besides optimizer tiles, in bytes by class."""
    resident = sum(layout.weight_bytes[unit] for unit in layout.own_slots)
    resident += sum(layout.gradient_bytes[unit] for unit in layout.own_accumulators)
    return {
        "weight slots": sum(layout.slot_bytes),
        "gradient accumulators": sum(layout.accumulator_bytes),
        "resident": resident,
        "frozen, encoded": layout.held_bytes,
        "optimizer state": updates[0],
        "activations": activations.device_bytes,
        "workspace": max(demand.workspace_bytes, updates[1]),
        "shared": demand.shared_bytes * layout.round_size,
        "fixed": demand.fixed_bytes + demand.bounce_bytes * (below == "disk"),
    }


def _scratch_bytes(layout: StepLayout, boundary_bytes: Sequence[int]) -> int:
    """Return what the room for saved activations takes: equal extents, each as large as the largest needs."""
    largest = max((boundary_bytes[unit] for unit in layout.offload), default=0)
    return len(layout.offload) * layout.round_size * align_up(largest, _EXTENT_BYTES)


def offload_rooms(layout: StepLayout, demand: Demand) -> dict[Extent, tuple[int, int]]:
    """Return what waits below the device of what forwards kept: by extent, how many at once, bytes of the largest."""
    rooms: dict[Extent, tuple[int, int]] = {}
    if not layout.any_leaves:
        return rooms
    for unit in range(len(layout.kept)):
        for choice, times in layout.choices(unit, layout.microbatches_at_once).items():
            if choice.leaves and choice.extent is not None:
                count, size = rooms.get(choice.extent, (0, 0))
                rooms[choice.extent] = (count + times, max(size, demand.extent_bytes(choice, unit)))
    return rooms


def memory_table(
    demand: Demand,
    layout: StepLayout,
    activations: Live,
    lower: Mapping[str, Mapping[str, int]],
    below: Tier,
    codecs: tuple[int, int],
    products: int,
    updates: tuple[int, int] = (0, 0),
) -> dict[str, dict[str, int]]:
    """Return bytes by tier and class; classes without bytes are left out.

    Args:
        demand: of a microbatch.
        layout: of the step.
        activations: most that are live at once.
        lower: what `bytes_below` says; its buffers in host memory are the device's own where the disk is below it.
        below: the tier next to the device.
        codecs: what they take on the device and in host memory.
        products: what `products_bytes` says.
        updates: what `resident_state_bytes` and `update_workspace_bytes` say.
    """
    table: dict[str, dict[str, int]] = {"device": {}, "host": {}, "disk": {}}
    table["device"] = {**_device_table(demand, layout, activations, below, updates), "codecs": codecs[0]}
    table["device"][PRODUCTS] = products
    table["host"]["encoded weights"] = codecs[1]
    table[below]["saved activations"] = _scratch_bytes(layout, demand.boundary_bytes)
    rooms = offload_rooms(layout, demand).values() if layout.kept else ()
    table[below]["offloaded activations"] = sum(count * size for count, size in rooms)
    for tier, classes in lower.items():
        has_mirror = tier == "host" and below == "disk"
        table["device" if has_mirror else tier] |= classes
    return {tier: {name: size for name, size in sizes.items() if size} for tier, sizes in table.items()}


def bytes_below(
    model: ModelSpec,
    layout: StepLayout,
    *,
    home: Tier,
    tile_elements: int,
    host_buffer_bytes: int,
    transport: Transport = NO_CODECS,
    state: StateLayout | None = None,
    wire: Wire = EXACT,
) -> dict[str, dict[str, int]]:
    """Return what lies below devices whatever a step computes, by tier and class.

    That is the home, and in host memory buffers for tiles, whole units, other nodes and checkpoints.
    """
    state_layout = layout_of(model.dtype if state is None else state)
    buffers = {
        **disk_buffer_bytes(model, layout, home, tile_elements, state_layout),
        "host buffers": layout.num_host_buffers * host_buffer_bytes,
        **net_bytes(model, layout, wire, home, state_layout),
    }
    table: dict[str, dict[str, int]] = {"host": buffers, "disk": {}}
    table[home]["home"] = state_bytes(model, layout, home, transport, state_layout)
    return table


def disk_buffer_bytes(
    model: ModelSpec, layout: StepLayout, home: Tier, tile_elements: int, state: State
) -> dict[str, int]:
    """Return what memory a home takes for its optimizer tiles, commits and checkpoints, in bytes by class."""
    state_layout = layout_of(state)
    tiles = "optimizer tiles" if layout.tiles_on_disk else "gradient ring"
    granule = home_granule(model, tile_elements, layout.num_nodes)
    record = commit_record_bytes(model, granule, state_layout.planes) if layout.commits else 0
    return {
        tiles: layout.num_tile_buffers
        * state_layout.tile_bytes(model, tile_elements, with_state=layout.tiles_on_disk),
        "optimizer scratch": state_layout.scratch_bytes(model),
        "checkpoint buffer": store_buffer_bytes(model, home),
        "commits": COMMIT_COPIES * record,
    }


def state_bytes(model: ModelSpec, layout: StepLayout, home: Tier, transport: Transport, state: State) -> int:
    """Return the bytes of a home: all units, those that change twice where it commits."""
    planes = layout_of(state)
    num_elements = layout.own_elements or tuple(unit.numel for unit in model.units)
    whole_planes = layout.whole_planes
    if layout.commits:
        twice = sum(
            committed_bytes(unit, planes, num_elements[unit.index], whole_planes) for unit in model.units
        )
        return twice + 2 * commit_record_bytes(model, planes=planes.planes)
    size = sum(home_bytes(unit, planes, num_elements[unit.index], whole_planes) for unit in model.units)
    size -= sum(planes.bytes_of(model.units[unit]) for unit in layout.resident)
    return size - packed_bytes(transport, model) if home == "host" else size


def gradients_at_home(
    state: StateLayout,
    *,
    clip: bool,
    num_workers: int,
    nodes: int,
    transport: Transport,
    rounds: bool = False,
) -> StateLayout:
    """Return ``state`` without a gradient at home where a unit can step on its own as its gradient arrives.

    It cannot where the global norm is to be known first, where gradients are summed at home from round to round, as
    several workers do, where nodes reduce whole gradients, and where gradients arrive encoded.
    """
    leave_as_one = clip or rounds or num_workers > 1 or nodes > 1 or not transport.is_raw("gradients")
    return state if leave_as_one else replace(state, gradients="none")
