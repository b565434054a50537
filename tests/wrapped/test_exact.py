"""Losses and gradients in the user's own loop are those of the model that is not wrapped, bit for bit in fp32."""

import warnings

import pytest
import torch

import zoo
from outsize.errors import ModelError
from wrapped.loops import assert_equal, gradients, resident_backward, streamed_backward, wrapped

FAMILIES = (
    "llama", "llama_tied", "qwen3_moe", "gemma3_text", "gpt2", "gpt_neox", "falcon", "bloom", "gpt_oss", "deepseek_v3",
    "mamba2", "bert", "qwen3_next", "phi3",
)  # fmt: skip
SHARES_ITS_LAYERS = "albert"
ROUTES_WITH_NOISE = "phimoe"  # in training; its random numbers are others when streamed
OTHERS = tuple(name for name in zoo.ARCHITECTURES if name not in (*FAMILIES, SHARES_ITS_LAYERS))
ROUNDING = 1e-6


def compare(name: str, count: int, **settings: object) -> None:
    plain, model = zoo.build(name), zoo.build(name)
    if name == ROUTES_WITH_NOISE:
        plain, model = plain.eval(), model.eval()
    tied = len(list(plain.named_parameters())) < len(list(plain.named_parameters(remove_duplicate=False)))
    batch = zoo.batch(name, num_sequences=4)
    with warnings.catch_warnings(), wrapped(model, microbatches=count, **settings) as model:
        warnings.simplefilter("ignore")
        loss = streamed_backward(model, batch)
        want = resident_backward(plain, batch, count, causal=not zoo.is_masked(name))
        assert torch.equal(loss, want)
        assert_equal(gradients(model), gradients(plain), ROUNDING if tied else 0.0)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_and_gradients_have_the_bits_of_the_plain_model(name: str, count: int):
    compare(name, count, slots=1 + (count + len(name)) % 3, activations=("recompute", "auto")[count % 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_too(name: str):
    compare(name, 1 + OTHERS.index(name) % 3)


@pytest.mark.parametrize(
    "settings",
    [
        {"offload": True, "slots": 2},
        {"offload": True, "slots": 2, "activations": "recompute"},
        {"device": "emulated:1", "slots": 1},
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_neither_offloading_nor_the_device_change_a_bit(count: int, settings: dict[str, object]):
    compare("llama", count, **settings)


def test_a_model_that_repeats_its_layers_is_refused():
    with wrapped(zoo.build(SHARES_ITS_LAYERS)) as model, pytest.raises(ModelError, match="in order"):
        model(**zoo.batch(SHARES_ITS_LAYERS))
