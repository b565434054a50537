"""Transformers of images and videos, vision with language, and others have the plain model's loss and gradients.

`scripts/models_page.py` tries each in all ways.
"""

from itertools import cycle
from typing import Any

import peft
import pytest
import torch
from torch import nn

import outsize
import zoo_of_lists
from outsize.wrapped.module import runner_of
from wrapped.loops import assert_equal, gradients, wrapped

pytestmark = pytest.mark.filterwarnings("default")  # diffusers calls what it deprecates itself
WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {"device": "emulated:1", "slots": 2, "activations": "recompute"},
    "on two workers": {"device": "emulated:2"},
}
# What diffusers' pipelines make adapters of, by the names of layers.
TARGETS = {
    "flux": ["to_q", "to_k", "to_v", "to_out.0", "proj_mlp"],
    "qwen2_5_vl": ["q_proj", "qkv", "down_proj"],
}


@pytest.mark.parametrize(("name", "way"), list(zip(zoo_of_lists.MODELS, cycle(WAYS), strict=False)))
def test_loss_and_gradients_are_those_of_the_plain_model(name: str, way: str):
    plain, batch = zoo_of_lists.build(name)
    want = zoo_of_lists.loss_of(plain(**batch))
    want.backward()
    with wrapped(zoo_of_lists.build(name)[0], home="host", **WAYS[way]) as model:
        got = zoo_of_lists.loss_of(model(**batch))
        got.backward()
        assert torch.equal(got.detach(), want.detach())
        assert_equal(gradients(model), gradients(plain))
        assert runner_of(model).split.streamed_share > 0.75


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]
) -> dict[str, torch.Tensor]:
    losses = []
    for _ in range(5):
        loss = zoo_of_lists.loss_of(model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {
        "losses": torch.stack(losses),
        **{name: value.clone() for name, value in model.state_dict().items()},
    }


@pytest.mark.parametrize(
    ("name", "adapters", "way"),
    [
        ("flux", False, "on two workers"),
        ("flux", True, "recomputed"),
        ("qwen2_5_vl", False, "recomputed"),
        ("qwen2_5_vl", True, "on two workers"),
    ],
)
def test_five_steps_are_those_of_the_plain_model(name: str, adapters: bool, way: str):
    def make() -> nn.Module:
        model, _ = zoo_of_lists.build(name)
        if adapters:
            torch.manual_seed(1)
            config = peft.LoraConfig(r=2, target_modules=TARGETS[name], init_lora_weights=False)
            model = peft.inject_adapter_in_model(config, model.requires_grad_(False))
        return model

    plain, (_, batch) = make(), zoo_of_lists.build(name)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    want = steps(plain, torch.optim.AdamW(trained, lr=1e-2, fused=True), batch)
    with wrapped(make(), home="host", **WAYS[way]) as model:
        assert_equal(steps(model, outsize.AdamW(model, lr=1e-2), batch), want)
