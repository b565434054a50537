"""Codecs by name."""

from collections.abc import Callable
from functools import partial

from outsize.codecs.blockwise import BlockwiseCodec
from outsize.codecs.codec import Codec, RawCodec
from outsize.codecs.codec_spec import CodecSpec, codec_spec
from outsize.codecs.delta import DeltaCodec
from outsize.codecs.fp8 import FP8Codec
from outsize.codecs.nf4 import NF4Codec
from outsize.codecs.window import WindowCodec

_MAKERS: dict[str, Callable[[CodecSpec], Codec]] = {
    "raw": RawCodec,
    "lossless4": partial(WindowCodec, code_bits=4),
    "lossless3": partial(WindowCodec, code_bits=3),
    "delta": DeltaCodec,
    "int8": partial(BlockwiseCodec, bits=8),
    "int8-asymmetric": partial(BlockwiseCodec, bits=8, symmetric=False),
    "int8-stochastic": partial(BlockwiseCodec, bits=8, stochastic=True),
    "int4": partial(BlockwiseCodec, bits=4),
    "int4-asymmetric": partial(BlockwiseCodec, bits=4, symmetric=False),
    "int4-stochastic": partial(BlockwiseCodec, bits=4, stochastic=True),
    "int8-hadamard": partial(BlockwiseCodec, bits=8),
    "int8-hadamard-stochastic": partial(BlockwiseCodec, bits=8, stochastic=True),
    "int4-hadamard": partial(BlockwiseCodec, bits=4),
    "int4-hadamard-stochastic": partial(BlockwiseCodec, bits=4, stochastic=True),
    "fp8": FP8Codec,
    "nf4": NF4Codec,
    "nf4-double": partial(NF4Codec, double=True),
}


def open_codec(name: str) -> Codec:
    """Return the codec called ``name``, one of `outsize.codecs.codec_spec.SPECS`.

    Raises:
        ValueError: there is none of that name.
    """
    spec = codec_spec(name)
    return _MAKERS[name](spec)
