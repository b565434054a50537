"""Codecs on the link of a wrapped model."""

import pytest
import torch

import outsize
import zoo
from outsize.errors import ConfigError
from wrapped.loops import ROOM, assert_equal, gradients, resident_backward, streamed_backward, wrapped

BATCH = zoo.batch("llama", num_sequences=4)
LINK = {"device": "emulated:1", "home": "host", "offload": True, "slots": 2}


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


@pytest.mark.parametrize(
    ("transport", "says"),
    [
        ({"gradients": "int9"}, "no codec 'int9' for gradients"),
        ({"gradient": "int8"}, "names codecs of activations and gradients"),
        ({"weights": "lossless4"}, "weights of a wrapped model go as they are"),
        ({"weights": "auto"}, "weights of a wrapped model go as they are"),
        ({"gradients": "int8-ef"}, "without -ef"),
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
