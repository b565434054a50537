"""What operations of a unit return and compute, noted in a trial: what an FA or FP would keep of it, and its FLOPs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from outsize.compat import torch_private
from outsize.compat.torch_private import watching
from outsize.runtime.forward.selective_recompute import ATTENTION, PRODUCTS
from outsize.runtime.forward.unit_facts import UnitFlops, Yield, Yields
from outsize.runtime.trial.op_flops import flops_of, is_routed


class _Ran(NamedTuple):
    at: int
    flops: int
    routed: bool
    # Of attention and products. They keep no bytes, but their identity from being given to other memory.
    is_product: bool = False
    num_bytes: int = 0
    memory: tuple[StorageWeakRef, ...] = ()


class OpTrial:
    """Notes what a forward returns and computes on its way, and what its backward computes; for one of each.

    Args:
        ops: operations that have run, appended to by whoever sees them, as of `short_recompute.Trial`.
    """

    def __init__(self, ops: list[Any]) -> None:
        self._ops = ops
        self._forward: list[_Ran] = []
        self._backward_flops = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context of the forward."""
        with watching(self._note):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of the backward."""
        with watching(self._note_backward):
            yield

    def yields(self, last_needed: int, others: set[int]) -> Yields:
        """Return what may be kept.

        Args:
            last_needed: operations that had run when the last tensor was saved for the backward.
            others: memory, by identity, that is there in any case: what the unit received and what it returned.
        """
        needed = [one for one in self._forward if one.at <= last_needed and one.memory]
        attention = [one for one in needed if not one.is_product]
        num_products = len(needed) - len(attention)
        return Yields(_sum(attention, others), _sum(needed, others), num_products)

    def flops(self, last_needed: int | None = None) -> UnitFlops:
        """Return what was computed; see `yields`, None where the backward needs all of the forward."""
        needed = (one.flops for one in self._forward if last_needed is None or one.at <= last_needed)
        return UnitFlops(
            forward=sum(one.flops for one in self._forward),
            needed=sum(needed),
            gradient=self._backward_flops,
            routed=sum(one.flops for one in self._forward if one.routed),
        )

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        at, flops = len(self._ops), flops_of(func, args, kwargs, out)
        if func in ATTENTION or func in PRODUCTS:
            tensors = [leaf for leaf in torch_private.leaves_of(out) if isinstance(leaf, Tensor)]
            memory = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)  # type: ignore[no-untyped-call]
            size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            self._forward.append(_Ran(at, flops, False, func in PRODUCTS, size, memory))
        elif flops:
            self._forward.append(_Ran(at, flops, is_routed(func)))
        return out

    def _note_backward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        self._backward_flops += flops_of(func, args, kwargs, out)
        return out


def _sum(returned: list[_Ran], others: set[int]) -> Yield:
    own = sum(one.num_bytes for one in returned if others.isdisjoint(ref.cdata for ref in one.memory))
    return Yield(own, sum(one.flops for one in returned))
