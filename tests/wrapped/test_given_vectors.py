"""Forwards that pass over units: given vectors in the place of tokens, or dropping layers; and gradients of inputs."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import M2M100Config, M2M100ForConditionalGeneration

import outsize
import zoo
from outsize.errors import ConfigError
from wrapped.loops import assert_equal, gradients, wrapped

ROWS, LENGTH = 4, 12
WAYS: list[dict[str, Any]] = [
    {},
    {"device": "emulated:1", "activations": "recompute", "slots": 1},
    {"home": "disk"},
]


def vectors(model: nn.Module) -> Tensor:
    width = model.get_input_embeddings().weight.shape[1]
    return torch.randn(ROWS, LENGTH, width, generator=torch.Generator().manual_seed(1), requires_grad=True)


def labels() -> Tensor:
    return torch.randint(0, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))


def build(frozen: str) -> nn.Module:
    model = zoo.build("llama")
    if frozen != "nothing":
        model.requires_grad_(False)
    if frozen == "all but the head":
        model.lm_head.requires_grad_(True)
    return model


@pytest.mark.parametrize("frozen", ["nothing", "all but the head", "all"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_vectors_in_place_of_tokens_give_the_plain_loss_and_all_its_gradients(
    frozen: str, way: dict[str, Any]
):
    plain = build(frozen)
    want_of = vectors(plain)
    want = plain(inputs_embeds=want_of * 2, labels=labels()).loss
    want.backward()
    with wrapped(build(frozen), **{"home": "host", **way}) as model:
        got_of = vectors(plain)
        got = model(inputs_embeds=got_of * 2, labels=labels()).loss
        got.backward()
        assert torch.equal(got, want)
        assert torch.equal(got_of.grad, want_of.grad)
        if way.get("home") != "disk":
            assert_equal(gradients(model), gradients(plain))
        ids = labels()
        assert torch.equal(model(input_ids=ids, labels=ids).loss, plain(input_ids=ids, labels=ids).loss)


def test_gradients_of_vectors_in_microbatches_are_those_of_a_plain_loop_over_them():
    plain = zoo.build("llama")
    want, targets = vectors(plain), labels()
    for part, own in zip(want.split(2), targets.split(2), strict=True):
        (plain(inputs_embeds=part, labels=own).loss / 2).backward()
    with wrapped(zoo.build("llama"), home="host", microbatches=2) as model:
        got = vectors(plain)
        model(inputs_embeds=got, labels=targets).loss.backward()
        assert torch.equal(got.grad, want.grad)
        assert_equal(gradients(model), gradients(plain))


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_an_embedding_that_the_caller_calls_gets_its_gradients(name: str, home: str):
    plain, ids = zoo.build(name), labels()

    def twice(model: nn.Module) -> None:
        for _ in range(2):
            model(inputs_embeds=model.get_input_embeddings()(ids), labels=ids).loss.backward()

    twice(plain)
    with wrapped(zoo.build(name), home=home) as model:
        twice(model)
        assert_equal(gradients(model), gradients(plain), 1e-6 if name == "llama_tied" else 0.0)


def test_a_forward_over_what_another_forward_returned_goes_back_through_both():
    plain, ids = zoo.build("llama"), labels()

    def chained(model: nn.Module) -> Tensor:
        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        loss = model(inputs_embeds=hidden, labels=ids).loss
        loss.backward()
        return loss.detach()

    want = chained(plain)
    with wrapped(zoo.build("llama"), home="host") as model:
        model(inputs_embeds=vectors(model), labels=ids)  # what both need is planned for
        assert torch.equal(chained(model), want)
        assert_equal(gradients(model), gradients(plain), 1e-6)


def test_vectors_without_values_are_refused_by_name():
    with (
        wrapped(zoo.build("llama"), home="host") as model,
        pytest.raises(ConfigError, match="inputs_embeds is on meta"),
    ):
        model(inputs_embeds=vectors(model).detach().to("meta"), labels=labels())


def test_several_workers_refuse_gradients_of_inputs_and_units_that_are_passed_over():
    with wrapped(zoo.build("llama"), home="host", device="emulated:2", microbatches=2) as model:
        given = vectors(model)
        with pytest.raises(ConfigError, match="gradients of inputs"):
            model(inputs_embeds=given, labels=labels())
        with pytest.raises(outsize.ModelError, match="passes over unit 0"):
            model(inputs_embeds=given.detach(), labels=labels())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.linear(inputs).tanh()


class Dropping(nn.Module):
    """Blocks of which every other call leaves one out, as layer drop does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.dropped: int | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != self.dropped:
                inputs = block(inputs)
        return inputs


@pytest.mark.parametrize("way", [{}, {"activations": "recompute"}, {"microbatches": 2}], ids=str)
def test_layers_that_a_forward_drops_are_passed_over_and_have_no_gradient(way: dict[str, Any]):
    plain, given = Dropping(), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with wrapped(Dropping(), home="host", **way) as model:
        for dropped in (None, 0, 2, 3, None):
            plain.dropped = model.dropped = dropped
            plain.zero_grad(), model.zero_grad()
            for part in given.split(2 if way.get("microbatches") else 4):
                plain(part).square().sum().backward()
            got = model(given)
            got.square().sum().backward()
            assert_equal(gradients(model), gradients(plain))
            assert torch.equal(
                got, torch.cat([plain(p) for p in given.split(2 if way.get("microbatches") else 4)])
            )


class Drawn(Block):
    """A block with dropout."""

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(inputs), 0.2)


class DroppingAtRandom(Dropping):
    """Blocks that the code around them leaves out by a draw, from torch's generator or Python's."""

    def __init__(self, draw: Callable[[], float], block: type[nn.Module] = Drawn) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.draw = nn.ModuleList(block() for _ in range(4)), draw

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            if self.draw() < 0.5:
                inputs = block(inputs)
        return inputs.square()


def steps(model: nn.Module, given: Tensor) -> list[Tensor | None]:
    """Return what a model returns, and its gradients, in four steps, and the draws behind them."""
    torch.manual_seed(4)
    random.seed(4)
    seen: list[Tensor | None] = []
    for _ in range(4):
        model.zero_grad()
        output = model(given)
        if output.requires_grad:
            output.sum().backward()
        seen += [output.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
    return [*seen, torch.rand(1), torch.tensor(random.random())]


@pytest.mark.parametrize("draw", [lambda: torch.rand([]).item(), random.random], ids=["torch", "python"])
@pytest.mark.parametrize("activations", ["recompute", "keep", "offload"])
def test_layers_dropped_at_random_are_those_of_the_plain_model(draw: Callable[[], float], activations: str):
    given = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    want = steps(DroppingAtRandom(draw), given)
    with wrapped(DroppingAtRandom(draw), device="emulated:1", activations=activations, slots=2) as model:
        got = steps(model, given)
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_microbatches_go_backward_through_the_layers_that_each_has_run():
    """Which layers each drops is told by what it returns."""
    plain, given = Dropping(), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

    def run(layers: tuple[int, ...], part: Tensor) -> Tensor:
        for layer in layers:
            part = plain.blocks[layer](part)
        return part.square()

    ways = [ways for count in range(5) for ways in itertools.combinations(range(4), count)]
    with wrapped(DroppingAtRandom(random.random, Block), microbatches=2) as model:
        torch.manual_seed(5)
        for _ in range(3):
            plain.zero_grad(), model.zero_grad()
            output = model(given)
            for part, returned in zip(given.split(2), output.split(2), strict=True):
                (layers,) = (way for way in ways if torch.equal(run(way, part), returned))
                if layers:
                    run(layers, part).sum().backward()
            if output.requires_grad:
                output.sum().backward()
            assert_equal(gradients(model), gradients(plain))


def test_a_forward_without_the_cache_of_its_config_is_said_and_equals_use_cache_false(
    caplog: pytest.LogCaptureFixture,
):
    """With attention dropout a cache lays keys out otherwise, and products round otherwise."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return M2M100ForConditionalGeneration(
            M2M100Config(
                vocab_size=96, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64,
                decoder_ffn_dim=64, encoder_attention_heads=4, decoder_attention_heads=4, pad_token_id=0,
                max_position_embeddings=64, decoder_start_token_id=2, attention_dropout=0.1,
                encoder_layerdrop=0.3, decoder_layerdrop=0.3,
            )
        ).train()  # fmt: skip

    ids, targets = labels(), labels()[:, :7].clone()
    plain = build()
    torch.manual_seed(8)
    want = plain(input_ids=ids, labels=targets, use_cache=False).loss
    want.backward()
    assert plain.model.encoder.layers[0].fc1.weight.grad is None  # passed over
    with caplog.at_level("INFO", "outsize"), wrapped(build(), device="emulated:1") as model:
        assert "trains as with use_cache=False" in caplog.text
        torch.manual_seed(8)
        got = model(input_ids=ids, labels=targets).loss
        got.backward()
        assert torch.equal(got, want)
        assert_equal(gradients(model), gradients(plain))
