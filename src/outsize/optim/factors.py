"""Second moments of a matrix in the mean squares of its rows and of its columns, as Adafactor keeps them. No torch.

A tensor of two or more dimensions has ``row_var`` and ``col_var``, over its last two; another has ``variance``, a
number for each element (Shazeer and Stern, 2018, arXiv:1804.04235; names and shapes are ``torch.optim.Adafactor``'s).
A unit has a plane for each of the three, with the factors of its tensors one behind the other, so how many items such
a plane has follows from the shapes of the unit's tensors and not from the number of its elements.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from outsize.model.sizes.model_spec import ALIGN_ELEMENTS, PLANE_ELEMENTS, TensorSpec, UnitSpec
from outsize.units import align_up

Factor = Literal["row_var", "col_var", "variance"]
FACTORS: tuple[Factor, ...] = ("row_var", "col_var", "variance")


def factor_shape(shape: tuple[int, ...], factor: Factor) -> tuple[int, ...] | None:
    """Return the shape of a factor of a tensor of ``shape``; None where the tensor has no such factor."""
    if len(shape) < 2:
        return shape if factor == "variance" else None
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1]), "variance": None}[factor]


def factored(unit: UnitSpec, factor: Factor) -> UnitSpec:
    """Return the unit as the plane of a factor sees it: its trained tensors that have the factor, in that shape.

    Its elements are those of the plane, a multiple of `PLANE_ELEMENTS`; there are some even where no tensor has the
    factor.
    """
    tensors: list[TensorSpec] = []
    end = 0
    for tensor, shape in _shapes(unit, factor):
        tensors.append(replace(tensor, shape=shape, offset=end))
        end = align_up(end + tensors[-1].numel, ALIGN_ELEMENTS)
    return replace(unit, tensors=tuple(tensors), numel=max(PLANE_ELEMENTS, align_up(end, PLANE_ELEMENTS)))


def _shapes(unit: UnitSpec, factor: Factor) -> Iterator[tuple[TensorSpec, tuple[int, ...]]]:
    for tensor in unit.tensors:
        shape = factor_shape(tensor.shape, factor) if tensor.trainable else None
        if shape is not None:
            yield tensor, shape
