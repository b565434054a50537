"""Units that do more than return tensors train as in the plain model: what they write is written once."""

import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import zoo_of_parts
from outsize.errors import ModelError
from wrapped.loops import assert_equal, gradients, wrapped

ROUNDING = 1e-6
SETTINGS: list[dict[str, Any]] = [
    {"activations": "keep"},
    {"activations": "recompute", "slots": 2, "device": "emulated:1"},
]
EVERY_WAY = pytest.mark.parametrize("settings", SETTINGS, ids=["kept", "recomputed"])
Loss = Callable[[Any], Tensor]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def change(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.change(x)


class Net(nn.Module):
    """Five blocks, that may share something of ``context``, between an embedding and a head."""

    def __init__(
        self, block: Callable[[], nn.Module] = Block, context: Callable[[Tensor], Any] | None = None
    ):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 8)
        self.layers = nn.ModuleList(block() for _ in range(5))
        self.context = context

    def forward(self, x: Tensor) -> Any:
        hidden = self.embed(x)
        shared = () if self.context is None else (self.context(hidden),)
        for layer in self.layers:
            hidden = layer(hidden, *shared)
        return self.head(hidden)


X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))


def square(output: Any) -> Tensor:
    return (output if isinstance(output, Tensor) else output[0]).square().mean()


def step(model: nn.Module, loss: Loss, *, batches: int = 1) -> list[float]:
    """Train on nothing but gradients, ``batches`` times, and say what the losses were."""
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    losses = []
    for index in range(batches):
        value = loss(model(X * (1 + index)))
        value.backward()
        losses.append(value.item())
    return losses


def compare(
    make: Callable[[], nn.Module],
    settings: dict[str, Any],
    loss: Loss = square,
    *,
    batches: int = 2,
    off: float = 0.0,
) -> nn.Module:
    """Assert that losses, gradients, buffers and the numbers drawn next are those of the plain model."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    streamed = make()
    want = step(plain, loss, batches=batches)
    drawn = torch.rand(()), random.random(), np.random.rand()
    with wrapped(streamed, **settings):
        assert step(streamed, loss, batches=batches) == want
        assert (torch.rand(()), random.random(), np.random.rand()) == drawn
        got, expected = gradients(streamed), gradients(plain)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert (
                torch.allclose(got[name], value, rtol=off, atol=off) if off else torch.equal(got[name], value)
            ), name
        for (name, one), (_, other) in zip(streamed.named_buffers(), plain.named_buffers(), strict=True):
            assert torch.equal(one, other), name
    return plain


class Held:
    """What a block gets or returns in an object of a class that nobody knows."""

    def __init__(self, value: Any):
        self.value = value


class InObjects(Block):
    def forward(self, x: Any) -> Held:  # type: ignore[override]
        return Held(super().forward(x.value if isinstance(x, Held) else x))


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


class Conditioned(Block):
    def forward(self, x: Tensor, held: Any) -> Tensor:  # type: ignore[override]
        return x + self.change(x) + self.up(held.value)


class Counted(Block):
    """Writes into the dict that all blocks share."""

    def forward(self, x: Tensor, shared: dict[str, Any]) -> Tensor:  # type: ignore[override]
        shared["count"] = shared.get("count", 0) + 1
        return x + self.change(x) * shared["count"]


class Reads(Block):
    """Adds what the block before it has left in a dict, a list or an object, with its history."""

    def forward(self, x: Tensor, shared: Any) -> Tensor:  # type: ignore[override]
        if isinstance(shared, dict):
            before, shared["last"] = shared.get("last", 0.0), self.change(x)
            return x + shared["last"] + before
        if isinstance(shared, list):
            shared.append(self.change(x))
            return x + shared[-1] + shared[0]
        before, shared.value = shared.value, self.change(x)
        return x + shared.value + before


class WithReturned(Net):
    def forward(self, x: Tensor) -> Any:
        found = self.layers[0](self.embed(x))
        for layer in self.layers[1:]:
            found = layer(found)
        return self.head(found.value)


@EVERY_WAY
def test_what_a_block_returns_in_an_object_has_its_gradient(settings: dict[str, Any]):
    compare(lambda: WithReturned(InObjects), settings)


@EVERY_WAY
@pytest.mark.parametrize("kind", [Held, Slotted, lambda value: types.SimpleNamespace(value=value)])
def test_what_a_block_is_given_in_an_object_has_its_gradient(
    kind: Callable[[Tensor], Any], settings: dict[str, Any]
):
    compare(lambda: Net(Conditioned, lambda hidden: kind(hidden.tanh())), settings, off=ROUNDING)


@EVERY_WAY
def test_what_blocks_write_into_a_dict_is_there_for_the_next(settings: dict[str, Any]):
    compare(lambda: Net(Counted, lambda _: {}), settings)


@EVERY_WAY
@pytest.mark.parametrize("shared", [dict, list, lambda: Held(0.0)])
def test_gradients_flow_between_blocks_by_way_of_what_they_share(
    shared: Callable[[], Any], settings: dict[str, Any]
):
    compare(lambda: Net(Reads, lambda _: shared()), settings, off=ROUNDING)


class Leaves(Block):
    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        self.aux = found.square().mean()
        return found


class Collecting(Net):
    """Returns what blocks leave on themselves, or hooks in them collect, beside its output."""

    def __init__(self, block: Callable[[], nn.Module] = Block, inside: str | None = None):
        super().__init__(block)
        self.found: list[Tensor] = []
        for layer in self.layers if inside is not None else ():
            layer.get_submodule(inside).register_forward_hook(lambda _, __, made: self.found.append(made))

    def forward(self, x: Tensor) -> Any:
        self.found.clear()
        output = super().forward(x)
        left = [layer.aux for layer in self.layers if hasattr(layer, "aux")]
        return output, sum([one.square().mean() for one in self.found] + left)


def with_aux(output: Any) -> Tensor:
    return output[0].square().mean() + output[1]


@EVERY_WAY
def test_what_a_block_leaves_on_itself_has_its_gradient(settings: dict[str, Any]):
    compare(lambda: Collecting(Leaves), settings, with_aux)


@EVERY_WAY
def test_what_hooks_inside_blocks_collect_has_its_gradient(settings: dict[str, Any]):
    compare(lambda: Collecting(inside="up"), settings, with_aux)


def test_a_hook_in_one_of_many_blocks_is_seen():
    def make() -> nn.Module:
        model = Collecting()
        model.layers[3].up.register_forward_hook(lambda _, __, made: model.found.append(made))
        return model

    compare(make, SETTINGS[1], with_aux)


@EVERY_WAY
def test_a_hook_that_comes_after_the_trial_is_seen(settings: dict[str, Any]):
    def watch(model: Any) -> None:
        model.layers[2].down.register_forward_hook(lambda _, __, made: model.found.append(made))

    torch.manual_seed(0)
    plain = Collecting()
    torch.manual_seed(0)
    model = Collecting()
    with wrapped(model, **settings):
        step(model, square)
        model.zero_grad()
        watch(model), watch(plain)
        assert step(model, with_aux) == step(plain, with_aux)
        assert_equal(gradients(model), gradients(plain))
        assert len(model.found) == 1


def test_a_loss_of_what_a_block_left_and_the_model_did_not_return_is_refused():
    model = Net(Leaves)
    with wrapped(model, **SETTINGS[1]):
        output = model(X)
        with pytest.raises(ModelError, match="left on itself"):
            (output.square().mean() + model.layers[2].aux).backward()


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.change(self.norm(x))


class Scaling(Block):
    """Divides by a running mean that it keeps in a buffer, in place or anew."""

    def __init__(self, in_place: bool = True):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        seen = x.detach().abs().mean()
        self.scale = self.scale.mul_(0.9).add_(0.1 * seen) if self.in_place else 0.9 * self.scale + 0.1 * seen
        return x + self.change(x) / self.scale


class Warming(Block):
    """Counts its calls in a number."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.change(x) * min(self.calls / 4, 1.0)


def spectral() -> nn.Module:
    block = Block()
    parametrizations.spectral_norm(block.up)
    return block


@EVERY_WAY
@pytest.mark.parametrize("block", [Normed, Scaling, lambda: Scaling(False), Warming, spectral])
def test_state_changes_once_for_each_forward(block: Callable[[], nn.Module], settings: dict[str, Any]):
    compare(lambda: Net(block), settings, batches=3)


def test_state_changes_once_for_each_microbatch():
    model = Net(Scaling)
    with wrapped(model, microbatches=2, slots=2, device="emulated:1", activations="recompute"):
        model(X).square().mean().backward()
        assert [int(layer.calls) for layer in model.layers] == [2] * 5


def test_state_of_units_is_refused_on_several_devices():
    model = Net(Scaling)
    with (
        wrapped(model, device="emulated:2", microbatches=2),
        pytest.raises(ModelError, match="use one device"),
    ):
        model(X)


class Drawing(Block):
    """Draws from a generator that is not PyTorch's own."""

    def __init__(self, draw: Callable[["Drawing"], float]):
        super().__init__()
        self.draw = draw
        self.generator = torch.Generator().manual_seed(3)
        self.numbers, self.chance = np.random.default_rng(3), random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.change(x) * self.draw(self)


@EVERY_WAY
@pytest.mark.parametrize(
    "draw",
    [
        lambda _: 2.0 * (random.random() < 0.5),
        lambda _: float(np.random.rand()),
        lambda block: float(torch.rand((), generator=block.generator)),
        lambda block: float(block.numbers.random()),
        lambda block: block.chance.random(),
        lambda _: float(torch.rand(())),
    ],
    ids=["random", "numpy", "own torch", "own numpy", "own random", "torch"],
)
def test_a_recompute_draws_what_its_forward_drew(draw: Callable[[Drawing], float], settings: dict[str, Any]):
    compare(lambda: Net(lambda: Drawing(draw)), settings)


class OnContext(torch.autograd.Function):
    """A product whose context holds the weight itself, which autograd does not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient @ ctx.weight, gradient.flatten(0, -2).t() @ ctx.x.flatten(0, -2)


class Stashing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(OnContext.apply(x, self.up.weight)))


class InAHook(Block):
    def forward(self, x: Tensor) -> Tensor:
        found, weight = torch.tanh(self.up(x)), self.up.weight
        found.register_hook(
            lambda gradient: gradient * (1 + weight.detach().mean())
        ) if found.requires_grad else None
        return x + self.down(found)


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("block", [Stashing, InAHook])
def test_weights_behind_the_back_of_autograd_are_those_of_their_unit(
    block: Callable[[], nn.Module], slots: int
):
    def between(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def loss(output: Tensor) -> Tensor:
            with torch.no_grad():
                model(X * 3)  # other weights come to lie in the slots
            return output.square().mean()

        return loss

    torch.manual_seed(0)
    plain = Net(block)
    torch.manual_seed(0)
    model = Net(block)
    step(plain, between(plain))
    with wrapped(model, slots=slots, device="emulated:1", activations="keep"):
        step(model, between(model))
        assert_equal(gradients(model), gradients(plain))


class Asks(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.to(next(self.parameters()).dtype))


def test_a_forward_may_ask_for_its_parameters():
    compare(Asks, SETTINGS[1])


class Empty(Block):
    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.zeros(1, 0, 16))


def test_parameters_without_elements_are_held():
    compare(lambda: Net(Empty), SETTINGS[1])


class Marking(Net):
    """Its blocks return a tensor without a gradient beside their output, until they are told not to."""

    class Block(Block):
        marks = True

        def forward(self, x: Tensor) -> Any:
            return (x + self.change(x), torch.ones(3))[: 1 + self.marks]

    def __init__(self):
        super().__init__(self.Block)

    def forward(self, x: Tensor) -> Any:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)[0]
        return self.head(hidden)


@EVERY_WAY
def test_blocks_may_return_less_than_in_their_trial(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    plain = Marking()
    torch.manual_seed(0)
    model = Marking()
    with wrapped(model, **settings):
        model(X)
        monkeypatch.setattr(Marking.Block, "marks", False)
        for each in (plain, model):
            each(X).square().mean().backward()
        assert_equal(gradients(model), gradients(plain))


class Advancing(Net):
    """Changes what it gives its blocks, in place, between them."""

    class Block(Block):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
            return x + self.down(torch.relu(self.up(x) + shift))

    def __init__(self):
        super().__init__(self.Block)

    def forward(self, x: Tensor) -> Any:
        hidden, shift = self.embed(x), torch.zeros(16)
        for layer in self.layers:
            hidden = layer(hidden, shift)
            shift += 0.1
        return self.head(hidden)


@pytest.mark.parametrize("settings", SETTINGS)
def test_code_between_blocks_may_change_in_place_what_they_were_given(settings: dict[str, Any]):
    compare(Advancing, settings)


class ChangingLate(Advancing):
    """Changes in place what a layer was given, but in no trial."""

    late = False

    def forward(self, x: Tensor) -> Any:
        hidden, shift = self.embed(x), torch.zeros(16)
        for layer in self.layers:
            hidden = layer(hidden, shift)
            shift = shift.add_(0.1) if self.late else shift + 0.1
        return self.head(hidden)


def test_what_no_trial_saw_changed_in_place_is_refused():
    model = ChangingLate()
    with wrapped(model, **SETTINGS[1]):
        model(X)
        model.late = True
        loss = model(X).square().mean()
        with pytest.raises(ModelError, match="changed in place since"):
            loss.backward()


def test_gradients_of_inputs_are_those_of_the_plain_model():
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    model = Net()
    given, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    plain(given).square().mean().backward()
    with wrapped(model, **SETTINGS[1]):
        model(other).square().mean().backward()
    assert torch.equal(given.grad, other.grad)


@EVERY_WAY
@pytest.mark.parametrize("name", zoo_of_parts.MODELS)
def test_models_that_make_caches_and_share_dicts_train_as_they_are(name: str, settings: dict[str, Any]):
    """Those that share a vision tower's or an embedding's tensors sum their gradients layer by layer."""
    (plain, batch), (model, _) = zoo_of_parts.build(name), zoo_of_parts.build(name)

    def loss(made: nn.Module) -> Tensor:
        found = made(**batch)
        return found.loss if "labels" in batch else found.action_preds.square().mean()

    want = loss(plain)
    want.backward()
    with wrapped(model, **settings):
        got = loss(model)
        got.backward()
        assert torch.equal(got, want)
        others, most = gradients(model), max(float(p.abs().max()) for p in gradients(plain).values())
        for key, value in gradients(plain).items():
            exact = name in ("llava", "internvl", "decision_transformer")
            off = float((others[key] - value).abs().max()) if value.numel() else 0.0
            assert off <= (0.0 if exact else ROUNDING * most), key


def test_a_config_deep_inside_makes_no_cache_and_is_left_as_it_was():
    model, batch = zoo_of_parts.build("llava")
    with wrapped(model):
        assert model(**batch).past_key_values is None
        assert model.config.text_config.use_cache


@EVERY_WAY
@pytest.mark.parametrize("holds", [False, True])
def test_what_trials_and_recomputes_write_into_what_the_caller_holds_is_not_there(
    settings: dict[str, Any], holds: bool
):
    shared: dict[str, Any] = {}
    net = Net(Counted, lambda hidden: shared)
    if holds:
        net.shared = shared  # type: ignore[assignment]
    with wrapped(net, **settings) as model:
        step(model, square)
    assert shared == {"count": 5}
