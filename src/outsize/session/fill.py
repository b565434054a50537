"""Fill the offload store with masters, frozen weights and their encodings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from outsize.checkpoint.files.checkpoint_map import pieces
from outsize.checkpoint.files.checkpoint_reader import WeightSource
from outsize.model.sizes.model_spec import PLANE_ELEMENTS, FrozenPart, ModelSpec, TensorSpec, UnitSpec
from outsize.optim.optimizer_spec import MASTER, MASTER_LOW, MASTER_TIES, WEIGHTS, StateLayout
from outsize.optim.split_masters import split_master
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.runtime.ops.link_codecs import decode, encode
from outsize.storage.home import Home
from outsize.storage.home_layout import ITEM_DTYPE
from outsize.storage.ledger import Arena

_KEPT = (WEIGHTS, MASTER, MASTER_LOW, MASTER_TIES)


class MasterWriter:
    """Writes fp32 masters of trained units, piece by piece.

    Args:
        home: where to.
        state: how a trained unit lies there.
        arena: where the memory of a piece comes from.
        size: elements of the largest piece.
        own: elements of each unit of which ``home`` holds more than weights; None for all. A piece lies within them, or
            without.
    """

    def __init__(
        self, home: Home, state: StateLayout, arena: Arena, size: int, share: Sequence[range] | None = None
    ) -> None:
        self._home = home
        self._own = share
        self._made = {name: plane for name, plane in state.planes.items() if name in _KEPT}
        self._room = {
            name: arena.take(plane.num_bytes(size), name).view(ITEM_DTYPE[plane.item])
            for name, plane in self._made.items()
            if plane.item != "fp32"
        }

    def write(self, unit: int, start: int, master: Tensor) -> None:
        """Write the weights of a unit from element ``start`` on, and all that is kept of their masters.

        Args:
            unit: index.
            start: first element, a multiple of the layout's quantum.
            master: fp32, at an address that direct I/O takes.

        Raises:
            StorageError: the home cannot be written.
        """
        numel = master.numel()
        parts = {name: room[: self._made[name].items(numel)] for name, room in self._room.items()}
        if MASTER_LOW in parts:
            ties = parts.get(MASTER_TIES)
            if ties is not None:
                ties.zero_()
                ties = ties[: numel // 8]
            split_master(master, parts[WEIGHTS][:numel], parts[MASTER_LOW][:numel], ties)
        elif WEIGHTS in parts:
            parts[WEIGHTS].copy_(master)
        for name, plane in self._made.items():
            if plane.item == "fp32":
                parts[name] = master
        if self._own is None:
            self._home.write_planes(unit, start, parts)
            return
        self._home.write(unit, WEIGHTS, start, parts.pop(WEIGHTS))
        if parts and start in self._own[unit]:
            self._home.write_planes(unit, start, parts)


def fill_encoded(
    home: Home, unit: UnitSpec, part: FrozenPart, source: WeightSource, arena: Arena
) -> dict[str, float]:
    """Encode a part of ``unit`` into ``home``; returns the error of each tensor, see `errors_of`.

    Raises:
        CheckpointError: a tensor cannot be read.
        StorageError: the home cannot be written.
    """
    values = arena.take(part.num_bytes, "frozen weights").view(TORCH_DTYPE[part.dtype])
    decoded = arena.take(part.num_bytes, "frozen weights, decoded").view(TORCH_DTYPE[part.dtype])
    encoded = arena.take(part.encoded_bytes, "frozen weights, encoded")
    _read(part, source, values)
    encode(part, values, encoded)
    decode(part, encoded, decoded)
    home.write(unit.index, part.plane, 0, encoded)
    return errors_of(part, values, decoded)


def errors_of(part: FrozenPart, values: Tensor, decoded: Tensor) -> dict[str, float]:
    """Return, by name, the root mean square of each tensor's error by that of its weights; 0 for zeros."""
    errors = {}
    for tensor in part.tensors:
        stretch = slice(tensor.offset, tensor.offset + tensor.numel)
        one = values[stretch].float()
        size = float(torch.linalg.vector_norm(one))
        error = float(torch.linalg.vector_norm(decoded[stretch].float().sub_(one)))
        errors[tensor.name] = error / size if size else 0.0
    return errors


def summary(errors: Mapping[str, float]) -> str:
    """Say errors by name in a few words; there is at least one."""
    worst = max(errors, key=lambda name: errors[name])
    return (
        f"root mean square error {median(errors.values()):.2%} of a tensor's weights (median), {errors[worst]:.2%} at "
        f"most ({worst})"
    )


class Decoded:
    """Weights as they arrive on a device: what a codec writes as it decodes, everything else as it is."""

    def __init__(self, source: WeightSource, spec: ModelSpec) -> None:
        self._source = source
        parts = [part for unit in spec.units for part in unit.frozen if part.codec is not None]
        self._part_of = {tensor.name: (part, tensor) for part in parts for tensor in part.tensors}
        self._last: tuple[FrozenPart, Tensor] | None = None

    def read(self, name: str, start: int, stop: int, into: Tensor) -> None:
        """See `WeightSource.read`; the part that was read last is kept."""
        if name not in self._part_of:
            self._source.read(name, start, stop, into)
            return
        part, tensor = self._part_of[name]
        if self._last is None or self._last[0] is not part:
            self._last = None
            self._last = part, self._decode(part)
        into.view(-1).copy_(self._last[1][tensor.offset + start : tensor.offset + stop])

    def _decode(self, part: FrozenPart) -> Tensor:
        values = torch.empty(part.numel, dtype=TORCH_DTYPE[part.dtype])
        _read(part, self._source, values)
        encoded = torch.empty(part.encoded_bytes, dtype=torch.uint8)
        encode(part, values, encoded)
        decode(part, encoded, values)
        return values


def _read(part: FrozenPart, source: WeightSource, into: Tensor) -> None:
    """Read a whole part; what lies between tensors is zero."""
    into.zero_()
    for tensor in part.tensors:
        source.read(tensor.name, 0, tensor.numel, into[tensor.offset : tensor.offset + tensor.numel])


FILL_ELEMENTS = 512 * PLANE_ELEMENTS


def fill(
    home: Home,
    spec: ModelSpec,
    source: WeightSource,
    progress: Callable[[int, int], None] | None = None,
    state: StateLayout | None = None,
    share: Sequence[range] | None = None,
) -> dict[str, float]:
    """Copy weights into ``home``, piece by piece of at most `FILL_ELEMENTS` elements.

    Frozen parts that a codec writes are encoded one at a time, in the memory of such a part.

    Args:
        home: of the model.
        spec: its units.
        source: of its weights, by name.
        progress: called with ``(elements done, elements in all)``.
        state: how a trained unit lies in ``home``; None for the plain layout of the model's dtype.
        share: elements of each unit whose masters ``home`` holds; None for all.

    Returns:
        The error of each tensor that a codec has written, by name: root mean square by that of its weights.

    Raises:
        CheckpointError: a tensor cannot be read.
        StorageError: the home cannot be written.
    """
    planes = [plane for unit in spec.units for plane in _planes(unit, spec.dtype)]
    encoded = [(unit, part) for unit in spec.units for part in unit.frozen if part.codec is not None]
    total = sum(plane.numel for plane in planes) + sum(part.numel for _, part in encoded)
    done = 0
    errors: dict[str, float] = {}
    with Arena() as arena:
        size = min(FILL_ELEMENTS, max((plane.numel for plane in planes), default=0))
        values = arena.take(size * 4, "fill").view(torch.float32)
        rounded = arena.take(size * 2, "fill, rounded") if spec.dtypes != {"fp32"} else None
        masters = MasterWriter(home, state or StateLayout(dtype=spec.dtype), arena, size, share)
        for plane in planes:
            for start, stop in _ranges(plane, size, share):
                _fill_range(home, plane, source, start, values[: stop - start], rounded, masters)
                done += stop - start
                if progress is not None:
                    progress(done, total)
    for unit, part in encoded:
        with Arena() as arena:
            errors |= fill_encoded(home, unit, part, source, arena)
        done += part.numel
        if progress is not None:
            progress(done, total)
    return errors


@dataclass(frozen=True, slots=True)
class _Plane:
    """A plane of weights to be filled.

    Attributes:
        unit: index of its unit.
        name: of the plane.
        dtype: of its weights.
        tensors: what lies in it.
        numel: its elements.
        trains: whether what a trained unit keeps of its masters goes with it.
    """

    unit: int
    name: str
    dtype: str
    tensors: tuple[TensorSpec, ...]
    numel: int
    trains: bool = False


def _planes(unit: UnitSpec, dtype: str) -> Iterator[_Plane]:
    yield _Plane(unit.index, WEIGHTS, dtype, unit.tensors, unit.numel, unit.trainable)
    for part in unit.frozen:
        if part.codec is None:
            yield _Plane(unit.index, part.plane, part.dtype, part.tensors, part.numel)


def _ranges(plane: _Plane, size: int, share: Sequence[range] | None) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most ``size`` elements, none of them across an end of the own share."""
    held = share[plane.unit] if share is not None and plane.trains else range(0)
    for first, last in pairwise(sorted({0, held.start, held.stop, plane.numel})):
        for start in range(first, last, size):
            yield start, min(start + size, last)


def _fill_range(
    home: Home,
    plane: _Plane,
    source: WeightSource,
    start: int,
    values: Tensor,
    rounded: Tensor | None,
    masters: MasterWriter,
) -> None:
    """Fill a range of elements of a plane; padding is zero."""
    values.zero_()
    for name, first, piece in pieces(plane.tensors, start, values):
        source.read(name, first, first + piece.numel(), piece)
    if plane.trains:
        masters.write(plane.unit, start, values)
        return
    if plane.dtype == "fp32":
        home.write(plane.unit, plane.name, start, values)
        return
    assert rounded is not None
    weights = rounded.view(TORCH_DTYPE[plane.dtype])[: values.numel()]
    weights.copy_(values)
    home.write(plane.unit, plane.name, start, weights)
