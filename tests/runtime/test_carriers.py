from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from outsize.codecs.open import open_codec
from outsize.codecs.transport import Transport, staging_bytes
from outsize.model.spec import pack_unit
from outsize.runtime.carriers import GradientCarrier

UNIT = pack_unit(3, "block", "block", [("weight", (64, 128), True, True)])
DEVICE: Any = SimpleNamespace(link=lambda _: nullcontext())


def carrier(gradients: str, residuals: dict[int, Tensor] | None = None) -> GradientCarrier:
    transport = Transport(gradients=gradients)
    staging = [torch.empty(staging_bytes(transport, "gradients"), dtype=torch.uint8) for _ in range(2)]
    return GradientCarrier(open_codec(gradients.removesuffix("-ef")), DEVICE, staging, residuals or {})


def sent(through: GradientCarrier, source: Tensor, number: int) -> Tensor:
    into = torch.empty_like(source)
    through.bring_home(UNIT, frozenset({0}), source.clone(), into, number)
    return into


@pytest.mark.parametrize("gradients", ["int8-stochastic", "int4-stochastic"])
def test_rounding_by_chance_is_exact_on_the_mean_over_steps_and_repeats(gradients: str):
    """The same gradient in every step: what one step loses, others bring."""
    source = torch.randn(UNIT.numel, generator=torch.Generator().manual_seed(0))
    through = carrier(gradients)
    steps = torch.stack([sent(through, source, number) for number in range(100)])
    one = cast(float, (steps[0] - source).norm())
    assert (steps.mean(0) - source).norm() < 0.2 * one  # of independent ones a tenth
    assert torch.equal(sent(carrier(gradients), source, 7), steps[7])


def test_what_was_lost_is_added_at_the_loss_scale_of_the_step_that_adds_it():
    source = torch.randn(UNIT.numel, generator=torch.Generator().manual_seed(0))
    found = []
    for scales in ((1.0, 1.0), (1024.0, 512.0)):
        through = carrier("int4-ef", {UNIT.index: torch.zeros(UNIT.numel, dtype=torch.bfloat16)})
        into = torch.empty_like(source)
        for number, scale in enumerate(scales):
            through.bring_home(UNIT, frozenset({0}), source * scale, into, number, scale)
        found.append(into / scales[-1])
    assert torch.equal(*found)
