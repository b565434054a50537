"""From a model's checkpoint into the home: weights, and masters where there are any, in bounded memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from outsize.checkpoint.files.checkpoint_map import pieces
from outsize.checkpoint.files.checkpoint_reader import WeightSource
from outsize.model.sizes.model_spec import PLANE_ELEMENTS, ModelSpec, TensorSpec, UnitSpec
from outsize.optim.optimizer_spec import WEIGHTS, StateLayout
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.session.frozen_encoding import fill_encoded
from outsize.session.masters import MasterWriter
from outsize.storage.arena import Arena
from outsize.storage.home import Home

FILL_ELEMENTS = 512 * PLANE_ELEMENTS


def fill(
    home: Home,
    spec: ModelSpec,
    source: WeightSource,
    progress: Callable[[int, int], None] | None = None,
    state: StateLayout | None = None,
    own: Sequence[range] | None = None,
) -> dict[str, float]:
    """Copy weights into ``home``, piece by piece of at most `FILL_ELEMENTS` elements.

    Frozen parts that a codec writes are encoded one at a time, in the memory of such a part.

    Args:
        home: of the model.
        spec: its units.
        source: of its weights, by name.
        progress: called with ``(elements done, elements in all)``.
        state: how a trained unit lies in ``home``; None for the plain layout of the model's dtype.
        own: elements of each unit whose masters ``home`` holds; None for all.

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
        masters = MasterWriter(home, state or StateLayout(dtype=spec.dtype), arena, size, own)
        for plane in planes:
            for start, stop in _ranges(plane, size, own):
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


def _ranges(plane: _Plane, size: int, own: Sequence[range] | None) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most ``size`` elements, none of them across an end of the own share."""
    held = own[plane.unit] if own is not None and plane.trains else range(0)
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
