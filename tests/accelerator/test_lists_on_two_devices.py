"""Models of several lists over two devices: what several layers use lies on each that has used it."""

import pytest
import torch
from torch import nn

from devices import IS_MADE_UP
from wrapped.loops import assert_equal, gradients, wrapped
from wrapped.test_several_lists import INPUTS, Flux, Model, Towers, UNet

pytestmark = pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late")


def backward(model: nn.Module) -> torch.Tensor:
    loss = model(INPUTS.to("late:0")).square().sum()
    loss.backward()
    return loss.detach().cpu()


@pytest.mark.parametrize("kind", [Flux, Towers, UNet])
def test_gradients_are_those_of_one_device(kind: type[Model]):
    plain = kind().to("late:0")
    want = backward(plain)
    with wrapped(kind(), home="host", device="late:0,1") as model:
        assert torch.equal(backward(model), want)
        found = {name: gradient.cpu() for name, gradient in gradients(model).items()}
    assert_equal(found, {name: gradient.cpu() for name, gradient in gradients(plain).items()})
