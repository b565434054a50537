"""Frozen parts that a codec has written, decoded on the device as they arrive."""

from torch import Tensor

from outsize.codecs.codec import Codec, open_codec
from outsize.codecs.codec_spec import codec_spec
from outsize.model.sizes.model_spec import FrozenPart, ModelSpec
from outsize.runtime.device.device import Device

# What decoding takes beside the encoding: pieces that stay in a cache, and for scales that are encoded themselves up to
# three numbers of 4 bytes per group of 64 elements.
_PIECES_BYTES, _SCALE_BYTES, _GROUP = 2**21, 12, 64


def encoded_parts(spec: ModelSpec) -> list[FrozenPart]:
    """The frozen parts of ``spec`` that a codec writes."""
    return [part for unit in spec.units for part in unit.frozen if part.codec is not None]


def decoding_bytes(spec: ModelSpec) -> int:
    """Return what decoding takes on the device: room for the largest encoding, and for the work; 0 without codecs."""
    parts = encoded_parts(spec)
    if not parts:
        return 0
    largest = max(part.numel for part in parts)
    return max(part.encoded_bytes for part in parts) + largest // _GROUP * _SCALE_BYTES + _PIECES_BYTES


def encode(part: FrozenPart, values: Tensor, into: Tensor) -> None:
    """Write ``values`` [part.numel] as they rest at home, uint8 [part.encoded_bytes]; what is over is zero."""
    assert part.codec is not None
    into[open_codec(part.codec).encode(values, into) :].zero_()


def decode(part: FrozenPart, encoded: Tensor, into: Tensor, codec: Codec | None = None) -> None:
    """Fill ``into`` [part.numel] from what `encode` has written; ``codec`` is that of the part, if there is one yet."""
    assert part.codec is not None
    size = codec_spec(part.codec).max_bytes(part.numel, part.dtype)
    (codec or open_codec(part.codec)).decode(encoded[:size], into)


class Decoding:
    """Room on one device for one encoding, and the codecs of a model. For one lane: loads are decoded one at a time."""

    def __init__(self, spec: ModelSpec, device: Device) -> None:
        parts = encoded_parts(spec)
        self._codecs: dict[str, Codec] = {part.codec: open_codec(part.codec) for part in parts if part.codec}
        size = max((part.encoded_bytes for part in parts), default=0)
        self._room = device.allocate(size, "encoded weights") if size else None

    def room(self, part: FrozenPart) -> Tensor:
        """Where the encoding of ``part`` is to come, uint8 [part.encoded_bytes]."""
        assert self._room is not None
        return self._room[: part.encoded_bytes]

    def decode(self, part: FrozenPart, encoded: Tensor, plane: Tensor) -> None:
        """Decode what has come into ``plane`` [part.numel], in order with the lane that calls."""
        assert part.codec is not None
        decode(part, encoded, plane, self._codecs[part.codec])
