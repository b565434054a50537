"""Decode and encode on a GPU in one kernel each, by Triton: the bits of the torch forms, which do so elsewhere.

A codec asks `device_kernels` (outsize.codecs.codec), which imports this file where Triton is, and a kernel of it runs.
Products and sums are rounded apart (``enable_fp_fusion=False``), as torch rounds them, and divisions as IEEE says.
bf16 is read and written by its bits: rounding is then the same on every GPU, and in Triton's interpreter, which the
tests run. A kernel takes no memory; it works in order with the stream that its thread has set.
"""

import threading
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outsize.codecs.blockwise import LEAST_SCALE, PIECE_ELEMENTS, SPREAD_PIECE

if TYPE_CHECKING:
    from outsize.codecs.blockwise import Grid, Sections
    from outsize.codecs.window_layout import WindowLayout, WindowSections

_BLOCK = tl.constexpr(2048)  # elements of a program of the kernels that look at elements one by one
_PIECE, _LEAST_SCALE = tl.constexpr(PIECE_ELEMENTS), tl.constexpr(LEAST_SCALE)
_SPREAD = tl.constexpr(SPREAD_PIECE - 2**64)  # as a number of 64 bits with a sign
_INFINITE = tl.constexpr(0x7F800000)
_COLUMNS, _SPAN = tl.constexpr(1024), tl.constexpr(2048)  # of a block of window codecs, and between counts
_HALFWAY = tl.constexpr(
    12582912.0
)  # 1.5 * 2^23: a sum with it has no fraction, and rounds to the nearest even
# Lanes of several devices launch from threads of their own, and the first launch of each form compiles it.
_LAUNCHING = threading.Lock()


def _launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    with _LAUNCHING:
        kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)


def _bf16_words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


def compile_one(device: torch.device) -> None:
    """Compile a kernel and launch it, which raises whatever is missing on this machine."""
    decode_nf4(
        torch.zeros(32, dtype=torch.uint8, device=device),
        torch.zeros(1, device=device),
        None,
        torch.zeros(16, device=device),
        torch.empty(64, device=device),
    )


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


@triton.jit(do_not_specialize=["numel"])
def _nf4(codes, scales, numbers, levels, into, numel, DOUBLE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    inside = at < numel
    pairs = tl.load(codes + at // 2, mask=inside, other=0).to(tl.int32)
    level = tl.load(levels + ((pairs >> ((at % 2) * 4).to(tl.int32)) & 15), mask=inside, other=0.0)
    block = at // 64
    if DOUBLE:  # ``scales`` are least and step of 256 blocks each
        number = tl.load(numbers + block, mask=inside, other=0).to(tl.float32)
        least = tl.load(scales + block // 256 * 2, mask=inside, other=0.0)
        scale = number * tl.load(scales + block // 256 * 2 + 1, mask=inside, other=0.0) + least
    else:
        scale = tl.load(scales + block, mask=inside, other=0.0)
    _store(into, at, level * scale, inside)


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
    _launch(_nf4, triton.cdiv(into.numel(), _BLOCK.value), *arguments, DOUBLE=numbers is not None)


@triton.jit(do_not_specialize=["numel"])
def _blockwise(
    codes, scales, zeros, into, numel, BITS: tl.constexpr, SYMMETRIC: tl.constexpr, GROUP: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    inside = at < numel
    if BITS == 8:
        number = tl.load(codes + at, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.int32)
        if not SYMMETRIC:
            number += 128
    else:
        pairs = tl.load(codes + at // 2, mask=inside, other=0).to(tl.int32)
        number = (pairs >> ((at % 2) * 4).to(tl.int32)) & 15
        if SYMMETRIC:
            number = (number ^ 8) - 8
    y = number.to(tl.float32) * _from_bf16(tl.load(scales + at // GROUP, mask=inside, other=0))
    if not SYMMETRIC:
        y = y + _from_bf16(tl.load(zeros + at // GROUP, mask=inside, other=0))
    _store(into, at, y, inside)


def _parts(grid: "Grid", sections: "Sections") -> tuple[Tensor, Tensor, Tensor]:
    scales = _bf16_words(sections.scales)
    return sections.codes, scales, scales if grid.symmetric else _bf16_words(sections.zeros)


def decode_blockwise(grid: "Grid", sections: "Sections", into: Tensor) -> None:
    """Fill ``into`` [n], fp32, bf16 or fp16, from ``sections``."""
    form = {"BITS": grid.bits, "SYMMETRIC": grid.symmetric, "GROUP": grid.group}
    arguments = *_parts(grid, sections), _bf16_words(into), into.numel()
    _launch(_blockwise, triton.cdiv(into.numel(), _BLOCK.value), *arguments, **form)


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
    _launch(_blockwise_encode, programs, *arguments, source.numel(), _signed(seed), factor, FORM=form)


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
def _add_exceptions(
    counts,
    into,
    elements,
    num_counts,
    num_listed,
    HOLE_SHIFT: tl.constexpr,
    GUESTS: tl.constexpr,
):
    """Add to a block what its holes held, by the list behind ``counts``."""
    # Exceptions of earlier blocks come first; those of this one lie in spans.
    span = tl.program_id(0) * (_COLUMNS * 16 // _SPAN)
    column = tl.arange(0, _COLUMNS)
    before = tl.zeros_like(column)
    start = 0
    while start < span:
        before += tl.load(counts + start + column, mask=start + column < span, other=0).to(tl.int32) & 0xFFFF
        start += _COLUMNS
    at = tl.sum(before, axis=0)
    tl.debug_barrier()  # what is added to was written by other threads of this program
    for each in range(_COLUMNS * 16 // _SPAN):
        inside_counts = span + each < num_counts
        count = tl.load(counts + span + each, mask=inside_counts, other=0).to(tl.int32) & 0xFFFF
        start = 0
        while start < count:
            index = start + tl.arange(0, 128)
            ours = (index < count) & (at + index < num_listed)
            listed = tl.load(counts + num_counts + at + index, mask=ours, other=0).to(tl.int32)
            position = each * _SPAN + (listed & (_SPAN - 1))
            ours = ours & (position < elements)
            held = ((listed & 0xFFFF) // _SPAN & ((1 << GUESTS) - 1)) << HOLE_SHIFT
            if into.dtype.element_ty == tl.int32:
                held = held << 16
            added = tl.load(into + position, mask=ours, other=0).to(tl.int32) + held
            tl.store(into + position, added.to(into.dtype.element_ty), mask=ours)
            start += 128
        at += count


@triton.jit(do_not_specialize=["numel", "num_listed"])
def _window(
    words,
    bases,
    lower,
    into,
    numel,
    num_listed,
    MANTISSA: tl.constexpr,
    HOLE_SHIFT: tl.constexpr,
    GUESTS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Decode one block into ``into``, int16 words, or int32 of which they are the upper halves."""
    hosts: tl.constexpr = 16 - GUESTS
    hole: tl.constexpr = ((1 << GUESTS) - 1) << HOLE_SHIFT
    block = tl.program_id(0).to(tl.int64)
    num_blocks = numel // (_COLUMNS * 16)
    tail = numel % (_COLUMNS * 16) // 16 * 16
    left_over = numel % 16
    columns = tl.where(block < num_blocks, _COLUMNS, tail // 16)
    elements = columns * 16
    first = block * (_COLUMNS * 16)
    rows = words + block * (_COLUMNS * hosts)
    base = (tl.load(bases + block, mask=elements > 0, other=0).to(tl.int32)) << MANTISSA
    column = tl.arange(0, _COLUMNS)
    inside = column < columns
    for row in tl.static_range(16):
        if row < hosts:
            word = tl.load(rows + row * columns + column, mask=inside, other=0).to(tl.int32) & ~hole
        else:
            word = tl.zeros_like(column)
            for piece in tl.static_range(len(PIECES)):
                word |= _carried(
                    rows,
                    column,
                    inside,
                    columns,
                    PIECES[piece][0] + (row - hosts) * PIECES[piece][3],
                    PIECES[piece][1] << ((row - hosts) * PIECES[piece][4]),
                    PIECES[piece][2] - (row - hosts) * PIECES[piece][4],
                )
        _store_words(into, lower, first + row * columns + column, word + base, inside)
    # Words that are kept as they are lie behind the last block, and counts of exceptions behind them.
    behind = words + (num_blocks.to(tl.int64) * _COLUMNS + tail // 16) * hosts
    place = tl.arange(0, 16)
    last = (block == 0) & (place < left_over)
    word = tl.load(behind + place, mask=last, other=0).to(tl.int32)
    _store_words(into, lower, (numel - left_over).to(tl.int64) + place, word, last)
    num_counts = tl.cdiv(numel - left_over, _SPAN)
    _add_exceptions(behind + left_over, into + first, elements, num_counts, num_listed, HOLE_SHIFT, GUESTS)


@triton.jit
def _store_words(into, lower, at, word, mask):
    if into.dtype.element_ty == tl.int32:
        half = tl.load(lower + at, mask=mask, other=0).to(tl.int32) & 0xFFFF
        tl.store(into + at, word << 16 | half, mask=mask)
    else:
        tl.store(into + at, word.to(tl.int16), mask=mask)


def decode_window(
    layout: "WindowLayout", sections: "WindowSections", encoded: Tensor, lower: Tensor | None, into: Tensor
) -> None:
    """Fill ``into`` [n] from an encoding in blocks, whose length has been looked at.

    Args:
        layout: of the words.
        sections: of so many elements.
        encoded: uint8.
        lower: int16 [n] where ``into`` is fp32: the halves that are not encoded.
        into: fp32, bf16 or fp16.
    """
    ends = encoded.numel() - sections.num_bases
    words, bases = encoded[:ends].view(torch.int16), encoded[ends:] if sections.num_bases else encoded
    # Field by field: first host, mask, shift, and what a guest adds to host and mask. Signs may share a host.
    pieces = [(piece.hosts[0], piece.mask, piece.shift, 1, 0) for piece in layout.pieces]
    if layout.signs:
        pieces.append((layout.num_hosts - 1, 1 << layout.signs[0], 15 - layout.signs[0], 0, 1))
    _launch(
        _window,
        max(1, sections.num_bases),
        words,
        bases,
        words if lower is None else lower,
        into.view(torch.int16 if lower is None else torch.int32),
        into.numel(),
        sections.num_exceptions(encoded.numel()),
        MANTISSA=layout.mantissa_bits,
        HOLE_SHIFT=layout.hole_shift,
        GUESTS=layout.num_guests,
        PIECES=tuple(pieces),
        num_warps=8,
    )
