"""Codecs on the link of a wrapped model."""

from typing import Any

import pytest
import torch

import outsize
import zoo
from outsize.errors import ConfigError
from wrapped.loops import (
    ROOM,
    assert_equal,
    gradients,
    resident_backward,
    streamed_backward,
    train,
    wrapped,
)

BATCH = zoo.batch("llama", num_sequences=4)
LINK = {"device": "emulated:1", "home": "host", "offload": True, "slots": 2}


def torch_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def test_lossless_codecs_change_no_bit():
    plain = zoo.build("llama")
    codecs = {"activations": "lossless3", "gradients": "lossless4"}
    with wrapped(zoo.build("llama"), microbatches=2, transport=codecs, **LINK) as model:
        for _ in range(2):  # onto the gradients that are there
            assert torch.equal(streamed_backward(model, BATCH), resident_backward(plain, BATCH, 2))
        assert_equal(gradients(model), gradients(plain))


def test_quantised_ones_move_fewer_bytes_and_lose_within_their_bound():
    moved, found = [], []
    for codecs in (None, {"activations": "int8", "gradients": "int8"}):
        with wrapped(zoo.build("llama"), microbatches=2, transport=codecs, **LINK) as model:
            streamed_backward(model, BATCH)
            found.append(gradients(model))
            moved.append(vars(model)["_outsize_runner"]._engine.link_bytes()["down:w0"])
    assert moved[1] < 0.35 * moved[0]
    for name, exact in found[0].items():
        assert not torch.equal(found[1][name], exact)
        assert torch.allclose(found[1][name], exact, atol=0.1 * float(exact.abs().max())), name


@pytest.mark.parametrize("make", [outsize.AdamW, torch_adamw], ids=["outsize", "torch"])
@pytest.mark.parametrize("codec", ["lossless4", "lossless3"])
def test_steps_over_encoded_weights_are_those_of_the_plain_loop(codec: str, make: Any):
    """Whoever changes the weights: what goes up is an encoding of what is at home."""
    batches = [zoo.batch("llama", seed=seed, num_sequences=4) for seed in range(3)]
    plain, moved = zoo.build("llama"), {}
    want = train(plain, batches, torch_adamw, lambda model, batch: resident_backward(model, batch, 2))
    for transport in (None, {"weights": codec}):
        with wrapped(zoo.build("llama"), microbatches=2, transport=transport, **LINK) as model:
            assert train(model, batches, make, streamed_backward) == want
            assert_equal(dict(model.state_dict()), plain.state_dict())
            moved[transport is None] = vars(model)["_outsize_runner"]._engine.link_bytes()["up:w0"]
    assert moved[False] < moved[True]


def test_weights_that_are_loaded_or_changed_in_place_go_up_as_they_are_then():
    plain, other = zoo.build("llama"), zoo.build("llama", seed=9)
    with wrapped(zoo.build("llama"), transport={"weights": "lossless4"}, **LINK) as model, torch.no_grad():
        assert torch.equal(model(**BATCH).loss, plain(**BATCH).loss)
        model.load_state_dict(other.state_dict())
        assert torch.equal(model(**BATCH).loss, other(**BATCH).loss)
        for each in (model, other):
            each.get_parameter("model.norm.weight").mul_(0.5)
            each.get_parameter("model.layers.1.mlp.up_proj.weight").add_(0.01)
        assert torch.equal(model(**BATCH).loss, other(**BATCH).loss)


def frozen_but_for(model: torch.nn.Module, part: str) -> torch.nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    return model


def test_weights_that_do_not_train_rest_encoded_at_home():
    plain = frozen_but_for(zoo.build("llama"), "layers.1.")
    want, _ = (streamed_backward(plain, BATCH) for _ in range(2))
    packed = []
    for transport in (None, {"weights": "lossless4"}):
        model = frozen_but_for(zoo.build("llama"), "layers.1.")
        with wrapped(model, transport=transport, **LINK) as model:
            for _ in range(2):
                assert torch.equal(streamed_backward(model, BATCH), want)
            assert_equal(gradients(model), gradients(plain))
            assert_equal({k: v.clone() for k, v in model.state_dict().items()}, plain.state_dict())
            runner = vars(model)["_outsize_runner"]
            packed.append(runner.session.home.packed(0, "weights") is not None)
            model.generate(BATCH["input_ids"][:1], max_new_tokens=2, do_sample=False)
    assert_equal(dict(model.state_dict()), plain.state_dict())  # unwrapped
    assert packed == [False, True]


def test_what_rests_encoded_may_train_later():
    def both(model: torch.nn.Module) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        losses = [streamed_backward(model, BATCH)]
        model.requires_grad_(True)
        model.zero_grad()
        return [*losses, streamed_backward(model, BATCH)], gradients(model)

    want = both(frozen_but_for(zoo.build("llama"), "layers.1."))
    with wrapped(
        frozen_but_for(zoo.build("llama"), "layers.1."), transport={"weights": "lossless4"}, **LINK
    ) as model:
        losses, found = both(model)
        assert losses == want[0]
        assert_equal(found, want[1])


@pytest.mark.parametrize(
    ("transport", "says"),
    [
        ({"gradients": "int9"}, "no codec 'int9' for gradients"),
        ({"gradient": "int8"}, "names codecs of weights, activations and gradients"),
        ({"weights": "fp8"}, "no codec 'fp8' for weights.*frozen ones rest and cross in fewer by base_codec"),
        ({"weights": "auto"}, "name a codec, e.g. weights=lossless4"),
    ],
)
def test_codecs_that_cannot_be_are_refused(transport: dict[str, str], says: str):
    model = zoo.build("llama")
    with pytest.raises(ConfigError, match=says):
        outsize.wrap(model, **ROOM, transport=transport)
    model(**BATCH).loss.backward()  # as it was


def test_a_cpu_has_no_link():
    model = zoo.build("llama")
    with pytest.raises(ConfigError, match="over no link"):
        outsize.wrap(model, **ROOM, transport={"gradients": "int8"})
    model(**BATCH).loss.backward()
