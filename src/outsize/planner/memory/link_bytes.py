"""Bytes that cross links and networks, and the buffers that they take.

What codecs on the link take and save: memory by tier, bytes by op.

What a node holds to exchange gradients and weights with others, beside the buffers that gradients come down into.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from outsize.codecs.transport import (
    CHUNK_ELEMENTS,
    PIECE_ALIGN,
    PIECE_ELEMENTS,
    RESIDUAL_BYTES,
    Transport,
    Wire,
    room_bytes,
    staging_bytes,
)
from outsize.model.sizes.model_spec import ITEMSIZE, ModelSpec, UnitSpec, is_packed
from outsize.optim.optimizer_spec import MASTER_LOW, MASTER_TIES, WEIGHTS, State, layout_of
from outsize.optim.shares import shares
from outsize.planner.program.step_layout import StepLayout
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


def device_bytes(transport: Transport, model: ModelSpec, boundary_bytes: tuple[int, ...]) -> int:
    """Return what codecs hold on each device: two buffers a crossing, what gradients lost, what is under way."""
    buffer_bytes = 2 * (staging_bytes(transport, "weights") + staging_bytes(transport, "gradients"))
    if not transport.is_raw("weights"):
        buffer_bytes += DECODE_BYTES * PIECE_ELEMENTS
    if transport.feedback:
        buffer_bytes += RESIDUAL_BYTES * sum(unit.numel for unit in model.units if unit.trainable)
    if not transport.is_raw("activations"):  # one encoding on its way down and one on its way up
        itemsize = ITEMSIZE[model.dtype]
        numel = max(boundary_bytes, default=0) // itemsize
        buffer_bytes += 2 * transport.spec("activations").max_bytes(numel, model.dtype)
    if not transport.is_raw("gradients"):  # a piece decoded again, to know what it lost
        buffer_bytes += staging_bytes(Transport(gradients="lossless4"), "gradients") * transport.feedback
    return buffer_bytes


def host_bytes(transport: Transport, model: ModelSpec) -> int:
    """Return what the encodings of weights that train take beside their home."""
    if transport.is_raw("weights"):
        return 0
    spec = transport.spec("weights")
    return sum(
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
    return sent + sum(part.home_bytes for part in unit.frozen if part.codec is not None and not stays)


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

    Attributes:
        chunk_elements: of a share, at most.
        gradient_in: what each other node sends of its gradient.
        gradient_out: what goes to each other node; 0 where it is sent from where it lies.
        decoded: a chunk as fp32, decoded; 0 where what arrives is added as it is.
        summed: a chunk as fp32, summed on its way to a disk; 0 where it is summed where it will lie.
        lost: a chunk as fp32, to know what an encoding has lost; 0 without error feedback.
        weight_in: what each other node sends of its weights; 0 where they are received where they will lie.
        weight_out: what goes to all of them; 0 where it is sent from where it lies.
        changed: a chunk of 16-bit weights' changes, decoded; 0 where weights are sent whole.
        former: a chunk of 16-bit weights as they were before a STEP; 0 where weights are sent whole.
        stored_elements: of a piece on its way to a checkpoint.
        stored: such a piece of one plane as fp32, and of weights.
        halves: such a piece of the planes of split masters; 0 where they lie in host memory, or are not split.
    """

    chunk_elements: int = 0
    gradient_in: int = 0
    gradient_out: int = 0
    decoded: int = 0
    summed: int = 0
    lost: int = 0
    weight_in: int = 0
    weight_out: int = 0
    changed: int = 0
    former: int = 0
    stored_elements: int = 0
    stored: int = 0
    halves: int = 0

    def total_bytes(self, num_nodes: int) -> int:
        """Return the bytes of all of them."""
        others = num_nodes - 1
        of_each = self.gradient_in + self.gradient_out + self.weight_in
        return (
            others * of_each
            + self.decoded
            + self.summed
            + self.lost
            + self.weight_out
            + self.changed
            + self.former
            + self.stored
            + self.halves
        )


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
    delta, on_disk = wire.weights == "delta", home == "disk"
    layout = layout_of(state)
    split = tuple(name for name in (WEIGHTS, MASTER_LOW, MASTER_TIES) if name in layout.planes)
    joins = on_disk and MASTER_LOW in layout.planes
    return NetStaging(
        chunk_elements=chunk,
        gradient_in=sent,
        gradient_out=sent if encoded or wire.gradient_dtype != "fp32" else 0,
        decoded=4 * chunk if encoded else 0,
        summed=4 * chunk if on_disk else 0,
        lost=4 * chunk if wire.feedback else 0,
        weight_in=weights if delta or on_disk else 0,
        weight_out=weights if delta or on_disk else 0,
        changed=weights if delta else 0,
        former=weights if delta else 0,
        stored_elements=piece,
        stored=piece * (4 + ITEMSIZE[model.dtype]),
        halves=sum(layout.planes[name].num_bytes(piece) for name in split) if joins else 0,
    )


def net_bytes(model: ModelSpec, layout: StepLayout, wire: Wire, home: str, state: State) -> dict[str, int]:
    """Return what a node holds for others in host memory, by class; nothing of a single node."""
    if layout.num_nodes == 1:
        return {}
    sent = sum(unit.numel for unit in model.units if unit.trainable) - sum(layout.own_elements)
    staging = net_staging(model, layout.num_nodes, wire, home, state)
    return {
        "network buffers": staging.total_bytes(layout.num_nodes),
        "network residuals": RESIDUAL_BYTES * sent * wire.feedback,
    }
