"""What a caller sets of layers between a forward and its backward: as in the plain model, or refused."""

import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import outsize
import zoo
from outsize.errors import OutsizeError
from outsize.runtime.forward import unit_visit
from outsize.wrapped.module import runner_of

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


@pytest.mark.parametrize(
    "name", ["eval", "chance", "factor", "other adapter", "no adapter", "factor of adapters"]
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_is_recomputed_is_refused(name: str, microbatches: int):
    wrapped = outsize.wrap(
        _model(name), home="host", device="emulated:1", device_memory="64MiB", activations="recompute",
        microbatches=microbatches,
    )  # fmt: skip
    try:
        loss = wrapped(input_ids=IDS, labels=IDS).loss
        _set(wrapped, name)
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
