"""What an optimizer keeps that not every parameter has, or not for every element. No torch.

Of second moments beside Muon, matrices of blocks have none, and what AdamW steps has the whole: the factor
``beside_muon``. What a class of torch keeps has a factor of two words, ``rows/none``: the shape for a parameter of two
or more dimensions, and for another. ``full`` is the parameter's shape; ``rows`` and ``columns`` have 1 in place of the
last dimension, or of the one before it, and ``row`` and ``column`` lack it; ``scalar`` and ``one`` are a number,
without a dimension and with one; ``none`` is nothing. So ``torch.optim.Adafactor`` has ``rows/none``,
``columns/none`` and
``none/full``. A unit has a plane for each, with what its tensors have of it one behind the other, so how many items
such a plane has follows from the shapes of the unit's tensors and not from the number of its elements.
"""

from collections.abc import Iterator
from dataclasses import replace

from outsize.model.sizes.model_spec import ALIGN_ELEMENTS, PLANE_ELEMENTS, TensorSpec, UnitSpec
from outsize.units import align_up

Factor = str
BESIDE_MUON: Factor = "beside_muon"


def factor_shape(shape: tuple[int, ...], factor: Factor) -> tuple[int, ...] | None:
    """Return the shape of a factor of a tensor of ``shape``; None where the tensor has no such factor."""
    matrix, vector = factor.split("/")
    kind = matrix if len(shape) > 1 else vector
    if kind in ("full", "none"):
        return shape if kind == "full" else None
    if kind in ("scalar", "one"):
        return () if kind == "scalar" else (1,)
    if len(shape) < 2:
        return None
    rows, columns = shape[:-1], (*shape[:-2], shape[-1])
    return {"rows": (*rows, 1), "columns": (*shape[:-2], 1, shape[-1]), "row": rows, "column": columns}[kind]


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
    if factor == BESIDE_MUON:
        matrices = {tensor.name for tensor in muon_matrices(unit)}
        yield from ((t, t.shape) for t in unit.tensors if t.trainable and t.name not in matrices)
        return
    for tensor in unit.tensors:
        shape = factor_shape(tensor.shape, factor) if tensor.trainable else None
        if shape is not None:
            yield tensor, shape
