"""Compiled blocks in the user's own loop: the bits of a resident model with the same blocks compiled."""

from collections.abc import Iterator

import pytest
import torch

import outsize
import zoo
from outsize.errors import ConfigError
from outsize.model import compiled
from outsize.model.compiled import compile_blocks
from outsize.model.split import split
from wrapped.loops import ROOM, assert_equal, gradients, resident_backward, streamed_backward, wrapped


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # what torch asks of tensors, and mostly hushes
@pytest.mark.parametrize(
    "settings",
    [
        {"microbatches": 2, "activations": "recompute"},
        {"microbatches": 2, "activations": "keep"},
        {"microbatches": 1, "activations": "offload", "device": "emulated:1"},
    ],
)
def test_losses_and_gradients_are_those_of_the_compiled_model(settings: dict[str, object]):
    plain, model, batch = zoo.build("llama"), zoo.build("llama"), zoo.batch("llama", num_sequences=4)
    said: list[str] = []
    compile_blocks(split(plain), said.append)
    with wrapped(model, compile="blocks", **settings) as streamed:
        loss = streamed_backward(streamed, batch)
        assert torch.equal(loss, resident_backward(plain, batch, settings["microbatches"]))
        assert_equal(gradients(streamed), gradients(plain))
    assert said
    assert not any("runs as it is" in line for line in said), said
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_without_gradients_runs_as_it_is(caplog: pytest.LogCaptureFixture):
    """What is compiled is the short sequences of the trial, which measures a backward as well."""
    batch = zoo.batch("llama")
    with wrapped(zoo.build("llama"), compile="blocks") as model, torch.no_grad():
        logits = model(**batch).logits
    assert sum("compile: LlamaDecoderLayer, in" in record.message for record in caplog.records) == 3
    assert torch.equal(logits, zoo.build("llama")(**batch).logits)


@pytest.mark.parametrize("named", [{"compile": "model"}, {"compile": "blocks", "mlp_parts": 2}])
def test_what_cannot_be_is_refused(named: dict[str, object]):
    with pytest.raises(ConfigError, match="compile"):
        outsize.wrap(zoo.build("llama"), **named, **ROOM)
