"""Tensors that wait for a backward, by the memory that they lie in, so that it can wait elsewhere.

What is held is remembered as a place: which memory, and how it is shown there. So the memory may go (`take`), and other
memory with the same bytes may take its place (`put`) before anything is shown again. Tensors that share memory go on
sharing it. Memory that others use as well (what the unit received, what it returned) stays where it is.
"""

from collections.abc import Container, Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Memory:
    """Memory that is held, or None while it is elsewhere; it lives as long as something that shows it."""

    __slots__ = ("storage",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage


class Shown(NamedTuple):
    """How a tensor shows memory that is held.

    Attributes:
        memory: which one.
        dtype: of its elements.
        offset: of the first, in elements.
        size: by dimension.
        stride: likewise.
    """

    memory: Memory
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """Return the tensor again, without history."""
        storage = self.memory.storage
        assert storage is not None
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)


class SavedTensors:
    """The memory of what one forward keeps."""

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}  # by the identity of the storage
        self._gone: list[Memory] = []

    def hold(self, tensor: Tensor) -> Shown:
        """Hold the memory of a strided tensor, and return how it is shown."""
        storage = tensor.untyped_storage()
        memory = self._memories.setdefault(storage._cdata, Memory(storage))
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        return Shown(memory, tensor.dtype, int(tensor.storage_offset()), size, stride)

    def stay(self, tensors: Iterable[Tensor]) -> None:
        """Leave what is held of the memory of ``tensors``, which must still be alive, where it is."""
        for tensor in tensors:
            self._memories.pop(tensor.untyped_storage()._cdata, None)

    def memories_of(self, storages: Container[int]) -> list[Memory]:
        """Return what is held of ``storages``, named by their identities."""
        return [memory for identity, memory in self._memories.items() if identity in storages]

    def storages(self) -> list[torch.UntypedStorage]:
        """Return the memory that may go, always in the same order."""
        return [memory.storage for memory in self._memories.values() if memory.storage is not None]

    def take(self) -> None:
        """Let go of all memory that may go."""
        self._gone = list(self._memories.values())
        self._memories.clear()
        for memory in self._gone:
            memory.storage = None

    def put(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Hold ``storages`` in the place of those taken, in the order of `storages`."""
        for memory, storage in zip(self._gone, storages, strict=True):
            memory.storage = storage
        self._gone.clear()

    def clear(self) -> None:
        """Look after it no longer: each part lives as long as something that shows it."""
        self._memories.clear()
        self._gone.clear()
