"""Units of a wrapped model that rest on the device with their state: what they compute and keep has the same bits."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

import outsize
import zoo
from outsize.errors import ConfigError
from outsize.wrapped.module import runner_of
from wrapped.loops import assert_equal, streamed_backward, train, wrapped

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

LINK = {"device": "emulated:1", "home": "host"}
ALL = 99
Clip = Callable[[nn.Module], Any]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return outsize.AdamW(model, lr=1e-2)


def torchs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def ours(model: nn.Module) -> Any:
    return outsize.clip_grad_norm_(model, 0.05)


def theirs(model: nn.Module) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def after_three_steps(
    model: nn.Module, optimizer: Callable[[nn.Module], torch.optim.Optimizer], clip: Clip, **settings: Any
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, weights, and how many units were resident."""
    batches = [zoo.batch("llama", num_sequences=4, seed=seed) for seed in range(3)]
    with wrapped(model, **settings) as model:
        losses = train(model, batches, optimizer, streamed_backward, clip)
        plan = runner_of(model).plan
        assert plan is not None
        return losses, values_of(model), len(plan.layout.resident)


@pytest.mark.parametrize(
    ("name", "dtype", "optimizer", "clip", "settings"),
    [
        ("llama", torch.float32, adamw, ours, {"resident": 1, "microbatches": 2, "slots": 2}),
        ("llama", torch.float32, torchs, theirs, {"resident": 3}),
        ("llama", torch.bfloat16, adamw, ours, {"resident": ALL, "microbatches": 2}),
        ("llama_tied", torch.float32, adamw, theirs, {"resident": 2, "microbatches": 3}),
        ("qwen3_moe", torch.float32, adamw, ours, {"resident": 2, "activations": "recompute"}),
        ("llama", torch.float32, adamw, ours, {"resident": ALL, "device": "cpu", "offload": True}),
    ],
)
def test_steps_have_the_bits_of_those_at_home(
    name: str, dtype: torch.dtype, optimizer: Any, clip: Clip, settings: dict[str, Any]
):
    settings = {**LINK, **settings}
    at_home = {key: value for key, value in settings.items() if key != "resident"}
    want = after_three_steps(zoo.build(name).to(dtype), optimizer, clip, **at_home)
    got = after_three_steps(zoo.build(name).to(dtype), optimizer, clip, **settings)
    assert got[0] == want[0]
    assert_equal(got[1], want[1])
    assert (got[2] > 0, want[2]) == (True, 0)


def adapted() -> nn.Module:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(zoo.build("llama"), config)


def test_adapters_rest_beside_a_base_that_stays():
    want = after_three_steps(adapted(), adamw, ours, **LINK)
    got = after_three_steps(adapted(), adamw, ours, **LINK, resident=ALL)
    assert got[0] == want[0]
    assert_equal(got[1], want[1])


def test_what_is_resident_moves_no_more():
    batch = zoo.batch("llama", num_sequences=2)
    with wrapped(zoo.build("llama"), **LINK, resident=ALL) as model:
        runner, optimizer = runner_of(model), adamw(model)
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
        optimizer.settle()
        plan, engine = runner.plan, runner.session.engine
        assert plan is not None
        assert engine is not None
        assert "home" not in plan.memory["host"]
        assert (plan.traffic.up, plan.traffic.down) == (0, 0)


def test_state_goes_on_with_other_units_resident():
    """So a run may go on with another budget, whatever rests where."""
    batch = zoo.batch("llama", num_sequences=2)

    def go_on(resident: int, saved: Any) -> Any:
        with wrapped(zoo.build("llama"), **LINK, resident=resident) as model:
            optimizer = adamw(model)
            if saved is not None:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            model(**batch).loss.backward()
            optimizer.step()
            state = optimizer.state_dict()
            state["state"] = {
                number: {key: torch.as_tensor(value).clone() for key, value in values.items()}
                for number, values in state["state"].items()
            }
            return values_of(model), state

    saved = other = None
    for resident in (0, ALL, 2):
        saved, other = go_on(resident, saved), go_on(0, other)
    assert saved is not None
    assert other is not None
    assert_equal(saved[0], other[0])
    for number, values in other[1]["state"].items():
        assert_equal(saved[1]["state"][number], values)


def test_a_model_that_trains_generates_from_what_rests_on_the_device():
    ids = zoo.batch("llama", num_sequences=1)["input_ids"]
    texts = []
    for resident in (0, ALL):
        with wrapped(zoo.build("llama"), **LINK, resident=resident) as model:
            optimizer = adamw(model)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            texts.append(model.generate(input_ids=ids, max_new_tokens=4, do_sample=False))
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"home": "disk"}, "a home on disk keeps all state"),
        ({"device": "emulated:2"}, "several workers take turns"),
        ({"state": "int8"}, "only AdamW with its exact state"),
    ],
)
def test_where_no_unit_can_be_resident_a_number_is_refused(settings: dict[str, Any], reason: str):
    with (
        pytest.raises(ConfigError, match=f"resident=2: {reason}"),
        wrapped(zoo.build("llama"), resident=2, **settings),
    ):
        pass
