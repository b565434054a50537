"""MLPs that take their tokens in parts: the same numbers but for rounding, with less alive at a time."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import zoo
from outsize.errors import ModelError
from outsize.model.split import split
from outsize.model.tiled import take_in_parts

TOKENS = 32


def make_llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=61
    )
    return LlamaForCausalLM(config)


# By what their routers are: softmax before and behind the choice, a tuple returned, groups and an expert for all.
MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe")


def parts_of(model: nn.Module) -> int:
    return max(getattr(module, "num_parts", 1) for module in model.modules())


def in_parts(model: nn.Module, num_parts: int) -> nn.Module:
    parted = copy.deepcopy(model)
    parts = split(parted)
    take_in_parts(parts, num_parts)
    assert parts_of(parted) == num_parts
    return parted


def gradients(
    model: nn.Module, ids: torch.Tensor, **asked: bool
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    loss = model(input_ids=ids, labels=ids, **asked).loss
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("num_parts", [1, 3, 4, 2 * TOKENS])
def test_losses_and_gradients_differ_by_rounding_alone(num_parts: int) -> None:
    """Parts of unequal length, and more parts than tokens, included."""
    model, ids = make_llama(), torch.arange(2 * TOKENS).view(2, TOKENS) % 61
    loss, expected = gradients(model, ids)
    parted_loss, found = gradients(in_parts(model, num_parts), ids)
    assert torch.allclose(loss, parted_loss, rtol=1e-6)
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("num_parts", [3, 4])
def test_a_mixture_routes_each_token_as_it_would_among_all(name: str, num_parts: int) -> None:
    """Losses of what its router says included, where it has them: the logits are those of all tokens, in order."""
    model = zoo.build(name)
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) % 61 + 3
    asked = {"output_router_logits": True} if hasattr(model, "router_aux_loss_coef") else {}
    loss, expected = gradients(model, ids, **asked)
    parted = in_parts(zoo.build(name), num_parts)
    parted_loss, found = gradients(parted, ids, **asked)
    assert torch.allclose(loss, parted_loss, rtol=1e-6)
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    if asked:
        logits, others = (each(input_ids=ids, **asked).router_logits for each in (model, parted))
        assert [each.shape for each in logits] == [each.shape for each in others]
        for one, other in zip(logits, others, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_weights_train_where_their_input_needs_no_gradient() -> None:
    model, ids = in_parts(make_llama(), 4), torch.arange(TOKENS)[None]
    first = model.model.layers[0].mlp
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    first.up_proj.weight.requires_grad_(True)
    _, found = gradients(model, ids)
    assert sum(gradient is not None for gradient in found) == 1
    assert first.up_proj.weight.grad.abs().sum() > 0


def test_a_forward_makes_and_saves_one_part_at_a_time() -> None:
    """Of the MLP autograd saves its input, and nothing that it makes is as long as the sequence but what it returns."""
    model = in_parts(make_llama(), 4)
    mlp, hidden = model.model.layers[0].mlp, torch.randn(1, TOKENS, 32, requires_grad=True)
    saved, widths = [], []
    mlp.gate_proj.register_forward_hook(lambda module, given, made: widths.append(made.shape[-2]))
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t)
    with hooks:
        out = mlp(hidden)
    assert saved == [hidden.shape[1:]]
    assert widths == [TOKENS // 4] * 4
    out.sum().backward()
    assert widths == [TOKENS // 4] * 8  # and once more on the way back


def test_names_and_copies_stay_what_they_were() -> None:
    model = make_llama()
    parted = in_parts(model, 4)
    assert list(parted.state_dict()) == list(model.state_dict())
    again = copy.deepcopy(parted)
    assert parts_of(again) == 4
    assert again.model.layers[0].mlp.up_proj.weight is not parted.model.layers[0].mlp.up_proj.weight


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=31)), "dropout"),
        (
            BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=31)),
            "takes more than the tokens",
        ),
        (zoo.build("phimoe"), "noise in its router"),
    ],
    ids=["dropout", "residual", "jitter"],
)
def test_what_looks_at_more_than_a_token_is_refused(model: nn.Module, reason: str) -> None:
    parts = split(model)
    with pytest.raises(ModelError, match=f"{reason}.*leave it at 1"):
        take_in_parts(parts, 2)
    assert parts_of(parts.model) == 1
    take_in_parts(parts, 1)


def test_blocks_without_an_mlp_of_that_name_are_refused() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    with pytest.raises(ModelError, match="has no module called mlp"):
        take_in_parts(split(model), 2)
