"""Blockwise codecs by the kernels in C, byte for byte as torch does it, at about half the rate of memory per core."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outsize import native
from outsize.codecs.hadamard import MOST_GROUP, signs

if TYPE_CHECKING:
    from outsize.codecs.blockwise import Grid, Sections

_DTYPES = (torch.float32, torch.bfloat16)


class _Grid(ctypes.Structure):
    """``struct grid`` of blockwise.c."""

    _fields_ = (
        ("bits", ctypes.c_int32),
        ("symmetric", ctypes.c_int32),
        ("rotated", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("signs", ctypes.c_float * MOST_GROUP),
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
    flips = signs(grid.group, torch.device("cpu")).tolist() if grid.rotated else ()
    by_element = (ctypes.c_float * MOST_GROUP)(*flips)
    return _Grid(grid.bits, grid.symmetric, grid.rotated, dtype is torch.bfloat16, factor, by_element)
