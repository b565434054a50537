"""FP8: an element is a float of 8 bits, e4m3, times a scale that it shares with its neighbours.

The format is that of "FP8 formats for deep learning" (Micikevicius et al., 2022): 4 bits of exponent, 3 of mantissa,
448 the largest, no infinity. A scale is the largest magnitude of 128 neighbours by 448, in bf16. So an element is off
by a sixteenth of itself at most, whatever stands beside it, down to 1/28,672 of that magnitude; a smaller one by half a
subnormal step, 2^-10 of the scale. Zeros keep their sign. Groups that are not finite decode to NaN.

An encoding is the scales of all groups, then a byte for each element, the last group filled up with zeros. Decoding
takes no memory beside the elements.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from outsize.codecs.blockwise import LEAST_SCALE, PIECE_ELEMENTS
from outsize.codecs.codec import Codec
from outsize.codecs.codec_spec import FP8_GROUP, CodecSpec

_LARGEST = 448.0
# For each dtype its words, how far a code is shifted in them, and what makes up for the bias of its exponents.
_WORDS = {
    torch.float32: (torch.int32, 20, 2.0**120),
    torch.bfloat16: (torch.int16, 4, 2.0**120),
    torch.float16: (torch.int16, 7, 2.0**8),
}


class FP8Codec(Codec):
    """FP8, see this file.

    Args:
        spec: see `outsize.codecs.codec_spec.FP8`.
    """

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec

    def _encode(self, source: Tensor, into: Tensor) -> int:
        scales, codes = self._sections(into, source.numel())
        for elements, groups in _pieces(source.numel(), PIECE_ELEMENTS):
            x = source[elements].float().view(groups.stop - groups.start, -1)
            scale = (x.abs().amax(1) / _LARGEST).clamp_min_(LEAST_SCALE).bfloat16()
            scales[groups] = scale.masked_fill_(~scale.isfinite(), torch.nan)
            x = x / scale.float()[:, None]
            codes[elements] = x.view(-1).to(torch.float8_e4m3fn).view(torch.int8)
        codes[source.numel() :].zero_()
        return scales.nbytes + codes.nbytes

    def _decode(self, encoded: Tensor, into: Tensor) -> None:
        scales, codes = self._sections(encoded, into.numel())
        on_host = into.device.type == "cpu"
        for elements, groups in _pieces(into.numel(), PIECE_ELEMENTS if on_host else into.numel()):
            values = into[elements]
            if on_host:
                _cast(codes[elements], values)
            else:
                values.copy_(codes[elements].view(torch.float8_e4m3fn))
            values.view(groups.stop - groups.start, -1).mul_(scales[groups, None])

    def _sections(self, encoded: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return scales, bf16 [groups], and codes of whole groups, int8."""
        groups = -(-numel // FP8_GROUP)
        scales, codes = encoded[: 2 * groups], encoded[2 * groups : (2 + FP8_GROUP) * groups]
        return scales.view(torch.bfloat16), codes.view(torch.int8)


def _cast(codes: Tensor, into: Tensor) -> None:
    """Fill ``into`` with the floats that ``codes``, int8 on the host, are: six times as fast there as torch's own cast.

    Shifted in a wider word, the bits of a code are a float that is smaller by a power of two, a subnormal one as well.
    """
    word, shift, bias = _WORDS[into.dtype]
    bits = torch.iinfo(word).min + (0x7F << shift)
    into.view(word).copy_(codes).bitwise_left_shift_(shift).bitwise_and_(bits)
    into.mul_(bias)


def _pieces(numel: int, step: int) -> Iterator[tuple[slice, slice]]:
    """Yield elements and their groups: ``step`` elements of whole groups at a time, then what is left."""
    end = numel - numel % FP8_GROUP
    for start, stop in pairwise(sorted({*range(0, end, step), end, numel})):
        yield slice(start, stop), slice(start // FP8_GROUP, -(-stop // FP8_GROUP))
