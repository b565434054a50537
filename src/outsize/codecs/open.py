"""Codecs by name."""

from collections.abc import Callable

from outsize.codecs.codec import Codec, RawCodec
from outsize.codecs.spec import CodecSpec, codec_spec

_MAKERS: dict[str, Callable[[CodecSpec], Codec]] = {"raw": RawCodec}


def open_codec(name: str) -> Codec:
    """Return the codec called ``name``, one of `outsize.codecs.spec.SPECS`.

    Raises:
        ValueError: there is none of that name.
    """
    spec = codec_spec(name)
    return _MAKERS[name](spec)
