"""What every codec makes of tensors of the user's own: ratio, error, and rates of one core."""

from pathlib import Path

from outsize.codecs.codec_figures import CodecFigures, measure_file
from outsize.hardware.machine_file import ProbedCodec
from outsize.hardware.readings import Fact, Measurement


def measure_codecs(tensors: Path | None) -> tuple[ProbedCodec, ...]:
    """Return the figures of every codec on a safetensors file; none without one.

    Raises:
        CodecError: not a safetensors file, or nothing in it that codecs are for.
    """
    return () if tensors is None else tuple(_rates(figures, tensors) for figures in measure_file(tensors))


def _rates(figures: CodecFigures, tensors: Path) -> ProbedCodec:
    where = f"{figures.numel} elements of {tensors}"
    return ProbedCodec(
        kind=figures.kind,
        codec=figures.codec,
        dtype=figures.dtype,
        num_elements=figures.numel,
        ratio=Fact.read(figures.ratio, where),
        bound=Fact.read(figures.bound, where),
        largest_error=Fact.read(figures.largest_error, where),
        relative_error=Fact.read(figures.relative_error, where),
        encode_bytes_per_s=Measurement.of([figures.encode_bytes_per_s], f"{where}, seconds of one core"),
        decode_bytes_per_s=Measurement.of([figures.decode_bytes_per_s], f"{where}, seconds of one core"),
    )
