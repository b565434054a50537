"""The lossless window encoding on a core: passes over pieces that stay in a cache, see `window_layout`.

NumPy rather than torch: a pass over 64 KiB takes 2 µs here, and calling a torch operator as long again.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outsize.codecs.window_layout import (
    BLOCK_ELEMENTS,
    POSITION_BITS,
    ROWS,
    SPAN_ELEMENTS,
    WindowLayout,
    WindowSections,
)

Words: TypeAlias = NDArray[np.uint16]

# Sixteen blocks are 512 KiB of words: with what is made of them they stay in a second-level cache of 1 MiB.
PIECE_BLOCKS = 16
# Of so many elements one is looked at to choose a base.
SAMPLING = 16


def encode_window(layout: WindowLayout, source: Words, into: NDArray[np.uint8]) -> int:
    """Encode ``source`` [n] into ``into`` [2 n] and return the bytes written."""
    sections = WindowSections(layout, source.size)
    words = into[: into.size // 2 * 2].view(np.uint16)
    if sections.num_bytes(0) >= source.nbytes:
        return _as_it_is(source, words)
    bases = np.empty(sections.num_bases, np.uint8)
    found: list[tuple[NDArray[np.int64], Words]] = []
    for first, blocks, rows in _blocks(sections, source, words):
        chosen = choose_bases(layout, blocks)
        bases[first : first + len(blocks)] = chosen
        positions, holes = _pack(layout, blocks, chosen, rows)
        found.append((positions + first * BLOCK_ELEMENTS, holes))
    num_exceptions = sum(len(positions) for positions, _ in found)
    size = sections.num_bytes(num_exceptions)
    if size >= source.nbytes:
        return _as_it_is(source, words)
    words[sections.left_over_start : sections.counts_start] = source[source.size - sections.left_over :]
    _list_exceptions(sections, found, words)
    into[size - sections.num_bases : size] = bases
    return size


def decode_window(layout: WindowLayout, encoded: NDArray[np.uint8], into: Words) -> None:
    """Decode into ``into`` [n].

    Raises:
        ValueError: the lengths do not fit each other, or a list of exceptions leads outside.
    """
    if encoded.size == into.nbytes:
        into.view(np.uint8)[:] = encoded
        return
    sections = WindowSections(layout, into.size)
    num_exceptions = sections.num_exceptions(encoded.size)
    if not 0 <= num_exceptions <= into.size:
        raise ValueError(f"{encoded.size} bytes hold no {into.size} elements")
    words = encoded[: encoded.size // 2 * 2].view(np.uint16)
    counts = words[sections.counts_start : sections.exceptions_start]
    if int(counts.sum(dtype=np.int64)) != num_exceptions:
        raise ValueError(f"{num_exceptions} exceptions are listed, {int(counts.sum(dtype=np.int64))} counted")
    listed = words[sections.exceptions_start : sections.exceptions_start + num_exceptions]
    ends = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    bases = encoded[encoded.size - sections.num_bases :].astype(np.uint16)
    bases <<= np.uint16(layout.mantissa_bits)
    for first, blocks, rows in _blocks(sections, into, words):
        _unpack(layout, rows, bases[first : first + len(blocks)], blocks)
        start = first * BLOCK_ELEMENTS // SPAN_ELEMENTS
        stop = start - (-blocks.size // SPAN_ELEMENTS)
        _add_exceptions(layout, counts[start:stop], listed[ends[start] : ends[stop]], blocks.reshape(-1))
    into[into.size - sections.left_over :] = words[sections.left_over_start : sections.counts_start]


def choose_bases(layout: WindowLayout, blocks: Words) -> Words:
    """Return for each of ``blocks`` [m, elements] the lowest exponent of the window that covers most of a sample."""
    num_bins = 1 << layout.exponent_bits
    exponents = blocks[:, ::SAMPLING] >> layout.mantissa_bits
    exponents &= num_bins - 1
    bins = exponents + (np.arange(len(blocks)) * num_bins)[:, None]
    histogram = np.bincount(bins.reshape(-1), minlength=len(blocks) * num_bins)
    below = np.zeros((len(blocks), num_bins + 1), np.int64)
    np.cumsum(histogram.reshape(len(blocks), num_bins), axis=1, out=below[:, 1:])
    width = 1 << layout.code_bits
    covered = below[:, width:] - below[:, :-width]
    bases: Words = covered.argmax(axis=1).astype(np.uint16)
    return bases


def _blocks(sections: WindowSections, elements: Words, words: Words) -> list[tuple[int, Words, Words]]:
    """Cut in pieces: index of the first block, elements [m, size] of blocks, words [m, hosts, size / 16] of theirs."""
    hosts = sections.layout.num_hosts
    whole = elements[: sections.num_blocks * BLOCK_ELEMENTS].reshape(-1, BLOCK_ELEMENTS)
    rows = words[: sections.tail_start].reshape(-1, hosts, BLOCK_ELEMENTS // ROWS)
    pieces = [
        (first, whole[first : first + PIECE_BLOCKS], rows[first : first + PIECE_BLOCKS])
        for first in range(0, sections.num_blocks, PIECE_BLOCKS)
    ]
    if sections.tail:
        tail = elements[whole.size : whole.size + sections.tail].reshape(1, sections.tail)
        tail_rows = words[sections.tail_start : sections.left_over_start].reshape(1, hosts, -1)
        pieces.append((sections.num_blocks, tail, tail_rows))
    return pieces


def _pack(layout: WindowLayout, blocks: Words, bases: Words, rows: Words) -> tuple[NDArray[np.int64], Words]:
    """Fill ``rows`` [m, hosts, size / 16]; return positions in ``blocks`` [m, size] whose hole is not empty, and it."""
    rest = blocks - (bases << layout.mantissa_bits)[:, None]
    hole = np.uint16(layout.hole)
    exceptions: NDArray[np.int64] = np.flatnonzero((rest & hole).reshape(-1) != 0)
    holes = _shift(rest.reshape(-1)[exceptions] & hole, -layout.hole_shift)
    rest = rest.reshape(len(blocks), ROWS, -1)
    guests = rest[:, layout.num_hosts :]
    np.bitwise_and(rest[:, : layout.num_hosts], ~hole, out=rows)
    for piece in layout.pieces:
        field = guests & np.uint16(_shifted(piece.mask, piece.shift))
        rows[:, piece.hosts[0] : piece.hosts[1]] |= _shift(field, -piece.shift)
    for guest, bit in enumerate(layout.signs):
        rows[:, -1] |= _shift(guests[:, guest] & np.uint16(0x8000), bit - 15)
    return exceptions, holes


def _unpack(layout: WindowLayout, rows: Words, bases: Words, blocks: Words) -> None:
    """Fill ``blocks`` [m, size] from ``rows`` [m, hosts, size / 16] and shifted ``bases`` [m], exceptions aside."""
    words = blocks.reshape(len(blocks), ROWS, -1)
    guests = words[:, layout.num_hosts :]
    np.bitwise_and(rows, ~np.uint16(layout.hole), out=words[:, : layout.num_hosts])
    for position, piece in enumerate(layout.pieces):
        field = rows[:, piece.hosts[0] : piece.hosts[1]] & np.uint16(piece.mask)
        if position == 0:
            guests[...] = _shift(field, piece.shift)
        else:
            guests |= _shift(field, piece.shift)
    for guest, bit in enumerate(layout.signs):
        guests[:, guest] |= _shift(rows[:, -1] & np.uint16(1 << bit), 15 - bit)
    blocks += bases[:, None]


def _list_exceptions(
    sections: WindowSections, found: list[tuple[NDArray[np.int64], Words]], words: Words
) -> None:
    at = sections.exceptions_start
    counts = np.zeros(sections.num_counts, np.int64)
    for positions, holes in found:
        words[at : at + len(positions)] = (positions & (SPAN_ELEMENTS - 1)).astype(np.uint16)
        words[at : at + len(positions)] |= holes << POSITION_BITS
        counts += np.bincount(positions >> POSITION_BITS, minlength=len(counts))
        at += len(positions)
    words[sections.counts_start : sections.exceptions_start] = counts


def _add_exceptions(layout: WindowLayout, counts: Words, listed: Words, elements: Words) -> None:
    if not len(listed):
        return
    positions = np.repeat(np.arange(len(counts)) << POSITION_BITS, counts)
    positions += listed & (SPAN_ELEMENTS - 1)
    if int(positions.max()) >= elements.size:
        raise ValueError(f"an exception is listed at {int(positions.max())} of {elements.size} elements")
    elements[positions] += (listed >> POSITION_BITS) << layout.hole_shift


def _as_it_is(source: Words, words: Words) -> int:
    words[: source.size] = source
    return source.nbytes


def _shifted(mask: int, shift: int) -> int:
    return mask << shift if shift >= 0 else mask >> -shift


def _shift(words: Words, shift: int) -> Words:
    """Shift in place, left where positive."""
    shifted: Any = np.left_shift if shift >= 0 else np.right_shift
    found: Words = shifted(words, np.uint16(abs(shift)), out=words)
    return found
