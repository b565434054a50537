"""Scratch files and the extents within them.

Room for saved activations: a fixed number of equal extents, each filled once and emptied once.

What is taken is what was put, bit for bit. An extent is free again when its tensor has been taken.

Which extent of a scratch holds what: the half of a scratch that moves no bytes.
"""

import ctypes
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outsize.accelerators import catch_up
from outsize.errors import BudgetExceededError
from outsize.storage.disk_file import SECTOR_BYTES, DirectFile, Tally
from outsize.storage.ledger import Arena, Ledger
from outsize.storage.prealloc import IOPool
from outsize.units import align_up, format_bytes


class _Held(NamedTuple):
    """Which extent it is, and dtype and number of elements of each tensor in it."""

    number: int
    forms: list[tuple[torch.dtype, int]]


class Extents:
    """Books of ``num_extents`` equal extents. May be used from any thread."""

    def __init__(self, num_extents: int, extent_bytes: int) -> None:
        if num_extents < 1 or extent_bytes < 1:
            raise ValueError(f"a scratch of {num_extents} extents of {extent_bytes} bytes holds nothing")
        self.num_extents = num_extents
        self.extent_bytes = extent_bytes
        self._free = list(range(num_extents - 1, -1, -1))
        self._held: dict[Hashable, _Held] = {}
        self._lock = threading.Lock()

    def enter(self, key: Hashable, tensors: Sequence[Tensor], num_bytes: int) -> int:
        """Give ``key`` an extent for ``tensors``, which take ``num_bytes`` of it."""
        if num_bytes > self.extent_bytes:
            raise ValueError(f"{key}: {num_bytes} bytes do not fit an extent of {self.extent_bytes}")
        with self._lock:
            if key in self._held:
                raise ValueError(f"{key} is in this scratch already")
            if not self._free:
                size = format_bytes(self.extent_bytes)
                raise BudgetExceededError(
                    f"all {self.num_extents} extents of {size} are taken, none left for {key}"
                )
            index = self._free.pop()
            self._held[key] = _Held(index, _forms(tensors))
            return index

    def find(self, key: Hashable, into: Sequence[Tensor]) -> int:
        """Return the extent of ``key``, whose tensors ``into`` must be able to hold exactly."""
        with self._lock:
            held = self._held.get(key)
        if held is None:
            raise ValueError(f"{key} is not in this scratch")
        if held.forms != _forms(into):
            raise ValueError(f"{key} holds {_told(held.forms)}, not {_told(_forms(into))}")
        return held.number

    def drop(self, key: Hashable) -> None:
        """Free the extent of ``key``, if it has one."""
        with self._lock:
            held = self._held.pop(key, None)
            if held is not None:
                self._free.append(held.number)

    @property
    def num_held(self) -> int:
        """Keys that have an extent now."""
        return len(self._held)


def _forms(tensors: Sequence[Tensor]) -> list[tuple[torch.dtype, int]]:
    return [(tensor.dtype, tensor.numel()) for tensor in tensors]


def _told(forms: Sequence[tuple[torch.dtype, int]]) -> str:
    return ", ".join(f"{numel} elements of {dtype}" for dtype, numel in forms)


DEFAULT_BOUNCE_BYTES = 2**20


class Scratch(ABC):
    """What the runtime needs of a scratch; its kinds say how the bytes of one tensor move.

    Attributes:
        tally: bytes moved for the thread that asks; None where nothing is transferred.
    """

    tally: Tally | None = None
    _extents: Extents

    def put(self, key: Hashable, *tensors: Tensor) -> None:
        """Keep copies of ``tensors`` in one extent under ``key``; they are free to change when this returns.

        Raises:
            BudgetExceededError: all extents are taken.
            StorageError: the medium failed; the extent is free again.
            ValueError: the key is taken, or the tensors are larger than an extent.
        """
        index = self._extents.enter(key, tensors, _end_of(tensors))
        try:
            for at, tensor in _places(tensors):
                self._write(index, at, tensor)
            self._finish(tensors)
        except BaseException:
            self._extents.drop(key)
            raise
        self._count(bytes_in=sum(tensor.nbytes for tensor in tensors))

    def take(self, key: Hashable, *into: Tensor) -> None:
        """Fill ``into`` with what was put under ``key``, in the same order, and forget it.

        Raises:
            StorageError: the medium failed; the tensors are still held.
            ValueError: nothing under this key, or other dtypes or numbers of elements.
        """
        self.read(key, *into)
        self._extents.drop(key)

    def read(self, key: Hashable, *into: Tensor) -> None:
        """Fill ``into`` as `take` does, and keep what was put; raises the same."""
        index = self._extents.find(key, into)
        for at, tensor in _places(into):
            self._read(index, at, tensor)
        self._finish(into)
        self._count(bytes_out=sum(tensor.nbytes for tensor in into))

    def holds(self, *tensors: Tensor) -> bool:
        """Whether ``tensors`` fit one extent together."""
        return _end_of(tensors) <= self._extents.extent_bytes

    def forget(self, key: Hashable) -> None:
        """Free the extent of ``key`` without reading it; nothing happens where there is none."""
        self._extents.drop(key)

    @property
    def num_held(self) -> int:
        """Keys under which something is held now."""
        return self._extents.num_held

    @abstractmethod
    def close(self) -> None:
        """Forget everything and give the medium back; a second call does nothing."""

    @abstractmethod
    def _write(self, index: int, at: int, tensor: Tensor) -> None:
        """Copy ``tensor`` into an extent, from byte ``at`` on."""

    @abstractmethod
    def _read(self, index: int, at: int, into: Tensor) -> None:
        """Fill ``into`` from an extent, from byte ``at`` on."""

    def _finish(self, tensors: Sequence[Tensor]) -> None:  # noqa: B027 - most have moved when they have been moved
        """Return when what was written or read of ``tensors`` has moved."""

    def _count(self, *, bytes_in: int = 0, bytes_out: int = 0) -> None:  # noqa: B027 - most have no tally
        """Add to the tally."""


class HostScratch(Scratch):
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

    def close(self) -> None:
        """Let go of the memory; the arena gives it back."""
        self._memory.clear()

    def _write(self, index: int, at: int, tensor: Tensor) -> None:
        self._view(index, at, tensor).copy_(tensor.detach(), non_blocking=True)

    def _read(self, index: int, at: int, into: Tensor) -> None:
        into.detach().copy_(self._view(index, at, into), non_blocking=True)

    def _finish(self, tensors: Sequence[Tensor]) -> None:
        """See `Scratch`; once for all of them."""
        for device in {tensor.device for tensor in tensors}:
            catch_up(device)

    def _view(self, index: int, at: int, like: Tensor) -> Tensor:
        extent: Tensor = self._memory[index][at : at + like.nbytes].view(like.dtype)
        return extent.view(like.shape)


class DiskScratch(Scratch):
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
        self.tally = self.file.tally
        self._bounces: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        try:
            for buffer in arena.take_all([self._bounce_bytes] * pool.num_threads, "bounce buffers"):
                self._bounces.put(buffer)
        except BaseException:
            self.file.close()
            raise

    def close(self) -> None:
        """Close the file, which frees its space; the arena gives the bounce buffers back."""
        self.file.close()

    def _write(self, index: int, at: int, tensor: Tensor) -> None:
        self._move(tensor, index * self._stride + at, written=True)

    def _read(self, index: int, at: int, into: Tensor) -> None:
        self._move(into, index * self._stride + at, written=False)

    def _count(self, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        self.file.tally.written_bytes += bytes_in
        self.file.tally.read_bytes += bytes_out

    def _move(self, tensor: Tensor, offset: int, *, written: bool) -> None:
        """Move the bytes of ``tensor``, cut into requests that are in flight together."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"need a contiguous CPU tensor, not one on {tensor.device} with strides {tensor.stride()}"
            )
        size = self._bounce_bytes
        view = _view_of(tensor)
        request = self.file.write_request if written else self.file.read_request
        if (tensor.data_ptr() | len(view)) % SECTOR_BYTES:
            request = partial(self._bounce, written=written)
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


def _end_of(tensors: Sequence[Tensor]) -> int:
    """Return how much of an extent ``tensors`` take together."""
    return max((at + tensor.nbytes for at, tensor in _places(tensors)), default=0)


def _view_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor; `Tensor.numpy` would fix the size of its storage."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy as many bytes as the shorter view has, without the GIL (slice assignment would hold it)."""
    num_bytes = min(len(target), len(source))
    ctypes.memmove(_address(target), _address(source), num_bytes)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
