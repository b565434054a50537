"""Keep what autograd saves for a backward: offloaded by storage, or of some operations alone.

What is held is a tensor that shows some memory, and may let that go: then how it showed the memory is all that is left
of it. So the memory may go (`take`), and other memory with the same bytes may take its place (`put`) before anything is
shown again. Tensors that share memory go on sharing it. Memory that others use as well (what the unit received, what
it returned) stays where it is.

A unit's weights lie in a slot while it runs, and other weights may lie there before its backward does. So a saved
tensor that shows weights is packed as a reference, and unpacked from wherever they lie then. Everything else is held,
so that it may leave the device meanwhile; tensors that share memory, with each other or with the unit's input, go on
sharing it.

The story of one unit and microbatch of which some operations are kept (`Selected`):

1. The forward runs with a graph, whose tensors nobody saves: so it is computed in the very operations of the recompute,
   kernels that differ with a graph included. A dispatch mode, which sees operations below autograd, remembers what
   those returned that are to be kept.
2. Memory that something changes in place behind the operation is not what it returned any more: then nothing is kept.
3. The recompute runs as ever, but where it comes to an operation whose result is there, the result is handed out, once,
   and nothing computed. Autograd makes the same graph of it, and saves it where it would have saved the computed one.
4. Operations that draw random numbers (dropout within attention) leave the generator behind as they left it then.
5. Should the recompute come to other operations than the forward did, it is run again, in full.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from outsize.accelerators import is_accelerator, module_of
from outsize.compat import torch_private
from outsize.compat.torch_private import (
    counting_changes_of_views,
    is_grouped_product,
    memory_key,
    operations,
    storage_key,
    version_of,
    watching,
)


class Memory:
    """Memory that is held, or None while it is elsewhere; it lives as long as something that shows it."""

    __slots__ = ("storage",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage


class Form(NamedTuple):
    """How a tensor shows its storage.

    Attributes:
        dtype: of its elements.
        offset: of the first, in elements.
        size: by dimension.
        stride: likewise.
    """

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        """Return how a strided tensor shows its storage."""
        return cls(tensor.dtype, int(tensor.storage_offset()), tuple(tensor.size()), tuple(tensor.stride()))

    def shown(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor of this form in ``storage``, without history."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)


class Shown:
    """A tensor that is held: itself, or once its memory has gone, how it is to be shown in whatever takes its place.

    To make a tensor anew costs some microseconds, and forwards save some forty per block: most are never taken away.

    Attributes:
        memory: that it shows.
    """

    __slots__ = ("_form", "_tensor", "memory")

    def __init__(self, memory: Memory, tensor: Tensor) -> None:
        self.memory = memory
        self._tensor: Tensor | None = tensor
        self._form: Form | None = None

    def let_go(self) -> None:
        """Hold the memory no longer."""
        if self._tensor is not None:
            self._form, self._tensor = Form.of(self._tensor), None

    def tensor(self) -> Tensor:
        """Return the tensor again, without history."""
        if self._tensor is not None:
            return self._tensor
        assert self._form is not None
        assert self.memory.storage is not None
        return self._form.shown(self.memory.storage)


class SavedTensors:
    """The memory of what one forward keeps."""

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}  # by the identity of the storage
        self._shown: list[Shown] = []
        self._gone: list[Memory] = []

    def hold(self, tensor: Tensor) -> Shown:
        """Hold the memory of a strided tensor, and return how it is shown."""
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage_key(storage))
        if memory is None:
            memory = self._memories[storage_key(storage)] = Memory(storage)
        # Not the tensor itself: a result that its own graph holds would keep that graph alive for ever.
        shown = Shown(memory, tensor.detach())
        self._shown.append(shown)
        return shown

    def stay(self, tensors: Iterable[Tensor]) -> None:
        """Leave what is held of the memory of ``tensors``, which must still be alive, where it is."""
        for tensor in tensors:
            self._memories.pop(memory_key(tensor), None)

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
        going = set(self._gone)
        for shown in self._shown:
            if shown.memory in going:
                shown.let_go()
        self._shown.clear()
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
        self._shown.clear()
        self._gone.clear()


def storages_of(tensors: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage, torch.dtype]]:
    """Return the storages of ``tensors``, each once, with the dtype of the elements in it."""
    by_memory = {memory_key(tensor): (tensor.untyped_storage(), tensor.dtype) for tensor in tensors}
    return list(by_memory.values())


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Reference(NamedTuple):
    """A view of one of a unit's planes of weights: bytes from its beginning, and how to show them."""

    unit: int
    plane: int
    offset_bytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Keeping:
    """Packs and unpacks what one forward saves.

    Args:
        planes: units whose weights it may use, and where they lie while it runs.
        planes_of: where the weights of a unit lie at the time of its backward.
        look: called at every tensor, to keep to a budget.

    Attributes:
        held: what is kept besides weights.
    """

    def __init__(
        self,
        planes: Mapping[int, Sequence[Tensor]],
        planes_of: Callable[[int], Sequence[Tensor]],
        look: Callable[[], None],
    ) -> None:
        self._ranges = [
            (unit, index, plane.data_ptr(), plane.data_ptr() + plane.nbytes)
            for unit, parts in planes.items()
            for index, plane in enumerate(parts)
        ]
        self._planes_of = planes_of
        self.held = SavedTensors()
        self._look = look

    def hooks(self) -> AbstractContextManager[None]:
        """A context in which a forward runs with a graph."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | Shown | _Reference:
        self._look()
        if tensor.layout is torch.strided and tensor.numel() and tensor.device.type != "meta":
            address = tensor.data_ptr()
            for unit, index, begin, end in self._ranges:
                if begin <= address < end:
                    size, stride = tuple(tensor.shape), tuple(tensor.stride())
                    return _Reference(unit, index, address - begin, tensor.dtype, size, stride)
            return self.held.hold(tensor)
        return tensor.detach()  # a result that its own graph holds would keep that graph alive for ever

    def _unpack(self, packed: Tensor | Shown | _Reference) -> Tensor:
        self._look()
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, Shown):
            return packed.tensor()
        plane = self._planes_of(packed.unit)[packed.plane]
        storage = plane.untyped_storage()
        start = plane.data_ptr() - storage.data_ptr() + packed.offset_bytes
        shown = torch.empty(0, dtype=packed.dtype, device=plane.device)
        return shown.set_(storage, start // packed.dtype.itemsize, packed.size, packed.stride)


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


def is_kept_product(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operation is a product of tokens with weights whose result is worth its bytes."""
    # Making many columns of a few, as adapters of rank 256 and less do, takes less time than moving them in fp32.
    if func not in PRODUCTS:
        return is_grouped_product(func)
    inner, outer = args[-1].shape
    return bool(inner > 256 or inner * 8 > outer)


class DivergedError(BaseException):
    """A recompute ran other operations than its forward; not an `Exception`, so that no code of models catches it."""


class _Result(NamedTuple):
    """What an operation returned: leaves of a structure, and the generator's state behind it where it drew from one."""

    request: tuple[Any, ...]
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
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda _: None, _unneeded))
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
        self._left_out = frozenset(self.held.memories_of({memory_key(tensor) for tensor in tensors}))

    def clear(self) -> None:
        """Keep nothing after all."""
        self._results.clear()
        self.held.clear()

    def _is_kept(self, func: Any, args: tuple[Any, ...]) -> bool:
        if func in ATTENTION:
            return True
        if self._most_products == 0 or not is_kept_product(func, args):
            return False
        self._num_products += 1
        return self._most_products is None or self._num_products <= self._most_products

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_kept(func, args):
            return func(*args, **kwargs)
        generator = _generator_of(func, args)
        before = None if generator is None else generator.get_state()
        out = func(*args, **kwargs)
        leaves, structure = torch_private.flatten(out)
        values = [self._keep(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        behind = None if generator is None else generator.get_state()
        drawn = None if before is None or behind is None or torch.equal(before, behind) else behind
        request = (func, *map(_form, (*args, *kwargs.values())))
        self._results.append(_Result(request, values, structure, drawn))
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
        if not self._is_kept(func, args):
            return func(*args, **kwargs)
        request = (func, *map(_form, (*args, *kwargs.values())))
        if not self._results or self._results[-1].request != request:
            raise DivergedError
        result = self._results.pop()
        if any(isinstance(leaf, Shown) and leaf.memory in self._left_out for leaf in result.leaves):
            return func(*args, **kwargs)
        generator = _generator_of(func, args)  # that of the device where this runs
        if result.drawn is not None and generator is not None:
            generator.set_state(result.drawn)
        leaves = [leaf.tensor() if isinstance(leaf, Shown) else leaf for leaf in result.leaves]
        return torch_private.unflatten(leaves, result.structure)


def _unneeded(packed: None) -> NoReturn:
    raise AssertionError("the graph of a forward that is recomputed has no backward")


def _form(value: Any) -> Any:
    """Return what must be the same of an argument for a result to be; ends of groups too, where no device is read."""
    if not isinstance(value, Tensor):
        return value
    ends = value.is_cpu and value.ndim < 2 and not value.is_floating_point()
    return value.shape, value.dtype, ends and value.tolist()


def _generator_of(func: Any, args: tuple[Any, ...]) -> torch.Generator | None:
    """The generator that an operation may draw from."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    device = next((leaf.device for leaf in args if isinstance(leaf, Tensor)), torch.device("cpu"))
    if not is_accelerator(device):
        return torch.default_generator
    index = module_of(device).current_device() if device.index is None else device.index
    return cast(torch.Generator, module_of(device).default_generators[index])
