"""Calls may go in rounds as steps of the trainer do; losses and gradients are those of the plain loop, to the bit."""

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import outsize
import zoo
from outsize.errors import ModelError
from outsize.planner.program.activation_policy import Choice
from outsize.wrapped.module import runner_of
from wrapped.loops import (
    assert_equal,
    gradients,
    planned_in,
    resident_backward,
    streamed_backward,
    train,
    wrapped,
)

BATCH = zoo.batch("llama", num_sequences=5)
LINK = {"device": "emulated:1"}


def plan_of(model: nn.Module) -> Any:
    plan = runner_of(model)._plan
    assert plan is not None
    return plan


@settings(max_examples=5)
@given(st.data())
def test_any_combination_is_exact(data: st.DataObject):
    """Two backwards before a step, and the steps of two batches, which may have other numbers of microbatches."""
    draw = data.draw
    name, count = draw(st.sampled_from(["llama", "qwen3_moe", "gpt_neox"])), draw(st.integers(1, 5))
    how = {
        "home": draw(st.sampled_from(["host", "disk"])),
        "device": draw(st.sampled_from(["cpu", "emulated:1"])),
        "activations": draw(st.sampled_from(Choice)).value,
        "offload": draw(st.booleans()),
        "slots": draw(st.integers(1, 4)),
        "microbatches": count,
    }
    batches = [zoo.batch(name, seed=rows, num_sequences=rows) for rows in (5, draw(st.integers(1, 5)))]
    plain = zoo.build(name)

    def twice(backward: Any) -> Any:
        return lambda model, batch: backward(model, batch) + backward(model, batch)

    want = train(
        plain,
        batches,
        lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        twice(lambda model, batch: resident_backward(model, batch, count)),
    )
    with planned_in(draw(st.integers(1, count))), wrapped(zoo.build(name), **how) as model:
        assert train(model, batches, outsize.AdamW, twice(streamed_backward)) == want
        assert_equal(dict(model.state_dict()), plain.state_dict())


def test_a_call_that_is_too_large_for_one_round_goes_in_several():
    """What fits four rows fits thirty-two, but for what the model returns."""
    large = zoo.batch("llama", num_sequences=32)
    room = {"slots": 2, "activations": "recompute", "offload": False}
    plain = zoo.build("llama")
    with wrapped(zoo.build("llama"), microbatches=4, **room) as model:
        streamed_backward(model, zoo.batch("llama", num_sequences=4))
        outputs = 32 * plain(**large).logits[0].nbytes
        budget = plan_of(model).total_bytes("device") + outputs
    with wrapped(zoo.build("llama"), microbatches=32, device_memory=budget, **room) as model:
        assert torch.equal(streamed_backward(model, large), resident_backward(plain, large, 32))
        assert_equal(gradients(model), gradients(plain))
        assert plan_of(model).layout.num_rounds > 1
        with torch.no_grad():
            assert torch.equal(model(**large).logits, plain(**large).logits)


@pytest.mark.parametrize("how", [{"activations": "keep"}, {"activations": "offload", **LINK}])
def test_several_forwards_before_their_backwards(how: dict[str, Any]):
    """The second keeps inputs only, in the rounds that its backward runs again as well."""
    other = zoo.batch("llama", seed=4, num_sequences=3)

    def both(model: nn.Module) -> torch.Tensor:
        loss: torch.Tensor = model(**BATCH).loss * 2 - model(**other).loss
        loss.backward()
        return loss.detach()

    found = []
    for size in (1, 3):
        with planned_in(size), wrapped(zoo.build("llama"), microbatches=3, slots=2, **how) as model:
            found.append((both(model), gradients(model)))
            assert runner_of(model)._engine.num_let_go == 0  # type: ignore[union-attr]
    assert torch.equal(found[0][0], found[1][0])
    assert_equal(found[0][1], found[1][1])


def test_a_loss_of_the_caller_s_own_reaches_every_round():
    plain = zoo.build("llama")
    ids = BATCH["input_ids"]
    for row in ids.split(1):
        plain(input_ids=row).logits.square().sum().backward()
    with planned_in(2), wrapped(zoo.build("llama"), microbatches=5) as model:
        model(input_ids=ids).logits.square().sum().backward()
        assert_equal(gradients(model), gradients(plain))


def test_rounds_that_run_again_have_the_masks_of_their_forward():
    found = []
    for size in (1, 2):
        with planned_in(size), wrapped(zoo.build("gpt2", dropout=0.3), microbatches=2) as model:
            torch.manual_seed(3)
            found.append((streamed_backward(model, BATCH), gradients(model)))
    assert torch.equal(found[0][0], found[1][0])
    tied = "transformer.wte.weight"  # summed use by use in each round
    assert torch.allclose(found[0][1].pop(tied), found[1][1].pop(tied), atol=1e-6)
    assert_equal(found[0][1], found[1][1])


def test_a_gradient_is_encoded_once_it_is_whole_in_a_call_of_fewer_rounds_too():
    found = []
    for count in (5, 2):
        how = {**LINK, "transport": {"gradients": "int8"}, "microbatches": count}
        with planned_in(1), wrapped(zoo.build("llama"), **how) as model:
            streamed_backward(model, zoo.batch("llama", num_sequences=2))
            found.append(gradients(model))
    assert_equal(*found)
    with planned_in(1), wrapped(zoo.build("llama"), microbatches=2, **LINK) as model:
        streamed_backward(model, zoo.batch("llama", num_sequences=2))
        assert any(not torch.equal(raw, found[0][name]) for name, raw in gradients(model).items())


@pytest.mark.parametrize("call", [2, 4])
def test_an_exception_in_a_later_round_is_catchable_and_the_next_call_works(call: int):
    """In the forward, and where the backward runs it again; everything under way is freed."""
    broken, calls, at = zoo.build("llama"), [], [0]
    inner = broken.model.layers[2].forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == at[0]:
            raise IndexError("planted")
        return inner(*args, **kwargs)

    broken.model.layers[2].forward = forward
    plain = zoo.build("llama")
    resident_backward(plain, BATCH, 2)
    with planned_in(1), wrapped(broken, microbatches=2, offload=True, activations="recompute") as model:
        streamed_backward(model, BATCH)
        model.zero_grad()
        calls.clear()
        at[0] = call
        with pytest.raises(ModelError, match="IndexError: planted") as raised:
            streamed_backward(model, BATCH)
        del raised
        gc.collect()
        assert not [o for o in gc.get_objects() if type(o).__name__ in ("MicrobatchRun", "AutogradBridge")]
        model.zero_grad()
        streamed_backward(model, BATCH)
        assert_equal(gradients(model), gradients(plain))
