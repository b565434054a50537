"""Second moments that not every parameter has, or not for every element: Adafactor's, and those beside Muon. No torch.

Adafactor keeps those of a matrix in the mean squares of its rows and of its columns. A tensor of two or more
dimensions has ``row_var`` and ``col_var``, over its last two; another has ``variance``, a number for each element
(Shazeer and Stern, 2018, arXiv:1804.04235; names and shapes are ``torch.optim.Adafactor``'s). Of Muon's, matrices of
blocks have none; what AdamW steps beside them has the whole, its factor ``beside_muon``. A unit has a plane for each
factor, with those of its tensors one behind the other, so how many items such a plane has follows from the shapes of
the unit's tensors and not from the number of its elements.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from outsize.model.sizes.model_spec import ALIGN_ELEMENTS, PLANE_ELEMENTS, TensorSpec, UnitSpec
from outsize.units import align_up

Factor = Literal["row_var", "col_var", "variance", "beside_muon"]
FACTORS: tuple[Factor, ...] = ("row_var", "col_var", "variance")


def factor_shape(shape: tuple[int, ...], factor: Factor) -> tuple[int, ...] | None:
    """Return the shape of a factor of a tensor of ``shape``; None where the tensor has no such factor."""
    if len(shape) < 2:
        return shape if factor == "variance" else None
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1]), "variance": None}[factor]


def muon_matrices(unit: UnitSpec) -> Iterator[TensorSpec]:
    """Yield the parameters of a unit that Muon steps: matrices of blocks; embeddings, heads and vectors are AdamW's."""
    for tensor in unit.tensors:
        if unit.kind == "block" and tensor.trainable and tensor.muon and len(tensor.shape) == 2:
            yield tensor


def newton_schulz_flops(unit: UnitSpec, iterations: int) -> float:
    """Return the FLOPs of so many iterations for the matrices of a unit that Muon steps.

    Of k by n, k at most n, each multiplies k·n·k, k·k·k and k·k·n; a multiply-add counts two.
    """
    sides = (sorted(tensor.shape) for tensor in muon_matrices(unit))
    return float(sum(iterations * (4 * k * k * n + 2 * k**3) for k, n in sides))


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
    if factor == "beside_muon":
        matrices = {tensor.name for tensor in muon_matrices(unit)}
        yield from ((t, t.shape) for t in unit.tensors if t.trainable and t.name not in matrices)
        return
    for tensor in unit.tensors:
        shape = factor_shape(tensor.shape, factor) if tensor.trainable else None
        if shape is not None:
            yield tensor, shape
