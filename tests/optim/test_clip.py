import pytest
import torch

from outsize.model.sizes.model_spec import pack_unit
from outsize.optim.step import clip_coefficient, gradient_norms

SHAPES = [(300, 301), (7,), (64, 64), (1,), (70_001,)]


def unit_and_gradient(scale):
    unit = pack_unit(0, "u", "block", [(f"p{i}", shape, True, True) for i, shape in enumerate(SHAPES)])
    gradient = torch.full((unit.numel,), torch.inf)  # padding must not count
    for seed, t in enumerate(unit.tensors):
        values = torch.randn(t.numel, generator=torch.Generator().manual_seed(seed))
        gradient[t.offset : t.offset + t.numel] = values * scale
    return unit, gradient


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("max_norm", [1e-4, 1.0, 1000.0])
def test_norm_and_clipped_gradients_are_bit_equal_to_torch(scale, max_norm):
    unit, gradient = unit_and_gradient(scale)
    parameters = []
    for t in unit.tensors:
        parameters.append(torch.nn.Parameter(torch.zeros(t.shape)))
        parameters[-1].grad = gradient[t.offset : t.offset + t.numel].clone().view(t.shape)
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    total, coefficient = clip_coefficient(list(gradient_norms(unit, gradient)), max_norm)
    assert torch.equal(total, expected)
    for t, parameter in zip(unit.tensors, parameters, strict=True):
        clipped = gradient[t.offset : t.offset + t.numel].view(t.shape) * coefficient
        assert torch.equal(clipped, parameter.grad)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_shows_in_the_norm(value):
    unit, gradient = unit_and_gradient(1.0)
    gradient[unit.tensors[2].offset] = value
    norms = gradient_norms(unit, gradient)
    assert norms.isfinite().tolist() == [True, True, False, True, True]
    assert not clip_coefficient(list(norms), 1.0)[0].isfinite()


def test_no_gradients_have_norm_zero_and_nothing_to_clip():
    assert [value.item() for value in clip_coefficient([], 1.0)] == [0.0, 1.0]


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_a_norm_to_clip_to_must_be_positive(max_norm):
    with pytest.raises(ValueError, match="above 0"):
        clip_coefficient([torch.ones(())], max_norm)


def test_a_gradient_of_another_size_is_refused():
    unit, gradient = unit_and_gradient(1.0)
    with pytest.raises(ValueError, match="need a gradient"):
        gradient_norms(unit, gradient[:-1])
