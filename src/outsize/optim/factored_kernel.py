"""What takes longest of a step of Adafactor, in C (native/factored.c), and in torch ops: the same bits.

Norms of columns: torch walks down one column after the other, a number from each line of the cache, and takes thirty
times as long as for rows. The kernel walks over all of them at once; each is summed in the same order, row by row. The
division by the root of an estimate is five operations of torch over pieces that stay in a cache, and one pass in C.

Whether torch's compiler fuses a square with the sum is for that to decide, and torch promises no order of operations.
So the kernels are compared with the torch at hand before they are used, once in a process, and left alone where they
are not the same to the bit.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from outsize import native

# Squares stand by themselves, or are fused with the sum.
_FORMS = (0, 1)
# A thread's part of a piece of an estimate, 512 KiB in fp32, stays in its cache from the product to the root.
_PIECE_ELEMENTS = 2**17


def column_norms(matrices: Tensor) -> Tensor:
    """Return the 2-norms ``[..., 1, m]`` of the columns of fp32 ``[..., n, m]``, contiguous, in host memory.

    A single column lies as a row does, and torch sums it as one: fast, and in another order.
    """
    form = form_of_torch(native.level()) if native.available() else None
    if form is None or matrices.size(-1) == 1:
        norms: Tensor = torch.linalg.vector_norm(matrices, dim=-2, keepdim=True)
        return norms
    return _norms(matrices, form)


def divide_by_root(gradient: Tensor, row_var: Tensor, col_var: Tensor, eps1: float) -> None:
    """Divide a gradient by the root of the second moment that its factors tell.

    Args:
        gradient: fp32 ``[..., n, m]``, contiguous, in host memory; changed in place.
        row_var: fp32 ``[..., n, 1]``.
        col_var: fp32 ``[..., 1, m]``.
        eps1: what the root, and the mean of ``row_var``, are at least.
    """
    means = row_var.mean(dim=-2, keepdim=True).clamp_(min=eps1).view(-1)
    num_rows, num_columns = gradient.shape[-2:]
    gradient = gradient.view(-1, num_rows, num_columns)
    rows, columns = row_var.view(-1, num_rows, 1), col_var.view(-1, 1, num_columns)
    agrees = native.available() and form_of_torch(native.level()) is not None
    divide = _divide if agrees else _divide_in_pieces
    for matrix, of_rows, of_columns, mean in zip(gradient, rows, columns, means, strict=True):
        divide(matrix, of_rows, of_columns, mean, eps1 * eps1)


def _divide_in_pieces(matrix: Tensor, rows: Tensor, columns: Tensor, mean: Tensor, least: float) -> None:
    """In torch ops; each element of an estimate is one product, so pieces have the bits of a whole."""
    at_once = max(1, _PIECE_ELEMENTS * torch.get_num_threads() // matrix.size(1))
    for start in range(0, matrix.size(0), at_once):
        few = slice(start, start + at_once)
        estimate = (rows[few] * columns).div_(mean).clamp_(min=least).rsqrt_()
        matrix[few].mul_(estimate)


def _divide(matrix: Tensor, rows: Tensor, columns: Tensor, mean: Tensor, least: float) -> None:
    native.call(
        "divide_by_root",
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (matrix, rows, columns)),
        *map(ctypes.c_size_t, matrix.shape),
        ctypes.c_float(mean.item()),
        ctypes.c_float(least),
        ctypes.c_int(torch.get_num_threads()),
    )


def _norms(matrices: Tensor, form: int) -> Tensor:
    num_rows, num_columns = matrices.shape[-2:]
    norms = torch.empty(*matrices.shape[:-2], 1, num_columns)
    pairs = zip(matrices.view(-1, num_rows, num_columns), norms.view(-1, num_columns), strict=True)
    for matrix, into in pairs:
        native.call(
            "column_norms",
            ctypes.c_void_p(matrix.data_ptr()),
            ctypes.c_void_p(into.data_ptr()),
            ctypes.c_size_t(num_rows),
            ctypes.c_size_t(num_columns),
            ctypes.c_int(form),
            ctypes.c_int(torch.get_num_threads()),
        )
    return norms


@cache
def form_of_torch(level: str) -> int | None:
    """Return the way in which the kernels, with instruction set ``level`` in use, are the torch at hand's; or None."""
    generator = torch.Generator().manual_seed(0)
    trials = [torch.randn(shape, generator=generator) for shape in ((257, 97), (2, 33, 2049), (70_000, 3))]
    if not all(map(_divides_as_torch, trials)):
        return None
    wanted = [torch.linalg.vector_norm(trial, dim=-2, keepdim=True) for trial in trials]
    agreeing = (form for form in _FORMS if all(map(torch.equal, (_norms(t, form) for t in trials), wanted)))
    return next(agreeing, None)


def _divides_as_torch(trial: Tensor) -> bool:
    matrix = trial.view(-1, *trial.shape[-2:])[0]
    rows, columns = matrix.square().mean(1, keepdim=True), matrix.square().mean(0, keepdim=True)
    columns[:, 0] = 1e-20
    ours, theirs = matrix.clone(), matrix.clone()
    _divide(ours, rows, columns, rows.mean(), 1e-14)
    _divide_in_pieces(theirs, rows, columns, rows.mean(), 1e-14)
    return torch.equal(ours, theirs)
