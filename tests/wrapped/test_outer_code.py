"""A model's own code around its units has the plain model's bits: modes, values used at both ends, pruning."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import outsize
import zoo
from outsize.errors import ModelError
from outsize.wrapped.module import runner_of
from wrapped.loops import assert_equal, gradients, wrapped

WAYS: dict[str, dict[str, Any]] = {
    "host": {"home": "host"},
    "recomputed": {"home": "host", "device": "emulated:1", "slots": 2, "activations": "recompute"},
}
SEVERAL: dict[str, dict[str, Any]] = {
    "two workers": {"home": "host", "device": "emulated:2"},
    "three workers": {"home": "host", "device": "emulated:3"},
}
# One function asks transformers, and another torch, what they no longer like.
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


class Block(nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Tensor:
        made = torch.tanh(self.inner(hidden))
        return hidden + made if scale is None else hidden * scale + made * scale


class Layers(nn.Module):
    """Three blocks between two matrices; what is done with them is its forward's business."""

    def __init__(self, around: Callable[["Layers", Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inward, self.blocks, self.outward = (
            nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 4),
        )  # fmt: skip
        self.norm = nn.LayerNorm(8)
        self.around = around

    def through(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        return self.around(self, inputs)


def _returned_twice(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    hidden = model.norm(model.inward(inputs))
    return model.outward(model.through(hidden)), hidden, hidden


def _aside_returned_twice(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    hidden = model.inward(inputs)
    aside = torch.tanh(hidden)
    return model.outward(model.through(hidden) + aside), aside, aside


def _long_residual(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    hidden = model.norm(model.inward(inputs))
    made = model.through(hidden)
    return (made * hidden).mean() + hidden.mean(), model.norm(made + hidden)


def _long_residual_in_place(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    hidden = model.inward(inputs)
    made = model.through(hidden)
    made += hidden
    return model.outward(made.mul_(2.0)), made


def _kept_on_the_model(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    model.last = hidden = model.inward(inputs)
    return (model.outward(model.through(hidden)) + model.last.mean(),)


def _a_module_at_both_ends(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    made = model.through(model.inward(inputs))
    return model.outward(made) @ model.outward.weight, model.inward(made)


def _norm_of_a_block_s_weight(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    return (model.outward(model.through(model.inward(inputs))) * model.blocks[0].inner.weight.norm(),)


def _hidden_states(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    found = [model.inward(inputs)]
    for block in model.blocks:
        found.append(model.norm(block(found[-1])))
    return tuple(found)


def _first_without_a_graph(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        hidden = model.blocks[0](model.inward(inputs))
    for block in model.blocks[1:]:
        hidden = block(hidden)
    return (model.outward(hidden),)


def _each_without_a_graph(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    hidden = model.inward(inputs)
    for block in model.blocks[:2]:
        with torch.no_grad():
            hidden = block(hidden)
    return model.outward(model.blocks[2](hidden) + model.inward(inputs)), hidden


def _all_without_a_graph(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    with torch.set_grad_enabled(False):
        hidden = model.through(model.inward(inputs))
    return (model.outward(hidden) + model.inward(inputs).mean(),)


def _own_autocast(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    hidden = model.inward(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.through(hidden)
    return (model.outward(hidden.float()),)


def _own_autocast_of_some(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.blocks[0](model.inward(inputs)).float()
    for block in model.blocks[1:]:
        hidden = block(hidden.float())
    with torch.autocast("cpu", enabled=False):
        return (model.outward(hidden),)


def _autocast_turned_off(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    hidden = model.inward(inputs)
    with torch.autocast("cpu", enabled=False):
        hidden = model.through(hidden.float())
    return (model.outward(hidden),)


def _own_checkpoints(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    hidden = checkpoint(model.inward, inputs, use_reentrant=False)
    for block in model.blocks:
        hidden = checkpoint(block, hidden, use_reentrant=False)
    return (model.outward(hidden),)


def _reentrant_checkpoints_around_blocks(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    hidden = model.inward(inputs)
    for block in model.blocks:
        hidden = checkpoint(block, hidden, use_reentrant=True)
    return (model.outward(hidden),)


def _gradient_within(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaf = inputs.clone().requires_grad_()
        (slope,) = torch.autograd.grad(leaf.square().sum(), leaf)
    return (model.outward(model.through(model.inward(slope))),)


def _hooks_on_tensors(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    hidden = model.inward(inputs)
    made = model.through(hidden)
    for tensor, factor in ((hidden, 2), (made, 3)):
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient, factor=factor: gradient * factor)
    return (model.outward(made),)


def _dropped_layers(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    hidden = model.inward(inputs)
    for block in model.blocks:
        if not (model.training and bool(torch.rand(()) < 0.5)):
            hidden = nn.functional.dropout(block(hidden), 0.3, model.training)
    return (model.outward(hidden),)


def _a_skip(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    """As of a U-Net: its gradient is summed of three parts."""
    first = model.blocks[0](model.inward(inputs))
    second = model.blocks[1](first)
    return model.outward(model.blocks[2](second + first) + first), second


def _a_time_embedding(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    """As of diffusion transformers: made once, used by each block, between them and behind them."""
    hidden, time = model.inward(inputs), model.norm(model.inward(inputs.flip(0)))
    for block in model.blocks:
        hidden = block(hidden, time) * (1 + torch.tanh(time))
    return model.outward(hidden * time), time


def _an_embedding_made_of_another(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    """Made between blocks of what was made before them, and used by later ones."""
    hidden, time = model.inward(inputs), model.norm(model.inward(inputs.flip(0)))
    for block in model.blocks:
        hidden, time = block(hidden, time), torch.tanh(time) + time
    return (model.outward(hidden + time),)


def _a_parameter_for_every_block(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
    hidden = model.inward(inputs)
    for block in model.blocks:
        hidden = block(hidden, model.norm.weight)
    return (model.outward(model.norm(hidden)),)


OF_SEVERAL_USES = [_a_skip, _a_time_embedding, _an_embedding_made_of_another, _a_parameter_for_every_block]
AROUND = [
    one for name, one in list(globals().items()) if name.startswith("_") and callable(one) and name[1] != "_"
]
INPUTS = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool = False) -> dict[str, Tensor]:
    """Two steps: losses, and where they end."""
    found = {}
    for number in range(2):
        torch.manual_seed(7)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs = model(INPUTS)
        loss = sum(t.float().square().mean() * at for at, t in enumerate(outputs, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {number}"] = loss.detach().clone()
    return found | {name: value.clone() for name, value in model.state_dict().items()}


def assert_trains_as_plain(
    make: Callable[[], nn.Module], way: str, run: Callable[..., dict[str, Tensor]] = train, **settings: Any
) -> None:
    plain = make()
    want = run(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), **settings)
    with wrapped(make(), **(WAYS | SEVERAL)[way]) as model:
        assert_equal(run(model, outsize.AdamW(model, lr=1e-2), **settings), want)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("around", AROUND, ids=lambda one: one.__name__[1:])
def test_code_around_units_trains_as_in_the_plain_model(around: Any, way: str):
    assert_trains_as_plain(lambda: Layers(around), way, autocast=around is _autocast_turned_off)


# Of layers that are dropped a pass on several workers says what it lacks, and it draws other ones.
ON_ONE_DEVICE = [_norm_of_a_block_s_weight, _reentrant_checkpoints_around_blocks, _dropped_layers]
ON_SEVERAL = [one for one in AROUND if one not in ON_ONE_DEVICE]


@pytest.mark.parametrize("way", SEVERAL)
@pytest.mark.parametrize("around", ON_SEVERAL, ids=lambda one: one.__name__[1:])
def test_code_around_units_trains_on_several_workers(around: Any, way: str):
    assert_trains_as_plain(lambda: Layers(around), way, autocast=around is _autocast_turned_off)


@pytest.mark.parametrize("around", ON_ONE_DEVICE[:2], ids=lambda one: one.__name__[1:])
def test_what_does_not_run_on_several_workers_says_so(around: Any):
    with pytest.raises(ModelError, match="use one device"):
        assert_trains_as_plain(lambda: Layers(around), "two workers")


@pytest.mark.parametrize("frozen", ["inward", "outward", "blocks.0", "norm"])
@pytest.mark.parametrize("around", OF_SEVERAL_USES, ids=lambda one: one.__name__[1:])
def test_what_is_used_several_times_trains_beside_what_is_frozen(around: Any, frozen: str):
    def make() -> nn.Module:
        model = Layers(around)
        model.get_submodule(frozen).requires_grad_(False)
        return model

    assert_trains_as_plain(make, "recomputed")


@pytest.mark.parametrize("around", OF_SEVERAL_USES[:3], ids=lambda one: one.__name__[1:])
def test_what_is_used_several_times_trains_in_microbatches(around: Any):
    plain = Layers(around)
    for part in INPUTS.chunk(2):
        summed(plain(part)).backward()
    with wrapped(Layers(around), home="host", microbatches=2) as model:
        summed(model(INPUTS)).backward()
        got = gradients(model)
    assert_equal(got, gradients(plain))


def summed(outputs: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([output.sum() for output in outputs]).sum()


def test_a_unit_within_inference_mode_of_the_model_is_refused_by_name():
    def within(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode():
            hidden = model.blocks[0](model.inward(inputs))
        return (model.outward(model.blocks[2](model.blocks[1](hidden.clone()))),)

    with wrapped(Layers(within)) as model, pytest.raises(ModelError, match=r"write torch.no_grad\(\)"):
        model(INPUTS)


def test_modes_of_the_caller_are_as_before():
    with wrapped(Layers(_own_autocast)) as model, torch.no_grad():
        model(INPUTS)
        assert not torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")


# --- weights made of others on the way, before the units of a Llama and inside ----------------------------------

BATCH = zoo.batch("llama", num_sequences=2, seq_len=6)
MADE_OF_OTHERS: dict[str, Callable[[nn.Module], Any]] = {
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.3),
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
}


def train_llama(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {}
    for number in range(2):
        loss = model(**BATCH).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {number}"] = loss.detach()
    return found | {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", MADE_OF_OTHERS)
@pytest.mark.parametrize("of", ["model.layers.0.mlp.up_proj", "lm_head", "model.embed_tokens"])
def test_weights_made_of_others_by_hooks_train_as_in_the_plain_model(of: str, change: str, way: str):
    def make() -> nn.Module:
        model = zoo.small_llama(pad_token_id=None)  # a row of zeros has no direction
        torch.manual_seed(0)
        MADE_OF_OTHERS[change](model.get_submodule(of))
        return model

    assert_trains_as_plain(make, way, train_llama)


# --- buffers and parameters that are assigned -------------------------------------------------------------------


def test_a_buffer_that_is_replaced_stays_replaced_after_the_wrapping():
    made: Any = Layers(_long_residual)
    made.register_buffer("scale", torch.ones(8))
    made.blocks[1].register_buffer("shift", torch.ones(8))
    model = outsize.wrap(made, device="cpu", device_memory="1GiB")
    model(INPUTS)
    model.scale, model.blocks[1].shift = torch.full((8,), 2.0), torch.full((3,), 3.0)
    model(INPUTS)
    outsize.unwrap(model)
    assert torch.equal(made.scale, torch.full((8,), 2.0))
    assert torch.equal(made.blocks[1].shift, torch.full((3,), 3.0))


@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_parameter_may_become_its_own_transpose(home: str):
    with wrapped(Layers(_long_residual), home=home) as model:
        weight = model.blocks[0].inner.weight
        want = weight.detach().clone().t()
        weight.data = weight.data.t()
        assert torch.equal(weight.detach().clone(), want)
        weight.data[1:] = weight.data[:-1].clone()
        assert torch.equal(weight.detach().clone()[1:], want[:-1])


def test_an_input_of_a_layer_that_code_behind_it_uses_does_not_leave_the_device():
    """Features of a middle layer of a tower, which is streamed, go on into what stands behind the last."""

    def features(model: Layers, inputs: Tensor) -> tuple[Tensor, ...]:
        hidden = [model.inward(inputs)]
        for block in model.blocks:
            hidden.append(block(hidden[-1]))
        return (model.outward(model.norm(hidden[-2][:, 1:])),)

    plain, inputs = Layers(features), torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))
    summed(plain(inputs)).backward()
    with wrapped(Layers(features), device="emulated:1", slots=2, activations="recompute") as model:
        summed(model(inputs)).backward()
        assert_equal(gradients(model), gradients(plain))
        assert runner_of(model)._measured.inputs_shared  # type: ignore[union-attr]
