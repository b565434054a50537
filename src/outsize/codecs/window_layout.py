"""The form of the fixed-rate lossless encoding of 16-bit floats, and its passes in NumPy. No torch.

Theory of operation. The exponents of a block of weights are nearly all within a few binades of each other, so a short
code for them suffices: the exponent less a *base* chosen per block, in ``code_bits`` bits. Sign and mantissa are kept
as they are. Codes are not packed apart: the base is subtracted from the whole word where it lies, modulo 2^16, which
leaves a *hole* of zeros in the upper part of the exponent's field::

    bf16, 4-bit codes         fp16, 3-bit codes
    s hhhh cccc mmmmmmm       s hh ccc mmmmmmmmmm

A block is sixteen rows of words. With a hole of d bits, the first 16 - d rows are *hosts*: they are stored, and in
their holes they carry the words of the last d rows, the *guests*, whose 16 - d bits are just what the holes hold. So
packing and unpacking are a few masks and shifts of whole rows, with no bit stream to follow: the same expressions run
in NumPy on a core and in torch on a GPU.

Where the exponent is outside the window the hole is not empty. What it held goes to a list of *exceptions*, 16 bits
each: the position within 2,048 elements (11 bits) and the hole (at most 5). Decoding adds them back, modulo 2^16, so
every pattern of 16 bits is exact, NaN payloads, subnormals and infinities included.

The encoding is, one behind the other: the words of all blocks; those of a shorter last block; up to 15 words as they
are; the number of exceptions in every 2,048 elements, 16 bits each; the exceptions; the base of every block, 8 bits.
If that is not shorter than the elements themselves, these are the encoding, and their length says so.

NumPy rather than torch: a pass over 64 KiB takes 2 µs here, and calling a torch operator as long again.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# A row of a block of 16,384 is 2 KiB of words: long enough for a vector loop, and the block's base is its own.
BLOCK_ELEMENTS = 16_384
ROWS = 16
POSITION_BITS = 11
SPAN_ELEMENTS = 1 << POSITION_BITS

MANTISSA_BITS = {"bf16": 7, "fp16": 10}


@dataclass(frozen=True, slots=True)
class WindowPiece:
    """A field of guests in the holes of hosts.

    Attributes:
        hosts: first and last plus one of the rows that carry it, one for each guest.
        mask: the field in a host.
        shift: by how much it moves left to become the guest's, negative for right.
    """

    hosts: tuple[int, int]
    mask: int
    shift: int


@dataclass(frozen=True, slots=True)
class WindowLayout:
    """Where the bits of a word go.

    Attributes:
        mantissa_bits: of the dtype: 7 for bf16, 10 for fp16.
        code_bits: kept of the exponent.
    """

    mantissa_bits: int
    code_bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_guests <= 16 - POSITION_BITS:
            raise ValueError(f"no layout for {self.code_bits} of {self.exponent_bits} exponent bits")

    @property
    def exponent_bits(self) -> int:
        """Of the dtype."""
        return 15 - self.mantissa_bits

    @property
    def num_guests(self) -> int:
        """Rows of a block that are carried; also the bits of a hole."""
        return self.exponent_bits - self.code_bits

    @property
    def num_hosts(self) -> int:
        """Rows of a block that are stored."""
        return ROWS - self.num_guests

    @property
    def hole_shift(self) -> int:
        """Lowest bit of the hole."""
        return self.mantissa_bits + self.code_bits

    @property
    def hole(self) -> int:
        """The hole's bits in a word."""
        return ((1 << self.num_guests) - 1) << self.hole_shift

    @property
    def pieces(self) -> tuple[WindowPiece, ...]:
        """Fields of as many hosts as there are guests: host i of a piece carries it for guest i."""
        width, low_bits = self.num_guests, 15 - self.num_guests
        pieces = [
            WindowPiece((first * width, (first + 1) * width), self.hole, first * width - self.hole_shift)
            for first in range(low_bits // width)
        ]
        rest = low_bits % width
        if rest + 1 == width:  # what is left of the guest, and its sign at the top of the hole
            hosts = (self.num_hosts - width, self.num_hosts)
            if rest:
                mask = ((1 << rest) - 1) << self.hole_shift
                pieces.append(WindowPiece(hosts, mask, low_bits - rest - self.hole_shift))
            pieces.append(WindowPiece(hosts, 1 << 14, 1))
        return tuple(pieces)

    @property
    def signs(self) -> tuple[int, ...]:
        """By guest, the bit of the last host that is its sign; empty where signs are in `pieces`."""
        if (15 - self.num_guests) % self.num_guests + 1 == self.num_guests:
            return ()
        return tuple(self.hole_shift + guest for guest in range(self.num_guests))


@dataclass(frozen=True, slots=True)
class WindowSections:
    """Where the parts of an encoding of ``numel`` elements lie, in 16-bit words; exceptions and bases follow.

    Attributes:
        layout: of the words.
        numel: elements.
    """

    layout: WindowLayout
    numel: int

    @property
    def num_blocks(self) -> int:
        """Whole blocks."""
        return self.numel // BLOCK_ELEMENTS

    @property
    def tail(self) -> int:
        """Elements of the shorter block, a multiple of 16."""
        return self.numel % BLOCK_ELEMENTS // ROWS * ROWS

    @property
    def num_bases(self) -> int:
        """Blocks, the shorter one included."""
        return self.num_blocks + (self.tail > 0)

    @property
    def left_over(self) -> int:
        """Elements that are kept as they are."""
        return self.numel % ROWS

    @property
    def tail_start(self) -> int:
        """First word of the shorter block."""
        return self.num_blocks * (BLOCK_ELEMENTS // ROWS * self.layout.num_hosts)

    @property
    def left_over_start(self) -> int:
        """First of the words that are kept as they are."""
        return self.tail_start + self.tail // ROWS * self.layout.num_hosts

    @property
    def counts_start(self) -> int:
        """First count of exceptions."""
        return self.left_over_start + self.left_over

    @property
    def num_counts(self) -> int:
        """Counts of exceptions."""
        return -(-(self.numel - self.left_over) // SPAN_ELEMENTS)

    @property
    def exceptions_start(self) -> int:
        """First exception."""
        return self.counts_start + self.num_counts

    def num_bytes(self, num_exceptions: int) -> int:
        """Bytes of the encoding."""
        return 2 * (self.exceptions_start + num_exceptions) + self.num_bases

    def num_exceptions(self, num_bytes: int) -> int:
        """Exceptions in an encoding of that many bytes; negative or beyond `numel` if it cannot be one."""
        words, odd = divmod(num_bytes - self.num_bases, 2)
        return -1 if odd else words - self.exceptions_start

    def check(self, num_bytes: int) -> int:
        """Return the exceptions in an encoding of that many bytes.

        Raises:
            ValueError: it cannot be one.
        """
        count = self.num_exceptions(num_bytes)
        if not 0 <= count <= self.numel:
            raise ValueError(f"{num_bytes} bytes hold no {self.numel} elements")
        return count


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
    exceptions: list[tuple[NDArray[np.int64], Words]] = []
    for first, blocks, rows in _blocks(sections, source, words):
        chosen = choose_bases(layout, blocks)
        bases[first : first + len(blocks)] = chosen
        positions, holes = _pack(layout, blocks, chosen, rows)
        exceptions.append((positions + first * BLOCK_ELEMENTS, holes))
    num_exceptions = sum(len(positions) for positions, _ in exceptions)
    size = sections.num_bytes(num_exceptions)
    if size >= source.nbytes:
        return _as_it_is(source, words)
    words[sections.left_over_start : sections.counts_start] = source[source.size - sections.left_over :]
    _list_exceptions(sections, exceptions, words)
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
    num_exceptions = sections.check(encoded.size)
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
    in_blocks = elements[: sections.num_blocks * BLOCK_ELEMENTS].reshape(-1, BLOCK_ELEMENTS)
    rows = words[: sections.tail_start].reshape(-1, hosts, BLOCK_ELEMENTS // ROWS)
    pieces = [
        (first, in_blocks[first : first + PIECE_BLOCKS], rows[first : first + PIECE_BLOCKS])
        for first in range(0, sections.num_blocks, PIECE_BLOCKS)
    ]
    if sections.tail:
        tail = elements[in_blocks.size : in_blocks.size + sections.tail].reshape(1, sections.tail)
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
    sections: WindowSections, exceptions: list[tuple[NDArray[np.int64], Words]], words: Words
) -> None:
    at = sections.exceptions_start
    counts = np.zeros(sections.num_counts, np.int64)
    for positions, holes in exceptions:
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
    result: Words = shifted(words, np.uint16(abs(shift)), out=words)
    return result
