"""Lossless and nearly fixed in rate: 4- or 3-bit exponents for bf16, 3-bit ones for fp16; `window_layout` says how.

fp32 is taken apart: its upper half is a bf16, which is encoded, and its lower half, which looks like noise, is
kept in front of the encoding.
"""

import numpy as np
import torch
from torch import Tensor

from outsize.codecs.codec import Codec, host_bytes
from outsize.codecs.codec_spec import CodecSpec
from outsize.codecs.window_layout import MANTISSA_BITS, WindowLayout
from outsize.codecs.window_native import decode_window, encode_window, join_halves, split_halves
from outsize.codecs.window_numpy import Words
from outsize.codecs.window_torch import decode_window_torch
from outsize.errors import CodecError


class WindowCodec(Codec):
    """Exponents in a window per block, everything else as it is.

    Encodes on the host. Decodes where the bytes lie: by a kernel or NumPy on the host, in torch elsewhere, without a
    synchronisation.

    Args:
        spec: see `outsize.codecs.codec_spec.LOSSLESS4` and ``LOSSLESS3``.
        code_bits: kept of a bf16's exponent; an fp16 keeps 3 of its 5.
    """

    def __init__(self, spec: CodecSpec, code_bits: int) -> None:
        self.spec = spec
        self._bf16 = WindowLayout(MANTISSA_BITS["bf16"], code_bits)
        self._fp16 = WindowLayout(MANTISSA_BITS["fp16"], 3)

    def _encode(self, source: Tensor, into: Tensor) -> int:
        if source.device.type != "cpu":
            raise ValueError(f"codec {self.spec.name} encodes on the host, not on {source.device}")
        room = host_bytes(into)
        if source.dtype is not torch.float32:
            return encode_window(self._layout(source.dtype), _words(source), room)
        lower = room[: source.nbytes // 2].view(np.uint16)
        upper = split_halves(host_bytes(source).view(np.uint32), lower)
        return upper.nbytes + encode_window(self._bf16, upper, room[upper.nbytes :])

    def _decode(self, encoded: Tensor, into: Tensor) -> None:
        lower_bytes = 2 * into.numel() if into.dtype is torch.float32 else 0
        try:
            upper = self._decode_words(self._layout(into.dtype), encoded[lower_bytes:], into)
        except ValueError as error:
            raise CodecError(
                f"no {self.spec.name} encoding of {into.numel()} elements of {into.dtype}: {error}"
            ) from error
        if into.dtype is not torch.float32:
            return
        if into.device.type == "cpu":
            lower = host_bytes(encoded[:lower_bytes]).view(np.uint16)
            join_halves(lower, _words(upper), host_bytes(into).view(np.uint32))
            return
        halves = into.view(torch.int16)
        halves[::2] = encoded[:lower_bytes].view(torch.int16)
        halves[1::2] = upper

    def _decode_words(self, layout: WindowLayout, encoded: Tensor, into: Tensor) -> Tensor:
        """Return the words of a 16-bit encoding, int16 [into.numel()]; in ``into`` itself where they fit."""
        if into.device.type != "cpu":
            words = decode_window_torch(layout, encoded, into.numel())
            return words if into.dtype is torch.float32 else into.view(torch.int16).copy_(words)
        if into.dtype is torch.float32:
            into = torch.empty(into.numel(), dtype=torch.int16)
        decode_window(layout, host_bytes(encoded), _words(into))
        return into.view(torch.int16)

    def _layout(self, dtype: torch.dtype) -> WindowLayout:
        return self._fp16 if dtype is torch.float16 else self._bf16


def _words(tensor: Tensor) -> Words:
    return host_bytes(tensor).view(np.uint16)
