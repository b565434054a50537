"""Bytes of a step: across links, in the buffers they take, and of activations alive at each op."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from outsize.codecs.transport import (
    CHUNK_ELEMENTS,
    PIECE_ALIGN,
    PIECE_ELEMENTS,
    Transport,
    Wire,
    room_bytes,
    staging_bytes,
)
from outsize.model.sizes.model_spec import ITEMSIZE, ModelSpec, UnitSpec, is_packed
from outsize.optim.optimizer_spec import MASTER_LOW, MASTER_TIES, WEIGHTS, State, layout_of
from outsize.optim.shares import shares
from outsize.planner.program.hazards import SAVE_WINDOW
from outsize.planner.program.program import COMPUTE_KINDS, Op
from outsize.planner.program.stages import KeptBytes, bytes_of
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.program.table import Content
from outsize.units import align_up

# What decoding a piece allocates in passing, by element: blocks before and after their bases are added, and joined.
DECODE_BYTES = 8


def encoded_planes(unit: UnitSpec, dtype: str, *, stays: bool = False) -> Iterator[tuple[str, int, str]]:
    """Yield ``(plane, elements, dtype)`` of the weights of ``unit`` that have no encoding of their own yet.

    Of a unit that stays on the device those that are loaded again.
    """
    if unit.numel and (unit.trainable or not stays):
        yield WEIGHTS, unit.numel, dtype
    for part in unit.frozen if not stays else ():
        if part.codec is None and part.numel:
            yield part.plane, part.numel, part.dtype


def largest_plane(model: ModelSpec) -> tuple[int, str]:
    """Return elements and dtype of the plane of most bytes that goes encoded; none of a model without weights."""
    planes = (plane[1:] for unit in model.units for plane in encoded_planes(unit, model.dtype))
    return max(planes, key=lambda each: each[0] * ITEMSIZE[each[1]], default=(0, ""))


def largest_gradient(model: ModelSpec) -> tuple[int, str]:
    """Return elements and dtype of the gradient of the largest unit that trains."""
    return max((unit.numel for unit in model.units if unit.trainable), default=0), "fp32"


def device_bytes(transport: Transport, model: ModelSpec, boundary_bytes: tuple[int, ...]) -> int:
    """Return what codecs hold on each device: two buffers a crossing, and what is under way."""
    buffer_bytes = 2 * staging_bytes(transport, "weights", largest_plane(model))
    buffer_bytes += 2 * staging_bytes(transport, "gradients", largest_gradient(model))
    if not transport.is_raw("weights"):
        buffer_bytes += DECODE_BYTES * PIECE_ELEMENTS
    if not transport.is_raw("activations"):  # one encoding on its way down and one on its way up
        itemsize = ITEMSIZE[model.dtype]
        numel = max(boundary_bytes, default=0) // itemsize
        buffer_bytes += 2 * transport.spec("activations").max_bytes(numel, model.dtype)
    return buffer_bytes


def host_bytes(transport: Transport, model: ModelSpec, num_workers: int = 1) -> int:
    """Return what the encodings of weights that train take beside their home, and where gradients arrive encoded."""
    arrivals = 2 * num_workers * staging_bytes(transport, "gradients", largest_gradient(model))
    if transport.is_raw("weights"):
        return arrivals
    spec = transport.spec("weights")
    return arrivals + sum(
        room_bytes(spec, numel, dtype)
        for unit in model.units
        for plane, numel, dtype in encoded_planes(unit, model.dtype)
        if not is_packed(unit, plane)
    )


def packed_bytes(transport: Transport, model: ModelSpec) -> int:
    """Return by how much a home in host memory shrinks, since weights that do not train are kept encoded."""
    return sum(
        packed_bytes_of(transport, unit, plane, model.dtype)
        for unit in model.units
        for plane, _, _ in encoded_planes(unit, model.dtype)
    )


def packed_bytes_of(transport: Transport, unit: UnitSpec, name: str, dtype: str) -> int:
    """Return by how much one plane of ``unit`` shrinks there; 0 for one that lies as it is."""
    if transport.is_raw("weights"):
        return 0
    spec = transport.spec("weights")
    return sum(
        numel * ITEMSIZE[kind] - room_bytes(spec, numel, kind)
        for plane, numel, kind in encoded_planes(unit, dtype)
        if plane == name and is_packed(unit, plane)
    )


def load_bytes(transport: Transport, unit: UnitSpec, dtype: str, *, stays: bool = False) -> int:
    """Return the bytes that a LOAD of ``unit`` takes on the link; of one that stays on the device, once it is there."""
    if transport.is_raw("weights"):
        return unit.trained_bytes(dtype) if stays else unit.link_bytes(dtype)
    planes = encoded_planes(unit, dtype, stays=stays)
    sent = sum(transport.wire_bytes("weights", numel, kind) for _, numel, kind in planes)
    return sent + (0 if stays else encoded_bytes(unit))


def encoded_bytes(unit: UnitSpec) -> int:
    """Return the bytes of its frozen parts that a codec has written once for all steps."""
    return sum(part.home_bytes for part in unit.frozen if part.codec is not None)


def gradient_bytes(transport: Transport, num_bytes: int) -> int:
    """Return the bytes that an fp32 gradient of ``num_bytes`` takes on the link."""
    if transport.is_raw("gradients"):
        return num_bytes
    return transport.wire_bytes("gradients", num_bytes // 4, "fp32")


def activation_bytes(transport: Transport, num_bytes: int, dtype: str) -> int:
    """Return the bytes that an activation of ``num_bytes`` in ``dtype`` takes on the link; never more than it has."""
    if transport.is_raw("activations"):
        return num_bytes
    numel = num_bytes // ITEMSIZE[dtype]
    return min(num_bytes, transport.wire_bytes("activations", numel, dtype))


# Of a plane, on its way to a checkpoint: 1 MiB of fp32, for a checkpoint is in no hurry.
STORE_ELEMENTS = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class NetStaging:
    """Buffers for one chunk of an exchange, in bytes.

    They are beside the buffers that gradients come down into.

    Attributes:
        chunk_elements: of a share, at most.
        gradient_in: what each other node sends of its gradient.
        gradient_out: what goes to each other node; 0 where it is sent from where it lies.
        decoded: a chunk as fp32, decoded; 0 where what arrives is added as it is.
        summed: a chunk as fp32, summed on its way to a disk; 0 where it is summed where it will lie.
        weight_in: what each other node sends of its weights; 0 where they are received where they will lie.
        weight_out: what goes to all of them; 0 where it is sent from where it lies.
        stored_elements: of a piece on its way to a checkpoint.
        stored: such a piece of one plane as fp32, and of weights.
        halves: such a piece of the planes of split masters; 0 where they lie in host memory, or are not split.
    """

    chunk_elements: int = 0
    gradient_in: int = 0
    gradient_out: int = 0
    decoded: int = 0
    summed: int = 0
    weight_in: int = 0
    weight_out: int = 0
    stored_elements: int = 0
    stored: int = 0
    halves: int = 0

    def total_bytes(self, num_nodes: int) -> int:
        """Return the bytes of all of them."""
        others = num_nodes - 1
        of_each = self.gradient_in + self.gradient_out + self.weight_in
        return others * of_each + self.decoded + self.summed + self.weight_out + self.stored + self.halves


def net_staging(model: ModelSpec, num_nodes: int, wire: Wire, home: str, state: State) -> NetStaging:
    """Return the buffers that `num_nodes` nodes need, each, with a home on ``home`` that is laid out as ``state``."""
    if num_nodes == 1:
        return NetStaging()
    longest = max((len(part) for ranges in shares(model, num_nodes) for part in ranges), default=0)
    chunk = min(CHUNK_ELEMENTS, longest)
    encoded = wire.gradient_spec.name != "raw"
    sent = align_up(wire.gradient_bytes(chunk), PIECE_ALIGN)
    weights = align_up(chunk * ITEMSIZE[model.dtype], PIECE_ALIGN)
    piece = min(STORE_ELEMENTS, chunk)
    on_disk = home == "disk"
    layout = layout_of(state)
    split = tuple(name for name in (WEIGHTS, MASTER_LOW, MASTER_TIES) if name in layout.planes)
    joins = on_disk and MASTER_LOW in layout.planes
    return NetStaging(
        chunk_elements=chunk,
        gradient_in=sent,
        gradient_out=sent if encoded or wire.gradient_dtype != "fp32" else 0,
        decoded=4 * chunk if encoded else 0,
        summed=4 * chunk if on_disk else 0,
        weight_in=weights if on_disk else 0,
        weight_out=weights if on_disk else 0,
        stored_elements=piece,
        stored=piece * (4 + ITEMSIZE[model.dtype]),
        halves=sum(layout.planes[name].num_bytes(piece) for name in split) if joins else 0,
    )


def net_bytes(model: ModelSpec, layout: StepLayout, wire: Wire, home: str, state: State) -> dict[str, int]:
    """Return what a node holds for others in host memory, by class; nothing of a single node."""
    if layout.num_nodes == 1:
        return {}
    staging = net_staging(model, layout.num_nodes, wire, home, state)
    return {"network buffers": staging.total_bytes(layout.num_nodes)}


NOTHING: KeptBytes = MappingProxyType({})


class Live(NamedTuple):
    """Activation bytes on the device and saved in the tier below it, at the worst moment of an op."""

    device_bytes: int
    below_bytes: int


class ActivationMeter:
    """Counts activation bytes op by op.

    What else lies on the device (slots, accumulators, tile buffers) is allocated once; only activations come and go:

    * F u.m makes the input of unit u+1; it lives until the backward of unit u+1, or the SAVE, has passed;
    * FA, FP and FK u.m keep what B u.m needs besides its input; from when B u.m begins this is part of the workspace.
      An OFFLOAD of it counts as a SAVE does, and an ONLOAD as a FETCH;
    * FB and B u.m make the gradient of the input of unit u, and consume that of unit u+1;
    * a SAVE that nothing has waited for yet counts as not done: up to `hazards.SAVE_WINDOW` of them, or all behind an
      F;
    * a FETCH counts from where it stands, since it waits for the compute op before it, and for all SAVEs;
    * an FB or B that no FETCH has been needed for may run before the FETCHes that stand before it, and then before the
      SAVEs are done that those wait for: the larger of the two counts.

    Inputs of unit 0 (ids) are counted elsewhere, as shared bytes.

    Args:
        layout: the step.
        boundary_bytes: bytes of the input of each streamed unit, for one microbatch.
        kept_bytes: bytes that forwards of each extent keep; what it does not tell counts none.
    """

    def __init__(
        self, layout: StepLayout, boundary_bytes: Sequence[int], kept_bytes: KeptBytes = NOTHING
    ) -> None:
        if len(boundary_bytes) != layout.num_streamed:
            raise ValueError(f"boundary_bytes needs {layout.num_streamed} entries, not {len(boundary_bytes)}")
        self._bytes = (0, *boundary_bytes[1:], 0)  # behind the last unit nothing of ours is made
        self._first_backward = layout.first_backward
        self._layout = layout
        self._saved = kept_bytes
        self._leaving: deque[int] = deque()  # bytes of SAVEs that nothing has waited for yet
        self._behind = 0  # of them, those behind the last compute op, which no F waits for
        self._early: dict[
            tuple[Content, int, int | None], int
        ] = {}  # FETCHes that no compute op has waited for yet
        self._late = 0  # bytes of SAVEs that only those have waited for
        self._device = 0
        self._below = 0

    def add(self, op: Op) -> Live:
        """Return the bytes that are live while ``op`` runs."""
        unit, row = op.unit or 0, op.row
        peak = Live(self._device, self._below)
        if row.price == "forward":
            self._finish_saves(but=max(SAVE_WINDOW - 1, self._behind))
            self._device += self._bytes[unit + 1]
            peak = Live(self._device, self._below)
            if unit < self._first_backward:
                self._device -= self._bytes[unit]
            self._device += self._kept(op)
        elif row.price in ("turn", "backward"):
            self._device -= self._kept(op)
            size = self._bytes[unit] if unit > self._first_backward else 0
            keys: list[tuple[Content, int, int | None]] = [
                ("input", unit, op.microbatch),
                ("kept", unit, op.microbatch),
            ]
            if [self._early.pop(key) for key in keys if key in self._early]:
                self._late = 0
            behind = max(0, self._late - sum(self._early.values()))
            peak = Live(self._device + size + behind, self._below)
            consumed = self._bytes[unit + 1] if row.price == "backward" else 0
            self._device += size - self._bytes[unit] - consumed
        elif row.price == "link" and row.carries in ("input", "kept"):
            moved = self._bytes[unit] if row.carries == "input" else self._kept(op)
            peak = self._move(op, moved)
        if op.kind in COMPUTE_KINDS:
            self._behind = 0
        return peak

    def _move(self, op: Op, moved: int) -> Live:
        """Count what leaves the device, or comes back."""
        row = op.row
        if row.lane == "down":
            self._below += moved
            self._leaving.append(moved)
            self._behind += 1
            return Live(self._device, self._below)
        self._late += sum(self._leaving)
        self._early[row.carries or "input", op.unit or 0, op.microbatch] = moved
        self._finish_saves(but=0)
        self._device += moved
        peak = Live(self._device, self._below)
        self._below -= moved
        return peak

    def _kept(self, op: Op) -> int:
        unit, microbatch = op.unit or 0, op.microbatch or 0
        return bytes_of(self._layout.choice(unit, microbatch), unit, self._saved)

    def _finish_saves(self, but: int) -> None:
        """Count all SAVEs as done but the last few."""
        while len(self._leaving) > but:
            self._device -= self._leaving.popleft()
