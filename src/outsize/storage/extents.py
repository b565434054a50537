"""Which extent of a scratch holds what: the half of a scratch that moves no bytes."""

import threading
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.errors import BudgetExceededError
from outsize.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchStatistics:
    """What a scratch has held and moved.

    Attributes:
        num_extents: tensors that it can hold at once.
        num_held: tensors that it holds now.
        high_water: the most tensors that it ever held.
        bytes_in: bytes put, as the caller counts them.
        bytes_out: bytes taken, as the caller counts them.
        bounced_bytes: bytes that went through a bounce buffer because the caller's tensor was not aligned.
    """

    num_extents: int
    num_held: int
    high_water: int
    bytes_in: int
    bytes_out: int
    bounced_bytes: int


@dataclass(frozen=True, slots=True)
class _Held:
    """What an extent holds."""

    index: int
    dtype: torch.dtype
    numel: int


class Extents:
    """Books of ``num_extents`` equal extents. May be used from any thread."""

    def __init__(self, num_extents: int, extent_bytes: int) -> None:
        if num_extents < 1 or extent_bytes < 1:
            raise ValueError(f"a scratch of {num_extents} extents of {extent_bytes} bytes holds nothing")
        self.num_extents = num_extents
        self.extent_bytes = extent_bytes
        self._free = list(range(num_extents - 1, -1, -1))
        self._held: dict[Hashable, _Held] = {}
        self._high_water = self._bytes_in = self._bytes_out = self._bounced = 0
        self._lock = threading.Lock()

    def enter(self, key: Hashable, tensor: Tensor) -> int:
        """Give ``key`` an extent for ``tensor``."""
        if tensor.nbytes > self.extent_bytes:
            raise ValueError(f"{key}: {tensor.nbytes} bytes do not fit an extent of {self.extent_bytes}")
        with self._lock:
            if key in self._held:
                raise ValueError(f"{key} is in this scratch already")
            if not self._free:
                size = format_bytes(self.extent_bytes)
                raise BudgetExceededError(
                    f"all {self.num_extents} extents of {size} are taken, none left for {key}"
                )
            index = self._free.pop()
            self._held[key] = _Held(index, tensor.dtype, tensor.numel())
            self._high_water = max(self._high_water, len(self._held))
            return index

    def find(self, key: Hashable, into: Tensor) -> int:
        """Return the extent of ``key``, whose bytes ``into`` must be able to hold exactly."""
        with self._lock:
            held = self._held.get(key)
        if held is None:
            raise ValueError(f"{key} is not in this scratch")
        if (held.dtype, held.numel) != (into.dtype, into.numel()):
            raise ValueError(
                f"{key} holds {held.numel} elements of {held.dtype}, not {into.numel()} of {into.dtype}"
            )
        return held.index

    def leave(self, key: Hashable) -> None:
        """Free the extent of ``key``."""
        with self._lock:
            self._free.append(self._held.pop(key).index)

    def drop(self, key: Hashable) -> None:
        """Free the extent of ``key``, if it has one."""
        with self._lock:
            held = self._held.pop(key, None)
            if held is not None:
                self._free.append(held.index)

    def fits(self, num_bytes: int) -> bool:
        """Whether an extent holds ``num_bytes``."""
        return num_bytes <= self.extent_bytes

    def count(self, *, bytes_in: int = 0, bytes_out: int = 0, bounced: int = 0) -> None:
        """Add to the statistics."""
        with self._lock:
            self._bytes_in += bytes_in
            self._bytes_out += bytes_out
            self._bounced += bounced

    def statistics(self) -> ScratchStatistics:
        """Return the record of now."""
        with self._lock:
            return ScratchStatistics(
                num_extents=self.num_extents,
                num_held=len(self._held),
                high_water=self._high_water,
                bytes_in=self._bytes_in,
                bytes_out=self._bytes_out,
                bounced_bytes=self._bounced,
            )
