"""Random numbers over two devices: each has a generator of its own, and a plain model draws from that of the first."""

import random

import pytest
import torch
from torch import Tensor, nn

from devices import IS_MADE_UP
from wrapped.loops import assert_equal, gradients, wrapped

pytestmark = pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late")
# Halves of it begin where products of a whole do, which round by that.
INPUTS = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    """Draws on its device, on the CPU and from Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        made = nn.functional.dropout(torch.tanh(self.inner(hidden)), 0.5)
        return hidden + made * float(torch.rand(())) * random.uniform(0.5, 1.0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.outward = nn.ModuleList(Layer() for _ in range(6)), nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = nn.functional.dropout(layer(hidden), 0.1)
        return self.outward(hidden)


def course(model: nn.Module) -> tuple[Tensor, dict[str, Tensor], list[float]]:
    """Return a loss, gradients, and what is drawn behind them on both devices."""
    inputs = INPUTS.to("late:0")
    torch.manual_seed(3)
    random.seed(3)
    loss = model(inputs).square().sum()
    loss.backward()
    drawn = [float(torch.rand((), device=device)) for device in ("late:0", "late:1", "cpu")]
    return loss.detach().cpu(), {n: g.cpu() for n, g in gradients(model).items()}, [*drawn, random.random()]


@pytest.mark.parametrize("activations", ["offload-products", "recompute"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_two_devices_draw_what_one_device_draws(activations: str, microbatches: int):
    courses = []
    for device in ("late:0", "late:0,1"):
        settings = {"home": "host", "activations": activations, "microbatches": microbatches}
        with wrapped(Model(), device=device, **settings) as model:
            courses.append(course(model))
    if microbatches == 1:
        courses.append(course(Model().to("late:0")))
    want, *others = courses
    for loss, found, drawn in others:
        assert torch.equal(loss, want[0])
        assert_equal(found, want[1])
        assert drawn == want[2]
