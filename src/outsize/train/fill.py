"""From a model's checkpoint into the home: weights, and masters where there are any, in bounded memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from outsize.model.checkpoint import WeightSource
from outsize.model.spec import PLANE_ELEMENTS, ModelSpec, UnitSpec
from outsize.optim.spec import MASTER, WEIGHTS
from outsize.runtime.binding import TORCH_DTYPE
from outsize.storage.arena import Arena
from outsize.storage.home import Home

FILL_ELEMENTS = 512 * PLANE_ELEMENTS


def fill(
    home: Home, spec: ModelSpec, source: WeightSource, progress: Callable[[int, int], None] | None = None
) -> None:
    """Copy weights into ``home``, piece by piece of at most `FILL_ELEMENTS` elements.

    Args:
        home: of the model.
        spec: its units.
        source: of its weights, by name.
        progress: called with ``(elements done, elements in all)``.

    Raises:
        CheckpointError: a tensor cannot be read.
        StorageError: the home cannot be written.
    """
    total = sum(unit.numel for unit in spec.units)
    done = 0
    with Arena() as arena:
        size = min(FILL_ELEMENTS, max(unit.numel for unit in spec.units))
        values = arena.take(size * 4, "fill").view(torch.float32)
        rounded = None
        if spec.dtype != "fp32":
            rounded = arena.take(size * 2, "fill, rounded").view(TORCH_DTYPE[spec.dtype])
        for unit in spec.units:
            for start in range(0, unit.numel, size):
                stop = min(start + size, unit.numel)
                _fill_range(home, unit, source, start, values[: stop - start], rounded)
                done += stop - start
                if progress is not None:
                    progress(done, total)


def _fill_range(
    home: Home, unit: UnitSpec, source: WeightSource, start: int, values: Tensor, rounded: Tensor | None
) -> None:
    """Fill a range of elements of a unit; padding is zero."""
    values.zero_()
    stop = start + values.numel()
    for tensor in unit.tensors:
        low, high = max(tensor.offset, start), min(tensor.offset + tensor.numel, stop)
        if low < high:
            source.read(
                tensor.name, low - tensor.offset, high - tensor.offset, values[low - start : high - start]
            )
    if rounded is None:
        home.write(unit.index, WEIGHTS, start, values)
        return
    weights = rounded[: values.numel()]
    weights.copy_(values)
    home.write(unit.index, WEIGHTS, start, weights)
    if unit.trainable:
        home.write(unit.index, MASTER, start, values)
