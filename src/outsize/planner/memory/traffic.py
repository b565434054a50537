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
    kept = layout_of(model.dtype if state is None else state)
    count = _Count(model, layout, boundary_bytes, home, below, tile_elements, transport, kept, kept_bytes)
    moved: Counter[str] = Counter()
    for op in program:
        for way, num_bytes in count.moved_by(op):
            moved[way] += num_bytes
    return Traffic(**moved)


@dataclass(frozen=True, slots=True)
class _Count:
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
            yield "up", load_bytes(self.transport, self.model.units[unit], self.model.dtype)
            if self.below == "disk" == self.home:
                yield "disk_read", self._loaded(unit)
        elif op.kind is Kind.SUM:
            yield "up", self.layout.gradient_bytes[unit]
            if self.home == "disk":
                yield "disk_read", self.layout.gradient_bytes[unit]
        elif op.kind is Kind.GRAD:
            yield from self._gradient(op, unit)
        elif op.kind in (Kind.SAVE, Kind.SEND, Kind.FETCH, Kind.RECV, Kind.OFFLOAD, Kind.ONLOAD):
            yield from self._activations(op, unit)
        elif op.kind in (Kind.PASS, Kind.RETURN):
            yield "across", self.boundary_bytes[unit]
        elif op.kind in (Kind.REDUCE, Kind.GATHER) and self.home == "disk":
            yield from self._exchanged(op, unit)
        elif op.kind is Kind.READ:
            yield (
                "disk_read",
                self._loaded(unit) if op.tile is None else self._tile(op, self.state.read_planes),
            )
        elif op.kind is Kind.WRITE:
            whole = self._rounded(unit)
            yield "disk_written", whole if op.tile is None else self._tile(op, self.state.write_planes)

    def _gradient(self, op: Op, unit: int) -> Iterator[tuple[str, int]]:
        if op.tile is not None:
            yield "down", 4 * self._elements(op)
            return
        item_bytes = ITEM_BYTES.get(self.state.gradients, 4)  # those that are rounded leave in fewer bytes
        yield "down", gradient_bytes(self.transport, self.layout.gradient_bytes[unit]) * item_bytes // 4
        if self.below == "disk" == self.home and op.buffer is None:  # else it waits for its REDUCE
            yield "disk_written", self._rounded(unit)

    def _exchanged(self, op: Op, unit: int) -> Iterator[tuple[str, int]]:
        """The share of this node: its gradient once it is summed, its weights, and beside them those of the others."""
        own, itemsize = self.layout.own_elements[unit], ITEMSIZE[self.model.dtype]
        if op.kind is Kind.REDUCE:
            yield "disk_written", 4 * own
        else:
            yield "disk_read", own * itemsize
            yield "disk_written", (self.model.units[unit].numel - own) * itemsize

    def _activations(self, op: Op, unit: int) -> Iterator[tuple[str, int]]:
        """Activations that leave the device, or come back; on disk they lie as they are."""
        leaves = op.kind in (Kind.SAVE, Kind.SEND, Kind.OFFLOAD)
        size = self.boundary_bytes[unit]
        if op.kind in (Kind.OFFLOAD, Kind.ONLOAD):
            size = bytes_of(self.layout.choice(unit, op.microbatch or 0), unit, self.kept_bytes)
        encoded = op.kind in (Kind.SAVE, Kind.FETCH)  # gradients that workers hand over go as they are
        on_link = activation_bytes(self.transport, size, self.model.dtype) if encoded else size
        yield "down" if leaves else "up", on_link
        if self.below == "disk":
            yield "disk_written" if leaves else "disk_read", size

    def _loaded(self, unit: int) -> int:
        return self.model.units[unit].link_bytes(self.model.dtype)

    def _rounded(self, unit: int) -> int:
        """Bytes of the gradient of a unit in the dtype that it waits at home in."""
        return self.layout.gradient_bytes[unit] * ITEM_BYTES.get(self.state.gradients, 4) // 4

    def _elements(self, op: Op) -> int:
        unit = op.unit or 0
        numel = self.layout.own_elements[unit] if self.layout.own_elements else self.model.units[unit].numel
        return min(self.tile_elements, numel - (op.tile or 0) * self.tile_elements)

    def _tile(self, op: Op, planes: tuple[str, ...]) -> int:
        return self.state.bytes_of(self.model.units[op.unit or 0], self._elements(op), planes)
