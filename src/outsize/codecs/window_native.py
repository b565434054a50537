"""The lossless window encoding on the host: by the kernels in C where they are built, in NumPy otherwise.

Both write the same bytes. What the kernels find to be no encoding is left to NumPy, which says what is wrong with it.
"""

import ctypes
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from outsize import native
from outsize.codecs import window_numpy
from outsize.codecs.window_layout import WindowLayout, WindowSections
from outsize.codecs.window_numpy import Words

_MOST_PIECES, _MOST_SIGNS = 16, 5
_PARTS = (
    *("numel", "num_blocks", "tail", "left_over", "left_over_start"),
    *("counts_start", "num_counts", "exceptions_start", "num_bases"),
)


class _Layout(ctypes.Structure):
    """``struct layout`` of window.c."""

    _fields_ = (
        ("mantissa_bits", ctypes.c_int32),
        ("code_bits", ctypes.c_int32),
        ("num_guests", ctypes.c_int32),
        ("hole_shift", ctypes.c_int32),
        ("num_pieces", ctypes.c_int32),
        ("num_signs", ctypes.c_int32),
        ("first_host", ctypes.c_int32 * _MOST_PIECES),
        ("mask", ctypes.c_int32 * _MOST_PIECES),
        ("shift", ctypes.c_int32 * _MOST_PIECES),
        ("sign_bit", ctypes.c_int32 * _MOST_SIGNS),
    )


class _Sections(ctypes.Structure):
    """``struct sections`` of window.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in _PARTS)


def encode_window(layout: WindowLayout, source: Words, into: NDArray[np.uint8]) -> int:
    """Encode ``source`` [n] into ``into`` [2 n] and return the bytes written."""
    if not _serve(source, into):
        return window_numpy.encode_window(layout, source, into)
    num_bytes = ctypes.c_int64()
    native.call(
        "window_encode",
        ctypes.byref(_layout(layout)),
        ctypes.byref(_sections(layout, source.size)),
        _address(source),
        _address(into),
        ctypes.byref(num_bytes),
    )
    return num_bytes.value


def decode_window(layout: WindowLayout, encoded: NDArray[np.uint8], into: Words) -> None:
    """Decode into ``into`` [n].

    Raises:
        ValueError: the lengths do not fit each other, or a list of exceptions leads outside.
    """
    num_exceptions = WindowSections(layout, into.size).num_exceptions(encoded.size)
    if encoded.size < into.nbytes and 0 <= num_exceptions <= into.size and _serve(encoded, into):
        arguments = _address(encoded), ctypes.c_int64(num_exceptions), _address(into)
        places = ctypes.byref(_layout(layout)), ctypes.byref(_sections(layout, into.size))
        if native.call("window_decode", *places, *arguments) == 0:
            return
    window_numpy.decode_window(layout, encoded, into)


def split_halves(source: NDArray[np.uint32], lower: Words) -> Words:
    """Return the upper halves of ``source`` [n], and write the lower ones into ``lower`` [n]."""
    if not _serve(source, lower):
        halves = source.view(np.uint16)
        lower[:] = halves[::2]
        return np.ascontiguousarray(halves[1::2])
    upper = np.empty(source.size, np.uint16)
    native.call("halves", _address(source), ctypes.c_int64(source.size), _address(lower), _address(upper))
    return upper


def join_halves(lower: Words, upper: Words, into: NDArray[np.uint32]) -> None:
    """Fill ``into`` [n] from its lower and upper halves."""
    if not _serve(lower, upper, into):
        halves = into.view(np.uint16)
        halves[::2], halves[1::2] = lower, upper
        return
    native.call("whole", _address(lower), _address(upper), ctypes.c_int64(into.size), _address(into))


def _serve(*arrays: NDArray[np.generic]) -> bool:
    """Return whether the kernels can be called on these: words of 16 bits lie at even addresses."""
    return native.available() and not any(array.ctypes.data % 2 for array in arrays)


def _address(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@cache
def _layout(layout: WindowLayout) -> _Layout:
    pieces = layout.pieces
    integers = ctypes.c_int32 * _MOST_PIECES
    return _Layout(
        layout.mantissa_bits,
        layout.code_bits,
        layout.num_guests,
        layout.hole_shift,
        len(pieces),
        len(layout.signs),
        integers(*(piece.hosts[0] for piece in pieces)),
        integers(*(piece.mask for piece in pieces)),
        integers(*(piece.shift for piece in pieces)),
        (ctypes.c_int32 * _MOST_SIGNS)(*layout.signs),
    )


@lru_cache(maxsize=256)
def _sections(layout: WindowLayout, numel: int) -> _Sections:
    sections = WindowSections(layout, numel)
    return _Sections(*(getattr(sections, name) for name in _PARTS))
