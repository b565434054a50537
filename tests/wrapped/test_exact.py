"""Losses and gradients in the user's own loop are those of the model that is not wrapped, bit for bit in fp32."""

import warnings

import pytest
import torch

import outsize
import zoo
from outsize.errors import ConfigError, ModelError
from outsize.model.split import split
from outsize.model.tiled import take_in_parts
from wrapped.loops import ROOM, assert_equal, gradients, resident_backward, streamed_backward, wrapped

FAMILIES = (
    "llama", "llama_tied", "qwen3_moe", "gemma3_text", "gpt2", "gpt_neox", "falcon", "bloom", "gpt_oss", "deepseek_v3",
    "mamba2", "bert", "qwen3_next", "phi3",
)  # fmt: skip
ROUTES_WITH_NOISE = "phimoe"  # in training; its random numbers are others in several microbatches
OTHERS = tuple(name for name in zoo.ARCHITECTURES if name not in FAMILIES)
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


def after_two_losses(model: torch.nn.Module, is_first: bool) -> dict[str, torch.Tensor]:
    """Gradients of one backward of two losses, the first of all or on top of gradients that are there."""
    batches = [
        {"input_ids": ids, "labels": ids} for ids in zoo.batch("llama", num_sequences=6)["input_ids"].split(2)
    ]
    if not is_first:
        model(**batches[0]).loss.backward()
    (model(**batches[1]).loss + 2 * model(**batches[2]).loss).backward()
    return {name: value.grad.clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("is_first", [True, False])
def test_one_backward_of_two_losses_differs_by_summation_order_at_most(is_first: bool):
    """Equal alone; on top of other gradients docs/wrap.md says that the last bits may differ."""
    plain, model = zoo.build("llama"), zoo.build("llama")
    with wrapped(model, microbatches=1) as model:
        assert_equal(
            after_two_losses(model, is_first),
            after_two_losses(plain, is_first),
            0.0 if is_first else ROUNDING,
        )


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_and_gradients_have_the_bits_of_the_plain_model(name: str, count: int):
    compare(name, count, slots=1 + (count + len(name)) % 3, activations=("recompute", "auto")[count % 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_too(name: str):
    """Kept, or recomputed in two slots of a device: every second of them in each way."""
    there = {"device": "emulated:1", "slots": 2, "activations": "recompute"}
    compare(name, 1 + OTHERS.index(name) % 3, **(there if OTHERS.index(name) % 2 else {}))


@pytest.mark.parametrize("name", FAMILIES)
def test_models_that_are_recomputed_in_two_slots_too(name: str):
    compare(name, 1, device="emulated:1", slots=2, activations="recompute")


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


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_mlps_in_parts_have_the_bits_of_the_plain_model_in_parts(name: str, autocast: bool):
    """Where the caller's autocast ends before the backward, too; unwrapped, MLPs are whole again."""
    plain, model, batch = zoo.build(name), zoo.build(name), zoo.batch(name)
    mlps = [module for path, module in model.named_modules() if path.endswith(".mlp")]
    classes = [type(mlp) for mlp in mlps]
    take_in_parts(split(plain), 3)
    with wrapped(model, mlp_parts=3, activations="recompute") as streamed:
        losses = []
        for each in (streamed, plain):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = each(**batch).loss
            loss.backward()
            losses.append(loss.detach())
        assert all(type(mlp).__name__.endswith("InParts") for mlp in mlps)
        assert torch.equal(*losses)
        assert_equal(gradients(model), gradients(plain))
    assert [type(mlp) for mlp in mlps] == classes


def test_mlps_that_take_no_parts_are_refused():
    with pytest.raises(ModelError, match="leave it at 1"):
        outsize.wrap(zoo.build("bert"), mlp_parts=2, **ROOM)
    with pytest.raises(ConfigError, match="mlp_parts is 0"):
        outsize.wrap(zoo.build("llama"), mlp_parts=0, **ROOM)
