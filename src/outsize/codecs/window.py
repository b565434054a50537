"""Lossless, nearly fixed rate for 16-bit floats: in torch, by kernels in C, or in NumPy.

fp32 is taken apart: its upper half is a bf16, which is encoded, and its lower half, which looks like noise, is kept in
front of the encoding. All three write the same bytes. What the kernels find to be no encoding is left to NumPy, which
says what is wrong with it.

On a GPU that has Triton, one kernel decodes. In torch nothing waits for the device: what must be known beforehand
follows from the length of the encoding. Under ``torch.compile`` the masks and shifts become one kernel.
"""

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outsize import native
from outsize.codecs import window_layout
from outsize.codecs.codec import Codec, host_bytes
from outsize.codecs.codec_spec import CodecSpec
from outsize.codecs.window_layout import (
    BLOCK_ELEMENTS,
    MANTISSA_BITS,
    POSITION_BITS,
    ROWS,
    SPAN_ELEMENTS,
    WindowLayout,
    WindowSections,
    Words,
)
from outsize.errors import CodecError


def decode_window_torch(layout: WindowLayout, encoded: Tensor, numel: int) -> Tensor:
    """Return the words of an encoding, int16 ``[numel]``.

    Raises:
        ValueError: the lengths do not fit each other.
    """
    if encoded.numel() == 2 * numel:
        return encoded.view(torch.int16)
    sections = WindowSections(layout, numel)
    num_exceptions = sections.check(encoded.numel())
    words = encoded[: sections.num_bytes(num_exceptions) - sections.num_bases].view(torch.int16)
    bases = encoded[-sections.num_bases :].to(torch.int16) << layout.mantissa_bits
    hosts = layout.num_hosts
    rows = words[: sections.tail_start].view(-1, hosts, BLOCK_ELEMENTS // ROWS)
    parts = [unpack(layout, rows, bases[: sections.num_blocks]).view(-1)]
    if sections.tail:
        tail_rows = words[sections.tail_start : sections.left_over_start].view(1, hosts, -1)
        parts.append(unpack(layout, tail_rows, bases[sections.num_blocks :]).view(-1))
    parts.append(words[sections.left_over_start : sections.counts_start])
    elements = torch.cat(parts)
    counts = words[sections.counts_start : sections.exceptions_start].to(torch.int64)
    listed = words[sections.exceptions_start :]
    spans = torch.arange(0, numel - sections.left_over, SPAN_ELEMENTS, device=encoded.device)
    positions = torch.repeat_interleave(spans, counts, output_size=num_exceptions)
    positions += listed & (SPAN_ELEMENTS - 1)
    # An int16 shifts right with its sign; what was the sign of a hole's top bit is masked off.
    holes = (listed >> POSITION_BITS) & ((1 << layout.num_guests) - 1)
    return elements.index_add_(0, positions, holes << layout.hole_shift)


def unpack(layout: WindowLayout, rows: Tensor, bases: Tensor) -> Tensor:
    """Return blocks, int16 ``[m, 16, columns]``, of ``rows``, int16 ``[m, hosts, columns]``, exceptions aside.

    Args:
        layout: of the words.
        rows: as stored.
        bases: int16 ``[m]``, shifted to the exponent's place.
    """
    pieces = layout.pieces
    guests = _shift(rows[:, pieces[0].hosts[0] : pieces[0].hosts[1]] & pieces[0].mask, pieces[0].shift)
    for piece in pieces[1:]:
        guests = guests | _shift(rows[:, piece.hosts[0] : piece.hosts[1]] & piece.mask, piece.shift)
    if layout.signs:
        last = rows[:, -1]
        signs = [(last & (1 << bit)) << (15 - bit) for bit in layout.signs]
        guests = guests | torch.stack(signs, dim=1)
    return torch.cat([rows & ~layout.hole, guests], dim=1) + bases[:, None, None]


def _shift(words: Tensor, shift: int) -> Tensor:
    """Left where positive; ``words`` have no sign, so a shift to the right brings in zeros."""
    return words << shift if shift >= 0 else words >> -shift


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
        return window_layout.encode_window(layout, source, into)
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
    window_layout.decode_window(layout, encoded, into)


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


class WindowCodec(Codec):
    """Exponents in a window per block, everything else as it is.

    Encodes on the host. Decodes where the bytes lie: by a kernel or NumPy on the host, by a kernel or in torch
    elsewhere, without a synchronisation.

    Args:
        spec: see `outsize.codecs.codec_spec.LOSSLESS4` and ``LOSSLESS3``.
        code_bits: kept of a bf16's exponent; an fp16 keeps 3 of its 5.
    """

    def __init__(self, spec: CodecSpec, code_bits: int) -> None:
        self.spec = spec
        self._bf16 = WindowLayout(MANTISSA_BITS["bf16"], code_bits)
        self._fp16 = WindowLayout(MANTISSA_BITS["fp16"], 3)

    def _encode(self, source: Tensor, into: Tensor) -> int:
        if source.device.type != "cpu":
            raise ValueError(f"codec {self.spec.name} encodes on the host, not on {source.device}")
        room = host_bytes(into)
        if source.dtype is not torch.float32:
            return encode_window(self._layout(source.dtype), _words(source), room)
        lower = room[: source.nbytes // 2].view(np.uint16)
        upper = split_halves(host_bytes(source).view(np.uint32), lower)
        return upper.nbytes + encode_window(self._bf16, upper, room[upper.nbytes :])

    def _decode(self, encoded: Tensor, into: Tensor) -> None:
        if self.kernels_on(into.device) is not None and encoded.numel() < into.nbytes:
            self.decode_pieces(encoded, [encoded.numel()], into, into.numel())
            return
        lower_bytes = 2 * into.numel() if into.dtype is torch.float32 else 0
        try:
            upper = self._decode_words(self._layout(into.dtype), encoded[lower_bytes:], into)
        except ValueError as error:
            raise self._refusal(into, error) from error
        if into.dtype is not torch.float32:
            return
        if into.device.type == "cpu":
            lower = host_bytes(encoded[:lower_bytes]).view(np.uint16)
            join_halves(lower, _words(upper), host_bytes(into).view(np.uint32))
            return
        halves = into.view(torch.int16)
        halves[::2] = encoded[:lower_bytes].view(torch.int16)
        halves[1::2] = upper

    def decode_pieces(self, room: Tensor, sizes: Sequence[int], into: Tensor, numel: int) -> None:
        """See `Codec.decode_pieces`; on a GPU with Triton all of them in one kernel."""
        kernels = self.kernels_on(into.device)
        lengths = [*[numel] * (len(sizes) - 1), into.numel() - (len(sizes) - 1) * numel]
        pieces = list(zip(sizes, lengths, strict=True))
        if kernels is None or any(size == length * into.itemsize for size, length in pieces):
            super().decode_pieces(room, sizes, into, numel)
            return
        layout, lower_bytes = self._layout(into.dtype), into.itemsize - 2
        try:
            for size, length in pieces:
                WindowSections(layout, length).check(size - lower_bytes * length)
        except ValueError as error:
            raise self._refusal(into, error) from error
        kernels.decode_window(layout, room, room.numel() // len(sizes), numel, into)

    def _refusal(self, into: Tensor, error: ValueError) -> CodecError:
        return CodecError(f"no {self.spec.name} encoding of {into.numel()} elements of {into.dtype}: {error}")

    def _decode_words(self, layout: WindowLayout, encoded: Tensor, into: Tensor) -> Tensor:
        """Return the words of a 16-bit encoding, int16 [into.numel()]; in ``into`` itself where they fit."""
        if into.device.type != "cpu":
            words = decode_window_torch(layout, encoded, into.numel())
            return words if into.dtype is torch.float32 else into.view(torch.int16).copy_(words)
        if into.dtype is torch.float32:
            into = torch.empty(into.numel(), dtype=torch.int16)
        decode_window(layout, host_bytes(encoded), _words(into))
        return into.view(torch.int16)

    def _layout(self, dtype: torch.dtype) -> WindowLayout:
        return self._fp16 if dtype is torch.float16 else self._bf16


def _words(tensor: Tensor) -> Words:
    return host_bytes(tensor).view(np.uint16)
