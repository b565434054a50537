"""Choose codecs for what crosses a link and lay out the bytes.

Which codec is used where bytes cross the link between a device and the tier below it. No torch.

How gradients and weights are written on the network between ranks. No torch.
"""

from dataclasses import dataclass
from typing import Final, get_args

from outsize.codecs.codec_spec import (
    CODECS,
    EXACT_WEIGHTS,
    RAW,
    CodecSpec,
    WireGradients,
    codec_spec,
    raw_bytes,
)
from outsize.units import align_up

# What is sent is encoded in pieces of so many elements: some are decoded while the next ones are under way.
PIECE_ELEMENTS: Final = 2**20
# Of weights so many pieces are decoded at once, by one kernel on a GPU: each would take as long to launch as to copy.
# So a unit of an 8B model is decoded in 7.
PIECES_AT_ONCE: Final = 32
# Of gradients so many elements are encoded at once: they take less time to launch than to copy.
GRADIENT_ELEMENTS: Final = 2**23
# What a codec works on at once off the host, where a piece costs a few launches whatever its size; it holds 4 to 6
# bytes per element meanwhile.
DEVICE_PIECE_ELEMENTS: Final = 2**24
# Their encodings begin at multiples of so many bytes.
PIECE_ALIGN: Final = 64
# Room for an encoding at home, beyond what weights are expected to take: a share, and bytes, for small planes are
# rarely alike. None needs more than its elements.
SLACK: Final = 1.02
SLACK_BYTES: Final = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRates:
    """What a codec of weights reaches where a run takes place, in bytes of weights.

    Attributes:
        encode_bytes_per_s: at home.
        decode_bytes_per_s: on the device.
    """

    encode_bytes_per_s: float
    decode_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """Codecs by crossing; `RAW` is none.

    Attributes:
        weights: up to the device; exact ones only.
        activations: inputs of units, down and up again.
        gradients: down to their home.
    """

    weights: str = RAW.name
    activations: str = RAW.name
    gradients: str = RAW.name

    def __post_init__(self) -> None:
        for crossing, names in CODECS.items():
            if getattr(self, crossing) not in names:
                raise ValueError(
                    f"no codec {getattr(self, crossing)!r} for {crossing}; there is {', '.join(names)}"
                    + (f"; {EXACT_WEIGHTS}" if crossing == "weights" else "")
                )

    @property
    def exact(self) -> bool:
        """Whether every bit arrives."""
        return all(self.spec(c).lossless for c in ("weights", "activations", "gradients"))

    def spec(self, crossing: str) -> CodecSpec:
        """Return the facts of the codec of a crossing: ``weights``, ``activations`` or ``gradients``."""
        return codec_spec(getattr(self, crossing))

    def is_raw(self, crossing: str) -> bool:
        """Whether a crossing has no codec."""
        return self.spec(crossing) is RAW

    def wire_bytes(self, crossing: str, numel: int, dtype: str) -> int:
        """Return the bytes that ``numel`` elements are expected to take on the link."""
        return self.spec(crossing).expected_bytes(numel, dtype)


def room_bytes(spec: CodecSpec, numel: int, dtype: str) -> int:
    """Return the bytes that are set aside at home for the encoding of a plane."""
    pieces = -(-numel // PIECE_ELEMENTS)
    expected = int(spec.expected_bytes(numel, dtype) * SLACK) + SLACK_BYTES
    return align_up(min(expected, raw_bytes(numel, dtype)) + pieces * PIECE_ALIGN, 4096)


def staging_bytes(transport: Transport, crossing: str, largest: tuple[int, str] = (0, "")) -> int:
    """Return the size of each of the two buffers on the device for pieces of a crossing; 0 where it is raw.

    Args:
        transport: names the codecs.
        crossing: which one.
        largest: elements and dtype of the largest plane that crosses; without it, of weights one piece at a time.
    """
    if transport.is_raw(crossing):
        return 0
    spec, (numel, dtype) = transport.spec(crossing), largest
    if crossing == "gradients":
        return spec.max_bytes(min(numel or GRADIENT_ELEMENTS, GRADIENT_ELEMENTS), "fp32")
    at_once = min(PIECES_AT_ONCE, -(-numel // PIECE_ELEMENTS))
    several = at_once * spec.max_bytes(PIECE_ELEMENTS, dtype) if numel else 0
    return max(several, spec.max_bytes(PIECE_ELEMENTS, "fp32"))


# Elements of a share that are exchanged at once: 4 MiB of fp32, some milliseconds at 10 Gbit/s, beside which a round
# trip is short.
CHUNK_ELEMENTS: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How ranks write gradients for each other, ``fp32`` exactly; weights go as they are."""

    gradients: str = "fp32"

    def __post_init__(self) -> None:
        names = get_args(WireGradients)
        if self.gradients not in names:
            raise ValueError(f"no codec {self.gradients!r} for gradients; there is {', '.join(names)}")

    @property
    def gradient_dtype(self) -> str:
        """The dtype that gradients are encoded from."""
        return "bf16" if self.gradients == "bf16" else "fp32"

    @property
    def gradient_spec(self) -> CodecSpec:
        """Facts of the codec of gradients, after they were rounded to `gradient_dtype`."""
        return RAW if self.gradients in ("fp32", "bf16") else codec_spec(self.gradients)

    def gradient_bytes(self, numel: int) -> int:
        """Return what ``numel`` elements of a gradient take on the wire."""
        return self.gradient_spec.max_bytes(numel, self.gradient_dtype)

    def gradient_s(self, numel: int) -> float:
        """Return the seconds in which a core writes ``numel`` elements of a gradient for others and reads as many."""
        if self.gradients == "fp32":
            return 0.0
        spec, size = self.gradient_spec, raw_bytes(numel, "fp32")
        return size / spec.encode_bytes_per_s + size / spec.decode_bytes_per_s


EXACT: Final = Wire()
