"""How gradients and weights are written on the network between ranks. No torch."""

from dataclasses import dataclass
from typing import Final, get_args

from outsize.codecs.codec_spec import (
    FEEDBACK,
    RAW,
    CodecSpec,
    WireGradients,
    WireWeights,
    codec_spec,
    raw_bytes,
)

# Elements of a share that are exchanged at once: 4 MiB of fp32, some milliseconds at 10 Gbit/s, beside which a round
# trip is short.
CHUNK_ELEMENTS: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Codecs between ranks.

    Attributes:
        gradients: ``fp32`` is exact; ``-ef`` adds what was lost to the next step's.
        weights: ``raw``, or ``delta``: the bits that a step has changed of 16-bit weights, lossless.
    """

    gradients: str = "fp32"
    weights: str = "raw"

    def __post_init__(self) -> None:
        for what, known in (("gradients", get_args(WireGradients)), ("weights", get_args(WireWeights))):
            if getattr(self, what) not in known:
                raise ValueError(f"no codec {getattr(self, what)!r} for {what}; there is {', '.join(known)}")

    @property
    def gradient_dtype(self) -> str:
        """The dtype that gradients are encoded from."""
        return "bf16" if self.gradients == "bf16" else "fp32"

    @property
    def gradient_spec(self) -> CodecSpec:
        """Facts of the codec of gradients, after they were rounded to `gradient_dtype`."""
        name = self.gradients.removesuffix(FEEDBACK)
        return RAW if name in ("fp32", "bf16") else codec_spec(name)

    @property
    def feedback(self) -> bool:
        """Whether gradients have what they lost added the next time."""
        return self.gradients.endswith(FEEDBACK)

    def gradient_bytes(self, numel: int) -> int:
        """Return what ``numel`` elements of a gradient take on the wire."""
        return self.gradient_spec.max_bytes(numel, self.gradient_dtype)

    def weight_bytes(self, numel: int, dtype: str) -> int:
        """Return what ``numel`` weights in ``dtype`` are expected to take on the wire."""
        return (
            raw_bytes(numel, dtype)
            if self.weights == "raw"
            else codec_spec(self.weights).expected_bytes(numel, dtype)
        )

    def gradient_s(self, numel: int) -> float:
        """Return the seconds in which a core writes ``numel`` elements of a gradient for others and reads as many."""
        if self.gradients == "fp32":
            return 0.0
        spec, size = self.gradient_spec, raw_bytes(numel, "fp32")
        # What was lost is known when what is sent has been read again.
        return size / spec.encode_bytes_per_s + (1 + self.feedback) * size / spec.decode_bytes_per_s

    def weight_s(self, written: int, read: int, dtype: str) -> float:
        """Return the seconds in which a core writes so many weights in ``dtype`` and reads so many of others."""
        if self.weights == "raw":
            return 0.0
        spec = codec_spec(self.weights)
        return (
            raw_bytes(written, dtype) / spec.encode_bytes_per_s
            + raw_bytes(read, dtype) / spec.decode_bytes_per_s
        )


EXACT: Final = Wire()
