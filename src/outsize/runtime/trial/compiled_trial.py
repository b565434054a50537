"""What a compiled unit takes: a mode that watches operations sees none of it, but the allocator tells its bytes."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from outsize.compat import torch_private
from outsize.compat.torch_private import allocations, memory_key
from outsize.runtime.trial.measured import Trace

T = TypeVar("T")


class Taken(NamedTuple):
    """What one forward of a unit and its backward take.

    Attributes:
        forward: bytes alive in a forward that makes a graph.
        backward: the same through a backward behind it.
        saved: bytes that the forward leaves alive besides its outputs.
        num_saved: tensors that it saves.
        outputs: what it returned.
    """

    forward: Trace
    backward: Trace
    saved: int
    num_saved: int
    outputs: Any


def measure_compiled(call: Callable[[], Any]) -> Taken:
    """Measure what ``call``, the forward of a unit on arguments that are leaves, takes; it has run before."""
    saved: list[None] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(None)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs, forward = _allocated(call)
    tensors = [leaf for leaf in torch_private.leaves_of(outputs) if isinstance(leaf, Tensor)]
    made = {memory_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    roots = [tensor for tensor in tensors if tensor.requires_grad]

    def back() -> None:
        if roots:
            torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])

    alive = forward[-1] if forward else 0
    _, behind = _allocated(back)
    backward = (*forward, *(alive + num_bytes for num_bytes in behind))
    return Taken(forward, backward, max(alive - sum(made.values()), 0), len(saved), outputs)


def _allocated(work: Callable[[], T]) -> tuple[T, Trace]:
    """Return what ``work`` returns, and the bytes alive after each allocation and release in it."""
    result, changes = allocations(work)
    return result, tuple(accumulate(changes))
