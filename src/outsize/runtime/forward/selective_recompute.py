"""What an FA or FP keeps for a backward: what some operations of the unit returned, for the recompute to find.

The story of one unit and microbatch:

1. The forward runs with a graph, whose tensors nobody saves: so it is computed in the very operations of the recompute,
   kernels that differ with a graph included. A dispatch mode, which sees operations below autograd, remembers what
   those returned that are to be kept.
2. Memory that something changes in place behind the operation is not what it returned any more: then nothing is kept.
3. The recompute runs as ever, but where it comes to an operation whose result is there, the result is handed out, once,
   and nothing computed. Autograd makes the same graph of it, and saves it where it would have saved the computed one.
4. Operations that draw random numbers (dropout within attention) leave the generator behind as they left it then.
5. Should the recompute come to other operations than the forward did, it is run again, in full.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from outsize.accelerators import is_accelerator, module_of
from outsize.compat import torch_private
from outsize.compat.torch_private import (
    counting_changes_of_views,
    memory_key,
    operations,
    version_of,
    watching,
)
from outsize.runtime.forward.saved_tensors import Memory, SavedTensors, Shown

# Attention in one operation: per byte that it returns it takes as many FLOPs as the sequence has tokens, times two.
ATTENTION = operations(
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_cudnn_attention.default",
    "_scaled_dot_product_fused_attention_overrideable.default",  # XPU's
)
# Products of all tokens with weights. Not those of batches of matrices: they may be scores, of all tokens by all.
PRODUCTS = operations("mm.default", "addmm.default")


class DivergedError(BaseException):
    """A recompute ran other operations than its forward; not an `Exception`, so that no code of models catches it."""


class _Result(NamedTuple):
    """What an operation returned: leaves of a structure, and the generator's state behind it where it drew from one."""

    func: Any
    forms: list[Any]
    leaves: list[Any]
    structure: Any
    drawn: Tensor | None


class Selected:
    """What some operations of one forward returned.

    Args:
        most_products: how many products are kept, the first ones; None keeps all of them, 0 attention alone.

    Attributes:
        held: the memory of it.
    """

    def __init__(self, most_products: int | None) -> None:
        self._most_products = most_products
        self.held = SavedTensors()
        self._results: list[_Result] = []
        self._versions: list[tuple[Tensor, int]] = []
        self._left_out: frozenset[Memory] = frozenset()
        self._num_products = 0
        self._begun = False

    def __len__(self) -> int:
        return len(self._results)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context of the forward."""
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_forget, _unneeded))
            stack.enter_context(watching(self._record))
            yield
        if any(version_of(tensor) != version for tensor, version in self._versions):
            self.clear()
        self._versions.clear()

    def replaying(self) -> AbstractContextManager[Any]:
        """Context of the recompute; each attempt begins with `rewind`."""
        return cast(AbstractContextManager[Any], watching(self._replay))

    def rewind(self) -> None:
        """Begin with the first operation; of a second attempt, whose results are handed out, nothing is left."""
        self._num_products = 0
        self.held.clear()  # results live until they are handed out, and then as long as the graph needs them
        if self._begun:
            self._results.clear()
        self._begun = True
        self._results.reverse()

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Have the recompute run the operations that returned memory of ``tensors``: it goes ways of its own."""
        storages = {memory_key(tensor) for tensor in tensors}
        self._left_out = frozenset(self.held.memories_of(storages))

    def clear(self) -> None:
        """Keep nothing after all."""
        self._results.clear()
        self.held.clear()

    def _is_kept(self, func: Any) -> bool:
        if func in ATTENTION:
            return True
        if func not in PRODUCTS or self._most_products == 0:
            return False
        self._num_products += 1
        return self._most_products is None or self._num_products <= self._most_products

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_kept(func):
            return func(*args, **kwargs)
        generator = _generator_of(func, args)
        before = None if generator is None else generator.get_state()
        out = func(*args, **kwargs)
        leaves, structure = torch_private.flatten(out)
        kept = [self._keep(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        drawn = None
        if generator is not None and before is not None:
            behind = generator.get_state()
            drawn = None if torch.equal(before, behind) else behind
        self._results.append(_Result(func, _forms(args), kept, structure, drawn))
        return out

    def _keep(self, leaf: Tensor) -> Any:
        # Beneath autograd, a view shares the counter of changes only where ADInplaceOrView makes it.
        with counting_changes_of_views():
            alias = leaf.detach()
        if not alias.numel() or alias.device.type == "meta":
            return alias
        self._versions.append((alias, version_of(alias)))
        return self.held.hold(alias)

    def _replay(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_kept(func):
            return func(*args, **kwargs)
        if not self._results or (self._results[-1].func, self._results[-1].forms) != (func, _forms(args)):
            raise DivergedError
        result = self._results.pop()
        if any(isinstance(leaf, Shown) and leaf.memory in self._left_out for leaf in result.leaves):
            return func(*args, **kwargs)
        generator = _generator_of(func, args)  # that of the device where this runs
        if result.drawn is not None and generator is not None:
            generator.set_state(result.drawn)
        leaves = [leaf.tensor() if isinstance(leaf, Shown) else leaf for leaf in result.leaves]
        return torch_private.unflatten(leaves, result.structure)


def _forget(tensor: Tensor) -> None:
    return None


def _unneeded(packed: None) -> NoReturn:
    raise AssertionError("the graph of a forward that is recomputed has no backward")


def _forms(args: tuple[Any, ...]) -> list[Any]:
    """What must be the same of the arguments of an operation for its result to be."""
    return [(arg.shape, arg.dtype) if isinstance(arg, Tensor) else arg for arg in args]


def _generator_of(func: Any, args: tuple[Any, ...]) -> torch.Generator | None:
    """The generator that an operation may draw from."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    device = next((leaf.device for leaf in args if isinstance(leaf, Tensor)), torch.device("cpu"))
    if not is_accelerator(device):
        return torch.default_generator
    backend = module_of(device)
    generator: torch.Generator = backend.default_generators[
        backend.current_device() if device.index is None else device.index
    ]
    return generator
