"""What codecs on the link take and save: memory by tier, bytes by op."""

from collections.abc import Iterator

from outsize.codecs.transport import PIECE_ELEMENTS, RESIDUAL_BYTES, Transport, room_bytes, staging_bytes
from outsize.model.sizes.model_spec import ITEMSIZE, ModelSpec, UnitSpec, is_packed
from outsize.optim.optimizer_spec import WEIGHTS

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
