"""Moments in fewer bits than fp32: bf16, or 8-bit floats whose exponents count from one of their block.

What does not fit is rounded up or down by chance, so that the mean of many roundings is exact. A moment that moves by
one part in a thousand of its way would otherwise stand still once that is less than half a step of its format. The
chances of an element follow from its place in its unit, the unit, the number of the update and a seed, and from nothing
else: tiles, threads and restarts change nothing.

Codes of 8 bits: blocks of `BLOCK_ELEMENTS` share the biased exponent ``top`` of their largest magnitude, one byte.
Exponents of codes count from it downwards, 3 bits are fraction: a sign and 16 octaves for ``exp_avg``, 32 octaves for
``exp_avg_sq``, which has no sign and is a square. Code 0 is zero. Scales that are powers of two make encoding a
matter of shifts, and a block whose ``top`` changes is not rounded a second time. The micro-scaling formats (OCP
Microscaling Formats 1.0) share exponents in this way; 8-bit moments in blocks, with tables of codes, are those of
Dettmers et al., arXiv:2110.02861.

`outsize.native` does this in C; here are the same bits in torch ops.
"""

import torch
from torch import Tensor

from outsize.optim.optimizer_spec import BLOCK_ELEMENTS

# Bits of fraction, and whether there is a sign.
EXP_AVG_FORM, EXP_AVG_SQ_FORM = (3, True), (3, False)
_MAGNITUDE, _INFINITY, _WORD = 0x7FFFFFFF, 0x7F800000, 0xFFFFFFFF
# A NaN to which no cut adds so much that a sign appears.
_HUGE = 0x7FF00000


def chance_key(seed: int, unit: int, update: int) -> int:
    """Return the key of the chances of one update of one unit: 32 bits of splitmix64 over the three."""
    value = 0
    for part in (seed, unit, update):
        value = (value + part + 0x9E3779B97F4A7C15) & (2**64 - 1)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            value = (value ^ value >> shift) * factor & (2**64 - 1)
        value ^= value >> 31
    return value & _WORD


def chances(first: int, key: int, count: int) -> Tensor:
    """Return 32 random bits for each of the elements ``first`` to ``first + count`` of a unit, int32 ``[count]``.

    The hash lowbias32 of index and key. Products wrap, and shifts are made to bring zeros in.
    """
    x = torch.arange(count, dtype=torch.int32).add_(_signed(first + key))
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _signed(0x846CA68B)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def halves(chance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper 16 bits of `chances`."""
    return chance & 0xFFFF, (chance >> 16).bitwise_and_(0xFFFF)


def _signed(word: int) -> int:
    """Return the int32 with the lower 32 bits of ``word``."""
    return (word & _WORD ^ 0x80000000) - 0x80000000


def to_bf16(values: Tensor, chance: Tensor) -> Tensor:
    """Return fp32 ``values`` in bf16; of ``chance``, 16 bits per element, follows which of the two neighbours."""
    bits = values.view(torch.int32)
    rounded = bits + chance >> 16
    rounded = torch.where(bits & _MAGNITUDE > _INFINITY, bits >> 16 | 0x40, rounded)
    return rounded.to(torch.int16).view(torch.bfloat16)


def to_codes(values: Tensor, chance: Tensor, form: tuple[int, bool], codes: Tensor, tops: Tensor) -> None:
    """Set codes of 8 bits.

    Args:
        values: fp32 ``[n]``.
        chance: 16 random bits per element, int32 ``[n]``.
        form: `EXP_AVG_FORM` or `EXP_AVG_SQ_FORM`.
        codes: uint8 ``[n]``.
        tops: uint8, one for each block, the last of which may be short.
    """
    mantissa, sign = form
    cut, largest = 23 - mantissa, 127 if sign else 255
    bits = values.view(torch.int32)
    magnitude = _by_block((bits & _MAGNITUDE).clamp_(max=_HUGE))
    top = (magnitude.amax(1, keepdim=True) + (1 << cut) - 1 >> 23).clamp_(max=255)
    tops.copy_(top.view(-1))
    base = _base(top, mantissa, sign)
    chance = _by_block(chance)
    code = (magnitude + (chance << cut - 16) >> cut) - base
    least = base + 1 << cut
    bar = chance.to(torch.float32) * 2.0**-16 * least.view(torch.float32) if sign else 0.0
    below = magnitude.view(torch.float32) > bar
    code = torch.where(magnitude < least, below, code).clamp_(max=largest).view(-1)[: bits.numel()]
    codes.copy_(code | (bits < 0) * 128 if sign else code)


def from_codes(codes: Tensor, tops: Tensor, form: tuple[int, bool]) -> Tensor:
    """Return the fp32 values of ``codes``; arguments as those of `to_codes`."""
    mantissa, sign = form
    code = _by_block(codes.to(torch.int32))
    magnitude = code & (127 if sign else 255)
    base = _base(tops.to(torch.int32).view(-1, 1), mantissa, sign)
    bits = torch.where(magnitude > 0, magnitude + base << 23 - mantissa, 0)
    values = bits.view(torch.float32)
    if sign:
        values = torch.where(code > 127, -values, values)
    return values.view(-1)[: codes.numel()]


def _base(top: Tensor, mantissa: int, sign: bool) -> Tensor:
    """What is added to a code of a block with exponent ``top`` to make the upper bits of its value."""
    octaves = (128 if sign else 256) >> mantissa
    return (top - (octaves - 1)).clamp_(min=1) << mantissa


def _by_block(elements: Tensor) -> Tensor:
    """Return ``elements`` as rows of `BLOCK_ELEMENTS`, the last filled up with zeros."""
    missing = -elements.numel() % BLOCK_ELEMENTS
    return torch.nn.functional.pad(elements, (0, missing)).view(-1, BLOCK_ELEMENTS)
