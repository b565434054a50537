"""Room for saved activations: a fixed number of equal extents, each filled once and emptied once.

What is taken is what was put, bit for bit. An extent is free again when its tensor has been taken. Both kinds
pass the same contract (`outsize.testing`).
"""

import ctypes
import queue
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from outsize.storage.arena import Arena
from outsize.storage.disk_file import SECTOR_BYTES, DirectFile
from outsize.storage.extents import Extents, ScratchStatistics
from outsize.storage.ledger import Ledger
from outsize.storage.pool import IOPool
from outsize.units import align_up

DEFAULT_BOUNCE_BYTES = 2**20


class Scratch(Protocol):
    """What the runtime needs of a scratch."""

    def put(self, key: Hashable, tensor: Tensor) -> None:
        """Keep a copy of ``tensor`` under ``key``; the tensor is free to change when this returns.

        Raises:
            BudgetExceededError: all extents are taken.
            StorageError: the medium failed; the extent is free again.
            ValueError: the key is taken, or the tensor is larger than an extent.
        """

    def take(self, key: Hashable, into: Tensor) -> None:
        """Fill ``into`` with what was put under ``key`` and forget it.

        Raises:
            StorageError: the medium failed; the tensor is still held.
            ValueError: nothing under this key, or another dtype or number of elements.
        """

    def holds_all(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors`` fit one extent together."""

    def put_all(self, key: Hashable, tensors: Sequence[Tensor]) -> None:
        """Keep copies of ``tensors`` in one extent; raises as `put`."""

    def take_all(self, key: Hashable, into: Sequence[Tensor]) -> None:
        """Fill ``into``, tensors of the same sizes in the same order, and forget ``key``; raises as `take`."""

    def forget(self, key: Hashable) -> None:
        """Free the extent of ``key`` without reading it; nothing happens where there is none."""

    def statistics(self) -> ScratchStatistics:
        """Return what is held and what was moved."""

    def close(self) -> None:
        """Forget everything and give the medium back; a second call does nothing."""


class _OverExtents:
    """What scratches have in common that keep each tensor in an extent."""

    _extents: Extents

    def holds_all(self, tensors: Sequence[Tensor]) -> bool:
        """See `Scratch.holds_all`."""
        return self._extents.fits(_together(tensors).nbytes)

    def forget(self, key: Hashable) -> None:
        """See `Scratch.forget`."""
        self._extents.drop(key)

    def statistics(self) -> ScratchStatistics:
        """See `Scratch.statistics`."""
        return self._extents.statistics()


class HostScratch(_OverExtents):
    """A scratch in host memory, for tensors of any device and stride.

    Args:
        num_extents: tensors held at once.
        extent_bytes: size of the largest.
        arena: where the memory comes from. It stays the owner: close it after the scratch.
    """

    def __init__(self, num_extents: int, extent_bytes: int, arena: Arena) -> None:
        self._extents = Extents(num_extents, extent_bytes)
        size = align_up(extent_bytes, SECTOR_BYTES)
        memory = arena.take(num_extents * size, "saved activations")
        self._memory = [memory[at : at + size] for at in range(0, len(memory), size)]

    def put(self, key: Hashable, tensor: Tensor) -> None:
        """See `Scratch.put`."""
        index = self._extents.enter(key, tensor)
        self._view(index, tensor).copy_(tensor.detach())
        self._extents.count(bytes_in=tensor.nbytes)

    def take(self, key: Hashable, into: Tensor) -> None:
        """See `Scratch.take`."""
        self.read(key, into)
        self._extents.leave(key)

    def read(self, key: Hashable, into: Tensor) -> None:
        """Fill ``into`` with what was put under ``key``, and keep it; raises as `take`."""
        index = self._extents.find(key, into)
        into.detach().copy_(self._view(index, into))
        self._extents.count(bytes_out=into.nbytes)

    def put_all(self, key: Hashable, tensors: Sequence[Tensor]) -> None:
        """See `Scratch.put_all`."""
        index = self._extents.enter(key, _together(tensors))
        for at, tensor in _places(tensors):
            self._view(index, tensor, at).copy_(tensor.detach())
        self._extents.count(bytes_in=sum(tensor.nbytes for tensor in tensors))

    def take_all(self, key: Hashable, into: Sequence[Tensor]) -> None:
        """See `Scratch.take_all`."""
        index = self._extents.find(key, _together(into))
        for at, tensor in _places(into):
            tensor.detach().copy_(self._view(index, tensor, at))
        self._extents.count(bytes_out=sum(tensor.nbytes for tensor in into))
        self._extents.leave(key)

    def close(self) -> None:
        """Let go of the memory; the arena gives it back."""
        self._memory.clear()

    def _view(self, index: int, like: Tensor, at: int = 0) -> Tensor:
        extent: Tensor = self._memory[index][at : at + like.nbytes].view(like.dtype)
        return extent.view(like.shape)


class DiskScratch(_OverExtents):
    """A scratch in a file without a name, for contiguous CPU tensors.

    PyTorch aligns its tensors to 64 bytes and direct I/O wants 4096, so a request goes through one of a few
    aligned bounce buffers, unless the tensor happens to be aligned. Each request is copied and written by the
    same thread of the pool, so copies and disk overlap.

    Args:
        num_extents: tensors held at once.
        extent_bytes: size of the largest.
        path: where the file is made; its name is gone at once, and the file with the process.
        pool: threads that move the bytes; shared.
        arena: where the bounce buffers come from, one per thread of the pool.
        bounce_bytes: size of a bounce buffer and of a request, a multiple of 4096.
        ledger: where the file's bytes are reserved, in tier ``disk``.
    """

    def __init__(
        self,
        num_extents: int,
        extent_bytes: int,
        path: str | Path,
        pool: IOPool,
        arena: Arena,
        *,
        bounce_bytes: int = DEFAULT_BOUNCE_BYTES,
        ledger: Ledger | None = None,
    ) -> None:
        self._extents = Extents(num_extents, extent_bytes)
        self._stride = align_up(extent_bytes, SECTOR_BYTES)
        self._bounce_bytes = min(bounce_bytes, self._stride)
        self.file = DirectFile(
            path,
            num_extents * self._stride,
            pool=pool,
            request_bytes=self._bounce_bytes,
            temporary=True,
            ledger=ledger,
        )
        self._bounces: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        try:
            for buffer in arena.take_all([self._bounce_bytes] * pool.num_threads, "bounce buffers"):
                self._bounces.put(buffer)
        except BaseException:
            self.file.close()
            raise

    def put(self, key: Hashable, tensor: Tensor) -> None:
        """See `Scratch.put`; refuses tensors of another device or with gaps."""
        _check_plain(tensor)
        index = self._extents.enter(key, tensor)
        try:
            self._move(tensor, index * self._stride, written=True)
        except BaseException:
            self._extents.leave(key)
            raise
        self._count(bytes_in=tensor.nbytes)

    def take(self, key: Hashable, into: Tensor) -> None:
        """See `Scratch.take`; refuses tensors of another device or with gaps."""
        _check_plain(into)
        index = self._extents.find(key, into)
        self._move(into, index * self._stride, written=False)
        self._extents.leave(key)
        self._count(bytes_out=into.nbytes)

    def put_all(self, key: Hashable, tensors: Sequence[Tensor]) -> None:
        """See `Scratch.put_all`; refuses tensors of another device or with gaps."""
        for tensor in tensors:
            _check_plain(tensor)
        index = self._extents.enter(key, _together(tensors))
        try:
            for at, tensor in _places(tensors):
                self._move(tensor, index * self._stride + at, written=True)
        except BaseException:
            self._extents.leave(key)
            raise
        self._count(bytes_in=sum(tensor.nbytes for tensor in tensors))

    def take_all(self, key: Hashable, into: Sequence[Tensor]) -> None:
        """See `Scratch.take_all`; refuses tensors of another device or with gaps."""
        for tensor in into:
            _check_plain(tensor)
        index = self._extents.find(key, _together(into))
        for at, tensor in _places(into):
            self._move(tensor, index * self._stride + at, written=False)
        self._extents.leave(key)
        self._count(bytes_out=sum(tensor.nbytes for tensor in into))

    def close(self) -> None:
        """Close the file, which frees its space; the arena gives the bounce buffers back."""
        self.file.close()

    def _count(self, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        self._extents.count(bytes_in=bytes_in, bytes_out=bytes_out)
        self.file.tally.written_bytes += bytes_in
        self.file.tally.read_bytes += bytes_out

    def _move(self, tensor: Tensor, offset: int, *, written: bool) -> None:
        """Move the bytes of ``tensor``, cut into requests that are in flight together."""
        size = self._bounce_bytes
        view = _view_of(tensor)
        request: Callable[[memoryview, int], None]
        if (tensor.data_ptr() | len(view)) % SECTOR_BYTES:
            request = partial(self._bounce, written=written)
            self._extents.count(bounced=len(view))
        else:
            request = self.file.write_request if written else self.file.read_request
        self.file.run(
            [partial(request, view[at : at + size], offset + at) for at in range(0, len(view), size)]
        )

    def _bounce(self, view: memoryview, offset: int, *, written: bool) -> None:
        """Move one request through a bounce buffer; waits until one is free."""
        buffer = self._bounces.get()
        try:
            sectors = buffer.numpy().data[: align_up(len(view), SECTOR_BYTES)]
            if written:
                _copy(sectors, view)
                self.file.write_request(sectors, offset)
            else:
                self.file.read_request(sectors, offset)
                _copy(view, sectors)
        finally:
            self._bounces.put(buffer)


def _places(tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Where each tensor begins in an extent that holds them all: on a sector of its own."""
    places, at = [], 0
    for tensor in tensors:
        places.append((at, tensor))
        at += align_up(tensor.nbytes, SECTOR_BYTES)
    return places


def _together(tensors: Sequence[Tensor]) -> Tensor:
    """Something as large as the extent that holds them all; it has no memory."""
    num_bytes = sum(align_up(tensor.nbytes, SECTOR_BYTES) for tensor in tensors)
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


def _view_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor; `Tensor.numpy` would fix the size of its storage."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy as many bytes as the shorter view has, without the GIL (slice assignment would hold it)."""
    num_bytes = min(len(target), len(source))
    ctypes.memmove(_address(target), _address(source), num_bytes)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _check_plain(tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"need a contiguous CPU tensor, not one on {tensor.device} with strides {tensor.stride()}"
        )
