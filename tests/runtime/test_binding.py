import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.model.sizes.model_spec import ALIGN_ELEMENTS, UnitSpec, pack_unit
from outsize.model.split import split
from outsize.runtime.forward.binding import Binder, GradientSums, tensor_views

UNIT = pack_unit(
    0, "u", "block", [("w", (3, 5), True, True), ("b", (7,), True, False), ("s", (), True, True)]
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight  # tied

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.second(x)


def filled(unit: UnitSpec, seed: int) -> Tensor:
    return torch.randn(unit.numel, generator=torch.Generator().manual_seed(seed))


def test_views_lie_in_the_plane_at_their_offsets():
    plane = torch.arange(UNIT.numel, dtype=torch.float32)
    w, b, s = tensor_views(UNIT, plane)
    assert (w.shape, b.shape, s.shape) == ((3, 5), (7,), ())
    assert (w[0, 0], b[0], s) == (0, ALIGN_ELEMENTS, 2 * ALIGN_ELEMENTS)
    b[1] = -1
    assert plane[ALIGN_ELEMENTS + 1] == -1


def test_bound_modules_compute_with_the_plane():
    model = Net()
    parts = split(model)
    planes = [filled(unit, unit.index) for unit in parts.spec.units]
    x = torch.randn(2, 4)
    binder = Binder(parts, GradientSums())
    for unit, plane in zip(parts.spec.units, planes, strict=True):
        binder.bind(unit, plane)
    weight, bias = tensor_views(parts.spec.units[0], planes[0])
    assert torch.equal(model.blocks[0](x), F.linear(x, weight, bias))
    tied = tensor_views(parts.spec.units[-1], planes[-1])[0]
    assert model.first.weight is model.second.weight
    assert torch.equal(model.second.weight, tied)
    planes[0].zero_()
    assert not model.blocks[0](x).any()
    binder.close()


def test_unbinding_gives_back_the_very_parameters_that_were_there():
    model = Net()
    before = dict(model.named_parameters(remove_duplicate=False))
    parts = split(model)
    binder = Binder(parts, GradientSums())
    for slot in range(3):
        for unit in parts.spec.units:
            binder.bind(unit, filled(unit, slot))
    binder.unbind(parts.spec.units[0])
    assert model.blocks[0].weight is before["blocks.0.weight"]
    assert model.blocks[1].weight is not before["blocks.1.weight"]
    binder.close()
    binder.close()
    assert dict(model.named_parameters(remove_duplicate=False)) == before
    assert all(p is before[n] for n, p in model.named_parameters(remove_duplicate=False))


def test_a_unit_may_change_its_slot_between_passes():
    """Forward in one slot, recompute in another: the gradient goes to the sum either way."""
    model = Net()
    parts = split(model)
    unit = parts.spec.units[0]
    sums = GradientSums()
    binder = Binder(parts, sums)
    total = torch.full((unit.numel,), torch.nan)
    sums.open(unit, total)
    x = torch.randint(-8, 9, (2, 4)).float()  # whose sums are exact
    for slot in (filled(unit, 1), filled(unit, 2)):
        binder.bind(unit, slot)
        model.blocks[0](x).sum().backward()
    weight, bias = tensor_views(unit, total)
    assert torch.equal(weight, 2 * x.sum(0).expand(4, 4))
    assert torch.equal(bias, torch.full((4,), 4.0))
    binder.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_summed_in_fp32_and_never_kept(dtype: torch.dtype):
    sums = GradientSums()
    plane = torch.full((UNIT.numel,), torch.nan)  # whatever was there before must not matter
    sums.open(UNIT, plane)
    add = sums.hook(0, 0)
    parameter = nn.Parameter(torch.zeros(3, 5, dtype=dtype))
    small = torch.full((3, 5), 2.0**-9, dtype=dtype)
    parameter.grad = torch.ones(3, 5, dtype=dtype)
    add(parameter)
    for _ in range(4):
        parameter.grad = small.clone()
        add(parameter)
        assert parameter.grad is None
    assert torch.equal(tensor_views(UNIT, plane)[0], torch.full((3, 5), 1 + 2.0**-7))
    assert sums.touched(0) == sums.close(0) == {0}
    assert plane[ALIGN_ELEMENTS : ALIGN_ELEMENTS + 7].isnan().all()


def test_a_sum_begins_anew_each_time_it_is_opened():
    sums, plane = GradientSums(), torch.ones(UNIT.numel)
    parameter = nn.Parameter(torch.zeros(7))
    for value in (1.0, 5.0):
        sums.open(UNIT, plane)
        parameter.grad = torch.full((7,), value)
        sums.hook(0, 1)(parameter)
        assert sums.close(0) == {1}
        assert torch.equal(plane[ALIGN_ELEMENTS : ALIGN_ELEMENTS + 7], torch.full((7,), value))


def test_a_hook_without_a_gradient_touches_nothing():
    sums = GradientSums()
    sums.open(UNIT, torch.zeros(UNIT.numel))
    sums.hook(0, 0)(nn.Parameter(torch.zeros(3, 5)))
    assert sums.close(0) == frozenset()


def test_frozen_parameters_have_no_gradient():
    model = Net()
    parts = split(model, freeze=("blocks.0.weight",))
    unit = parts.spec.units[0]
    sums = GradientSums()
    binder = Binder(parts, sums)
    sums.open(unit, torch.zeros(unit.numel))
    binder.bind(unit, filled(unit, 0))
    model.blocks[0](torch.ones(1, 4)).sum().backward()
    assert not model.blocks[0].weight.requires_grad
    assert sums.close(0) == {1}
    binder.close()
