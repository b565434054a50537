"""Losses on what is recorded inside units have the gradients of the unwrapped model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from wrapped.loops import assert_equal, gradients, parts_of, wrapped

MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "phimoe", "granitemoe", "jetmoe"]
COEFFICIENT = 0.5


def mixture(name: str) -> nn.Module:
    """A model whose router losses weigh a lot; without them its gradients would differ visibly."""
    model = zoo.build(name)
    model.router_aux_loss_coef = COEFFICIENT
    return model


def backward(model: nn.Module, batch: dict[str, Tensor], **asked: Any) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)  # routers of phimoe draw
    out = model(**batch, output_router_logits=True, **asked)
    out.loss.backward()
    return out.loss.detach(), out.aux_loss.detach()


@pytest.mark.parametrize("name", MIXTURES)
def test_router_losses_and_their_gradients_are_those_of_the_unwrapped_model(name: str):
    batch = zoo.batch(name)
    plain, model = mixture(name), mixture(name)
    want = backward(plain, batch)
    with wrapped(model, device="emulated:2" if name in ("mixtral", "qwen3_moe") else "cpu"):
        got = backward(model, batch)
        assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True, True]
        assert_equal(gradients(model), gradients(plain))
    without = mixture(name)
    without(**batch).loss.backward()
    router = next(n for n, _ in plain.named_parameters() if "router" in n or ".gate." in n)
    assert not torch.equal(gradients(without)[router], gradients(plain)[router])


@pytest.mark.parametrize("home", ["host", "disk"])
def test_of_several_microbatches_each_has_its_own(home: str):
    batch = zoo.batch("qwen3_moe", num_sequences=4)
    batch["labels"] = batch["input_ids"].clone()
    plain, model = mixture("qwen3_moe"), mixture("qwen3_moe")
    for part in parts_of(batch, 2):
        (plain(**part, output_router_logits=True).loss / 2).backward()
    with wrapped(model, microbatches=2, home=home):
        backward(model, batch)
        if home == "host":
            assert_equal(gradients(model), gradients(plain))
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert torch.equal(
                torch.as_tensor(float(norm)), nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            )


def test_the_config_asks_as_well_and_a_forward_without_gradients_answers():
    batch = zoo.batch("qwen3_moe")
    plain, model = mixture("qwen3_moe"), mixture("qwen3_moe")
    with wrapped(model):
        plain.config.output_router_logits = model.config.output_router_logits = True
        with torch.no_grad():
            want, got = plain(**batch), model(**batch)
        assert torch.equal(got.aux_loss, want.aux_loss)
        assert len(got.router_logits) == len(want.router_logits) == 3
        assert all(torch.equal(a, b) for a, b in zip(got.router_logits, want.router_logits, strict=True))


def test_a_loss_on_attention_probabilities_has_its_gradient():
    plain, model = zoo.build("llama"), zoo.build("llama")
    batch = zoo.batch("llama")
    with wrapped(model):
        for one in (plain, model):
            one.set_attn_implementation("eager")
            out = one(**batch, output_attentions=True)
            (out.loss + out.attentions[1].square().sum()).backward()
        assert_equal(gradients(model), gradients(plain))
