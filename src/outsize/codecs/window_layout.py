"""The form of the fixed-rate lossless encoding of 16-bit floats, as arithmetic. No torch.

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
"""

from dataclasses import dataclass

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
    def block_words(self) -> int:
        """Words of a whole block."""
        return BLOCK_ELEMENTS // ROWS * self.layout.num_hosts

    @property
    def tail_start(self) -> int:
        """First word of the shorter block."""
        return self.num_blocks * self.block_words

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
