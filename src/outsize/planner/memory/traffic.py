"""Count the bytes that cross links in one step, op by op; exact sums."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outsize.codecs.transport import Transport
from outsize.model.sizes.model_spec import ITEMSIZE, ModelSpec
from outsize.optim.optimizer_spec import ITEM_BYTES, StateLayout
from outsize.planner.memory.memory_table import Tier
from outsize.planner.memory.step_bytes import activation_bytes, encoded_bytes, gradient_bytes, load_bytes
from outsize.planner.program.program import Op, Program
from outsize.planner.program.stages import KeptBytes, bytes_of
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.program.table import ACTIVATIONS, AT_REST


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

    def traffic(self, program: Program) -> Traffic:
        """Return the bytes that the ops of ``program`` move."""
        moved: Counter[str] = Counter()
        for op in program:
            for way, num_bytes in self.moved_by(op):
                moved[way] += num_bytes
        return Traffic(**moved)

    def moved_by(self, op: Op) -> Iterator[tuple[str, int]]:
        """Yield the ways that an op moves something, fields of `Traffic`, and how many bytes."""
        unit, row = op.unit or 0, op.row
        if row.lane in ("up", "down"):
            yield row.lane, self.on_link(op)
            yield "disk_read" if row.lane == "up" else "disk_written", self._beyond_link(op)
        elif row.lane == "peer":
            yield "across", self.boundary_bytes[unit]
        elif row.carries == "products":
            _, products = self.state.products_of(self.model.units[unit])
            yield "up", products
            yield "down", products
        elif row.is_net and row.carries and self.home == "disk":
            yield from self._exchanged(op, unit)
        elif row.price == "disk":
            way = "disk_read" if row.lane in ("read", "read:units") else "disk_written"
            yield way, self.on_disk(op)

    def on_link(self, op: Op) -> int:
        """Return the bytes of an op on the link of its worker, as a codec writes them where there is one."""
        unit, content = op.unit or 0, op.row.carries
        if content in AT_REST and unit in self.layout.resident:
            return 0
        if content == "weights":
            stays = unit in self.layout.stays
            size = load_bytes(self.transport, self.model.units[unit], self.model.dtype, stays=stays)
            return size - encoded_bytes(self.model.units[unit]) * (unit in self.layout.encoded)
        if content == "sum":
            return self.layout.gradient_bytes[unit]
        if content == "gradient":
            if op.tile is not None:
                return 4 * self.elements(op)
            # Those that are rounded leave in fewer bytes.
            item_bytes = ITEM_BYTES.get(self.state.gradients, 4)
            return gradient_bytes(self.transport, self.layout.gradient_bytes[unit]) * item_bytes // 4
        size = self._activations(op)
        # Gradients that workers hand over go as they are, and so does what was kept.
        return activation_bytes(self.transport, size, self.model.dtype) if content == "input" else size

    def on_disk(self, op: Op) -> int:
        """Return the bytes of a READ or a WRITE."""
        unit, row = self.model.units[op.unit or 0], op.row
        if row.carries == "state":
            planes = self.state.read_planes if row.lane == "read" else self.state.write_planes
            return self.state.bytes_of(unit, self.elements(op), planes)
        return self._read_bytes(op.unit or 0) if row.carries == "weights" else self._rounded(op.unit or 0)

    def _beyond_link(self, op: Op) -> int:
        """Bytes of what crosses a link that go on to the disk, or come from it."""
        unit, content = op.unit or 0, op.row.carries
        if content in ACTIVATIONS:
            return self._activations(op) if self.below == "disk" else 0  # where they lie as they are
        if self.home != "disk":
            return 0
        if content == "sum":
            return self.layout.gradient_bytes[unit]
        if self.below != "disk":
            return 0
        if content == "weights":
            return self._read_bytes(unit)
        # One in a host buffer waits there for its REDUCE.
        return self._rounded(unit) if op.tile is None and op.buffer is None else 0

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
        own_elements, itemsize = self.layout.own_elements[unit], ITEMSIZE[self.model.dtype]
        if op.row.carries == "gradient":
            yield "disk_written", 4 * own_elements
        else:
            yield "disk_read", own_elements * itemsize
            yield "disk_written", (self.model.units[unit].numel - own_elements) * itemsize

    def _activations(self, op: Op) -> int:
        """Bytes of activations, or of their gradients, that leave the device or come back, as they are."""
        unit = op.unit or 0
        if op.row.carries == "kept":
            return bytes_of(self.layout.choice(unit, op.microbatch or 0), unit, self.kept_bytes)
        return self.boundary_bytes[unit]

    def _rounded(self, unit: int) -> int:
        """Bytes of the gradient of a unit in the dtype that it waits at home in."""
        return self.layout.gradient_bytes[unit] * ITEM_BYTES.get(self.state.gradients, 4) // 4
