"""Embeddings and heads that are given other sizes after wrap, before anything has stepped them: as a plain model's."""

from typing import Any

import pytest
import torch
from torch import nn

import outsize
import zoo
from outsize.errors import ConfigError, ModelError
from wrapped.loops import assert_equal, wrapped

BATCH = zoo.batch("llama", num_sequences=4)
WAYS = ({"home": "host"}, {"device": "emulated:1", "slots": 2, "activations": "recompute"})


def resized(model: nn.Module, count: int) -> nn.Module:
    torch.manual_seed(3)
    model.resize_token_embeddings(model.config.vocab_size + count, mean_resizing=False)
    return model


def losses_of(model: nn.Module) -> list[torch.Tensor]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        losses.append(model(**BATCH).loss.detach())
        model(**BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("way", WAYS, ids=["host", "recomputed"])
@pytest.mark.parametrize(("name", "count"), [("llama", 8), ("llama_tied", 5)])
def test_a_vocabulary_may_be_resized_before_the_first_step(
    name: str, count: int, way: dict[str, Any], tmp_path
):
    plain = resized(zoo.build(name), count)
    want = losses_of(plain)
    with wrapped(zoo.build(name), **way) as model:
        assert losses_of(resized(model, count)) == want
        model.save_pretrained(tmp_path)
        outsize.unwrap(model)
        assert_equal(dict(model.named_parameters()), dict(plain.named_parameters()))
    stored = type(plain).from_pretrained(tmp_path)
    assert_equal(dict(stored.named_parameters()), dict(plain.named_parameters()))


def test_unwrapped_at_once_it_has_its_new_sizes():
    plain = resized(zoo.build("llama"), 8)
    model = outsize.unwrap(resized(outsize.wrap(zoo.build("llama"), home="host"), 8))
    assert_equal(dict(model.named_parameters()), dict(plain.named_parameters()))


@pytest.mark.parametrize("home", ["host", "disk"])
def test_what_was_replaced_after_a_forward_is_there_once_it_is_unwrapped(home: str):
    model = outsize.wrap(zoo.build("llama"), home=home)
    model(**BATCH)
    head = model.lm_head.weight = nn.Parameter(torch.zeros(97, 32))
    outsize.unwrap(model)
    assert model.lm_head.weight is head
    assert not model(**BATCH).logits.any()


def test_what_has_a_gradient_or_was_stepped_is_not_resized():
    with wrapped(zoo.build("llama_tied"), home="host") as model:
        optimizer = outsize.AdamW(model, lr=1e-3)
        model(**BATCH).loss.backward()
        with pytest.raises(ConfigError, match=r"optimizer.zero_grad\(\) first"):
            resized(model, 8)
        optimizer.step()
        optimizer.zero_grad()
        resized(model, 8)
        with pytest.raises(ModelError, match="had been stepped"):
            model(**BATCH)


def test_over_a_disk_home_the_way_to_do_it_is_said():
    with (
        wrapped(zoo.build("llama_tied"), home="disk") as model,
        pytest.raises(ConfigError, match=r"before outsize\.wrap"),
    ):
        resized(model, 8)
