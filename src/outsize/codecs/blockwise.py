"""Quantised transport: groups share a scale, elements have 8 or 4 bits.

A group's scale is its largest magnitude by the largest integer (symmetric), or its range by the number of steps
(asymmetric, with the smallest element as zero point). Scales and zero points are bf16, which has the range of fp32;
scales are rounded up and zero points down, so that no element is cut off. What a group may hold:

* zeros: decode to zeros; a constant: to itself, within the bound;
* so little that a step would be below 2^-126: steps of 2^-126, no smaller;
* anything infinite or NaN, or a range that is: the whole group decodes to NaN, so that whoever looks for such values
  finds them.

An encoding is the integers of all groups, then their scales, then their zero points. A last group that is shorter is
filled up with its last element. Integers of 4 bits lie two to a byte, the first in the lower half. All of it is torch,
in pieces that stay in a cache; on the host, where its kernels are built, C does the same, on a GPU Triton where it is.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from outsize import native
from outsize.accelerators import catch_up
from outsize.codecs.codec import Codec, pieces_on
from outsize.codecs.codec_spec import CodecSpec

_DTYPES = (torch.float32, torch.bfloat16)


class OnDevice:
    """A small constant tensor, copied once to each device that asks for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._copies = {tensor.device: tensor}
        self._tensor = tensor

    def on(self, device: torch.device) -> Tensor:
        """Return the copy on ``device``."""
        if device not in self._copies:
            copy = torch.empty_like(self._tensor, device=device)
            catch_up(device)
            self._copies[device] = copy.copy_(self._tensor)
        return self._copies[device]


class _Grid(ctypes.Structure):
    """``struct grid`` of blockwise.c."""

    _fields_ = (
        ("bits", ctypes.c_int32),
        ("symmetric", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
        ("factor", ctypes.c_float),
    )


def native_serves(elements: Tensor, encoded: Tensor) -> bool:
    """Return whether the kernels can be called on these: elements, and bytes of their encoding."""
    return (
        elements.device.type == encoded.device.type == "cpu"
        and elements.dtype in _DTYPES
        and not encoded.data_ptr() % 2  # scales and zero points are words of 16 bits
        and native.available()
    )


def native_encode(
    grid: "Grid", factor: float, sections: "Sections", source: Tensor, chances: Sequence[Tensor]
) -> None:
    """Write ``source`` [n] into ``sections``.

    Args:
        grid: of its groups.
        factor: from the spread of a group to its scale.
        sections: of an encoding of as many elements.
        source: fp32 or bf16, on the host.
        chances: of each piece, where it is rounded by chance; empty to the nearest.
    """
    tables = (ctypes.c_void_p * len(chances))(*(table.data_ptr() for table in chances)) if chances else None
    native.call(
        "blockwise_encode",
        ctypes.byref(_grid(grid, factor, source.dtype)),
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_size_t(source.numel()),
        tables,
        *_places(grid, sections),
        ctypes.c_int(torch.get_num_threads()),
    )


def native_decode(grid: "Grid", sections: "Sections", into: Tensor) -> None:
    """Fill ``into`` [n], fp32 or bf16 on the host, from ``sections``."""
    native.call(
        "blockwise_decode",
        ctypes.byref(_grid(grid, 0.0, into.dtype)),
        *_places(grid, sections),
        ctypes.c_void_p(into.data_ptr()),
        ctypes.c_size_t(into.numel()),
        ctypes.c_int(torch.get_num_threads()),
    )


def _places(grid: "Grid", sections: "Sections") -> tuple[ctypes.c_void_p, ...]:
    parts = [sections.codes, sections.scales] + ([] if grid.symmetric else [sections.zeros])
    addresses = [part.data_ptr() for part in parts]
    return tuple(ctypes.c_void_p(address) for address in (*addresses, None)[:3])


@cache
def _grid(grid: "Grid", factor: float, dtype: torch.dtype) -> _Grid:
    return _Grid(grid.bits, grid.symmetric, dtype is torch.bfloat16, factor)


# 262,144 elements are 1 MiB of fp32: smaller pieces fit caches better and cost more in calls.
PIECE_ELEMENTS = 2**18
LEAST_SCALE = 2.0**-126
# Multipliers of splitmix64, to spread seeds and pieces over the table of noise.
_SPREAD_SEED, SPREAD_PIECE = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


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
    def code_bytes(self) -> int:
        """Bytes of a group's integers."""
        return self.group * self.bits // 8


class BlockwiseCodec(Codec):
    """Integers and a scale per group.

    Args:
        spec: see `outsize.codecs.codec_spec.INT8` and those after it.
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
        self._noise = OnDevice(_noise() if stochastic else torch.empty(0))

    def seeded(self, seed: int) -> "BlockwiseCodec":
        """Return the same codec with chances of its own; what it writes follows from seed and source."""
        other = copy(self)
        other._seed = seed
        return other

    def _encode(self, source: Tensor, into: Tensor) -> int:
        group = self.grid.group
        sections = Sections(self.grid, source.numel(), into)
        if native_serves(source, into):
            native_encode(self.grid, self._scale_of_spread, sections, source, self._places(source))
            return sections.num_bytes
        if (kernels := self.kernels_on(source.device)) is not None:
            chances = (self._noise.on(source.device), self._seed * _SPREAD_SEED) if self._stochastic else None
            kernels.encode_blockwise(self.grid, self._scale_of_spread, sections, source, chances)
            return sections.num_bytes
        step = pieces_on(source.device, PIECE_ELEMENTS)
        values = torch.empty(min(step, sections.padded), dtype=torch.float32, device=source.device)
        for first, last in sections.pieces(step):
            elements = source[first * group : last * group]
            y = values[: (last - first) * group].view(last - first, group)
            x = self._in_fp32(elements, y)
            scales, zeros = self._scales(x)
            sections.scales[first:last] = scales
            if zeros is not None:
                sections.zeros[first:last] = zeros
                x = torch.sub(x, zeros[:, None], out=y)
            torch.mul(x, scales.float().reciprocal_()[:, None], out=y)
            if y.device.type != "cpu" or scales.isnan().any():  # a look would wait for the device
                y.nan_to_num_(0.0, 0.0, 0.0)
            sections.write_codes(first, last, self._round(y, first * group // PIECE_ELEMENTS))
        return sections.num_bytes

    @property
    def _scale_of_spread(self) -> float:
        """A scale over the largest magnitude, or the range, of its group."""
        return (1 + 2**-8) / self.grid.most

    def _in_fp32(self, elements: Tensor, y: Tensor) -> Tensor:
        """Return elements by groups, themselves where they are fp32 and fill whole groups, in ``y`` otherwise."""
        if elements.dtype is torch.float32 and elements.numel() == y.numel():
            return elements.view_as(y)
        flat = y.view(-1)
        flat[: elements.numel()] = elements
        if elements.numel() < flat.numel():
            flat[elements.numel() :] = flat[elements.numel() - 1]
        return y

    def _scales(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scale and zero point of each row of ``x``, bf16; where not all of a row is finite, NaN and 0.

        Rounding to the nearest moves a number by one part in 2^9 at most: what was moved by one in 2^8 before has been
        rounded up, or down.
        """
        largest, smallest = x.amax(1), x.amin(1)
        zeros = None
        if self.grid.symmetric:
            spread = torch.maximum(largest, smallest.neg_())
        else:
            # With + 0, no zero point is a negative zero, which of several zeros amin may hand out or not.
            zeros = smallest.sub_(smallest.abs() * 2**-8).add_(0.0).to(torch.bfloat16)
            spread = largest.sub_(zeros)
        finite = spread.device.type == "cpu" and math.isfinite(spread.max().item())  # amax hands NaN on
        scales = spread.mul_(self._scale_of_spread).clamp_min_(LEAST_SCALE).to(torch.bfloat16)
        if not finite:
            bad = ~scales.isfinite()
            scales.masked_fill_(bad, torch.nan)
            if zeros is not None:
                zeros.masked_fill_(bad, 0.0)
        return scales, zeros

    def _round(self, y: Tensor, piece: int) -> Tensor:
        """Round ``y`` in place to integers of the grid."""
        if self._stochastic:
            y.view(-1).add_(self._chances(piece, y.numel(), y.device)).floor_()
            return y.clamp_(self.grid.least, self.grid.most)
        return y.round_()  # scales are rounded up: nothing lies beyond the grid

    def _chances(self, piece: int, numel: int, device: torch.device) -> Tensor:
        """Return ``numel`` numbers in [0, 1): a table, read from a place that follows from the seed and the piece.

        More than a piece holds are those of the pieces that follow.
        """
        if numel > PIECE_ELEMENTS:
            num_pieces, rest = divmod(numel, PIECE_ELEMENTS)
            sizes = [PIECE_ELEMENTS] * num_pieces + [rest] * bool(rest)
            return torch.cat([self._chances(piece + i, size, device) for i, size in enumerate(sizes)])
        start = ((self._seed * _SPREAD_SEED + piece * SPREAD_PIECE) >> 40) % PIECE_ELEMENTS
        return self._noise.on(device)[start : start + numel]

    def _places(self, source: Tensor) -> list[Tensor]:
        """Return the chances of each piece of ``source``; none where it is rounded to the nearest."""
        if not self._stochastic:
            return []
        pieces = range(-(-source.numel() // PIECE_ELEMENTS))
        return [self._chances(piece, PIECE_ELEMENTS, source.device) for piece in pieces]

    def _decode(self, encoded: Tensor, into: Tensor) -> None:
        sections = Sections(self.grid, into.numel(), encoded)
        if native_serves(into, encoded):
            native_decode(self.grid, sections, into)
            return
        if (kernels := self.kernels_on(into.device)) is not None:
            kernels.decode_blockwise(self.grid, sections, into)
            return
        if self.grid.symmetric and self.grid.bits == 8:  # every dtype holds its integers: no memory is taken
            step = into.numel() if into.device.type != "cpu" else PIECE_ELEMENTS
            for extent, groups in whole_groups(into.numel(), self.grid.group, step):
                part = into[extent].copy_(sections.codes.view(torch.int8).view(-1)[extent])
                part.view(groups.stop - groups.start, -1).mul_(sections.scales[groups, None])
            return
        step = pieces_on(into.device, PIECE_ELEMENTS)
        values = torch.empty(min(step, sections.padded), dtype=torch.float32, device=into.device)
        for first, last in sections.pieces(step):
            y = values[: (last - first) * self.grid.group].view(-1, self.grid.group)
            sections.read_codes(first, last, y)
            y *= sections.scales[first:last].float()[:, None]
            if not self.grid.symmetric:
                y += sections.zeros[first:last].float()[:, None]
            elements = into[first * self.grid.group : last * self.grid.group]
            elements.copy_(y.view(-1)[: elements.numel()])


def _noise() -> Tensor:
    """Return the table that roundings by chance read, the same one everywhere."""
    return torch.rand(2 * PIECE_ELEMENTS, generator=torch.Generator().manual_seed(0))


def whole_groups(numel: int, group: int, step: int) -> Iterator[tuple[slice, slice]]:
    """Yield elements and their groups: ``step`` elements of whole groups at a time, then those of a shorter group."""
    end = numel - numel % group
    for start, stop in pairwise(sorted({*range(0, end, step), end, numel})):
        yield slice(start, stop), slice(start // group, -(-stop // group))


class Sections:
    """Where the parts of an encoding lie in its bytes.

    Args:
        grid: of its groups.
        numel: elements.
        encoded: uint8, long enough.

    Attributes:
        padded: elements of whole groups.
        codes: integers by group, uint8 [groups, grid.code_bytes].
        scales: of groups, bf16 [groups].
        zeros: zero points of groups, bf16 [groups]; none of a symmetric grid.
        num_bytes: of all of it.
    """

    def __init__(self, grid: Grid, numel: int, encoded: Tensor) -> None:
        self._grid = grid
        groups = -(-numel // grid.group)
        self.padded = groups * grid.group
        self.codes = encoded[: groups * grid.code_bytes].view(groups, grid.code_bytes)
        at = groups * grid.code_bytes
        self.scales = encoded[at : at + 2 * groups].view(torch.bfloat16)
        self.num_bytes = at + 2 * groups
        if not grid.symmetric:
            self.zeros = encoded[self.num_bytes : self.num_bytes + 2 * groups].view(torch.bfloat16)
            self.num_bytes += 2 * groups

    def pieces(self, num_elements: int = PIECE_ELEMENTS) -> Iterator[tuple[int, int]]:
        """First group and last plus one of each piece of so many elements."""
        step = num_elements // self._grid.group
        groups = len(self.codes)
        yield from ((first, min(first + step, groups)) for first in range(0, groups, step))

    def write_codes(self, first: int, last: int, y: Tensor) -> None:
        """Write integers, fp32 [groups, group], which are free to be overwritten."""
        codes = self.codes[first:last]
        if self._grid.bits == 8:  # to int8 is eight times as fast as to uint8
            codes.view(torch.int8).copy_(y if self._grid.symmetric else y.sub_(128))
            return
        pairs = y.to(torch.int8).view(-1).view(torch.int16)
        pairs &= 0x0F0F
        codes.view(-1).copy_(pairs | pairs >> 4)  # of an int16, a byte takes the lower half

    def read_codes(self, first: int, last: int, y: Tensor) -> None:
        """Fill ``y``, fp32 [groups, group], with integers."""
        codes = self.codes[first:last]
        if self._grid.bits == 8:
            y.copy_(codes.view(torch.int8))
            if not self._grid.symmetric:
                y += 128
        else:
            pairs = codes.view(-1).to(torch.int16)
            pairs |= pairs << 4
            integers = pairs.bitwise_and_(0x0F0F).view(torch.int8)
            if self._grid.symmetric:  # a negative one has lost its sign
                integers ^= 8
                integers -= 8
            y.view(-1).copy_(integers)
