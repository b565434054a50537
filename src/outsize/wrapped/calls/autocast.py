"""The caller's autocast, which belongs to its thread, made again in the thread that computes."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Autocast:
    """What operations of the caller are cast to.

    Attributes:
        dtypes: by type of device, those that are cast at all.
    """

    dtypes: tuple[tuple[str, torch.dtype], ...] = ()

    @classmethod
    def of_now(cls, kinds: set[str]) -> "Autocast":
        """Return that of the calling thread, for devices of some kinds."""
        active = sorted(kind for kind in kinds if torch.is_autocast_enabled(kind))
        return cls(tuple((kind, torch.get_autocast_dtype(kind)) for kind in active))

    def on_cpu(self, kind: str) -> "Autocast":
        """Return what is the same on a CPU as this is on devices of a kind, for a trial there."""
        return Autocast(tuple(("cpu", dtype) for of, dtype in self.dtypes if of == kind))

    def enter(self) -> AbstractContextManager[Any]:
        """Return a context in which it is on."""
        stack = contextlib.ExitStack()
        # Without its cache, which would keep casts of weights that have left their slot.
        for kind, dtype in self.dtypes:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
        return stack
