"""What trains changes after `outsize.wrap`, also after steps: the weights move, and gradients and state go along."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import outsize
import zoo
from wrapped.loops import assert_equal, wrapped

peft = pytest.importorskip("peft")
CONFIG = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
BATCH = zoo.batch("llama", num_sequences=2, seq_len=6)
HOMES = {
    "host": {"home": "host"},
    "disk": {"home": "disk"},
    "emulated": {"home": "host", "device": "emulated:1"},
}
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
Make = Callable[[nn.Module], torch.optim.Optimizer]


def of_torch(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


def of_outsize(model: nn.Module) -> torch.optim.Optimizer:
    with torch.no_grad():
        model(**BATCH)  # over a disk home parameters that were added are others from then on
    return outsize.AdamW(
        model, lr=1e-2, groups=[{"params": [p for p in model.parameters() if p.requires_grad]}]
    )


def adapted(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(zoo.small_llama().to(dtype), CONFIG, autocast_adapter_dtype=False)


def add(model: nn.Module, name: str) -> None:
    torch.manual_seed(len(name))
    model.add_adapter(name, CONFIG, autocast_adapter_dtype=False)


def train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[float]:
    loss = model(**BATCH).loss
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    return [loss.item()]


def clones(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def two_adapters(model: nn.Module, make: Make, add: Callable[[nn.Module, str], None] = add) -> list[float]:
    """Train one adapter, another beside it, a third that comes late, and the first again."""
    first = make(model)
    seen = train(model, first)
    add(model, "second")
    seen += train(model, first)
    model(**BATCH).loss.backward()  # a gradient that waits while the weights move
    model.set_adapter("second")
    second = make(model)
    loss = model(**BATCH).loss
    loss.backward()
    model.set_adapter("default")
    first.step(), second.step()
    model.zero_grad()
    seen += [loss.item(), *train(model, first)]
    add(model, "other one")
    model.set_adapter("other one")
    seen += train(model, make(model))
    for name, optimizer in (("second", second), ("default", first)):
        model.set_adapter(name)
        seen += train(model, optimizer)
    return seen


@pytest.mark.parametrize("home", HOMES)
def test_adapters_are_added_and_switched_between_steps_as_over_the_plain_model(home: str):
    plain = adapted()
    want = two_adapters(plain, of_torch)
    with wrapped(adapted(), **HOMES[home]) as model:
        assert two_adapters(model, of_outsize) == want
        assert_equal(clones(model), dict(plain.state_dict()))


def test_masters_that_moved_are_those_of_a_model_that_had_room_from_the_start():
    early = adapted(torch.bfloat16)
    for name in ("second", "other one"):
        add(early, name)
    early.base_model.set_adapter(["default", "second", "other one"])  # all of them train
    with wrapped(early, home="disk") as model:
        model.set_adapter("default")
        want = two_adapters(model, of_outsize, lambda model, name: None), clones(model)
    with wrapped(adapted(torch.bfloat16), home="disk") as model:
        assert two_adapters(model, of_outsize) == want[0]
        assert_equal(clones(model), want[1])


@pytest.mark.parametrize(
    ("state", "dtype", "home"),
    [("int8", torch.float32, "host"), ("int8", torch.bfloat16, "disk"), ("bf16", torch.bfloat16, "host")],
)
def test_moments_in_few_bits_move_as_they_are(state: str, dtype: torch.dtype, home: str):
    with wrapped(adapted(dtype), state=state, home=home) as model:
        optimizer = of_outsize(model)
        train(model, optimizer)
        former = {n: {k: v.clone() for k, v in s.items()} for n, s in optimizer.state_dict()["state"].items()}
        add(model, "second")
        model.base_model.set_adapter(["default", "second"])
        model(**BATCH).loss.backward()
        moved = optimizer.state_dict()["state"]
        assert moved.keys() == former.keys()
        for number, values in former.items():
            assert_equal(moved[number], values)


def merged(model: nn.Module, make: Make) -> list[float]:
    add(model, "second")
    seen = train(model, make(model))
    for name in ("sum", "mean"):
        model.add_weighted_adapter(["default", "second"], [0.5, 0.5], name, combination_type="linear")
    for name in ("sum", "default", "mean", "second"):
        model.set_adapter(name)
        seen += train(model, make(model))
    return seen


@pytest.mark.parametrize("home", ["host", "disk"])
def test_adapters_made_of_others_train(home: str):
    want = merged(adapted(), of_torch)
    with wrapped(adapted(), **HOMES[home]) as model:
        assert merged(model, of_outsize) == want


def thawed(model: nn.Module, make: Make) -> list[float]:
    """Train the head, then a block beside it, then all, then the head alone by the first optimizer."""
    first = make(model)
    seen = train(model, first)
    model.model.layers[1].requires_grad_(True)
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1.01)  # changed just before it moves
    model.lm_head.weight.data.mul_(0.99)
    model.lm_head.requires_grad_(False)
    second = make(model)
    seen += train(model, second)
    model.requires_grad_(True)
    seen += train(model, first, second)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return seen + train(model, first) + train(model, first)


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_are_thawed_after_steps(dtype: torch.dtype, home: str):
    def build(*, frozen: bool) -> nn.Module:
        model = zoo.small_llama().to(dtype).requires_grad_(not frozen)
        model.lm_head.requires_grad_(True)
        return model

    if dtype is torch.float32:
        plain = build(frozen=True)
        want = thawed(plain, of_torch), clones(plain)
    else:  # the oracle had room from the start
        with wrapped(build(frozen=False), **HOMES[home]) as model:
            model.requires_grad_(False)
            model.lm_head.requires_grad_(True)
            want = thawed(model, of_outsize), clones(model)
    with wrapped(build(frozen=True), **HOMES[home]) as model:
        assert thawed(model, of_outsize) == want[0]
        assert_equal(clones(model), want[1])


def frozen_with_gradients(model: nn.Module, make: Make) -> tuple[list[float], Tensor]:
    optimizer = make(model)
    seen = train(model, optimizer)
    model(**BATCH).loss.backward()
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    seen.append(model(**BATCH).loss.item())
    if isinstance(optimizer, outsize.AdamW):
        norm = outsize.clip_grad_norm_(model, 0.1)
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return [*seen, model(**BATCH).loss.item()], norm


@pytest.mark.parametrize("home", ["host", "disk"])
def test_gradients_of_what_was_frozen_since_are_clipped_and_stepped_as_torch_does(home: str):
    want = frozen_with_gradients(zoo.small_llama(), of_torch)
    with wrapped(zoo.small_llama(), **HOMES[home]) as model:
        assert frozen_with_gradients(model, of_outsize) == want


def with_late_adapters(model: nn.Module, make: Make) -> tuple[list[float], list[float]]:
    """Names of parameters change under an optimizer: layers are put into those of an adapter."""
    optimizer = make(model)
    weight = model.model.layers[0].self_attn.q_proj.weight
    seen = train(model, optimizer)
    state = optimizer.state[weight]
    torch.manual_seed(1)
    model = peft.get_peft_model(model, CONFIG)
    weight.requires_grad_(True)
    seen += train(model, optimizer)
    assert state["step"] == 2
    moments = [optimizer.state[weight][name].sum().item() for name in ("exp_avg", "exp_avg_sq")]
    return seen + train(model, optimizer), moments


@pytest.mark.parametrize("home", ["host", "disk"])
def test_an_optimizer_goes_on_where_parameters_have_got_other_names(home: str):
    want = with_late_adapters(zoo.small_llama(), of_torch)
    with wrapped(zoo.small_llama(), **HOMES[home]) as model:
        assert with_late_adapters(model, of_outsize) == want


def test_adapters_in_fp32_are_put_around_a_bf16_model_that_was_wrapped_to_train():
    def losses(model: nn.Module) -> list[float]:
        torch.manual_seed(1)
        model = peft.get_peft_model(model, CONFIG)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
        return train(model, optimizer) + train(model, optimizer)

    want = losses(zoo.small_llama().to(torch.bfloat16))
    with wrapped(zoo.small_llama().to(torch.bfloat16), home="host") as model:
        assert losses(model) == want
    with wrapped(zoo.small_llama().to(torch.bfloat16), home="host") as model:
        train(model, of_outsize(model))
        with pytest.raises(outsize.errors.ModelError, match="autocast_adapter_dtype=False"):
            losses(model)


@pytest.mark.parametrize("home", ["host", "disk"])
def test_what_a_codec_has_written_is_thawed_as_it_was_read(home: str):
    """Over either home they are the same weights; an optimizer of torch's is refused for what it cannot step."""

    def losses(model: nn.Module, make: Make) -> list[float]:
        seen = train(model, make(model))
        model.requires_grad_(True)
        optimizer = make(model)
        return seen + train(model, optimizer) + train(model, optimizer)

    def build() -> nn.Module:
        model = zoo.small_llama().requires_grad_(False)
        model.lm_head.requires_grad_(True)
        return model

    with wrapped(build(), home=home, base_codec="nf4") as model:
        read = clones(model)
        got = losses(model, of_outsize)
    plain = build()
    plain.load_state_dict(read)
    assert got == losses(plain, of_torch)
    refused = pytest.raises(outsize.ConfigError, match="was encoded")
    with wrapped(build(), home="host", base_codec="nf4") as model, refused:
        losses(model, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
