"""Quantised transport: groups of elements share a scale, each is an integer of 8 or 4 bits. It loses, within a bound.

A group's scale is its largest magnitude by the largest integer (symmetric), or its range by the number of steps
(asymmetric, with the smallest element as zero point). Scales and zero points are bf16, which has the range of fp32;
scales are rounded up and zero points down, so that no element is cut off. What a group may hold:

* zeros: decode to zeros; a constant: to itself, within the bound;
* so little that a step would be below 2^-126: steps of 2^-126, no smaller;
* anything infinite or NaN, or a range that is: the whole group decodes to NaN, so that whoever looks for such values
  finds them.

An encoding is the integers of all groups, then their scales, then their zero points. A last group that is shorter is
filled up with its last element. Integers of 4 bits lie in one byte with those half a group further on, in the upper
half. All of it is torch, in pieces that stay in a cache: half a nanosecond per element on one core.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.codecs.codec import Codec
from outsize.codecs.spec import CodecSpec

# 65,536 elements are 256 KiB of fp32; with integers and a temporary they stay in a second-level cache.
PIECE_ELEMENTS = 2**16
LEAST_SCALE = 2.0**-126
# Multipliers of splitmix64, to spread seeds and pieces over the table of noise.
_SPREAD_SEED, _SPREAD_PIECE = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


@dataclass(frozen=True, slots=True)
class Grid:
    """What integers a group is written in.

    Attributes:
        bits: of an integer, 8 or 4.
        symmetric: whether the grid is centred on zero, without a zero point.
        group: elements that share a scale.
    """

    bits: int
    symmetric: bool
    group: int

    @property
    def least(self) -> int:
        """Smallest integer."""
        return 1 - (1 << self.bits - 1) if self.symmetric else 0

    @property
    def most(self) -> int:
        """Largest integer."""
        return (1 << self.bits - 1) - 1 if self.symmetric else (1 << self.bits) - 1

    @property
    def offset(self) -> int:
        """Added to an integer so that it is not negative."""
        return 1 << self.bits - 1 if self.symmetric else 0

    @property
    def code_bytes(self) -> int:
        """Bytes of a group's integers."""
        return self.group * self.bits // 8


class BlockwiseCodec(Codec):
    """Integers and a scale per group.

    Args:
        spec: see `outsize.codecs.spec.INT8` and those after it.
        bits: of an integer, 8 or 4.
        symmetric: whether the grid is centred on zero.
        stochastic: round up or down by chance, so that the mean of many roundings is exact; to the nearest otherwise.
        seed: of those chances.
    """

    def __init__(
        self, spec: CodecSpec, bits: int, *, symmetric: bool = True, stochastic: bool = False, seed: int = 0
    ) -> None:
        self.spec = spec
        self.grid = Grid(bits, symmetric, spec.group)
        self._stochastic = stochastic
        self._seed = seed
        self._noise: dict[torch.device, Tensor] = {}

    def seeded(self, seed: int) -> "BlockwiseCodec":
        """Return the same codec with chances of its own; what it writes follows from seed and source."""
        other = object.__new__(BlockwiseCodec)
        other.spec, other.grid, other._stochastic = self.spec, self.grid, self._stochastic
        other._noise = self._noise
        other._seed = seed
        return other

    def _encode(self, source: Tensor, into: Tensor) -> int:
        sections = _Sections(self.grid, source.numel(), into)
        values = torch.empty(min(PIECE_ELEMENTS, sections.padded), dtype=torch.float32, device=source.device)
        scratch = torch.empty_like(values)
        for piece, (first, last) in enumerate(sections.pieces()):
            elements = source[first * self.grid.group : last * self.grid.group]
            x = values[: (last - first) * self.grid.group]
            x[: elements.numel()] = elements
            x[elements.numel() :] = x[elements.numel() - 1]
            x = x.view(last - first, self.grid.group)
            y = scratch[: x.numel()].view_as(x)
            scales, zeros = self._scales(x, y)
            sections.scales[first:last] = scales
            if zeros is not None:
                sections.zeros[first:last] = zeros
                x -= zeros[:, None]
            finite = scales.isfinite()
            torch.mul(x, scales.reciprocal()[:, None], out=y)
            if not finite.all():
                y[~finite] = 0.0
            sections.write_codes(first, last, self._round(y, piece))
        return sections.num_bytes

    def _scales(self, x: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scale and zero point of each row of ``x``, fp32 values that a bf16 holds; NaN if not all is finite."""
        if self.grid.symmetric:
            spread, zeros = torch.abs(x, out=scratch).amax(1), None
        else:
            smallest = x.amin(1)
            zeros = _round_to_bf16(smallest, up=False)
            spread = x.amax(1) - zeros
        scales = _round_to_bf16((spread / (self.grid.most)).clamp_min(LEAST_SCALE), up=True)
        bad = ~spread.isfinite()
        if zeros is not None:
            bad |= ~zeros.isfinite()
        if bad.any():
            scales[bad] = torch.nan
            if zeros is not None:
                zeros[bad] = 0.0
        return scales, zeros

    def _round(self, y: Tensor, piece: int) -> Tensor:
        """Round ``y`` in place to integers of the grid."""
        if self._stochastic:
            y.view(-1).add_(self._chances(piece, y.numel(), y.device)).floor_()
        else:
            y.round_()
        return y.clamp_(self.grid.least, self.grid.most)

    def _chances(self, piece: int, numel: int, device: torch.device) -> Tensor:
        """Return ``numel`` numbers in [0, 1): a table, read from a place that follows from the seed and the piece."""
        if device not in self._noise:
            generator = torch.Generator().manual_seed(0)
            self._noise[device] = torch.rand(2 * PIECE_ELEMENTS, generator=generator).to(device)
        start = ((self._seed * _SPREAD_SEED + piece * _SPREAD_PIECE) >> 40) % PIECE_ELEMENTS
        return self._noise[device][start : start + numel]

    def _decode(self, encoded: Tensor, into: Tensor) -> None:
        sections = _Sections(self.grid, into.numel(), encoded)
        values = torch.empty(min(PIECE_ELEMENTS, sections.padded), dtype=torch.float32, device=into.device)
        for first, last in sections.pieces():
            y = values[: (last - first) * self.grid.group].view(-1, self.grid.group)
            sections.read_codes(first, last, y)
            y *= sections.scales[first:last].float()[:, None]
            if not self.grid.symmetric:
                y += sections.zeros[first:last].float()[:, None]
            elements = into[first * self.grid.group : last * self.grid.group]
            elements.copy_(y.view(-1)[: elements.numel()])


class _Sections:
    """Where the parts of an encoding lie in its bytes."""

    def __init__(self, grid: Grid, numel: int, encoded: Tensor) -> None:
        self._grid = grid
        groups = -(-numel // grid.group)
        self.padded = groups * grid.group
        self._codes = encoded[: groups * grid.code_bytes].view(groups, grid.code_bytes)
        at = groups * grid.code_bytes
        self.scales = encoded[at : at + 2 * groups].view(torch.bfloat16)
        self.num_bytes = at + 2 * groups
        if not grid.symmetric:
            self.zeros = encoded[self.num_bytes : self.num_bytes + 2 * groups].view(torch.bfloat16)
            self.num_bytes += 2 * groups

    def pieces(self) -> Iterator[tuple[int, int]]:
        """First group and last plus one of each piece."""
        step = PIECE_ELEMENTS // self._grid.group
        groups = len(self._codes)
        yield from ((first, min(first + step, groups)) for first in range(0, groups, step))

    def write_codes(self, first: int, last: int, y: Tensor) -> None:
        """Write integers, fp32 [groups, group], which are free to be overwritten."""
        codes = self._codes[first:last]
        if self._grid.bits == 8 and self._grid.symmetric:
            codes.view(torch.int8).copy_(y)
            return
        y += self._grid.offset
        if self._grid.bits == 8:
            codes.copy_(y)
            return
        half = self._grid.group // 2
        upper = y[:, half:].to(torch.uint8)
        upper <<= 4
        codes.copy_(y[:, :half])
        codes |= upper

    def read_codes(self, first: int, last: int, y: Tensor) -> None:
        """Fill ``y``, fp32 [groups, group], with integers."""
        codes = self._codes[first:last]
        if self._grid.bits == 8 and self._grid.symmetric:
            y.copy_(codes.view(torch.int8))
            return
        if self._grid.bits == 8:
            y.copy_(codes)
        else:
            half = self._grid.group // 2
            y[:, :half] = codes & 15
            y[:, half:] = codes >> 4
        y -= self._grid.offset


def _round_to_bf16(x: Tensor, *, up: bool) -> Tensor:
    """Return the nearest bf16 not below ``x``, or not above it, as fp32; whatever is not finite stays so."""
    bits = x.view(torch.int32)
    # Truncation goes towards zero: down where positive, up where negative.
    away = (bits >= 0) if up else (bits < 0)
    rounded = torch.where(away, bits + 0xFFFF, bits) & -0x10000
    return torch.where(x.isfinite(), rounded, bits).view(torch.float32)
