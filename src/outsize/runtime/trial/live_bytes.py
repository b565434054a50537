"""Modes that count what operations of a trial take, compute and return."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from outsize.accelerators import module_of
from outsize.compat import torch_private
from outsize.compat.torch_private import OperationMode, storage_key, watching
from outsize.runtime.forward.saved_tensors import ATTENTION, PRODUCTS, is_kept_product
from outsize.runtime.forward.unit_facts import UnitFlops, Yield, Yields
from outsize.runtime.forward.unit_state import UnitState, random_states, set_random_states, untouched


@contextmanager
def without_trace(model: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """Leave the state of ``model`` and the generators of random numbers as they are, whatever runs meanwhile.

    Args:
        model: whose parameters may be changed.
        device: that computes; None for the CPU.
    """
    device = torch.device("cpu") if device is None else device
    states = random_states(device)
    try:
        with untouched(UnitState(model.modules())):
            yield
    finally:
        set_random_states(device, states)


# Products of tokens with their experts' weights in one operation, which PyTorch's table does not know: each row of the
# first operand goes through one matrix of the second.
_GROUPED = ("_grouped_mm", "grouped_mm_fallback")


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs of an operation that has returned ``out``; 0 for one that the table leaves out."""
    # What it is from is slow to import, and of use in trials alone.
    from torch.utils.flop_counter import flop_registry

    if func in ATTENTION:
        return attention_flops(args, kwargs)
    name = _name(func)
    if name.startswith("_scaled_dot_product") and name.endswith("backward"):
        # Scores that it makes again are not counted, as elsewhere.
        return 2 * attention_flops(args[1:], kwargs)
    if name in _GROUPED:
        return int(2 * args[0].numel() * args[1].shape[-1])
    formula = flop_registry.get(getattr(func, "overloadpacket", func))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def attention_flops(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the FLOPs of an attention that is one operation; causal where it is said to be, half of its scores."""
    query, key = args[0], args[1]
    causal = any(arg is True for arg in (*args, kwargs.get("is_causal")))
    return int(4 * query.numel() * key.shape[-2] // (2 if causal else 1))


def _name(func: Any) -> str:
    return getattr(getattr(func, "overloadpacket", func), "__name__", "")


class _Ran(NamedTuple):
    at: int
    flops: int
    routed: bool
    # Of attention and products. They keep no bytes, but their identity from being given to other memory.
    is_product: bool = False
    num_bytes: int = 0
    memory: tuple[StorageWeakRef, ...] = ()
    # Elements that a product reads of tokens and returns.
    moved: int = 0


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
            moved=sum(one.moved for one in self._forward if one.is_product and not one.routed),
            routed_moved=sum(one.moved for one in self._forward if one.routed),
            low_rank=sum(one.moved for one in self._forward if not one.is_product and not one.routed),
        )

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        at, flops = len(self._ops), flops_of(func, args, kwargs, out)
        is_product, routed, moved = is_kept_product(func, args), _name(func) in _GROUPED, 0
        if func in PRODUCTS or routed:
            moved = args[0 if routed else -2].numel() + out.numel()
        if func in ATTENTION or is_product:
            tensors = [leaf for leaf in torch_private.leaves_of(out) if isinstance(leaf, Tensor)]
            memory = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)  # type: ignore[no-untyped-call]
            size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            self._forward.append(_Ran(at, flops, routed, is_product, size, memory, moved))
        elif flops:
            self._forward.append(_Ran(at, flops, routed, moved=moved))
        return out

    def _note_backward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        self._backward_flops += flops_of(func, args, kwargs, out)
        return out


def _sum(returned: list[_Ran], others: set[int]) -> Yield:
    own_bytes = sum(one.num_bytes for one in returned if others.isdisjoint(ref.cdata for ref in one.memory))
    return Yield(own_bytes, sum(one.flops for one in returned))


class LiveBytes(OperationMode):
    """While active, every storage that an op creates counts until it is freed.

    What a kernel allocates inside itself is seen by the allocator of an accelerator alone.

    Args:
        weights: a storage that was there before and does not count; views of it are made all the time.
        device: whose allocator is asked for its peak as well; None for none.

    Attributes:
        now: bytes alive.
        trace: bytes alive after each op since `restart` that took some.
        ops: where it is not None, every op but detach is appended when it has run.
    """

    def __init__(self, weights: torch.UntypedStorage, device: torch.device | None = None) -> None:
        super().__init__()
        self.now = 0
        self._device, self._besides = device, 0
        self.trace: list[int] = []
        self.ops: list[Any] | None = None
        self._blind = False
        self._known = storage_key(weights)
        self._seen: dict[int, weakref.finalize[Any, Any]] = {}

    @property
    def peak(self) -> int:
        """The most bytes alive since `restart`."""
        return max(self.trace, default=0)

    def restart(self) -> int:
        """Follow the bytes alive from here on; returns those of now."""
        self.trace = [self.now]
        if self._device is not None:
            module = module_of(self._device)
            module.reset_peak_memory_stats(self._device)
            self._besides = module.memory_allocated(self._device) - self.now
        return self.now

    def since(self, before: int) -> tuple[int, ...]:
        """The bytes alive after each op since `restart`, and at the allocator's peak, beyond ``before``."""
        trace = self.trace
        if self._device is not None:
            trace = [*trace, module_of(self._device).max_memory_allocated(self._device) - self._besides]
        return tuple(alive - before for alive in trace)

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
