"""What a caller sets of layers between a forward and its backward: as in the plain model, or refused."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.llama import modeling_llama

import outsize
import zoo
from outsize.errors import OutsizeError
from outsize.runtime.forward import unit_visit
from outsize.wrapped import batching
from outsize.wrapped.module import runner_of
from wrapped.loops import assert_equal, gradients, wrapped
from wrapped.test_side_effects import SETTINGS, Block, Net, X, square

IDS = torch.arange(48).view(4, 12) % 90
REFUSED = "between this forward and its backward"


def _model(name: str) -> nn.Module:
    model = zoo.build("gpt2" if name in ("eval", "chance") else "llama").train()
    if name in ("other adapter", "no adapter", "factor of adapters"):
        with warnings.catch_warnings():  # of PEFT's, about a name of transformers
            warnings.simplefilter("ignore", FutureWarning)
            model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return model


def _set(model: Any, name: str) -> None:
    if name == "eval":
        model.eval()
    elif name == "other adapter":
        model.set_adapter("other")
    elif name == "no adapter":
        model.base_model.disable_adapter_layers()
    for module in model.modules():
        if name == "chance" and isinstance(module, nn.Dropout):
            module.p = 0.7
        elif name == "factor" and hasattr(module, "q_proj"):
            module.scaling *= 2
        elif name == "factor of adapters" and hasattr(module, "scale_layer"):
            module.scale_layer(2.0)
        elif name == "switch" and hasattr(module, "q_proj"):
            module.is_causal = False
        elif name == "hook" and hasattr(module, "q_proj"):
            module.register_forward_hook(lambda module, args, output: None)
        elif name == "forward of a module" and hasattr(module, "act_fn"):
            module.forward = torch.zeros_like
    if name == "config":
        model.config._attn_implementation = "eager"


# Of these, tests put back what was there.
GLOBALS = {
    "function of torch": (torch, "matmul"),
    "function of torch.nn": (nn.functional, "silu"),
    "method of tensors": (torch.Tensor, "view"),
    "function of a file": (modeling_llama, "rotate_half"),
    "forward of a class": (modeling_llama.LlamaMLP, "forward"),
}


@pytest.mark.parametrize(
    "name",
    [
        "eval", "chance", "factor", "other adapter", "no adapter", "factor of adapters", "switch", "hook", "config",
        "forward of a module", *GLOBALS,
    ],
)  # fmt: skip
@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_is_recomputed_is_refused(name: str, microbatches: int, monkeypatch: pytest.MonkeyPatch):
    wrapped = outsize.wrap(
        _model(name), home="host", device="emulated:1", device_memory="64MiB", activations="recompute",
        microbatches=microbatches,
    )  # fmt: skip
    try:
        loss = wrapped(input_ids=IDS, labels=IDS).loss
        _set(wrapped, name)
        with monkeypatch.context() as patches:
            if name in GLOBALS:
                own = getattr(*GLOBALS[name])
                patches.setattr(*GLOBALS[name], lambda *args, **kwargs: own(*args, **kwargs))
            with pytest.raises(OutsizeError, match=REFUSED):
                loss.backward()
    finally:
        runner_of(wrapped).close()


def test_modes_that_are_as_before_go_on():
    wrapped = outsize.wrap(
        _model("eval"), home="host", device="emulated:1", device_memory="64MiB", activations="recompute"
    )
    try:
        loss = wrapped(input_ids=IDS, labels=IDS).loss
        wrapped.eval()
        wrapped.train()
        loss.backward()
    finally:
        runner_of(wrapped).close()


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_hook_on_what_a_layer_returns_is_told_to_have_no_effect(
    activations: str, caplog: pytest.LogCaptureFixture
):
    unit_visit._say_hooked.cache_clear()
    model = zoo.build("llama").train()
    model.model.layers[0].register_forward_hook(lambda module, args, out: out.retain_grad())
    wrapped = outsize.wrap(
        model, home="host", device="emulated:1", device_memory="64MiB", activations=activations
    )
    try:
        for _ in range(2):
            wrapped(input_ids=IDS, labels=IDS).loss.backward()
        assert caplog.text.count("puts on what a layer returns has no effect") == 1
    finally:
        runner_of(wrapped).close()


KEPT = pytest.mark.parametrize("activations", ["keep", "recompute"])


def _trained(
    activations: str | None, forward: Callable[[Any], Tensor], around: Callable[[], Any] = nullcontext
) -> dict[str, Tensor]:
    """Return the gradients of a model, wrapped where ``activations`` are given, with ``around`` its backward."""
    model = zoo.build("llama").train()
    if activations is None:
        loss = forward(model)
        with around():
            loss.backward()
        return gradients(model)
    with wrapped(model, home="host", device="emulated:1", activations=activations):
        loss = forward(model)
        with around():
            loss.backward()
        return gradients(model)


def _loss(model: Any) -> Tensor:
    return model(input_ids=IDS, labels=IDS).loss


def _in_bf16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def _loss_in_bf16(model: Any) -> Tensor:
    with _in_bf16():
        return _loss(model)


def _loss_by_plain_attention(model: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return _loss(model)


def _loss_under_a_hook(model: Any) -> Tensor:
    hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 2)
    loss = _loss(model)
    hook.remove()
    return loss


@KEPT
@pytest.mark.parametrize(
    ("forward", "around"),
    [
        (_loss, _in_bf16),
        (_loss_in_bf16, nullcontext),
        (_loss_in_bf16, _in_bf16),
        (_loss_by_plain_attention, nullcontext),
        (_loss, lambda: sdpa_kernel(SDPBackend.MATH)),
        (_loss_under_a_hook, nullcontext),
    ],
)
def test_what_is_on_around_one_of_both_counts_as_in_the_plain_model(
    activations: str, forward: Callable[[Any], Tensor], around: Callable[[], Any]
):
    assert_equal(_trained(activations, forward, around), _trained(None, forward, around))


@KEPT
def test_backward_hooks_in_layers_run_as_often_as_in_a_plain_model(activations: str):
    def note_into(seen: list[Tensor], model: Any) -> None:
        layer = model.model.layers[1].mlp
        layer.register_full_backward_hook(lambda layer, into, out: seen.append(out[0].clone()))
        _loss(model).backward()

    want, got = list[Tensor](), list[Tensor]()
    note_into(want, zoo.build("llama"))
    with wrapped(zoo.build("llama"), home="host", device="emulated:1", activations=activations) as model:
        note_into(got, model)
    assert len(got) == len(want) == 1
    assert torch.equal(got[0], want[0])


@pytest.mark.parametrize(("dtype", "times"), [(torch.bfloat16, 1), (torch.float32, 0)])
def test_that_sums_of_half_precision_are_fp32_is_said(
    dtype: torch.dtype, times: int, caplog: pytest.LogCaptureFixture
):
    batching.say_once.cache_clear()
    with wrapped(zoo.build("llama").to(dtype), home="host") as model:
        for _ in range(3):
            _loss(model).backward()
    assert caplog.text.count("of several backwards are summed in fp32") == times


SEEN: list[bool] = []


class _Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        SEEN.append(True)
        return gradient


def test_what_backwards_set_themselves_is_set_by_nobody_else():
    class Noted(Block):
        def forward(self, x: Tensor) -> Tensor:
            return _Noting.apply(super().forward(x))  # type: ignore[no-untyped-call]

    with wrapped(Net(Noted), **SETTINGS[1]) as model:
        (square(model(X)) + square(model(X))).backward()
        SEEN.clear()


def test_what_forwards_set_themselves_is_set_by_nobody_else():
    class Counting(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    with wrapped(Net(Counting), **SETTINGS[1]) as model:
        first = square(model(X))
        second = square(model(X))
        (first + second).backward()
        assert [layer.calls for layer in model.layers] == [2] * 5  # type: ignore[union-attr]


class Gained(Block):
    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.change(x)


def _forward_of_its_own(layer: Any) -> None:
    layer.forward = lambda x: x + 2 * layer.change(x)


@pytest.mark.parametrize(
    ("name", "put"), [("gain", lambda layer: setattr(layer, "gain", 3.0)), ("forward", _forward_of_its_own)]
)
def test_what_is_taken_away_again_before_the_backward_is_seen(name: str, put: Callable[[Any], None]):
    with wrapped(Net(Gained), **SETTINGS[1]) as model:
        square(model(X)).backward()
        put(model.layers[1])
        loss = square(model(X))
        delattr(model.layers[1], name)
        with pytest.raises(OutsizeError, match=REFUSED):
            loss.backward()


def test_what_layers_do_not_read_may_be_made_between(monkeypatch: pytest.MonkeyPatch):
    """Functions of their file, as a notebook's next cell is."""
    with wrapped(Net(Gained), **SETTINGS[1]) as model:
        square(model(X)).backward()
        loss = square(model(X))
        monkeypatch.setitem(globals(), "my_loss", lambda output: output.sum())
        loss.backward()


def test_the_precision_of_products_may_be_set_by_torchs_newer_names(monkeypatch: pytest.MonkeyPatch):

    def refuses() -> str:
        raise RuntimeError("a mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuses)
    with wrapped(Net(Gained), **SETTINGS[1]) as model:
        square(model(X)).backward()


def test_what_a_model_returns_may_be_detached_in_place():
    with wrapped(Net(), **SETTINGS[1]) as model:
        output = model(X)
        assert not output.detach_().requires_grad
