"""Decode and encode on a GPU in one kernel each, by Triton: the bits of the torch forms, which do so elsewhere.

A codec asks `device_kernels` (outsize.codecs.codec), which imports this file where Triton is, and a kernel of it runs.
Products and sums are rounded apart (``enable_fp_fusion=False``), as torch rounds them, and divisions as IEEE says.
bf16 is read and written by its bits: rounding is then the same on every GPU, and in Triton's interpreter, which the
tests run. A kernel takes no memory; it works in order with the stream that its thread has set.
"""

import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outsize.accelerators import as_current
from outsize.codecs.blockwise import LEAST_SCALE, PIECE_ELEMENTS, SPREAD_PIECE
from outsize.codecs.codec_spec import BLOCKWISE

if TYPE_CHECKING:
    from outsize.codecs.blockwise import Grid, Sections
    from outsize.codecs.codec import Codec
    from outsize.codecs.window_layout import WindowLayout

_PROVED_ELEMENTS = 3 * 16_384 + 1607  # blocks of all sizes, and a rest
_BLOCK = tl.constexpr(2048)  # elements of a program of the kernels that look at elements one by one
_PIECE, _LEAST_SCALE = tl.constexpr(PIECE_ELEMENTS), tl.constexpr(LEAST_SCALE)
_SPREAD = tl.constexpr(SPREAD_PIECE - 2**64)  # as a number of 64 bits with a sign
_INFINITE = tl.constexpr(0x7F800000)
_COLUMNS, _SPAN = tl.constexpr(1024), tl.constexpr(2048)  # of a block of window codecs, and between counts
# 1.5 * 2^23: a sum with it has no fraction, and rounds to the nearest even.
_HALFWAY = tl.constexpr(12582912.0)
# Lanes of several devices launch from threads of their own, and the first launch of each form compiles it.
_LAUNCHING = threading.Lock()


def _launch(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    with _LAUNCHING, as_current(arguments[0].device):
        kernel[programs](*arguments, **constants, enable_fp_fusion=False)


def _bf16_words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


def has_bits_of_host(codec: "Codec", device: torch.device) -> bool:
    """Return whether numbers that are encoded and decoded on a device are those of the host."""
    host, by_kernels = codec.by(None), codec.by(sys.modules[__name__])
    source = torch.randn(_PROVED_ELEMENTS, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    room = torch.zeros(codec.spec.max_bytes(len(source), "bf16"), dtype=torch.uint8)
    encoded, here = room[: host.encode(source, room)], torch.empty_like(source)
    host.decode(encoded, here)
    there, room_there = torch.empty_like(source, device=device), torch.zeros_like(room, device=device)
    arrived, source_there, encodes = encoded.to(device), source.to(device), codec.spec in BLOCKWISE
    by_kernels.decode(arrived, there)
    size = by_kernels.encode(source_there, room_there) if encodes else 0  # the only ones that kernels encode
    same_numbers = torch.equal(here.view(torch.int16), there.cpu().view(torch.int16))
    return same_numbers and (not encodes or torch.equal(encoded, room_there[:size].cpu()))


@triton.jit
def _from_bf16(words):
    return (words.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _to_bf16(x):
    """Return the bits of fp32 numbers rounded to bf16, int16; every NaN as 0x7FC0."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > _INFINITE, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def _store(into, at, x, mask):
    """Write fp32 numbers in the dtype of ``into``, of which int16 are the bits of bf16."""
    if into.dtype.element_ty == tl.int16:
        tl.store(into + at, _to_bf16(x), mask=mask)
    else:
        tl.store(into + at, x.to(into.dtype.element_ty), mask=mask)


@triton.jit
def _tile(numel, GROUP: tl.constexpr):
    """Return this program's first element and first group, and of a tile [groups, GROUP] what lies inside."""
    first = tl.program_id(0).to(tl.int64) * _BLOCK
    groups = tl.arange(0, _BLOCK // GROUP)
    at = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return first, first // GROUP + groups, groups * GROUP < numel - first, at, at < numel - first


@triton.jit
def _nibbles(codes, first, numel, GROUP: tl.constexpr):
    """Return the integers of 4 bits of a tile, int32 [groups, GROUP]; a byte holds two, the first in its lower half."""
    half = tl.arange(0, _BLOCK // 2)
    pairs = tl.load(codes + first // 2 + half, mask=half * 2 < numel - first, other=0).to(tl.int32)
    return tl.reshape(tl.interleave(pairs & 15, pairs >> 4), (_BLOCK // GROUP, GROUP))


@triton.jit
def _nf4(codes, scales, numbers, levels, into, numel, DOUBLE: tl.constexpr):
    first, block, there, at, inside = _tile(numel, 64)
    if DOUBLE:  # ``scales`` are least and step of 256 blocks each
        number = tl.load(numbers + block, mask=there, other=0).to(tl.float32)
        least = tl.load(scales + block // 256 * 2, mask=there, other=0.0)
        scale = number * tl.load(scales + block // 256 * 2 + 1, mask=there, other=0.0) + least
    else:
        scale = tl.load(scales + block, mask=there, other=0.0)
    _store(into + first, at, tl.load(levels + _nibbles(codes, first, numel, 64)) * scale[:, None], inside)


def decode_nf4(codes: Tensor, scales: Tensor, numbers: Tensor | None, levels: Tensor, into: Tensor) -> None:
    """Fill ``into`` [n] with the levels that codes name, times the magnitudes of blocks.

    Args:
        codes: uint8, two to a byte.
        scales: fp32 magnitudes [blocks], or least and step [groups, 2] of those that are quantised.
        numbers: quantised magnitudes, uint8 [blocks]; None where they are not.
        levels: fp32 [16].
        into: fp32, bf16 or fp16.
    """
    arguments = codes, scales, codes if numbers is None else numbers, levels, _bf16_words(into), into.numel()
    _launch(_nf4, (triton.cdiv(into.numel(), _BLOCK.value),), *arguments, DOUBLE=numbers is not None)


@triton.jit
def _blockwise(
    codes, scales, zeros, into, numel, BITS: tl.constexpr, SYMMETRIC: tl.constexpr, GROUP: tl.constexpr
):
    first, group, there, at, inside = _tile(numel, GROUP)
    if BITS == 8:
        number = tl.load(codes + first + at, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.int32)
        if not SYMMETRIC:
            number += 128
    else:
        number = _nibbles(codes, first, numel, GROUP)
        if SYMMETRIC:
            number = (number ^ 8) - 8
    y = number.to(tl.float32) * _from_bf16(tl.load(scales + group, mask=there, other=0))[:, None]
    if not SYMMETRIC:
        y = y + _from_bf16(tl.load(zeros + group, mask=there, other=0))[:, None]
    _store(into + first, at, y, inside)


def _parts(grid: "Grid", sections: "Sections") -> tuple[Tensor, Tensor, Tensor]:
    scales = _bf16_words(sections.scales)
    return sections.codes, scales, scales if grid.symmetric else _bf16_words(sections.zeros)


def decode_blockwise(grid: "Grid", sections: "Sections", into: Tensor) -> None:
    """Fill ``into`` [n], fp32, bf16 or fp16, from ``sections``."""
    form = {"BITS": grid.bits, "SYMMETRIC": grid.symmetric, "GROUP": grid.group}
    arguments = *_parts(grid, sections), _bf16_words(into), into.numel()
    _launch(_blockwise, (triton.cdiv(into.numel(), _BLOCK.value),), *arguments, **form)


@triton.jit
def _group_scales(x, factor, SYMMETRIC: tl.constexpr):
    """Return scale and zero point of each row of ``x``, as the bits of bf16, and whether it is finite."""
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = largest < _INFINITE
    zero = tl.zeros_like(largest).to(tl.int16)
    spread = largest.to(tl.float32, bitcast=True)
    if not SYMMETRIC:
        x = tl.where(finite[:, None], x, 0.0)
        smallest = tl.min(x, axis=1)
        zero = _to_bf16(smallest - tl.abs(smallest) * 0.00390625 + 0.0)
        spread = tl.max(x, axis=1) - _from_bf16(zero)
    scale = _to_bf16(tl.maximum(spread * factor, _LEAST_SCALE))
    finite = finite & ((scale.to(tl.int32) & 0x7FFF) < 0x7F80)
    return tl.where(finite, scale, 0x7FC0).to(tl.int16), tl.where(finite, zero, 0).to(tl.int16), finite


@triton.jit(do_not_specialize=["numel", "seed", "factor"])
def _blockwise_encode(source, codes, scales, zeros, chances, numel, seed, factor, FORM: tl.constexpr):
    BITS: tl.constexpr = FORM[0]  # noqa: N806
    SYMMETRIC: tl.constexpr = FORM[1]  # noqa: N806
    GROUP: tl.constexpr = FORM[2]  # noqa: N806
    ROWS: tl.constexpr = _BLOCK // GROUP  # noqa: N806
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    groups = tl.cdiv(numel, GROUP)
    at = rows[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    # A shorter last group is filled up with its last element.
    place = tl.minimum(at, numel.to(tl.int64) - 1)
    if source.dtype.element_ty == tl.int16:
        x = _from_bf16(tl.load(source + place))
    else:
        x = tl.load(source + place).to(tl.float32)
    scale, zero, finite = _group_scales(x, factor, SYMMETRIC)
    inside = rows < groups
    tl.store(scales + rows, scale, mask=inside)
    if not SYMMETRIC:
        tl.store(zeros + rows, zero, mask=inside)
        x = x - _from_bf16(zero)[:, None]
    y = tl.where(finite[:, None], x * tl.div_rn(1.0, _from_bf16(scale))[:, None], 0.0)
    if FORM[3]:  # by chance
        start = ((seed + at // _PIECE * _SPREAD) >> 40) & (_PIECE - 1)
        y = y + tl.load(chances + start + at % _PIECE)
        least: tl.constexpr = 1 - (1 << (BITS - 1)) if SYMMETRIC else 0
        most: tl.constexpr = (1 << (BITS - 1)) - 1 if SYMMETRIC else (1 << BITS) - 1
        number = y.to(tl.int32)
        number -= (number.to(tl.float32) > y).to(tl.int32)  # `tl.floor` takes subnormal numbers for zeros
        number = tl.minimum(tl.maximum(number, least), most)
    else:
        number = (y + _HALFWAY - _HALFWAY).to(tl.int32)
    if BITS == 8:
        if not SYMMETRIC:
            number -= 128
        tl.store(codes + at, number.to(tl.uint8), mask=inside[:, None])
    else:
        first, second = tl.split(tl.reshape(number & 15, (ROWS, GROUP // 2, 2)))
        pair = rows[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        tl.store(codes + pair, (first | second << 4).to(tl.uint8), mask=inside[:, None])


def encode_blockwise(
    grid: "Grid", factor: float, sections: "Sections", source: Tensor, chances: tuple[Tensor, int] | None
) -> None:
    """Write ``source`` [n], fp32, bf16 or fp16, into ``sections``.

    Args:
        grid: of its groups.
        factor: from the spread of a group to its scale.
        sections: of an encoding of as many elements.
        source: what is written.
        chances: a table, and what the place of the first piece in it follows from; None to the nearest.
    """
    table, seed = chances or (sections.scales, 0)
    form = grid.bits, grid.symmetric, grid.group, chances is not None
    arguments = _bf16_words(source), *_parts(grid, sections), _bf16_words(table)
    programs = triton.cdiv(len(sections.codes), _BLOCK.value // grid.group)
    _launch(_blockwise_encode, (programs,), *arguments, source.numel(), _signed(seed), factor, FORM=form)


def _signed(number: int) -> int:
    """Return the 64 lowest bits of ``number``, as an integer with a sign."""
    return (number + 2**63) % 2**64 - 2**63


@triton.jit
def _carried(rows, column, inside, columns, HOST: tl.constexpr, MASK: tl.constexpr, SHIFT: tl.constexpr):
    """Return a field of the words of one row, shifted to the left to where it belongs in those that it carries."""
    field = tl.load(rows + HOST * columns + column, mask=inside, other=0).to(tl.int32) & MASK
    if SHIFT >= 0:
        return field << SHIFT
    else:  # noqa: RET505 - to Triton, what follows a return is still to be compiled
        return field >> -SHIFT


@triton.jit
def _add_exceptions(counts, at, room, into, elements, num_counts, HOLE: tl.constexpr):
    """Add to a block what its holes held, by the list behind ``counts``, of which those before it take ``at``."""
    span = tl.program_id(0) * (_COLUMNS * 16 // _SPAN)
    tl.debug_barrier()  # what is added to was written by other threads of this program
    for each in range(_COLUMNS * 16 // _SPAN):
        count = tl.load(counts + span + each, mask=span + each < num_counts, other=0).to(tl.int32) & 0xFFFF
        start = 0
        while start < count:
            index = start + tl.arange(0, 128)
            listed_here = (index < count) & (num_counts + at + index < room)
            listed = tl.load(counts + num_counts + at + index, mask=listed_here, other=0).to(tl.int32)
            position = each * _SPAN + (listed & (_SPAN - 1))
            inside = listed_here & (position < elements)
            held = ((listed & 0xFFFF) // _SPAN & ((1 << HOLE[1]) - 1)) << HOLE[0]
            if into.dtype.element_ty == tl.int32:
                held = held << 16
            added = tl.load(into + position, mask=inside, other=0).to(tl.int32) + held
            tl.store(into + position, added.to(into.dtype.element_ty), mask=inside)
            start += 128
        at += count


@triton.jit
def _count_exceptions(counts, num_counts, span):
    """Return how many exceptions are listed before ``span``, and how many in all."""
    column = tl.arange(0, _COLUMNS)
    before, listed = tl.zeros_like(column), tl.zeros_like(column)
    first = 0
    while first < num_counts:
        at = first + column
        some = tl.load(counts + at, mask=at < num_counts, other=0).to(tl.int32) & 0xFFFF
        before += tl.where(at < span, some, 0)
        listed += some
        first += _COLUMNS
    return tl.sum(before, axis=0), tl.sum(listed, axis=0)


@triton.jit(do_not_specialize=["numel", "piece_numel", "stride"])
def _window(
    octets,
    words,
    into,
    numel,
    piece_numel,
    stride,
    MANTISSA: tl.constexpr,
    HOLE: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Decode one block of a piece into ``into``, int16 words, or int32 of which they are the upper halves."""
    hosts: tl.constexpr = 16 - HOLE[1]
    hole: tl.constexpr = ((1 << HOLE[1]) - 1) << HOLE[0]
    piece, block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    start, room = piece * stride, stride  # in words
    lower = words + start
    into += piece * piece_numel
    numel = tl.minimum(numel - piece * piece_numel, piece_numel).to(tl.int32)
    if into.dtype.element_ty == tl.int32:  # the lower halves come first, as they are
        start += numel
        room -= numel
    words += start
    num_blocks, tail, left_over = numel // (_COLUMNS * 16), numel % (_COLUMNS * 16) // 16 * 16, numel % 16
    columns = tl.where(block < num_blocks, _COLUMNS, tl.where(block == num_blocks, tail // 16, 0))
    # Behind the blocks come words that are kept as they are, counts of exceptions, these, and the bases of blocks.
    first_behind = (num_blocks * _COLUMNS + tail // 16) * hosts
    first_count = first_behind + left_over
    num_counts = tl.cdiv(numel - left_over, _SPAN)
    counts = words + first_count
    before, listed = _count_exceptions(counts, num_counts, block * (_COLUMNS * 16 // _SPAN))
    base_at = first_count + num_counts + listed
    there = (columns > 0) & (2 * base_at + block < 2 * room)
    base = tl.load(octets + 2 * (start + base_at) + block, mask=there, other=0).to(tl.int32) << MANTISSA
    block_start = block * (_COLUMNS * 16)
    rows = words + block * (_COLUMNS * hosts)
    column = tl.arange(0, _COLUMNS)
    inside = column < columns
    for row in tl.static_range(16):
        if row < hosts:
            word = tl.load(rows + row * columns + column, mask=inside, other=0).to(tl.int32) & ~hole
        else:
            word = tl.zeros_like(column)
            for part in tl.static_range(len(PIECES)):
                word |= _carried(
                    rows,
                    column,
                    inside,
                    columns,
                    PIECES[part][0] + (row - hosts) * PIECES[part][3],
                    PIECES[part][1] << ((row - hosts) * PIECES[part][4]),
                    PIECES[part][2] - (row - hosts) * PIECES[part][4],
                )
        _store_words(into, lower, block_start + row * columns + column, word + base, inside)
    place = tl.arange(0, 16)
    last = (block == 0) & (place < left_over)
    word = tl.load(words + first_behind + place, mask=last, other=0).to(tl.int32)
    _store_words(into, lower, numel - left_over + place, word, last)
    into += block_start
    _add_exceptions(counts, before, room - first_count, into, columns * 16, num_counts, HOLE)


@triton.jit
def _store_words(into, lower, at, word, mask):
    if into.dtype.element_ty == tl.int32:
        half = tl.load(lower + at, mask=mask, other=0).to(tl.int32) & 0xFFFF
        tl.store(into + at, word << 16 | half, mask=mask)
    else:
        tl.store(into + at, word.to(tl.int16), mask=mask)


def decode_window(
    layout: "WindowLayout", encoded: Tensor, stride: int, piece_numel: int, into: Tensor
) -> None:
    """Fill ``into`` [n] from encodings in blocks, whose lengths have been looked at.

    Args:
        layout: of the words.
        encoded: uint8.
        stride: bytes from the beginning of one encoding to that of the next one, an even number of several.
        piece_numel: elements of each; the last one is of fewer.
        into: fp32, bf16 or fp16.
    """
    # Field by field: first host, mask, shift, and what a guest adds to host and mask. Signs may share a host.
    pieces = [(piece.hosts[0], piece.mask, piece.shift, 1, 0) for piece in layout.pieces]
    if layout.signs:
        pieces.append((layout.num_hosts - 1, 1 << layout.signs[0], 15 - layout.signs[0], 0, 1))
    _launch(
        _window,
        (triton.cdiv(piece_numel, 16 * _COLUMNS.value), triton.cdiv(into.numel(), piece_numel)),
        encoded,
        encoded[: encoded.numel() // 2 * 2].view(torch.int16),
        into.view(torch.int32 if into.dtype is torch.float32 else torch.int16),
        *(into.numel(), piece_numel, triton.cdiv(stride, 2)),
        MANTISSA=layout.mantissa_bits,
        HOLE=(layout.hole_shift, layout.num_guests),
        PIECES=tuple(pieces),
        num_warps=8,
    )
