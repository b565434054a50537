"""What an FK keeps for a backward: what autograd saves, but of weights only where they lie in their unit.

A unit's weights lie in a slot while it runs, and other weights may lie there before its backward does. So a saved
tensor that shows weights is packed as a reference, and unpacked from wherever they lie then. Everything else is held
(`runtime.forward.saved_tensors`), so that it may leave the device meanwhile; tensors that share memory, with each
other or with the
unit's input, go on sharing it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from outsize.runtime.forward.saved_tensors import SavedTensors, Shown


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
