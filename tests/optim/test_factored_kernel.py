"""Norms of columns and quotients in C are those of the torch at hand, to the bit."""

import math

import pytest
import torch

from outsize import native
from outsize.optim import factored_kernel
from outsize.optim.factored_kernel import column_norms, divide_by_root, form_of_torch

SHAPES = [(61, 97), (1, 5), (5, 1), (4, 1000, 1), (3, 17, 2051), (2, 2, 9, 4), (3000, 7)]


@pytest.mark.skipif(not native.available(), reason="no kernels")
def test_the_kernels_agree_with_the_torch_that_the_tests_run_with(use_native):
    """Else what they are tested for would hold, at the speed of the fallback."""
    assert form_of_torch(native.level()) is not None


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_of_columns_are_those_of_torch(shape, use_native):
    matrices = torch.randn(shape) * 10.0 ** torch.randint(-9, 9, shape)
    wanted = torch.linalg.vector_norm(matrices, dim=-2, keepdim=True)
    assert torch.equal(column_norms(matrices), wanted)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gradient_is_divided_as_by_a_whole_estimate(shape, use_native, monkeypatch):
    """In whatever pieces; an estimate below the least is the least, and what is no number stays none."""
    monkeypatch.setattr(factored_kernel, "_PIECE_ELEMENTS", 500)
    gradient = torch.randn(shape)
    rows = torch.rand(*shape[:-1], 1) * 10.0 ** torch.randint(-12, 2, (*shape[:-1], 1))
    columns = torch.rand(*shape[:-2], 1, shape[-1])
    columns[..., 0, 0] = 0.0
    columns[..., 0, -1] = math.nan
    estimate = rows @ columns
    estimate.div_(rows.mean(dim=-2, keepdim=True).clamp_(min=1e-3))
    wanted = estimate.clamp_(min=1e-6).rsqrt_().mul_(gradient)
    divide_by_root(gradient, rows, columns, 1e-3)
    assert torch.equal(gradient.isnan(), wanted.isnan())
    assert torch.equal(gradient.nan_to_num(), wanted.nan_to_num())


def test_a_torch_that_sums_otherwise_is_left_to_sum_itself(monkeypatch):
    matrix = torch.randn(300, 40)
    monkeypatch.setattr(factored_kernel, "form_of_torch", lambda level: None)
    wanted = torch.linalg.vector_norm(matrix, dim=-2, keepdim=True)
    monkeypatch.setattr(factored_kernel, "_norms", None)
    assert torch.equal(column_norms(matrix), wanted)
