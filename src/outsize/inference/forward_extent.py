"""What a forward takes of the device beside weights: measured in the pass that sets a new record, not in a trial."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outsize.compat import torch_private
from outsize.runtime.trial.live_bytes import LiveBytes

# What kernels take inside themselves, as a share of the tensors they make (train.prepare uses the same).
KERNEL_SHARE = {"fp32": 0.125, "bf16": 0.375, "fp16": 0.375}
# Logits as the head gives them, in fp32, and once more while a token is chosen.
OUTPUT_COPIES = 3


@dataclass(frozen=True, slots=True)
class ForwardExtent:
    """The size of a forward: rows, and the length of a row."""

    rows: int
    length: int

    def covers(self, other: "ForwardExtent") -> bool:
        """Whether memory planned for this extent also holds ``other``."""
        return self.rows >= other.rows and self.length >= other.length


@dataclass(frozen=True, slots=True)
class Growth:
    """How far a generation goes on.

    Attributes:
        rows: texts at once, each beam one.
        length: tokens of the longest, prompt and new ones.
        num_new: of them, at most so many are new.
    """

    rows: int
    length: int
    num_new: int


class Workspace:
    """The most bytes that a unit needs while it computes, known for the largest forward so far."""

    def __init__(self, dtype: str) -> None:
        self._share = KERNEL_SHARE[dtype]
        self._largest: ForwardExtent | None = None
        self._known_bytes = 0
        self._measuring: ForwardExtent | None = None
        self._bytes = 0

    @property
    def known_bytes(self) -> int:
        """What the largest forward so far took; 0 before the first."""
        return self._known_bytes

    @property
    def measured_bytes(self) -> int:
        """What the forward that runs took so far, where it is larger than any before; else 0."""
        return 0 if self._measuring is None else self._bytes

    def begin(self, extent: ForwardExtent) -> bool:
        """A forward of that size begins; returns whether it is larger than any before, and measured therefore."""
        self._measuring = None if self._largest is not None and self._largest.covers(extent) else extent
        self._bytes = 0
        return self._measuring is not None

    def expected_bytes(self, extent: ForwardExtent) -> int:
        """What a forward of that size will take, as far as smaller ones tell; attention may grow with the square."""
        if self._largest is None or self._largest.covers(extent):
            return self._known_bytes
        rows = max(extent.rows / self._largest.rows, 1.0)
        length = max(extent.length / self._largest.length, 1.0)
        return int(self._known_bytes * rows * length**2)

    def run(self, real: Callable[..., Any], args: Any, kwargs: Any, weights: Tensor, last: bool) -> Any:
        """Call a unit, measured if this forward is."""
        if self._measuring is None:
            return real(*args, **kwargs)
        inputs = sum(x.nbytes for x in torch_private.leaves_of((args, kwargs)) if isinstance(x, Tensor))
        live = LiveBytes(weights.untyped_storage())
        try:
            with live:
                output = real(*args, **kwargs)
        finally:
            live.forget()
        most = inputs + live.peak
        if last:
            made = sum(x.nbytes for x in torch_private.leaves_of(output) if isinstance(x, Tensor))
            most = max(most, inputs + OUTPUT_COPIES * made)
        self._bytes = max(self._bytes, int(most * (1 + self._share)))
        return output

    def end(self) -> None:
        """The forward has come to its last unit: what was measured counts from here on."""
        if self._measuring is None:
            return
        known = self._largest or self._measuring
        self._largest = ForwardExtent(
            max(known.rows, self._measuring.rows), max(known.length, self._measuring.length)
        )
        self._known_bytes = max(self._known_bytes, self._bytes)
        self._measuring = None


def extent_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardExtent:
    """The size of a forward, by what its first unit is called with: ids [B, S] or vectors [B, S, d]."""
    for leaf in torch_private.leaves_of((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim():
            return ForwardExtent(len(leaf), leaf.shape[1] if leaf.dim() > 1 else 1)
    return ForwardExtent(1, 1)


def bytes_held(calls: Iterable[Any]) -> int:
    """Bytes of the tensors that forwards have paused with, each memory once."""
    leaves = (leaf for call in calls for leaf in torch_private.leaves_of((call.args, call.kwargs)))
    memories = (leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor))
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())


def no_grad_parameter(tensor: Tensor) -> torch.nn.Parameter:
    """A parameter for a forward alone, an ordinary tensor even where the caller is in inference mode."""
    with ordinary():
        return torch.nn.Parameter(tensor, requires_grad=False)


@contextlib.contextmanager
def ordinary() -> Iterator[None]:
    """What is made in here outlives the caller's inference mode, whose own tensors may not be written outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        yield
