import pytest
import torch

from outsize.session.steps import GROWTH_INTERVAL, INITIAL, LossScale


def test_without_fp16_the_scale_is_one_and_stays():
    scale = LossScale(enabled=False)
    scale.update(skipped=True)
    scale.restore({"value": 8.0, "good": 3})
    assert scale.value == 1.0


def test_it_halves_when_a_step_is_skipped_and_doubles_after_enough_good_ones():
    scale = LossScale(enabled=True)
    assert scale.value == INITIAL
    scale.update(skipped=True)
    assert scale.value == INITIAL / 2
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(skipped=False)
    assert scale.value == INITIAL / 2
    scale.update(skipped=False)
    assert scale.value == INITIAL


def test_it_moves_as_torch_s_scaler_does():
    ours = LossScale(enabled=True)
    torchs = torch.amp.GradScaler("cpu", init_scale=INITIAL, growth_interval=GROWTH_INTERVAL)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    torchs.scale(torch.zeros(()))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3 * GROWTH_INTERVAL):
        bad = bool(torch.rand((), generator=generator) < 0.0005)
        parameter.grad = torch.full((1,), float("inf") if bad else 1.0)
        torchs.step(optimizer)
        torchs.update()
        ours.update(skipped=bad)
        assert ours.value == torchs.get_scale()


@pytest.mark.parametrize("steps", [0, 5, GROWTH_INTERVAL - 1])
def test_a_checkpoint_brings_it_back(steps: int):
    scale, other = LossScale(enabled=True), LossScale(enabled=True)
    scale.update(skipped=True)
    for _ in range(steps):
        scale.update(skipped=False)
    other.restore(scale.state())
    for _ in range(GROWTH_INTERVAL):
        scale.update(skipped=False)
        other.update(skipped=False)
        assert other.value == scale.value


def test_scaling_and_back_loses_no_bit():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(values * INITIAL / INITIAL, values)
