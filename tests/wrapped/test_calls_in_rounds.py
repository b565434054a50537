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
from outsize.planner.program.stages import Choice
from outsize.wrapped.module import runner_of
from wrapped.loops import (
    assert_equal,
    gradients,
    parts_of,
    planned_in,
    resident_backward,
    streamed_backward,
    train,
    wrapped,
)

BATCH = zoo.batch("llama", num_sequences=5)
LINK = {"device": "emulated:1"}
UNDER_WAY = ("MicrobatchRun", "StagedRun", "AutogradBridge")
BELOW = (Choice.RECOMPUTE, Choice.OFFLOAD_ATTENTION, Choice.OFFLOAD_PRODUCTS)


def plan_of(model: nn.Module) -> Any:
    plan = runner_of(model)._plan
    assert plan is not None
    return plan


@settings(max_examples=8)
@given(st.data())
def test_any_combination_is_exact(data: st.DataObject):
    """Two backwards before a step, and the steps of two batches, which may have other numbers of microbatches.

    Of several workers another one runs a unit's backward: what its forward keeps leaves the device.
    """
    draw = data.draw
    name, count = draw(st.sampled_from(["llama", "qwen3_moe", "gpt_neox"])), draw(st.integers(1, 5))
    device = draw(st.sampled_from(["cpu", "emulated:1", "emulated:2", "emulated:4"]))
    how = {
        "home": draw(st.sampled_from(["host", "disk"])),
        "device": device,
        "activations": draw(st.sampled_from(BELOW if device[-1] in "24" else Choice)).value,
        "offload": draw(st.booleans()),
        "slots": draw(st.integers(1, 4)),
        "microbatches": count,
    }
    if device != "cpu" and draw(st.booleans()):
        how["transport"] = {"activations": "lossless4"}
        how["transport"] |= {"weights": "lossless4"} if how["home"] == "host" else {}
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


@pytest.mark.parametrize("name", ["llama", "llama_tied", "bert"])
def test_several_workers_take_a_call_in_rounds(name: str):
    """Rounds begin on one worker after the other, and so do what outputs are joined of and backwards begin with."""
    plain, batch = zoo.build(name), zoo.batch(name, num_sequences=5)
    tied = name != "llama"
    with planned_in(2), wrapped(zoo.build(name), microbatches=5, device="emulated:3") as model:
        for _ in range(2):
            want = resident_backward(plain, batch, 5, causal=not zoo.is_masked(name))
            assert torch.equal(streamed_backward(model, batch), want)
        layout = plan_of(model).layout
        assert (layout.num_workers, layout.round_size, layout.num_rounds) == (3, 2, 3)
        assert_equal(gradients(model), gradients(plain), 1e-6 if tied else 0.0)
        with torch.no_grad():
            parts = [plain(**part).logits for part in parts_of(batch, 5)]
            assert torch.equal(model(**batch).logits, torch.cat(parts))
        assert not runner_of(model)._engine._crew.workers[0].activations._below.parcels


@pytest.mark.parametrize("trained", ["lm_head", "layers.1", "norm"])
@pytest.mark.parametrize("device", ["cpu", "emulated:2", "emulated:4"])
def test_what_trains_alone_does_so_in_rounds(device: str, trained: str):
    """Where stages hand over little, what later rounds hand over has room beside what the first has saved."""

    def built() -> nn.Module:
        model = zoo.build("llama")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        return model

    plain = built()
    want = resident_backward(plain, BATCH, 5)
    with planned_in(1), wrapped(built(), microbatches=5, device=device) as model:
        assert torch.equal(streamed_backward(model, BATCH), want)
        assert_equal(gradients(model), gradients(plain))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_adapters_train_in_rounds_of_several_workers():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)

    def built() -> nn.Module:
        torch.manual_seed(1)
        return peft.get_peft_model(zoo.build("llama"), config)

    plain = built()
    want = resident_backward(plain, BATCH, 5)
    with planned_in(2), wrapped(built(), microbatches=5, device="emulated:2") as model:
        assert torch.equal(streamed_backward(model, BATCH), want)
        assert_equal(gradients(model), gradients(plain))


@pytest.mark.parametrize("device", ["cpu", "emulated:2"])
def test_a_call_that_is_too_large_for_one_round_goes_in_several(device: str):
    """What fits four rows fits thirty-two, but for what the model returns."""
    large = zoo.batch("llama", num_sequences=32)
    room = {"activations": "recompute", "device": device}
    room |= {"slots": 2, "offload": False} if device == "cpu" else {}
    plain = zoo.build("llama")
    tier = "device" if device == "cpu" else "host"
    with wrapped(zoo.build("llama"), microbatches=4, **room) as model:
        streamed_backward(model, zoo.batch("llama", num_sequences=4))
        outputs = 32 * plain(**large).logits[0].nbytes * (tier == "device")
        budget = {f"{tier}_memory": plan_of(model).total_bytes(tier) + outputs}
    with wrapped(zoo.build("llama"), microbatches=32, **budget, **room) as model:
        assert torch.equal(streamed_backward(model, large), resident_backward(plain, large, 32))
        assert_equal(gradients(model), gradients(plain))
        plan, measured = plan_of(model), runner_of(model)._measured
        assert plan.layout.num_rounds > 1
        # Later rounds go forward while the first one waits for its backward.
        least = plan.layout.round_size * 2 * measured.held_bytes + 31 * measured.output_bytes
        assert plan.memory["device"]["shared"] >= least
        with torch.no_grad():
            want = [
                plain(**{name: value[row : row + 1] for name, value in large.items()}) for row in range(32)
            ]
            assert torch.equal(model(**large).logits, torch.cat([each.logits for each in want]))


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


@pytest.mark.parametrize("device", ["cpu", "emulated:2"])
def test_a_loss_of_the_caller_s_own_reaches_every_round(device: str):
    plain = zoo.build("llama")
    ids = BATCH["input_ids"]
    for row in ids.split(1):
        plain(input_ids=row).logits.square().sum().backward()
    with planned_in(2), wrapped(zoo.build("llama"), microbatches=5, device=device) as model:
        model(input_ids=ids).logits.square().sum().backward()
        assert_equal(gradients(model), gradients(plain))


@pytest.mark.parametrize("device", ["cpu", "emulated:2"])
def test_rounds_that_run_again_have_the_masks_of_their_forward(device: str):
    found = []
    for size in (1, 2):
        how = {"microbatches": 2, "device": device}
        with planned_in(size), wrapped(zoo.build("gpt2", dropout=0.3), **how) as model:
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


@pytest.mark.parametrize("device", ["cpu", "emulated:2"])
@pytest.mark.parametrize("call", [2, 4])
def test_an_exception_in_a_later_round_is_catchable_and_the_next_call_works(
    call: int, device: str, monkeypatch: pytest.MonkeyPatch
):
    """In the forward, and where the backward runs it again; everything under way is freed."""
    broken, calls, at = zoo.build("llama"), [], [0]
    kind = type(broken.model.layers[2])
    inner = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.self_attn.layer_idx == 2:
            calls.append(1)
            if len(calls) == at[0]:
                raise IndexError("planted")
        return inner(self, *args, **kwargs)

    plain = zoo.build("llama")
    resident_backward(plain, BATCH, 2)
    monkeypatch.setattr(kind, "forward", forward)
    how: dict[str, Any] = {"microbatches": 2, "device": device, "activations": "recompute"}
    how |= {"offload": True} if device == "cpu" else {}
    with planned_in(1), wrapped(broken, **how) as model:
        streamed_backward(model, BATCH)
        model.zero_grad()
        calls.clear()
        at[0] = call
        with pytest.raises(ModelError, match="IndexError: planted") as raised:
            streamed_backward(model, BATCH)
        del raised
        gc.collect()
        assert not [o for o in gc.get_objects() if type(o).__name__ in UNDER_WAY]
        model.zero_grad()
        streamed_backward(model, BATCH)
        assert_equal(gradients(model), gradients(plain))
