"""The packed tier: planes that do not change, kept in host memory in fewer bytes.

A plane is encoded in pieces as it is written. Pieces lie in one range of memory per plane, where an allocator of its
own finds room for each: they are not all of one length, and one that is written again may be longer than it was.
"""

import threading

import torch
from torch import Tensor

from outsize.codecs.codec import DTYPE_NAME, Codec
from outsize.codecs.transport import PIECE_ALIGN, PIECE_ELEMENTS
from outsize.errors import StorageError
from outsize.units import align_up, format_bytes


class EncodedRoom:
    """Gives out stretches of a range of bytes and takes them back; the first that is long enough."""

    def __init__(self, num_bytes: int) -> None:
        self._free = [(0, num_bytes)]

    def take(self, num_bytes: int) -> int | None:
        """Return where ``num_bytes`` lie from now on; None where no stretch is long enough."""
        size = align_up(num_bytes, PIECE_ALIGN)
        for index, (start, length) in enumerate(self._free):
            if length >= size:
                self._free[index : index + 1] = [(start + size, length - size)] if length > size else []
                return start
        return None

    def give(self, start: int, num_bytes: int) -> None:
        """Take back what `take` gave; neighbours become one stretch again."""
        merged: list[tuple[int, int]] = []
        for at, length in sorted([*self._free, (start, align_up(num_bytes, PIECE_ALIGN))]):
            if merged and sum(merged[-1]) == at:
                merged[-1] = merged[-1][0], merged[-1][1] + length
            else:
                merged.append((at, length))
        self._free = merged

    @property
    def free_bytes(self) -> int:
        """Bytes of all stretches that are free."""
        return sum(length for _, length in self._free)


class PackedPlane:
    """One plane, encoded; zeros where nothing was written.

    Args:
        numel: elements.
        dtype: of them.
        codec: lossless.
        memory: for all pieces, uint8.
    """

    def __init__(self, numel: int, dtype: torch.dtype, codec: Codec, memory: Tensor) -> None:
        self.numel, self.dtype, self.codec = numel, dtype, codec
        self._memory = memory
        self._room = EncodedRoom(memory.numel())
        self._pieces: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def pieces(self) -> list[Tensor]:
        """Return the encodings of `PIECE_ELEMENTS` elements each, the last of fewer."""
        with self._lock:
            for index in range(-(-self.numel // PIECE_ELEMENTS)):
                if index not in self._pieces:
                    self._store(index, torch.zeros(self._length(index), dtype=self.dtype))
            spans = [self._pieces[index] for index in sorted(self._pieces)]
        return [self._memory[start : start + size] for start, size in spans]

    def read(self, start: int, into: Tensor) -> None:
        """Fill ``into`` with the elements from ``start`` on."""
        with self._lock:
            for index, low, high in self._overlaps(start, into.numel()):
                elements = self._decoded(index)
                first = index * PIECE_ELEMENTS
                into[low - start : high - start].copy_(elements[low - first : high - first])

    def write(self, start: int, source: Tensor) -> None:
        """Replace the elements from ``start`` on by ``source``.

        Raises:
            StorageError: they take more bytes than were set aside; what was there before stays.
        """
        with self._lock:
            for index, low, high in self._overlaps(start, source.numel()):
                elements, first = source[low - start : high - start], index * PIECE_ELEMENTS
                if high - low < self._length(index):
                    part, elements = elements, self._decoded(index)
                    elements[low - first : high - first] = part
                self._store(index, elements.detach().to("cpu", self.dtype))

    def _overlaps(self, start: int, numel: int) -> list[tuple[int, int, int]]:
        """Pieces that a range overlaps: index, and its part of the range."""
        stop = start + numel
        return [
            (index, max(start, index * PIECE_ELEMENTS), min(stop, (index + 1) * PIECE_ELEMENTS))
            for index in range(start // PIECE_ELEMENTS, -(-stop // PIECE_ELEMENTS))
        ]

    def _length(self, index: int) -> int:
        return min(PIECE_ELEMENTS, self.numel - index * PIECE_ELEMENTS)

    def _decoded(self, index: int) -> Tensor:
        elements = torch.zeros(self._length(index), dtype=self.dtype)
        if index in self._pieces:
            start, size = self._pieces[index]
            self.codec.decode(self._memory[start : start + size], elements)
        return elements

    def _store(self, index: int, elements: Tensor) -> None:
        most = self.codec.spec.max_bytes(elements.numel(), DTYPE_NAME[self.dtype])
        encoded = torch.empty(most, dtype=torch.uint8)
        size = self.codec.encode(elements.contiguous(), encoded)
        start = self._room.take(size)
        if start is None:
            start = self._make_room(index, size)
        elif index in self._pieces:
            self._room.give(*self._pieces[index])
        self._memory[start : start + size] = encoded[:size]
        self._pieces[index] = start, size

    def _make_room(self, index: int, size: int) -> int:
        """Forget a piece, push the others together, and return where ``size`` bytes lie behind them."""
        room_before = align_up(self._pieces[index][1], PIECE_ALIGN) if index in self._pieces else 0
        if self._room.free_bytes + room_before < align_up(size, PIECE_ALIGN):
            raise StorageError(
                f"weights that codec {self.codec.spec.name} should write in {format_bytes(self._memory.numel())} take "
                "more: they are not like those of a trained network; set transport.weights=raw"
            )
        self._pieces.pop(index, None)
        self._room = EncodedRoom(self._memory.numel())
        for other, (start, length) in sorted(self._pieces.items(), key=lambda item: item[1]):
            to = self._room.take(length)
            assert to is not None
            self._memory[to : to + length] = self._memory[start : start + length].clone()
            self._pieces[other] = to, length
        piece = self._room.take(size)
        assert piece is not None
        return piece
