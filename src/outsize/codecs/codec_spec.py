"""Codecs, a row each: what one promises in numbers, where it may be used, and the class that does it. No torch.

A codec is a row of `SPECS` and the file of its class; the words between which configuration, flags and calls choose
follow from the rows.

A rate here is an assumption for machines that nobody has measured, in bytes of what is encoded (logical bytes) per
second and core. They were measured by ``bench/bench_codec.py`` on one core of an AMD EPYC (Zen 4) and rounded down;
those of window and blockwise codecs and of NF4 are of the kernels in C, those of fp8 of a busy Xeon.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}

CountBytes = Callable[[int, str], int]
"""Elements and their dtype to bytes."""
_LINKS: Final = frozenset({"weights", "activations", "gradients"})
# One kernel of Triton reads codes and scales and writes bf16; for fp8, torch widens to bf16 (3) and scales (4).
_NF4_DEVICE_DECODE_BYTES, _INT8_DEVICE_DECODE_BYTES, _FP8_DEVICE_DECODE_BYTES = 2.5625, 3.015625, 7.0
# Elements a second that an H200 decoded, far from its memory's rate: bench/results/gpu_h200_2026-11.json.
_NF4_DEVICE_DECODE_RATE, _INT8_DEVICE_DECODE_RATE, _FP8_DEVICE_DECODE_RATE = 280e9, 358e9, 171e9
_H200_FP32_FLOPS = 66.9e12
_BLOCKWISE = "outsize.codecs.blockwise.BlockwiseCodec"


def raw_bytes(numel: int, dtype: str) -> int:
    """Bytes as they lie in memory."""
    return numel * ITEMSIZE[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """One codec.

    Attributes:
        name: as in the configuration.
        opens: path of its class, called with this row and ``options``.
        options: of that class.
        uses: where a user may choose it: for frozen weights at ``rest``; for ``weights``, ``activations`` and
            ``gradients`` on a link; for gradients on the ``network``.
        dtypes: of what it encodes, names of `ITEMSIZE`.
        lossless: whether decoding gives back every bit.
        fixed_rate: whether the count of elements alone decides the bytes.
        max_bytes: the most that an encoding takes, to set aside beforehand; exact where the rate is fixed.
        expected_bytes: what weights of a network take; the same where the rate is fixed.
        error: most that an element of a finite group is off, before rounding to the dtype, as a fraction of the largest
            magnitude in the group; 0 where lossless.
        group: elements that share a scale; 0 where there are no scales.
        encode_bytes_per_s: assumed rate of encoding on one core.
        decode_bytes_per_s: assumed rate of decoding on one core.
        device_decode_bytes: of a device's memory, moved there to decode an element: what its kernels read and write.
        device_decode_rate: elements a second that a device's kernels decode at most, as it was measured.
    """

    name: str
    opens: str
    options: Mapping[str, Any] = field(default_factory=dict)
    uses: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = tuple(ITEMSIZE)
    lossless: bool
    fixed_rate: bool
    max_bytes: CountBytes = raw_bytes
    expected_bytes: CountBytes
    error: float = 0.0
    group: int = 0
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    device_decode_bytes: float = _NF4_DEVICE_DECODE_BYTES
    device_decode_rate: float = _NF4_DEVICE_DECODE_RATE

    def element_s(self, memory_bytes_per_s: float, fp32_flops: float = _H200_FP32_FLOPS) -> float:
        """Return the seconds that a device with such memory and cores takes to decode an element.

        What was measured on an H200 was bound by its cores: others are taken to be as fast by their fp32, none faster,
        and none slower than a twentieth.
        """
        share = min(1.0, max(0.05, fp32_flops / _H200_FP32_FLOPS))
        return max(self.device_decode_bytes / memory_bytes_per_s, 1 / (share * self.device_decode_rate))

    def __post_init__(self) -> None:
        if self.lossless and self.error:
            raise ValueError(f"codec {self.name} is lossless and has an error of {self.error}")
        if not self.dtypes or not set(self.dtypes) <= ITEMSIZE.keys():
            raise ValueError(f"codec {self.name} needs dtypes of {', '.join(ITEMSIZE)}, not {self.dtypes}")


RAW = CodecSpec(
    name="raw",
    opens="outsize.codecs.codec.RawCodec",
    uses=_LINKS | {"rest"},
    lossless=True,
    fixed_rate=True,
    expected_bytes=raw_bytes,
    encode_bytes_per_s=8e9,
    decode_bytes_per_s=8e9,
)


def _window_bytes(upper_ratio: float) -> CountBytes:
    """Expected bytes where a bf16 takes ``upper_ratio`` of its own, an fp16 14 bits, and half an fp32 is a bf16."""

    def expected(numel: int, dtype: str) -> int:
        if numel < WINDOW_LEAST:
            return raw_bytes(numel, dtype)
        bf16_bytes = ceil(2 * numel * upper_ratio)
        return {"bf16": bf16_bytes, "fp16": ceil(2 * numel * 0.885), "fp32": 2 * numel + bf16_bytes}[dtype]

    return expected


# Below it there may be no room for counts and bases; what is encoded in earnest is far larger.
WINDOW_LEAST = 64

# Ratios are those of normal weights and of the weights of a sentence encoder, see bench/bench_codec.py.
LOSSLESS4 = CodecSpec(
    name="lossless4",
    opens="outsize.codecs.window.WindowCodec",
    options={"code_bits": 4},
    uses=_LINKS,
    lossless=True,
    fixed_rate=False,
    expected_bytes=_window_bytes(0.752),
    encode_bytes_per_s=3e9,
    decode_bytes_per_s=6e9,
)
LOSSLESS3 = CodecSpec(
    name="lossless3",
    opens="outsize.codecs.window.WindowCodec",
    options={"code_bits": 3},
    uses=_LINKS,
    lossless=True,
    fixed_rate=False,
    expected_bytes=_window_bytes(0.705),
    encode_bytes_per_s=2.5e9,
    decode_bytes_per_s=6e9,
)


# Groups are chosen by bench/bench_codec.py: where half as many elements to a scale no longer gain what they cost.
INT8_GROUP, INT4_GROUP = 128, 64
# A scale or a zero point in bf16 is off by one in 2^7 at most, and fp32 arithmetic by far less.
_BF16_SLACK = 1 + 2**-7 + 2**-16


def _blockwise_bytes(group: int, bits: int, scale_bytes: int) -> CountBytes:
    """Whole groups of integers, each with ``scale_bytes`` of scale and zero point."""

    def count(numel: int, dtype: str) -> int:
        return -(-numel // group) * (group * bits // 8 + scale_bytes)

    return count


def _blockwise(
    name: str,
    group: int,
    bits: int,
    steps: int,
    scale_bytes: int = 2,
    *,
    uses: Iterable[str],
    **options: bool,
) -> CodecSpec:
    """Integers of ``bits``; an element is off by a largest magnitude over ``steps`` at most."""
    count = _blockwise_bytes(group, bits, scale_bytes)
    return CodecSpec(
        name=name,
        opens=_BLOCKWISE,
        options={"bits": bits, **options},
        uses=frozenset(uses),
        lossless=False,
        fixed_rate=True,
        max_bytes=count,
        expected_bytes=count,
        error=_BF16_SLACK / steps,
        group=group,
        encode_bytes_per_s=5e9,
        decode_bytes_per_s=7e9,
        device_decode_bytes=_INT8_DEVICE_DECODE_BYTES,
        device_decode_rate=_INT8_DEVICE_DECODE_RATE,
    )


# To the nearest is off by half a step, by chance by a whole one. An asymmetric grid has its steps over the range, which
# may be twice the largest magnitude, and its zero point widens the range by one in 2^8 of it.
_NEAREST, _CHANCE = ("activations", "gradients"), ("gradients", "network")
INT8 = _blockwise("int8", INT8_GROUP, 8, 2 * 127, uses=(*_NEAREST, "rest", "network"))
INT8_ASYMMETRIC = _blockwise("int8-asymmetric", INT8_GROUP, 8, 253, 4, uses=("activations",), symmetric=False)
INT8_STOCHASTIC = _blockwise("int8-stochastic", INT8_GROUP, 8, 127, uses=_CHANCE, stochastic=True)
INT4 = _blockwise("int4", INT4_GROUP, 4, 2 * 7, uses=_NEAREST)
INT4_ASYMMETRIC = _blockwise("int4-asymmetric", INT4_GROUP, 4, 14, 4, uses=("activations",), symmetric=False)
INT4_STOCHASTIC = _blockwise("int4-stochastic", INT4_GROUP, 4, 7, uses=_CHANCE, stochastic=True)
BLOCKWISE = (INT8, INT8_ASYMMETRIC, INT8_STOCHASTIC, INT4, INT4_ASYMMETRIC, INT4_STOCHASTIC)

# Between 256 and 448, the largest magnitude of e4m3, floats are 32 apart.
FP8_GROUP = 128
FP8 = replace(
    _blockwise("fp8", FP8_GROUP, 8, 2 * 448 // 32, uses=("rest",)),
    opens="outsize.codecs.frozen.FP8Codec",
    options={},
    encode_bytes_per_s=1e9,
    decode_bytes_per_s=2.5e9,
    device_decode_bytes=_FP8_DEVICE_DECODE_BYTES,
    device_decode_rate=_FP8_DEVICE_DECODE_RATE,
)

# Dettmers et al. (2023), appendix E: quantiles of the normal distribution, with an exact zero, from -1 to 1.
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Elements that share a magnitude, and magnitudes that share a range: section 3 of the same paper.
NF4_BLOCK, NF4_DOUBLE_BLOCKS = 64, 256
# Half of the widest gap between two levels, and what fp32 arithmetic adds.
_NF4_ERROR = (NF4_LEVELS[1] - NF4_LEVELS[0]) / 2 * (1 + 2**-20)


def _nf4_bytes(numel: int, dtype: str) -> int:
    return -(-numel // NF4_BLOCK) * (NF4_BLOCK // 2 + 4)


def _nf4_double_bytes(numel: int, dtype: str) -> int:
    blocks = -(-numel // NF4_BLOCK)
    return blocks * (NF4_BLOCK // 2 + 1) + -(-blocks // NF4_DOUBLE_BLOCKS) * 8


NF4 = CodecSpec(
    name="nf4",
    opens="outsize.codecs.frozen.NF4Codec",
    uses=frozenset({"rest"}),
    lossless=False,
    fixed_rate=True,
    max_bytes=_nf4_bytes,
    expected_bytes=_nf4_bytes,
    error=_NF4_ERROR,
    group=NF4_BLOCK,
    encode_bytes_per_s=1.4e9,
    decode_bytes_per_s=2.5e9,
)
NF4_DOUBLE = CodecSpec(
    name="nf4-double",
    opens="outsize.codecs.frozen.NF4Codec",
    options={"double": True},
    uses=frozenset({"rest"}),
    lossless=False,
    fixed_rate=True,
    max_bytes=_nf4_double_bytes,
    expected_bytes=_nf4_double_bytes,
    error=_NF4_ERROR + (1 + 2**-16) / (2 * 255),
    group=NF4_BLOCK * NF4_DOUBLE_BLOCKS,
    encode_bytes_per_s=1.4e9,
    decode_bytes_per_s=2.5e9,
)

SPECS: dict[str, CodecSpec] = {
    spec.name: spec for spec in (RAW, LOSSLESS4, LOSSLESS3, *BLOCKWISE, NF4, NF4_DOUBLE, FP8)
}


def codec_spec(name: str) -> CodecSpec:
    """Return the codec called ``name``.

    Raises:
        ValueError: there is none.
    """
    if name not in SPECS:
        raise ValueError(f"unknown codec {name!r}; there is {', '.join(SPECS)}")
    return SPECS[name]


def _names(use: str) -> tuple[str, ...]:
    """Return the names that a user may give for a use."""
    return tuple(spec.name for spec in SPECS.values() if use in spec.uses)


# By crossing of a link, and on the network: `auto` is one of these in the end.
CODECS: Final = {use: _names(use) for use in ("weights", "activations", "gradients")}
if TYPE_CHECKING:
    FrozenCodec: TypeAlias = str
    TransportWeights: TypeAlias = str
    TransportActivations: TypeAlias = str
    TransportGradients: TypeAlias = str
    WireGradients: TypeAlias = str
else:
    FrozenCodec = Literal[_names("rest")]
    TransportWeights = Literal[RAW.name, "auto", *CODECS["weights"][1:]]
    TransportActivations = Literal[RAW.name, "auto", *CODECS["activations"][1:]]
    TransportGradients = Literal[RAW.name, "auto", *CODECS["gradients"][1:]]
    WireGradients = Literal["fp32", "bf16", *_names("network")]
# How weights go over links; all keep every bit, and what else there is.
EXACT_WEIGHTS: Final = (
    "weights that train keep every bit, and frozen ones rest and cross in fewer by base_codec (section lora)"
)
