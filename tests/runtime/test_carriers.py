from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from contracts.device_contract import encode, normal
from outsize.codecs.codec import open_codec
from outsize.codecs.transport import PIECE_ELEMENTS, PIECES_AT_ONCE, Transport, staging_bytes
from outsize.model.sizes.model_spec import pack_unit
from outsize.runtime.device.device import CpuDevice
from outsize.runtime.ops.context import StepContext
from outsize.runtime.ops.link_codecs import GradientCarrier, bring_up

UNIT = pack_unit(3, "block", "block", [("weight", (64, 128), True, True)])
DEVICE: Any = SimpleNamespace(link=lambda _: nullcontext(), here=lambda: None)


def carrier(gradients: str) -> GradientCarrier:
    transport = Transport(gradients=gradients)
    one, other, *landing = torch.empty((4, staging_bytes(transport, "gradients")), dtype=torch.uint8)
    return GradientCarrier(open_codec(gradients), DEVICE, (one, other), landing)


def sent(through: GradientCarrier, source: Tensor, number: int) -> Tensor:
    into = torch.empty_like(source)
    through.bring_home(UNIT, source.clone(), into, step(number))
    return into


def step(number: int) -> StepContext:
    touched = {UNIT.index: frozenset({0})}
    return StepContext(number=number, learning_rate=0.1, microbatches=(), touched=touched)


@pytest.mark.parametrize("gradients", ["int8-stochastic", "int4-stochastic"])
def test_rounding_by_chance_is_exact_on_the_mean_over_steps_and_repeats(gradients: str):
    """The same gradient in every step: what one step loses, others bring."""
    source = torch.randn(UNIT.numel, generator=torch.Generator().manual_seed(0))
    through = carrier(gradients)
    steps = torch.stack([sent(through, source, number) for number in range(100)])
    one = cast(float, (steps[0] - source).norm())
    assert (steps.mean(0) - source).norm() < 0.2 * one  # of independent ones a tenth
    assert torch.equal(sent(carrier(gradients), source, 7), steps[7])


@pytest.mark.parametrize(("numel", "at_once"), [(13 * 1024, 2), (2048, 4), (8 * 2048, 3)])
def test_weights_come_up_by_several_pieces_at_once(numel: int, at_once: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outsize.runtime.ops.link_codecs.PIECE_ELEMENTS", 2048)
    codec, source, device = open_codec("lossless4"), normal(numel, torch.bfloat16), CpuDevice()
    pieces = [encode(codec, piece) for piece in source.split(2048)]
    staging = [device.allocate(at_once * codec.spec.max_bytes(2048, "bf16"), "staging") for _ in range(2)]
    into = torch.empty_like(source)
    assert bring_up(device, codec, pieces, into, staging) == sum(piece.numel() for piece in pieces)
    assert torch.equal(into, source)
    device.close()


def test_buffers_hold_as_many_pieces_as_the_largest_plane_has_and_no_more_than_are_decoded_at_once():
    transport = Transport(weights="lossless4")
    piece = 2 * PIECE_ELEMENTS
    sizes = [staging_bytes(transport, "weights", (numel, "bf16")) for numel in (5, 3 * 2**20, 2**30)]
    assert sizes == [2 * piece, 3 * piece, PIECES_AT_ONCE * piece]
    assert staging_bytes(Transport(), "weights", (2**30, "bf16")) == 0
