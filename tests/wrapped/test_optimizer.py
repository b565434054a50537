"""Steps of `outsize.AdamW` and of torch's optimizers, over the home of a wrapped model."""

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import outsize
import zoo
from outsize.errors import ConfigError, NonFiniteError
from runtime.oddities import VOCAB, Sparse, batch
from wrapped.loops import assert_equal, gradients, resident_backward, streamed_backward, train, wrapped

HOMES = ["host", "disk"]
BATCHES = [zoo.batch("llama", seed=step, num_sequences=4) for step in range(4)]
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-7}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in dict(model.state_dict()).items()}


def torch_clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)


def our_clip(model: nn.Module) -> None:
    outsize.clip_grad_norm_(model, 0.3)


def resident(count: int, **settings: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = zoo.build("llama")
    clip = {"clip": torch_clip} if settings.pop("clip", False) else {}
    losses = train(
        model,
        BATCHES,
        lambda m: torch.optim.AdamW(m.parameters(), **SETTINGS, fused=True),
        lambda m, b: resident_backward(m, b, count),
        **clip,
    )
    return losses, weights(model)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("home", HOMES)
def test_several_steps_end_where_torch_s_fused_adamw_ends(home: str, count: int, clip: bool):
    want_losses, want = resident(count, clip=clip)
    with wrapped(zoo.build("llama"), home=home, microbatches=count, slots=2) as model:
        losses = train(
            model,
            BATCHES,
            lambda m: outsize.AdamW(m, **SETTINGS),
            streamed_backward,
            **({"clip": our_clip} if clip else {}),
        )
        assert losses == want_losses
        assert_equal(weights(model), want)


@pytest.mark.parametrize("clip", [torch_clip, our_clip])
@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
    ],
)
def test_torch_s_optimizers_step_where_the_bytes_are(make, clip):
    plain = zoo.build("llama")
    want = train(plain, BATCHES, make, lambda m, b: resident_backward(m, b, 2), torch_clip)
    with wrapped(zoo.build("llama"), microbatches=2) as model:
        assert train(model, BATCHES, make, streamed_backward, clip) == want
        assert_equal(weights(model), weights(plain))


class MuonBesideAdamW:
    """Two optimizers of torch that share the parameters of a model, as torch's page on Muon has them."""

    def __init__(self, model: nn.Module) -> None:
        matrices = {n for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n}
        named = dict(model.named_parameters())
        self.both = (
            torch.optim.Muon([p for n, p in named.items() if n in matrices], lr=0.02),
            torch.optim.AdamW([p for n, p in named.items() if n not in matrices], lr=1e-2),
        )

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.both:
            optimizer.zero_grad()


@pytest.mark.parametrize("count", [1, 2])
def test_two_of_torch_s_optimizers_share_a_model(count):
    plain = zoo.build("llama")
    want = train(plain, BATCHES, MuonBesideAdamW, lambda m, b: resident_backward(m, b, count), torch_clip)
    with wrapped(zoo.build("llama"), microbatches=count) as model:
        assert train(model, BATCHES, MuonBesideAdamW, streamed_backward, torch_clip) == want
        assert_equal(weights(model), weights(plain))


def test_a_disk_home_refuses_other_optimizers():
    with wrapped(zoo.build("llama"), home="disk") as model:
        streamed_backward(model, BATCHES[0])
        for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adafactor):
            with pytest.raises(ConfigError, match=r"rests on disk.*outsize\.AdamW"):
                make(model.parameters(), lr=0.1).step()
        others = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(1))])
        with pytest.raises(ConfigError, match="parameters of this model alone"):
            others.step()
        with pytest.raises(ConfigError, match="differentiable"):
            torch.optim.AdamW(model.parameters(), differentiable=True).step()
        scaler, own = torch.amp.GradScaler("cpu"), torch.optim.AdamW(model.parameters(), fused=True)
        scaler.scale(torch.ones(1))
        with pytest.raises(ConfigError, match=r"scaler\.unscale_"):
            scaler.step(own)


@pytest.mark.parametrize("way", ["plain", "closure", "scaler"])
def test_adamw_of_torch_steps_a_disk_home_as_fused(way: str):
    """With a schedule, and its state saved, loaded and looked at."""

    def trained(model: nn.Module) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        scaler, found = torch.amp.GradScaler("cpu", init_scale=1024.0), []
        optimizer.register_step_post_hook(lambda *_: found.append(model.lm_head.weight.detach().clone()))

        def backward() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(**BATCHES[0]).loss
            (scaler.scale(loss) if way == "scaler" else loss).backward()
            return loss.detach()

        for number in range(3):
            if way == "closure":
                found.append(optimizer.step(backward))
            else:
                found.append(backward())
                if way == "scaler":
                    model.lm_head.weight.grad[0, 0] *= float("inf") if number == 1 else 1
                    scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
            schedule.step()
            if not number:
                then = copy.deepcopy(optimizer.state_dict())
            elif number == 1:
                optimizer.load_state_dict(then)
        state = optimizer.state_dict()["state"].values()
        moments = [values[name] for values in state for name in ("step", "exp_avg", "exp_avg_sq")]
        return [*found, *moments, *model.state_dict().values()]

    want = trained(zoo.build("llama"))
    with wrapped(zoo.build("llama"), home="disk") as model:
        got = trained(model)
        assert len(got) == len(want)
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_torch_s_clipping_reaches_gradients_on_disk():
    want_losses, want = resident(2, clip=True)
    with wrapped(zoo.build("llama"), home="disk", microbatches=2) as model:
        losses = train(model, BATCHES, lambda m: outsize.AdamW(m, **SETTINGS), streamed_backward, torch_clip)
        assert losses == want_losses
        assert_equal(weights(model), want)


@pytest.mark.parametrize("home", HOMES)
def test_clipping_some_of_the_gradients_clips_those(home: str):
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        resident_backward(model, BATCHES[0], 1)
        nn.utils.clip_grad_norm_(list(model.parameters())[:3], 1e-3)
        nn.utils.clip_grad_norm_(list(model.parameters())[2:5], 1e-4)
        optimizer.step()
        return weights(model)

    plain = zoo.build("llama")
    want = run(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4, fused=True))
    with wrapped(zoo.build("llama"), home=home) as model:
        assert_equal(run(model, outsize.AdamW(model, lr=1e-2, eps=1e-4)), want)


def test_the_first_optimizer_may_come_after_a_backward():
    _, want = resident(1)
    with wrapped(zoo.build("llama")) as model:
        streamed_backward(model, BATCHES[0])
        optimizer = outsize.AdamW(model, **SETTINGS)
        optimizer.step()
        optimizer.zero_grad()
        for one in BATCHES[1:]:
            streamed_backward(model, one)
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(weights(model), want)


def test_groups_without_weight_decay():
    def groups(model: nn.Module) -> list[dict[str, object]]:
        named = list(model.named_parameters())
        return [
            {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.3},
            {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
        ]

    plain = zoo.build("llama")
    make = lambda m: torch.optim.AdamW(groups(m), lr=1e-2, fused=True)  # noqa: E731
    train(plain, BATCHES, make, lambda m, b: resident_backward(m, b, 1))
    with wrapped(zoo.build("llama")) as model:
        train(model, BATCHES, lambda m: outsize.AdamW(m, lr=1e-2, groups=groups(m)), streamed_backward)
        assert_equal(weights(model), weights(plain))
        with pytest.raises(ConfigError, match="one lr"):
            outsize.AdamW(model, groups=[{**g, "lr": i} for i, g in enumerate(groups(model))])
        with pytest.raises(ConfigError, match=r"one weight_decay besides 0"):
            outsize.AdamW(model, groups=[{**g, "weight_decay": 0.1 + i} for i, g in enumerate(groups(model))])
        with pytest.raises(ConfigError, match="not those of this wrapped model"):
            outsize.AdamW(model, groups=[{"params": list(plain.parameters())}])


@pytest.mark.parametrize("home", HOMES)
def test_a_learning_rate_schedule_and_a_resume_from_state_dicts(home: str):
    def run(first: int, last: int, state: tuple[dict, dict] | None) -> tuple[dict, dict]:
        with wrapped(zoo.build("llama"), home=home) as model:
            optimizer = outsize.AdamW(model, **SETTINGS)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            for _ in range(first):
                schedule.step()
            if state is not None:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
            for one in BATCHES[first:last]:
                streamed_backward(model, one)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            return weights(model), copy.deepcopy(optimizer.state_dict())

    half = run(0, 2, None)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before"):
        resumed = run(2, 4, half)
    want = run(0, 4, None)
    assert_equal(resumed[0], want[0])
    assert resumed[1]["state"][3]["step"] == 4
    assert torch.equal(resumed[1]["state"][3]["exp_avg_sq"], want[1]["state"][3]["exp_avg_sq"])


@pytest.mark.parametrize("home", HOMES)
def test_an_expert_without_tokens_neither_shifts_nor_blocks_its_neighbours(home: str, caplog):
    """It is left alone, moments, decay and all, and said to have had no gradient in the step."""
    batches = [batch(seed=step) for step in range(3)]
    for step, one in enumerate(batches):
        one["input_ids"] = one["input_ids"] % (3 + 3 * step)
    torch.manual_seed(1)
    plain = Sparse()
    train(
        plain,
        batches,
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
        lambda m, b: resident_backward(m, b, 2, causal=False),
    )
    torch.manual_seed(1)
    with wrapped(Sparse(), home=home, microbatches=2) as model, caplog.at_level(logging.WARNING):
        optimizer = outsize.AdamW(model, lr=1e-2)
        for one in batches:
            streamed_backward(model, one)
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(weights(model), weights(plain))
        idle = f"blocks.0.experts.{VOCAB - 1}.weight"
        assert idle in optimizer.without_gradient
        assert "no gradient in a whole step" in caplog.text


def test_clipping_returns_the_norm_and_refuses_what_is_not_finite():
    plain = zoo.build("llama")
    resident_backward(plain, BATCHES[0], 1)
    want = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    for home in HOMES:
        with wrapped(zoo.build("llama"), home=home) as model:
            streamed_backward(model, BATCHES[0])
            assert torch.equal(outsize.clip_grad_norm_(model, float("inf")), want)
            if home == "host":
                assert torch.equal(outsize.clip_grad_norm_(model, 0.5), want)
                assert_equal(gradients(model), gradients(plain))
                next(model.parameters()).grad.fill_(float("nan"))
                with pytest.raises(NonFiniteError, match="no gradient was changed"):
                    outsize.clip_grad_norm_(model, 0.5, error_if_nonfinite=True)


def test_a_backward_after_clipping_adds_to_clipped_gradients():
    plain = zoo.build("llama")
    resident_backward(plain, BATCHES[0], 1)
    torch_clip(plain)
    resident_backward(plain, BATCHES[1], 1)
    with wrapped(zoo.build("llama")) as model:
        outsize.AdamW(model)
        streamed_backward(model, BATCHES[0])
        our_clip(model)
        streamed_backward(model, BATCHES[1])
        assert_equal(gradients(model), gradients(plain))


@pytest.mark.parametrize("home", HOMES)
def test_half_precision_steps_exact_fp32_masters(home: str):
    """Weights that are loaded later become the masters: the next step starts from them."""
    other = zoo.build("llama", seed=7, dtype=torch.bfloat16).state_dict()

    def run(loaded_late: bool) -> dict[str, torch.Tensor]:
        with wrapped(zoo.build("llama", dtype=torch.bfloat16), home=home, microbatches=2) as model:
            if not loaded_late:
                model.load_state_dict(other)
            optimizer = outsize.AdamW(model, lr=1e-4)
            if loaded_late:
                model.load_state_dict(other)
            for one in BATCHES:
                streamed_backward(model, one)
                optimizer.step()
                optimizer.zero_grad()
            return weights(model)

    late = run(True)
    assert_equal(late, run(False))
    assert any(not torch.equal(late[name], other[name]) for name in other)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(
    "kind",
    [torch.optim.AdamW, partial(torch.optim.AdamW, fused=True), partial(torch.optim.SGD, momentum=0.9)],
    ids=["AdamW", "fused AdamW", "SGD"],
)
def test_optimizers_of_torch_step_half_precision_weights_as_in_a_plain_loop(
    kind: Callable[..., torch.optim.Optimizer], to_none: bool
):
    """One pass a step, and another one that adds to its gradients where they are kept and not zeroed."""

    def run(model: nn.Module, backward: Callable[..., object]) -> dict[str, torch.Tensor]:
        optimizer = kind(model.parameters(), lr=0.01)
        for one in BATCHES:
            backward(model, one)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        return weights(model)

    plain = zoo.build("llama", dtype=torch.bfloat16)
    want = run(plain, lambda model, one: resident_backward(model, one, 1))
    with wrapped(zoo.build("llama", dtype=torch.bfloat16)) as model:
        assert_equal(run(model, streamed_backward), want)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("home", HOMES)
def test_a_half_precision_run_goes_on_from_its_masters(home: str, order: str):
    """Weights rounded to bf16 do not say what their masters were; the optimizer's state does."""

    def go(state: tuple | None, steps: range) -> tuple[dict[str, torch.Tensor], dict]:
        with wrapped(zoo.build("llama", dtype=torch.bfloat16), home=home, microbatches=2) as model:
            optimizer = outsize.AdamW(model, lr=1e-3)
            loads = [lambda: model.load_state_dict(state[0]), lambda: optimizer.load_state_dict(state[1])]
            for load in (loads if order == "model first" else loads[::-1]) if state else ():
                load()
            for step in steps:
                streamed_backward(model, BATCHES[step])
                optimizer.step()
                optimizer.zero_grad()
            return weights(model), copy.deepcopy(optimizer.state_dict())

    whole, state = go(None, range(4))
    resumed, its_state = go(go(None, range(2)), range(2, 4))
    assert_equal(resumed, whole)
    for number, values in state["state"].items():
        assert torch.equal(its_state["state"][number]["master"], values["master"])


@pytest.mark.parametrize("home", ["host", "disk"])
def test_state_of_what_is_frozen_is_refused_by_name(home: str):
    model = zoo.build("llama")
    model.model.layers[0].requires_grad_(False)
    with wrapped(model, home=home) as model:
        optimizer = outsize.AdamW(model)
        frozen = model.model.layers[0].mlp.up_proj.weight
        moments = {name: torch.zeros(tuple(frozen.shape)) for name in ("exp_avg", "exp_avg_sq")}
        with pytest.raises(ConfigError, match=r"up_proj.weight is frozen, and has no state"):
            optimizer.state[frozen] = {"step": torch.tensor(1.0), **moments}
        optimizer.state.pop(frozen, None)
        assert not optimizer.state[frozen]
