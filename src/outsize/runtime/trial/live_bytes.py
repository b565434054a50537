"""Count the bytes of tensors that are alive, op by op, and their peak."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from outsize.compat import torch_private
from outsize.compat.torch_private import OperationMode, storage_key


class LiveBytes(OperationMode):
    """While active, every storage that an op creates counts until it is freed.

    What a kernel allocates inside itself is not seen.

    Args:
        known: a storage that was there before and does not count; views of it are made all the time.

    Attributes:
        now: bytes alive.
        trace: bytes alive after each op since `restart` that took some.
        ops: where it is not None, every op but detach is appended when it has run.
    """

    def __init__(self, known: torch.UntypedStorage) -> None:
        super().__init__()
        self.now = 0
        self.trace: list[int] = []
        self.ops: list[Any] | None = None
        self._blind = False
        self._known = storage_key(known)
        self._seen: dict[int, weakref.finalize[Any, Any]] = {}

    @property
    def peak(self) -> int:
        """The most bytes alive since `restart`."""
        return max(self.trace, default=0)

    def restart(self) -> int:
        """Follow the bytes alive from here on; returns those of now."""
        self.trace = [self.now]
        return self.now

    def since(self, before: int) -> tuple[int, ...]:
        """The bytes alive after each op since `restart`, beyond ``before``."""
        return tuple(alive - before for alive in self.trace)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave this mode while the context lasts, of which no other may have been entered since; else see `blind`."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    @contextmanager
    def blind(self) -> Iterator[None]:
        """Count nothing while the context lasts, whichever modes have been entered since this one."""
        self._blind = True
        try:
            yield
        finally:
            self._blind = False

    def forget(self) -> None:
        """Stop following what is still alive."""
        for finalizer in list(self._seen.values()):
            finalizer.detach()
        self._seen.clear()

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and follow the memory that it made."""
        out = func(*args, **kwargs)
        if self._blind:
            return out
        # The same memory, and what a hook on saved tensors does; and a question that only fake tensors pass on.
        if func is torch.ops.aten.detach.default or func is torch.ops.prim.device.default:
            return out
        if self.ops is not None:
            self.ops.append(func)
        for leaf in torch_private.leaves_of(out):
            # A sparse tensor has no memory of its own: it holds two tensors that do, which were made before it.
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._follow(leaf.untyped_storage())
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key == self._known or key in self._seen:
            return
        num_bytes = storage.nbytes()
        self.now += num_bytes
        self.trace.append(self.now)
        self._seen[key] = weakref.finalize(storage, self._gone, key, num_bytes)

    def _gone(self, key: int, num_bytes: int) -> None:
        self.now -= num_bytes
        del self._seen[key]
