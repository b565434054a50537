"""Models of several lists of layers: units of all of them, in the order of the forward, with the plain model's bits."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.errors import ModelError
from outsize.wrapped.module import runner_of
from wrapped.loops import assert_equal, wrapped

WIDTH = 8
WAYS: dict[str, dict[str, Any]] = {
    "host": {},
    "recomputed": {"device": "emulated:1", "slots": 2, "activations": "recompute"},
    "kept": {"device": "emulated:1", "activations": "keep"},
    "offloaded": {"device": "emulated:1", "slots": 2, "activations": "offload"},
    "in two": {"microbatches": 2},
    "in two, recomputed, from disk": {
        "device": "emulated:1", "slots": 1, "microbatches": 2, "activations": "recompute", "home": "disk",
    },
    "on two workers": {"device": "emulated:2"},
    "on three workers, in two": {"device": "emulated:3", "microbatches": 2},
}  # fmt: skip


class Block(nn.Module):
    """A layer with a residual, which more than one tensor may pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, time: Tensor, *others: Tensor) -> Any:
        made = hidden + torch.tanh(self.inner(hidden)) * self.scale(time)
        return (made, *(other * made.mean() for other in others)) if others else made


def blocks(count: int) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


class Model(nn.Module):
    """A projection, a time embedding and a head around lists of layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inward, self.time, self.outward = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def through(self, hidden: Tensor, text: Tensor, time: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> Tensor:
        time = torch.tanh(self.time(inputs.flip(1)))
        return self.outward(self.through(self.inward(inputs), inputs[:, :2], time))


class Flux(Model):
    """Double, then single blocks; between them streams are put together."""

    def build(self) -> None:
        self.doubles, self.singles = blocks(2), blocks(3)

    def through(self, hidden: Tensor, text: Tensor, time: Tensor) -> Tensor:
        for block in self.doubles:
            hidden, text = block(hidden, time, text)
        time = torch.cat([time[:, :2], time], 1)
        both = torch.cat([text, hidden], 1)
        for block in self.singles:
            both = block(both, time)
        return both[:, 2:] * time[:, 2:]


class Tower(nn.Module):
    """A list inside a part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = blocks(2), nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, time)
        return self.norm(hidden)


class Towers(Model):
    """The language model is defined first and called last; its last layers see the tower's output as well."""

    def build(self) -> None:
        self.language, self.vision = blocks(3), Tower()

    def through(self, hidden: Tensor, text: Tensor, time: Tensor) -> Tensor:
        image = self.vision(hidden, time)
        hidden = hidden + image
        for at, layer in enumerate(self.language):
            hidden = layer(hidden, image if at else time)
        return hidden


class Stage(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.resnets, self.attentions = blocks(count), blocks(count)


class UNet(Model):
    """Stages whose layers of two kinds are called by turns; the middle is defined last."""

    def build(self) -> None:
        self.down, self.up = nn.ModuleList([Stage(1), Stage(2)]), nn.ModuleList([Stage(2), Stage(1)])
        self.middle = Tower()

    def through(self, hidden: Tensor, text: Tensor, time: Tensor) -> Tensor:
        skips = []
        for stage in self.down:
            for resnet, attention in zip(stage.resnets, stage.attentions, strict=True):
                hidden = attention(resnet(hidden, time), time)
                skips.append(hidden)
        hidden = self.middle(hidden, time)
        for stage in self.up:
            for resnet, attention in zip(stage.resnets, stage.attentions, strict=True):
                hidden = attention(resnet(hidden + skips.pop(), time), time)
        return hidden


class Named(Model):
    """A ModuleDict, a Sequential, and layers that are called twice, which stay on the device."""

    def build(self) -> None:
        self.parts = nn.ModuleDict({"last": Block(), "first": Block()})
        self.chain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.shared = blocks(2)

    def through(self, hidden: Tensor, text: Tensor, time: Tensor) -> Tensor:
        hidden = self.chain(self.parts["first"](hidden, time))
        for _ in range(2):
            for layer in self.shared:
                hidden = layer(hidden, time)
        return self.parts["last"](hidden, time)


class Adding(Block):
    """A layer that needs no value of its second input for its backward."""

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        return hidden + torch.tanh(self.inner(hidden + time)) + self.scale(hidden)


class Changing(Model):
    """Code between layers of two lists, and behind them, changes in place what they are given, in whole and in part."""

    def build(self) -> None:
        self.first, self.second = (nn.ModuleList(Adding() for _ in range(2)) for _ in range(2))

    def through(self, hidden: Tensor, text: Tensor, time: Tensor) -> Tensor:
        aside = self.time(text[:, :1])
        aside.mul_(2.0)
        for block in self.first:
            hidden = block(hidden, aside)
            hidden.add_(aside)
            aside.add_(hidden.mean())
        for block in self.second:
            hidden = block(hidden, aside)
            aside.view(-1)[:3].mul_(0.5)
            aside[:, :, 4:] = aside[:, :, :4].detach()
        return hidden * aside


class Masking(Block):
    """A layer that makes a mask, which has no gradient, and asks those of others whether they have one."""

    def forward(self, hidden: Tensor, time: Tensor, mask: Tensor | None = None) -> Any:
        mask = torch.ones(1, 5, WIDTH) if mask is None else mask
        made = super().forward(hidden, time) * (mask + 1 if mask.requires_grad else mask)
        return made, mask, time * made.mean()


class Masks(Model):
    """What has no gradient in a layer has none behind it: kernels of attention with a mask are chosen by that."""

    def build(self) -> None:
        self.first, self.second = (nn.ModuleList(Masking() for _ in range(2)) for _ in range(2))

    def through(self, hidden: Tensor, text: Tensor, time: Tensor) -> Tensor:
        mask, found = None, []
        for block in (*self.first, *self.second):
            hidden, mask, aside = block(hidden, time, mask)
            found.append(aside)
        return hidden + torch.stack(found).mean(0)


class Bare(Model):
    """No list at all."""

    def build(self) -> None:
        self.first, self.second = Block(), Block()

    def through(self, hidden: Tensor, text: Tensor, time: Tensor) -> Tensor:
        return self.second(self.first(hidden, time), time)


ORDERS: dict[type[Model], list[str]] = {
    Flux: ["doubles.0", "doubles.1", "singles.0", "singles.1", "singles.2"],
    Towers: ["vision.layers.0", "vision.layers.1", "language.0", "language.1", "language.2"],
    UNet: [
        *("down.0.resnets.0", "down.0.attentions.0"),
        *("down.1.resnets.0", "down.1.attentions.0", "down.1.resnets.1", "down.1.attentions.1"),
        *("middle.layers.0", "middle.layers.1"),
        *("up.0.resnets.0", "up.0.attentions.0", "up.0.resnets.1", "up.0.attentions.1"),
        *("up.1.resnets.0", "up.1.attentions.0"),
    ],
    Named: ["parts.first", "chain.0", "chain.2", "parts.last"],
    Changing: ["first.0", "first.1", "second.0", "second.1"],
    Masks: ["first.0", "first.1", "second.0", "second.1"],
    Bare: ["time", "inward", "first", "second", "outward"],
}
INPUTS = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, count: int = 1) -> dict[str, Tensor]:
    """Two steps: losses, and where they end."""
    results = {}
    for number in range(2):
        optimizer.zero_grad()
        parts = [model(part) for part in (INPUTS.chunk(count) if count > 1 else (INPUTS,))]
        losses = [part.square().sum() for part in parts]
        for loss in losses:
            loss.backward()
        optimizer.step()
        results[f"outputs {number}"] = torch.cat(parts).detach().clone()
    return results | {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ORDERS)
def test_steps_are_those_of_the_plain_model(kind: type[Model], way: str):
    plain, settings = kind(), WAYS[way]
    count = settings.get("microbatches", 1)
    want = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), count=count)
    with wrapped(kind(), **{"home": "host", **settings}) as model:
        assert_equal(train(model, outsize.AdamW(model, lr=1e-2)), want, 0.0)
        units = [unit.name for unit in runner_of(model).split.spec.units]
        assert units == [*ORDERS[kind], *(["rest"] if kind is not Bare else [])]


@pytest.mark.parametrize("frozen", ["doubles", "singles", "inward"])
def test_frozen_lists_and_inference(frozen: str):
    def make() -> Model:
        model = Flux()
        model.get_submodule(frozen).requires_grad_(False)
        return model

    plain = make()
    want = train(
        plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], 1e-2, fused=True)
    )
    with wrapped(make(), home="host", **WAYS["recomputed"]) as model:
        assert_equal(train(model, outsize.AdamW(model, lr=1e-2)), want, 0.0)
        with torch.no_grad():
            assert torch.equal(model(INPUTS), plain(INPUTS))
    with wrapped(make().requires_grad_(False), home="host", device="emulated:1", slots=2) as model:
        assert torch.equal(model(INPUTS), make()(INPUTS))


class Later(Towers):
    """The tower, defined last, is called first, where there is an image."""

    def forward(self, inputs: Tensor, image: Tensor | None = None) -> Tensor:
        hidden = self.inward(inputs)
        if image is not None:
            hidden = hidden + self.vision(image, image)
        for layer in self.language:
            hidden = layer(hidden, inputs)
        return self.outward(hidden)


def train_later(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Steps without images, and with; in one of them gradients of both come together."""
    for given in ({}, {"image": INPUTS}, {}):
        model(INPUTS, **given).square().sum().backward()
        if not given:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_gradients_and_state_come_along_when_another_order_is_found():
    plain = Later()
    want = train_later(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    with wrapped(Later(), home="host", **WAYS["recomputed"]) as model:
        assert_equal(train_later(model, outsize.AdamW(model, lr=1e-2)), want, 0.0)


def test_what_stays_on_the_device_is_said_by_name(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "outsize"), wrapped(Named(), home="host") as model:
        model(INPUTS)
    text = caplog.text
    assert "layers of parts (2), chain (2): 46% of the parameters are streamed" in text
    assert (
        "Named: 2 of its layers stay on the device, such as shared.0, as forwards call them several times"
        in text
    )


class Twice(Model):
    def build(self) -> None:
        self.block = Block()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inward(self.inward(inputs))
        hidden = self.outward(self.outward(self.time(self.time(hidden))))
        return self.block(self.block(hidden, hidden), hidden)


def test_a_model_that_calls_all_it_has_twice_is_refused():
    with (
        wrapped(Twice(), home="host") as model,
        pytest.raises(ModelError, match="Twice calls each of its layers"),
    ):
        model(INPUTS)


class Late(Changing):
    """Code between layers that changes what layers before were given, from the second forward on."""

    num_forwards = 0

    def through(self, hidden: Tensor, text: Tensor, time: Tensor) -> Tensor:
        aside = self.time(text[:, :1])
        for number, block in enumerate((*self.first, *self.second)):
            hidden = block(hidden, aside)
            if self.num_forwards and number == 1:
                aside.mul_(2.0)
        return hidden * aside


@pytest.mark.parametrize("way", ["recomputed", "on two workers", "on three workers, in two"])
def test_what_is_changed_in_place_behind_all_trials_is_refused(way: str):
    """A layer that is run again would be given what it was not given."""
    with wrapped(Late(), **{"home": "host", **WAYS[way]}) as model:
        model(INPUTS[:2])
        model.num_forwards = 1
        loss = model(INPUTS[:2]).square().sum()
        with pytest.raises(ModelError, match="has been changed in place since"):
            loss.backward()
