"""What operations of a unit return for what they cost: what an FA or FP would keep of it, noted in a trial.

Attention is counted as causal where it is said to be: half of its scores.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from outsize.compat import trees
from outsize.compat.dispatch import watching
from outsize.runtime.forward.selective_recompute import ATTENTION, PRODUCTS


class Yield(NamedTuple):
    """What operations of a unit return, in one forward.

    Attributes:
        num_bytes: of the memory that they return.
        flops: that computing them takes, a multiply-add counting two.
    """

    num_bytes: int
    flops: int


class Yields(NamedTuple):
    """What may be kept of a unit's forward.

    Attributes:
        attention: of its attention.
        products: of its attention and of those products that its backward needs.
        num_products: how many these products are, the first ones.
    """

    attention: Yield
    products: Yield
    num_products: int


class _Returned(NamedTuple):
    at: int
    is_product: bool
    num_bytes: int
    flops: int
    # They keep no bytes, but their identity from being given to other memory.
    memory: tuple[StorageWeakRef, ...]


class YieldTrial:
    """Notes what a forward returns on its way; for one forward.

    Args:
        ops: operations that have run, appended to by whoever sees them, as of `short_recompute.Trial`.
    """

    def __init__(self, ops: list[Any]) -> None:
        self._ops = ops
        self._returned: list[_Returned] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the forward."""
        with watching(self._note):
            yield

    def yields(self, last_needed: int, others: set[int]) -> Yields:
        """Return what may be kept.

        Args:
            last_needed: operations that had run when the last tensor was saved for the backward.
            others: memory, by identity, that is there in any case: what the unit received and what it returned.
        """
        needed = [one for one in self._returned if one.at <= last_needed]
        attention = [one for one in needed if not one.is_product]
        num_products = len(needed) - len(attention)
        return Yields(_sum(attention, others), _sum(needed, others), num_products)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if func in ATTENTION or func in PRODUCTS:
            tensors = [leaf for leaf in trees.leaves_of(out) if isinstance(leaf, Tensor)]
            is_product = func in PRODUCTS
            flops = _product_flops(args) if is_product else attention_flops(args, kwargs)
            memory = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)  # type: ignore[no-untyped-call]
            size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            self._returned.append(_Returned(len(self._ops), is_product, size, flops, memory))
        return out


def _sum(returned: list[_Returned], others: set[int]) -> Yield:
    own = sum(one.num_bytes for one in returned if others.isdisjoint(ref.cdata for ref in one.memory))
    return Yield(own, sum(one.flops for one in returned))


def _product_flops(args: tuple[Any, ...]) -> int:
    left, right = [arg for arg in args if isinstance(arg, Tensor)][-2:]
    return int(2 * left.shape[0] * left.shape[1] * right.shape[1])


def attention_flops(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the FLOPs of an attention that is one operation."""
    query, key = args[0], args[1]
    causal = any(arg is True for arg in (*args, kwargs.get("is_causal")))
    return int(4 * query.numel() * key.shape[-2] // (2 if causal else 1))
