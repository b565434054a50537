"""Experts come up one by one, the hot ones stay, and the tokens are those of the resident model."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import zoo
from outsize.wrapped.module import runner_of
from wrapped.loops import wrapped

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "phimoe"]
MANY = {"num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16, "num_experts_per_tok": 2}


def mixture(name: str, implementation: str = "grouped_mm") -> nn.Module:
    """A model of 16 experts per layer, of which a token chooses 2."""
    config = zoo.make_config(name)
    for key, value in MANY.items():
        if hasattr(config, key):
            setattr(config, key, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation=implementation
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval().requires_grad_(False)


def write(model: nn.Module) -> torch.Tensor:
    ids = zoo.batch("llama", num_sequences=2, seq_len=5)["input_ids"]
    return model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=True, eos_token_id=None)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, "grouped_mm") for name in FAMILIES),
        ("qwen3_moe", "eager"),
        ("gpt_oss", "eager"),
        ("qwen3_moe", "batched_mm"),
    ],
)
def test_tokens_are_those_of_the_resident_model(name: str, implementation: str):
    want = write(mixture(name, implementation))
    room: dict[str, Any] = {"device": "emulated:1", "home": "host", "device_memory": 1_700_000}
    with wrapped(mixture(name, implementation), **room) as model:
        assert torch.equal(write(model), want)
        assert torch.equal(write(model), want)


@pytest.mark.parametrize("home", ["host", "disk"])
def test_only_chosen_experts_move_and_hot_ones_stay(home: str):
    whole = sum(parameter.nbytes for parameter in mixture("qwen3_moe").parameters())
    expert_bytes = 3 * 32 * 24 * 4
    moved, shares = [], []
    for budget in (480_000, 3_000_000):
        with wrapped(mixture("qwen3_moe"), device="emulated:1", home=home, device_memory=budget) as model:
            assert torch.equal(write(model), write(mixture("qwen3_moe")))
            found = runner_of(model).inference_statistics()
            assert found is not None
            moved.append(found.bytes_moved / found.num_passes)
            experts = found.experts
            assert experts is not None
            assert experts.num_experts == 3 * 16
            shares.append(experts.num_hits / experts.num_uses)
            assert experts.num_uses - experts.num_hits == round(experts.bytes_moved / expert_bytes)
            assert experts.hot_bytes == experts.num_hot * expert_bytes
    tight, roomy = moved
    assert roomy < tight < whole
    assert shares[0] < shares[1]


def test_a_host_home_takes_no_more_of_the_device_than_a_disk_home():
    """Views of the home, which rest in host memory, are no workspace of a forward."""
    taken = {}
    for home in ("host", "disk"):
        with wrapped(mixture("qwen3_moe"), device="emulated:1", home=home) as model:
            write(model)
            found = runner_of(model).inference_statistics()
            assert found is not None
            taken[home] = found.workspace_bytes
    assert taken["host"] <= taken["disk"]
