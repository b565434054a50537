"""What crosses the links in one step, counted op by op; all exact sums."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outsize.codecs.transport import Transport
from outsize.model.sizes.model_spec import ITEMSIZE, ModelSpec
from outsize.optim.optimizer_spec import ITEM_BYTES, StateLayout, layout_of
from outsize.planner.memory.activation_liveness import NOTHING
from outsize.planner.memory.link_bytes import activation_bytes, gradient_bytes, load_bytes
from outsize.planner.memory.memory_table import NO_CODECS, Tier
from outsize.planner.program.activation_policy import KeptBytes, bytes_of
from outsize.planner.program.ops import Kind, Op
from outsize.planner.program.program import Program
from outsize.planner.program.step_layout import StepLayout


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that cross links in one step.

    Attributes:
        up: towards the device, from the tier below it.
        down: away from the device.
        disk_read: from disk, wherever to.
        disk_written: to disk, wherever from.
        across: from the memory of one device to that of another.
    """

    up: int = 0
    down: int = 0
    disk_read: int = 0
    disk_written: int = 0
    across: int = 0


def count_traffic(
    program: Program,
    model: ModelSpec,
    layout: StepLayout,
    boundary_bytes: Sequence[int],
    *,
    home: Tier,
    below: Tier,
    tile_elements: int,
    transport: Transport = NO_CODECS,
    state: StateLayout | None = None,
    kept_bytes: KeptBytes = NOTHING,
) -> Traffic:
    """Return the bytes that ``program`` moves; the arguments are those of its plan."""
    op_bytes = OpBytes(
        model=model,
        layout=layout,
        boundary_bytes=boundary_bytes,
        home=home,
        below=below,
        tile_elements=tile_elements,
        transport=transport,
        state=layout_of(model.dtype if state is None else state),
        kept_bytes=kept_bytes,
    )
    moved: Counter[str] = Counter()
    for op in program:
        for way, num_bytes in op_bytes.moved_by(op):
            moved[way] += num_bytes
    return Traffic(**moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpBytes:
    """How many bytes each op of a plan moves, and from where to where; attributes are those of the plan."""

    model: ModelSpec
    layout: StepLayout
    boundary_bytes: Sequence[int]
    home: Tier
    below: Tier
    tile_elements: int
    transport: Transport
    state: StateLayout
    kept_bytes: KeptBytes

    def moved_by(self, op: Op) -> Iterator[tuple[str, int]]:
        """Yield the ways that an op moves something, fields of `Traffic`, and how many bytes."""
        unit = op.unit or 0
        if op.kind is Kind.LOAD:
            yield "up", self.on_link(op)
            if self.below == "disk" == self.home:
                yield "disk_read", self._read_bytes(unit)
        elif op.kind is Kind.SUM:
            yield "up", self.on_link(op)
            if self.home == "disk":
                yield "disk_read", self.layout.gradient_bytes[unit]
        elif op.kind is Kind.GRAD:
            yield "down", self.on_link(op)
            # One in a host buffer waits there for its REDUCE.
            if op.tile is None and self.below == "disk" == self.home and op.buffer is None:
                yield "disk_written", self._rounded(unit)
        elif op.kind in (Kind.SAVE, Kind.SEND, Kind.FETCH, Kind.RECV, Kind.OFFLOAD, Kind.ONLOAD):
            leaves = op.kind in (Kind.SAVE, Kind.SEND, Kind.OFFLOAD)
            yield "down" if leaves else "up", self.on_link(op)
            if self.below == "disk":  # where they lie as they are
                yield "disk_written" if leaves else "disk_read", self._activations(op)
        elif op.kind is Kind.STEP:
            _, products = self.state.products_of(self.model.units[unit])
            yield "up", products
            yield "down", products
        elif op.kind in (Kind.PASS, Kind.RETURN):
            yield "across", self.boundary_bytes[unit]
        elif op.kind in (Kind.REDUCE, Kind.GATHER) and self.home == "disk":
            yield from self._exchanged(op, unit)
        elif op.kind in (Kind.READ, Kind.WRITE):
            yield "disk_read" if op.kind is Kind.READ else "disk_written", self.on_disk(op)

    def on_link(self, op: Op) -> int:
        """Return the bytes of an op on the link of its worker, as a codec writes them where there is one."""
        unit = op.unit or 0
        if op.kind is Kind.LOAD:
            stays = unit in self.layout.stays
            return load_bytes(self.transport, self.model.units[unit], self.model.dtype, stays=stays)
        if op.kind is Kind.SUM:
            return self.layout.gradient_bytes[unit]
        if op.kind is Kind.GRAD:
            if op.tile is not None:
                return 4 * self.elements(op)
            item_bytes = ITEM_BYTES.get(
                self.state.gradients, 4
            )  # those that are rounded leave in fewer bytes
            return gradient_bytes(self.transport, self.layout.gradient_bytes[unit]) * item_bytes // 4
        size = self._activations(op)
        encoded = op.kind in (Kind.SAVE, Kind.FETCH)  # gradients that workers hand over go as they are
        return activation_bytes(self.transport, size, self.model.dtype) if encoded else size

    def on_disk(self, op: Op) -> int:
        """Return the bytes of a READ or a WRITE."""
        unit = self.model.units[op.unit or 0]
        if op.tile is not None:
            planes = self.state.read_planes if op.kind is Kind.READ else self.state.write_planes
            return self.state.bytes_of(unit, self.elements(op), planes)
        return self._read_bytes(op.unit or 0) if op.kind is Kind.READ else self._rounded(op.unit or 0)

    def elements(self, op: Op) -> int:
        """Return the elements that an op of a unit, or of a tile, is about; of several nodes, those of their share."""
        unit = op.unit or 0
        numel = self.layout.own_elements[unit] if self.layout.own_elements else self.model.units[unit].numel
        return numel if op.tile is None else min(self.tile_elements, numel - op.tile * self.tile_elements)

    def _read_bytes(self, index: int) -> int:
        """Return the bytes of a unit's weights that are read for a LOAD, once what stays is on the device."""
        unit, dtype = self.model.units[index], self.model.dtype
        return unit.trained_bytes(dtype) if index in self.layout.stays else unit.link_bytes(dtype)

    def _exchanged(self, op: Op, unit: int) -> Iterator[tuple[str, int]]:
        """Yield disk bytes of an exchange on this node: summed gradient, own weights, gathered weights."""
        own, itemsize = self.layout.own_elements[unit], ITEMSIZE[self.model.dtype]
        if op.kind is Kind.REDUCE:
            yield "disk_written", 4 * own
        else:
            yield "disk_read", own * itemsize
            yield "disk_written", (self.model.units[unit].numel - own) * itemsize

    def _activations(self, op: Op) -> int:
        """Bytes of activations, or of their gradients, that leave the device or come back, as they are."""
        unit = op.unit or 0
        if op.kind in (Kind.OFFLOAD, Kind.ONLOAD):
            return bytes_of(self.layout.choice(unit, op.microbatch or 0), unit, self.kept_bytes)
        return self.boundary_bytes[unit]

    def _rounded(self, unit: int) -> int:
        """Bytes of the gradient of a unit in the dtype that it waits at home in."""
        return self.layout.gradient_bytes[unit] * ITEM_BYTES.get(self.state.gradients, 4) // 4
