"""What forwards keep for their backwards may wait below the device in a loop of one's own; no bit changes."""

import gc
from collections import Counter
from typing import Any

import pytest
import torch

import outsize
import zoo
from outsize.wrapped.module import runner_of
from wrapped.loops import assert_equal, gradients, resident_backward, streamed_backward, train, wrapped

BATCH = zoo.batch("llama", num_sequences=4)
WAYS = ("offload", "offload-attention", "offload-products")
PLACES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "disk below": {"home": "disk"},
    "link": {"device": "emulated:1"},
    "link, inputs too": {"device": "emulated:1", "offload": True, "slots": 1},
}


def done_in(model: torch.nn.Module) -> Counter[str]:
    """Count the ops of the last forwards and backwards, by kind."""
    engine = runner_of(model)._engine
    assert engine is not None
    return Counter(str(event.op).partition(" ")[0] for event in engine.take_timeline().events)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("way", WAYS)
def test_steps_over_offloaded_activations_are_those_of_the_plain_loop(way: str, place: dict[str, Any]):
    batches = [zoo.batch("llama", seed=seed, num_sequences=4) for seed in range(2)]
    plain = zoo.build("llama")
    want = train(
        plain,
        batches,
        lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        lambda model, batch: resident_backward(model, batch, 2),
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    )
    with wrapped(zoo.build("llama"), microbatches=2, activations=way, **place) as model:
        got = train(
            model,
            batches,
            outsize.AdamW,
            streamed_backward,
            lambda model: outsize.clip_grad_norm_(model, 0.1),
        )
        assert got == want
        assert_equal(dict(model.state_dict()), plain.state_dict())
        kinds = done_in(model)
        assert kinds["OFFLOAD"] == kinds["ONLOAD"] > 0
        assert runner_of(model)._engine.num_let_go == 0  # type: ignore[union-attr]


def test_several_forwards_before_their_backwards_have_room_for_one_that_is_offloaded():
    other = zoo.batch("llama", seed=4, num_sequences=2)
    plain = zoo.build("llama")
    want = plain(**BATCH).logits.square().mean() - plain(**other).logits.mean()
    want.backward()
    with wrapped(zoo.build("llama"), slots=2, activations="offload", device="emulated:1") as model:
        got = model(**BATCH).logits.square().mean() - model(**other).logits.mean()
        got.backward()
        assert torch.equal(got, want)
        assert_equal(gradients(model), gradients(plain), 1e-7)


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_that_no_backward_follows_gives_its_room_back(training: bool):
    plain = zoo.build("llama").train(training)
    with wrapped(zoo.build("llama").train(training), microbatches=2, activations="offload") as model:
        for _ in range(3):
            out = model(**BATCH)
            del out
            gc.collect()
        assert torch.equal(streamed_backward(model, BATCH), resident_backward(plain, BATCH, 2))
        assert_equal(gradients(model), gradients(plain))
        assert runner_of(model)._engine.num_let_go == 0  # type: ignore[union-attr]


def test_a_larger_batch_gets_more_room_for_what_is_offloaded():
    """The plan is made anew, and with it the engine over the same home."""
    plain = zoo.build("llama")
    larger = zoo.batch("llama", seed=2, num_sequences=6)
    with wrapped(zoo.build("llama"), microbatches=2, activations="offload", device="emulated:1") as model:
        for batch in (BATCH, larger, BATCH):
            assert torch.equal(streamed_backward(model, batch), resident_backward(plain, batch, 2))
        assert_equal(gradients(model), gradients(plain))
        assert runner_of(model)._engine.num_let_go == 0  # type: ignore[union-attr]
