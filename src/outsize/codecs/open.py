"""Codecs by name."""

import importlib

from outsize.codecs.codec import Codec
from outsize.codecs.codec_spec import codec_spec


def open_codec(name: str) -> Codec:
    """Return the codec called ``name``, one of `outsize.codecs.codec_spec.SPECS`.

    Raises:
        ValueError: there is none of that name.
    """
    spec = codec_spec(name)
    module, _, kind = spec.opens.rpartition(".")
    codec: Codec = getattr(importlib.import_module(module), kind)(spec, **spec.options)
    return codec
