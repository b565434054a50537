"""Parameters that lie in one memory, or where modules do not look them up: as plain, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.errors import ConfigError, ModelError
from outsize.model.shared_memory import check_memory
from wrapped.loops import wrapped

WIDTH = 16
IDS = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(1))
HOMES: dict[str, dict[str, Any]] = {
    "host": {"home": "host"},
    "disk": {"home": "disk"},
    "recomputed": {"home": "host", "device": "emulated:1", "slots": 2, "activations": "recompute"},
}


class Block(nn.Module):
    """Two layers, whose output ``use`` may change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.use: Callable[[nn.Module], Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.second(torch.relu(self.first(hidden)))
        return hidden if self.use is None else hidden + self.use(self)


class Model(nn.Module):
    """An embedding, three blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), input_ids.flatten())}


Change = Callable[[Model], object]


def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for _ in range(3):
        loss = model(input_ids=IDS)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def _over(model: Model, view: Callable[[Tensor], Tensor], frozen: str = "") -> None:
    """Have a weight of the second block lie in the memory of one of the first."""
    first, second = model.layers[0].first, model.layers[1].first
    second.weight = nn.Parameter(view(first.weight.data))
    first.weight.requires_grad_("first" not in frozen)
    second.weight.requires_grad_("second" not in frozen)


def _in_one(model: Model, parts: Callable[[Tensor], list[Tensor]], size: tuple[int, ...]) -> None:
    """Put the first weight of each block into one memory, apart from each other."""
    memory = torch.randn(size, generator=torch.Generator().manual_seed(2)) * 0.1
    for layer, part in zip(model.layers, parts(memory), strict=True):
        layer.first.weight = nn.Parameter(part.view_as(layer.first.weight) if part.is_contiguous() else part)


def _with_bias(model: Model) -> None:
    """Have each bias be a row of the weight."""
    for layer in model.layers:
        layer.first.bias = nn.Parameter(layer.first.weight.data[3])


def _attribute(model: Model, name: str, value: Callable[[Block], Any], use: Callable[[Any], Tensor]) -> None:
    for layer in model.layers:
        setattr(layer, name, value(layer))
        layer.use = use


EQUAL: dict[str, Change] = {
    "one parameter": lambda m: setattr(m.layers[1].first, "weight", m.layers[0].first.weight),
    "rows of one memory": lambda m: _in_one(m, lambda t: list(t), (3, WIDTH, WIDTH)),
    "a flat memory": lambda m: _in_one(m, lambda t: list(t.split(WIDTH * WIDTH)), (3 * WIDTH * WIDTH,)),
    "columns of one memory": lambda m: _in_one(m, lambda t: list(t.chunk(3, 1)), (WIDTH, 3 * WIDTH)),
    "every third element": lambda m: _in_one(m, lambda t: [t[:, :, i] for i in range(3)], (WIDTH, WIDTH, 3)),
    "frozen, both": lambda m: _over(m, lambda t: t, "first second"),
    "frozen, transposed": lambda m: _over(m, lambda t: t.t(), "first second"),
    "frozen, expanded": lambda m: setattr(
        m.head, "weight", nn.Parameter(torch.full((1, 1), 0.1).expand(11, WIDTH), requires_grad=False)
    ),
    "a recurrent layer's list": lambda m: setattr(m.layers[1], "second", _Last(nn.GRU(WIDTH, WIDTH))),
    "a module in a list": lambda m: _attribute(
        m, "others", lambda layer: [layer.first], lambda layer: layer.others[0].bias
    ),
}
REFUSED: dict[str, tuple[Change, str]] = {
    "one memory": (lambda m: _over(m, lambda t: t), r"layers.0.first.weight and layers.1.first.weight lie"),
    "data assigned": (
        lambda m: setattr(m.layers[1].first.weight, "data", m.layers[0].first.weight.data),
        "layers.0.first.weight and layers.1.first.weight lie",
    ),
    "transposed": (lambda m: _over(m, lambda t: t.t()), "lie in one memory"),
    "flipped by view": (lambda m: _over(m, lambda t: t.view(-1).view(WIDTH, WIDTH)), "lie in one memory"),
    "a bias in its weight": (_with_bias, r"layers.(\d).first.weight and layers.\1.first.bias lie"),
    "windows that overlap": (
        lambda m: _in_one(m, lambda t: [t[i : i + WIDTH] for i in range(3)], (WIDTH + 2, WIDTH)),
        "lie in one memory",
    ),
    "the first frozen": (lambda m: _over(m, lambda t: t, "first"), "layers.1.first.weight trains"),
    "the second frozen": (lambda m: _over(m, lambda t: t, "second"), "layers.0.first.weight trains"),
    "expanded": (
        lambda m: setattr(m.head, "weight", nn.Parameter(torch.full((1, 1), 0.1).expand(11, WIDTH))),
        "several of its elements are one",
    ),
    "a buffer": (
        lambda m: m.layers[1].register_buffer("same", m.layers[1].first.weight.data[0]),
        "layers.1.first.weight and the buffer layers.1.same",
    ),
    "a tensor of the module": (
        lambda m: _attribute(m, "seen", lambda layer: layer.first.bias.detach(), lambda layer: layer.seen),
        r"layers.(\d).first.bias and the tensor layers.\1.seen",
    ),
    "a parameter in a list": (
        lambda m: _attribute(m, "some", lambda layer: [layer.first.bias], lambda layer: layer.some[0]),
        r"layers.0.some holds the parameter layers.0.first.bias",
    ),
    "parameters in a dict of the model": (
        lambda m: setattr(m, "named", {"head": (m.head.weight,)}),
        "named holds the parameter head.weight",
    ),
}


class _Last(nn.Module):
    """The output of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden)[0]


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("change", EQUAL)
def test_what_lies_apart_has_the_plain_model_s_losses(change: str, home: str):
    plain, model = Model(), Model()
    for each in (plain, model):
        torch.manual_seed(3)
        EQUAL[change](each)
    with wrapped(model, **HOMES[home]):
        got = losses(model, outsize.AdamW(model, lr=1e-2))
    for parameter in plain.parameters():  # torch's fused AdamW steps what is not contiguous as if it were
        parameter.data = parameter.data.contiguous()
    want = losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    assert got == pytest.approx(want, rel=1e-6 if change == "one parameter" else 0)


@pytest.mark.parametrize("change", REFUSED)
def test_what_shares_memory_and_trains_is_refused_by_name(change: str):
    do, words = REFUSED[change]
    model = Model()
    do(model)
    with pytest.raises(ModelError, match=words), wrapped(model, home="host"):
        pass


@pytest.mark.parametrize("home", HOMES)
def test_frozen_weights_of_one_memory_are_refused_once_they_change(home: str):
    for change in (
        lambda weight: weight.requires_grad_(True),
        lambda weight: weight.data.mul_(0.5),
        lambda weight: nn.init.zeros_(weight),
    ):
        model = Model()
        _over(model, lambda t: t, "first second")
        with wrapped(model, **HOMES[home]):
            model(input_ids=IDS)["loss"].backward()
            change(model.layers[1].first.weight)
            with pytest.raises(
                ModelError, match=r"layers.0.first.weight and layers.1.first.weight lay in one"
            ):
                model(input_ids=IDS)


def test_a_skeleton_whose_parameters_would_share_memory_is_refused_by_name():
    with torch.device("meta"):
        model = Model()
    assert check_memory(model) == ()
    _over(model, lambda t: t)
    with pytest.raises(ModelError, match="lie in one memory"):
        check_memory(model)


def test_a_parameter_added_later_over_the_memory_of_another_is_refused():
    model = Model()
    with wrapped(model, home="host"):
        model.head.extra = nn.Parameter(model.head.weight.data)
        with pytest.raises(ModelError, match=r"head.weight and head.extra lie in one memory"):
            model(input_ids=IDS)


@pytest.mark.parametrize("which", ["", "layers.1", "head"])
def test_what_was_compiled_in_place_is_refused(which: str):
    model = Model()
    model.get_submodule(which).compile(backend="eager")
    with pytest.raises(ConfigError, match=f"^{which or 'Model'} was compiled in place"), wrapped(model):
        pass
