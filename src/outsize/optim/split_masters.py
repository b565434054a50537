"""State in fewer bytes: masters split into bf16 and the rest, moments in bf16 or 8-bit floats.

`outsize.native` does this in C (``split_body.h`` tells what becomes of NaNs); here are the same bits in torch ops.

What does not fit is rounded up or down by chance, so that the mean of many roundings is exact. A moment that moves by
one part in a thousand of its way would otherwise stand still once that is less than half a step of its format. The
chances of an element follow from its place in its unit, the unit, the number of the update and a seed, and from nothing
else: tiles, threads and restarts change nothing.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from outsize import native
from outsize.codecs.codec import pieces_on
from outsize.optim.optimizer_spec import BLOCK_ELEMENTS

# Bits of fraction, and whether there is a sign.
EXP_AVG_FORM, EXP_AVG_SQ_FORM = (3, True), (3, False)
_MAGNITUDE, _INFINITY, _WORD = 0x7FFFFFFF, 0x7F800000, 0xFFFFFFFF
# A NaN to which no cut adds so much that a sign appears.
_HUGE = 0x7FF00000


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

    Blocks of `BLOCK_ELEMENTS` share the biased exponent ``top`` of their largest magnitude, one byte. Exponents of
    codes count from it downwards, 3 bits are fraction: a sign and 16 octaves for ``exp_avg``, 32 octaves for
    ``exp_avg_sq``, which has no sign and is a square. Code 0 is zero. Scales that are powers of two make encoding a
    matter of shifts, and a block whose ``top`` changes is not rounded a second time. The micro-scaling formats (OCP
    Microscaling Formats 1.0) share exponents in this way; 8-bit moments in blocks, with tables of codes, are those of
    Dettmers et al., arXiv:2110.02861.

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


# Masters are best halved in pieces that stay in a cache: these and what is made of them are 2 MiB.
PIECE_ELEMENTS = 2**17


def split_low(master: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `join_low` needs to make ``master`` from ``weights`` again.

    A bf16 weight is the upper 16 bits of its master, plus one where rounding to nearest went up, which the lower half
    says: it does from 0x8000 on. The one case that is not decided so is the tie that was rounded down to an even
    weight, one master in 131,072; those, and whatever else does not come back (the payload of a NaN), are kept one by
    one. Nothing is lost.

    Args:
        master: fp32 ``[n]``.
        weights: bf16 ``[n]``, of the same elements.

    Returns:
        The lower halves, int16 ``[n]``; the positions where they do not suffice, int64 ``[k]``; and the bits of the
        masters there, int32 ``[k]``.
    """
    bits = master.view(torch.int32)
    low = bits.bitwise_and(0xFFFF).to(torch.int16)
    positions = (join_low(weights, low).view(torch.int32) != bits).nonzero().view(-1)
    return low, positions, bits[positions]


def join_low(weights: Tensor, low: Tensor) -> Tensor:
    """Return masters, fp32 ``[n]``, of bf16 ``weights`` and lower halves, except where `split_low` names others."""
    bits = weights.view(torch.int16).to(torch.int32)
    bits += low >> 15  # -1 where it rounded up
    bits <<= 16
    bits |= low.to(torch.int32).bitwise_and_(0xFFFF)
    return bits.view(torch.float32)


# Kinds of numbers whose upper half rounding would change: bits of a quiet NaN, and of the least and the greatest.
_QUIET, _LEAST_NAN, _MOST_NAN = 0x7FC0, 0x7F80, 0x7FFF
_TIE = -0x8000
# Of eight bytes that are 0 or 1, the product has the i-th as bit 56 + i; of a byte, eight copies, and the i-th's bit i.
_TO_TOP, _TO_EACH, _ONE_OF_EACH = 0x0102040810204080, 0x0101010101010101, 0x8040201008040201 - 2**64
# In torch ops masters are best split in pieces that stay in a cache.
_PIECE_ELEMENTS = 2**17


def ties_bytes(numel: int) -> int:
    """Return the bytes of the ties of ``numel`` elements."""
    return -(-numel // 8)


@torch.no_grad()
def split_master(
    master: Tensor, hi: Tensor, lo: Tensor, ties: Tensor | None, first: int = 0, key: int | None = None
) -> None:
    """Set the planes of ``master``.

    The planes are the bf16 weight that it rounds to, the 16 bits below, and one bit for ties. Weight and master
    together take 4.125 bytes per parameter, not 6, and both are bit-exact. ``hi`` is what ``master.to(torch.bfloat16)``
    gives, ties to even; a NaN stays a NaN. ``lo`` is ``master - hi`` in units of the last place. 65,537 fp32 numbers
    round to each even bf16 and 65,535 to each odd one, while 16 bits tell 65,536 apart: half a step above an even
    ``hi`` (a tie that was rounded down) and half a step below it (one that was rounded up) have the same ``lo``,
    -32768, and the bit of the element in ``ties`` is 1 for the first. It is read and written only there, at one element
    in 65,536 of those that training makes, so its plane costs memory and no time.

    Without ``ties`` the first is stored as ``lo = 32767``: that master, one of 131,072, is one unit in the last place
    smaller.

    Or ``lo`` has the upper 8 of its bits, an int8, and there are no ties: masters of 24 bits. What is cut off is
    rounded by chance, as moments are, and of two bf16 numbers that are as near ``hi`` is the one further from zero, so
    that every number of 24 bits comes back as it is.

    Args:
        master: fp32 ``[n]``, in the memory that the others are in.
        hi: bf16 ``[n]``.
        lo: int16 ``[n]``, or int8 ``[n]`` of masters of 24 bits.
        ties: uint8 ``[ties_bytes(n)]``; None for planes that do not tell ties apart.
        first: index of the first element in its unit.
        key: of the chances by which 24 bits are rounded; None rounds them to the nearest.

    Raises:
        ValueError: planes that do not fit one another.
    """
    _check(master, hi, lo, ties)
    if master.device.type == "cpu" and native.available():
        chance = ctypes.c_uint32(first), ctypes.c_uint32(key or 0), ctypes.c_int32(key is not None)
        _call("split", master, hi, lo, ties, *chance)
        return
    length = pieces_on(master.device, _PIECE_ELEMENTS)
    for start in range(0, master.numel(), length):
        piece = slice(start, start + length)
        if lo.dtype is torch.int8:
            _split24(master[piece], hi[piece], lo[piece], first + start, key)
        else:
            _split(master[piece], hi[piece], lo[piece], None if ties is None else ties[start // 8 :])


@torch.no_grad()
def join_master(hi: Tensor, lo: Tensor, ties: Tensor | None, master: Tensor) -> None:
    """Set ``master`` from its planes; arguments and errors as those of `split_master`."""
    _check(master, hi, lo, ties)
    if master.device.type == "cpu" and native.available():
        _call("join", master, hi, lo, ties)
        return
    length = pieces_on(master.device, _PIECE_ELEMENTS)
    for start in range(0, master.numel(), length):
        piece = slice(start, start + length)
        _join(hi[piece], lo[piece], None if ties is None else ties[start // 8 :], master[piece])


def _split(master: Tensor, hi: Tensor, lo: Tensor, ties: Tensor | None) -> None:
    hi.copy_(master)
    lower, upper = master.view(torch.int16).view(-1, 2).unbind(1)  # as bytes lie
    lo.copy_(lower)
    hi_bits, nan = hi.view(torch.int16), hi.isnan()
    tie = torch.where(nan, upper & 0x7FFF == _ends_of_nans(lo), upper & 1 == 0)
    quiet = torch.where(tie, upper & -0x8000 | _QUIET, upper + (lo < 0))
    hi_bits.copy_(torch.where(nan, quiet, hi_bits))
    if ties is None:
        lo.masked_fill_((lo == _TIE) & tie & ~nan, 0x7FFF)
        return
    is_tie = _needs_tie(hi_bits, lo)
    bits = ties[: ties_bytes(len(lo))]
    bits.copy_(bits & ~_packed(is_tie) | _packed(is_tie & tie))


def _split24(master: Tensor, hi: Tensor, lo: Tensor, first: int, key: int | None) -> None:
    bits = master.view(torch.int32)
    drawn = None if key is None else chances(first, key, master.numel())
    # 8 bits that are independent of either half, by which moments are rounded.
    chance = 0x80 if drawn is None else (drawn >> 24 ^ drawn >> 8) & 0xFF
    rounded = torch.where(bits & _MAGNITUDE > _INFINITY, (bits | 0x400000) & -0x10000, bits + chance)
    hi.view(torch.int16).copy_(rounded + 0x8000 >> 16)
    lo.copy_(rounded >> 8)


def _join(hi: Tensor, lo: Tensor, ties: Tensor | None, master: Tensor) -> None:
    master.copy_(hi)
    bits = master.view(torch.int32).add_(lo, alpha=256 if lo.dtype is torch.int8 else 1)
    if ties is None:
        return
    hi_bits = hi.view(torch.int16)
    quiet = hi_bits & 0x7FFF == _QUIET
    steps = torch.where(
        quiet, _ends_of_nans(lo) - _QUIET + (lo < 0), 1
    )  # of the upper half, to what a tie bit names
    steps.mul_(_needs_tie(hi_bits, lo) & _unpacked(ties, len(lo)))
    bits.add_(steps, alpha=2**16)


def _ends_of_nans(lo: Tensor) -> Tensor:
    """Return the least and the greatest upper half of a NaN, int16: which of the two lower halves go with."""
    return (lo < 0).to(torch.int16).mul_(_MOST_NAN - _LEAST_NAN).add_(_LEAST_NAN)


def _packed(flags: Tensor) -> Tensor:
    """Return bits in bytes, the first the lowest."""
    eight = torch.nn.functional.pad(flags.view(torch.uint8), (0, -len(flags) % 8)).view(torch.int64)
    return (eight * _TO_TOP >> 56 & 0xFF).to(torch.uint8)


def _unpacked(ties: Tensor, numel: int) -> Tensor:
    """Return ``numel`` of the bits that `_packed` has packed."""
    eight = ties[: ties_bytes(numel)].to(torch.int64) * _TO_EACH & _ONE_OF_EACH
    return eight.view(torch.uint8)[:numel].bool()


def _needs_tie(hi_bits: Tensor, lo: Tensor) -> Tensor:
    return (lo == _TIE) & (hi_bits & 1 == 0) | (hi_bits & 0x7FFF == _QUIET)


def _call(name: str, master: Tensor, hi: Tensor, lo: Tensor, ties: Tensor | None, *chance: Any) -> None:
    low = (None, lo) if lo.dtype is torch.int8 else (lo, None)  # of 16 bits, and of 8
    planes = [
        None if plane is None else ctypes.c_void_p(plane.data_ptr()) for plane in (hi, *low, ties, master)
    ]
    count, num_threads = ctypes.c_size_t(master.numel()), ctypes.c_int(torch.get_num_threads())
    native.call(name, *planes, count, num_threads, *chance)


def _check(master: Tensor, hi: Tensor, lo: Tensor, ties: Tensor | None) -> None:
    low = torch.int8 if lo.dtype is torch.int8 and ties is None else torch.int16
    kinds = {"master": (master, torch.float32), "hi": (hi, torch.bfloat16), "lo": (lo, low)}
    shapes = dict.fromkeys(kinds, master.shape)
    if ties is not None:
        kinds["ties"] = (ties, torch.uint8)
        shapes["ties"] = torch.Size([ties_bytes(master.numel())])
    for name, (plane, dtype) in kinds.items():
        fits = plane.dtype is dtype and plane.shape == shapes[name] and master.dim() == 1
        if not (fits and plane.is_contiguous() and plane.device == master.device):
            raise ValueError(
                f"{name}: need contiguous {dtype} {list(shapes[name])} on {master.device},"
                f" not {plane.dtype} {list(plane.shape)} on {plane.device}"
            )
