"""What a wrapped model is to the code around it: names, state, saving, loading from files."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

import outsize
import zoo
from outsize.errors import ConfigError
from support import save_model
from wrapped.loops import ROOM, assert_equal, gradients, resident_backward, streamed_backward, wrapped

HOMES = ["host", "disk"]
BATCH = zoo.batch("llama", num_sequences=4)


@pytest.mark.parametrize("home", HOMES)
def test_it_is_the_same_object_with_the_same_names(home: str):
    plain, model = zoo.build("llama"), zoo.build("llama")
    parameters = dict(model.named_parameters())
    with wrapped(model, home=home) as streamed:
        assert streamed is model
        assert isinstance(model, LlamaForCausalLM)
        assert isinstance(model, PreTrainedModel)
        assert type(model).__name__ == "LlamaForCausalLM"
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
        if home == "host":  # an optimizer that was built before still holds the right ones
            assert all(p is parameters[n] for n, p in model.named_parameters())
        assert_equal(dict(model.state_dict()), plain.state_dict())
        assert model.get_input_embeddings() is model.model.embed_tokens


def test_the_state_of_a_disk_home_is_read_as_it_is_asked_for():
    plain = zoo.build("llama")
    with wrapped(zoo.build("llama"), home="disk") as model:
        state = model.state_dict(prefix="inner.")
        assert len(state) == len(plain.state_dict())
        assert torch.equal(state["inner.model.norm.weight"], plain.model.norm.weight)
        with pytest.raises(KeyError):
            state["inner.nothing"]
        assert not any(isinstance(getattr(p, "_shown", None), torch.Tensor) for p in model.parameters())


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3_moe"])
@pytest.mark.parametrize("home", HOMES)
def test_save_pretrained_writes_what_from_pretrained_loads(home: str, name: str, tmp_path: Path):
    with wrapped(zoo.build(name), home=home) as model:
        optimizer = outsize.AdamW(model, lr=1e-2)
        streamed_backward(model, zoo.batch(name))
        optimizer.step()
        model.save_pretrained(tmp_path / "saved")
        want = {key: value.clone() for key, value in dict(model.state_dict()).items()}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.config.architectures == [type(zoo.build(name)).__name__]
    assert_equal(loaded.state_dict(), want)


@pytest.mark.parametrize("home", HOMES)
def test_load_never_builds_the_model_in_memory(home: str, tmp_path: Path):
    plain = zoo.build("llama")
    save_model(plain, tmp_path / "model")
    model = outsize.load(tmp_path / "model", dtype="fp32", home=home, microbatches=2, **ROOM)
    try:
        assert torch.equal(streamed_backward(model, BATCH), resident_backward(plain, BATCH, 2))
        if home == "host":
            assert_equal(gradients(model), gradients(plain))
        reference = torch.optim.AdamW(plain.parameters(), fused=True)
        outsize.AdamW(model).step()
        reference.step()
        assert_equal(dict(model.state_dict()), plain.state_dict())
    finally:
        outsize.unwrap(model)
    assert_equal(model.state_dict(), plain.state_dict())


def test_arguments_that_cannot_be_are_refused():
    model = zoo.build("llama")
    for wrong, message in (
        ({"microbatches": 0}, "at least one part"),
        ({"home": "cloud"}, "home"),
        ({"device_memory": "many"}, "device_memory"),
        ({"slotz": 2}, "slotz"),
    ):
        with pytest.raises(ConfigError, match=message):
            outsize.wrap(model, **{**ROOM, **wrong})
    with pytest.raises(ConfigError, match="is not wrapped"):
        outsize.unwrap(model)
    model(**BATCH).loss.backward()  # as it was
