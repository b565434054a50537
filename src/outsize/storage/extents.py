"""Which extent of a scratch holds what: the half of a scratch that moves no bytes."""

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    """

    num_extents: int
    num_held: int
    high_water: int
    bytes_in: int
    bytes_out: int


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
        self._high_water = self._bytes_in = self._bytes_out = 0
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
            self._high_water = max(self._high_water, len(self._held))
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

    def count(self, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """Add to the statistics."""
        with self._lock:
            self._bytes_in += bytes_in
            self._bytes_out += bytes_out

    def statistics(self) -> ScratchStatistics:
        """Return the record of now."""
        with self._lock:
            return ScratchStatistics(
                num_extents=self.num_extents,
                num_held=len(self._held),
                high_water=self._high_water,
                bytes_in=self._bytes_in,
                bytes_out=self._bytes_out,
            )


def _forms(tensors: Sequence[Tensor]) -> list[tuple[torch.dtype, int]]:
    return [(tensor.dtype, tensor.numel()) for tensor in tensors]


def _told(forms: Sequence[tuple[torch.dtype, int]]) -> str:
    return ", ".join(f"{numel} elements of {dtype}" for dtype, numel in forms)
