"""Runs whose linear layers multiply in 8 bits, emulated: streamed equals resident with the same layers, bit for bit."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
import zoo
from outsize.accelerators import Devices
from outsize.config import Config
from outsize.errors import ConfigError, ModelError
from outsize.model import compiled, products
from outsize.model.build import quiet_torchao
from outsize.model.products import take_native, take_products
from outsize.model.split import split
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training.short_runs import verify
from support import make_run
from train.test_liger import KEPT
from wrapped.loops import ROOM, assert_equal, gradients, resident_backward, streamed_backward, wrapped

PARTS: dict[str, Any] = {"steps": 2, "microbatches": 4}
LORA: dict[str, Any] = {"r": 16, "target_modules": ("q_proj", "down_proj")}
RUNS: dict[str, dict[str, Any]] = {
    **KEPT,
    "rowwise, products kept": {
        "model": {"products": "fp8-rowwise"},
        "memory": {"activations": "keep-products"},
    },
    "disk, bf16": {"model": {"dtype": "bf16"}, "memory": {"home": "disk", "slots": 2}},
    "fp16": {"model": {"dtype": "fp16"}},
    "rounds": {"train": {**PARTS, "round_microbatches": 2}},
    "the model's own loss": {"train": {**PARTS, "loss": "model"}},
    "MLPs in parts": {"train": {**PARTS, "mlp_parts": 2}},
    "lora": {"model": {"dtype": "bf16"}, "train": {**PARTS, "method": "lora"}, "lora": LORA},
    "lora over 4 bits, products kept": {
        "train": {**PARTS, "method": "lora"},
        "lora": {**LORA, "base_codec": "nf4"},
        "memory": {"activations": "keep-products"},
    },
    "a frozen prefix": {"model": {"freeze": ("model.embed_tokens.*", "model.layers.0.*")}},
    "three workers": {"memory": {"device": "emulated:3"}},
    "three workers, bf16, products sent away": {
        "model": {"dtype": "bf16"},
        "memory": {"device": "emulated:3", "activations": "offload-products"},
    },
}


def fp8_run(directory: Path, name: str = "llama", **sections: Any) -> Config:
    model = {"products": "fp8", **sections.get("model", {})}
    return make_run(directory, name, **{"train": PARTS, **sections, "model": model})


def losses_of(config: Config) -> tuple[list[float], list[str]]:
    """Verify a run, and return its losses, and what it said of products."""
    said: list[str] = []
    result = verify(config, announce=said.append)
    assert (result.equal, result.differing) == (True, [])
    return list(result.loss_streamed), [line for line in said if line.startswith("products: ")]


@pytest.mark.parametrize("case", RUNS)
def test_streamed_is_resident_bit_for_bit(case: str, tmp_path: Path) -> None:
    losses_of(fp8_run(tmp_path, **RUNS[case]))


@pytest.mark.parametrize("name", ["llama_biased", "qwen3", "gemma2", "opt", "mixtral"])
def test_other_families(name: str, tmp_path: Path) -> None:
    losses_of(fp8_run(tmp_path, name))


@pytest.mark.parametrize("named", ["fp8", "fp8-rowwise"])
def test_compiled_blocks(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    said: list[str] = []
    config = fp8_run(tmp_path, model={"compile": "blocks", "products": named, "dtype": "bf16"})
    assert verify(config, announce=said.append).equal
    torch._dynamo.reset()
    assert not any("runs as it is" in line for line in said), said


def test_losses_are_those_of_the_plain_model_but_for_rounding(tmp_path: Path) -> None:
    plain, none = losses_of(fp8_run(tmp_path, model={"products": "native"}))
    found = {
        named: losses_of(fp8_run(tmp_path, model={"products": named})) for named in ("fp8", "fp8-rowwise")
    }
    for named, (losses, told) in found.items():
        assert losses == pytest.approx(plain, abs=1e-2)
        assert losses != plain
        line, error_line = told
        assert line.startswith(
            f"products: {named} in 21 of 21 linear layers of blocks; emulated, which is slow"
        )
        assert "random tokens with model.layers.1.self_attn.o_proj.weight are 3." in error_line
    assert not none
    assert found["fp8"][0] != found["fp8-rowwise"][0]


def test_layers_of_other_widths_and_adapters_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(zoo.SIZES, "intermediate_size", 40)
    model = zoo.build("llama")
    assert take_products(split(model), "fp8", Devices.parse("cpu")).startswith(
        "fp8 in 12 of 21 linear layers"
    )
    kinds = {name: type(module).__name__ for name, module in model.model.layers[0].named_modules()}
    assert (kinds["self_attn.q_proj"], kinds["mlp.down_proj"]) == ("Linear8", "Linear")
    assert type(model.lm_head) is nn.Linear
    take_native(model)
    assert repr(model) == repr(zoo.build("llama"))
    monkeypatch.undo()
    config = fp8_run(tmp_path, train={**PARTS, "method": "lora"}, lora=LORA)
    block = prepare(RunSpec.of(config, tmp_path), lambda _: None).split.modules[1]
    kinds = {name: type(module).__name__ for name, module in block.named_modules()}
    assert kinds["self_attn.q_proj.base_layer"] == kinds["self_attn.k_proj"] == "Linear8"
    assert kinds["self_attn.q_proj.lora_A.default"] == kinds["mlp.down_proj.lora_B.default"] == "Linear"


def test_a_backward_needs_what_it_needs_without(tmp_path: Path) -> None:
    """What casts work in is there for a moment, and a recompute does not end early."""
    fp8, native = (
        prepare(RunSpec.of(fp8_run(tmp_path, model={"products": named}), tmp_path), lambda _: None).measured
        for named in ("fp8", "native")
    )
    assert fp8.saved_bytes == native.saved_bytes
    assert fp8.forward_bytes[1] > native.forward_bytes[1]
    assert native.needed
    assert not fp8.needed


@pytest.mark.parametrize("named", ["fp8", "fp8-rowwise"])
def test_frozen_weights_pass_gradients_on_as_torchao_does(named: Any) -> None:
    """Without the product that makes the gradient of weights, and without the input that it would be made of."""
    torch.manual_seed(0)
    model = zoo.build("llama")
    take_products(split(model), named, Devices.parse("cpu"))
    layer = model.model.layers[0].mlp.gate_proj
    found, saved = [], []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    hidden = torch.randn(2, 5, 32, requires_grad=True)
    for trains in (True, False):
        layer.weight.requires_grad_(trains)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            made = layer(hidden)
        (gradient,) = torch.autograd.grad(made.square().sum(), hidden)
        found.append((made, gradient))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert saved == [(2, 5, 32), (32, 48), (32, 48)]


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"of 0 linear layers .* in blocks of GPT2LMHeadModel none has widths"
    ):
        prepare(RunSpec.of(fp8_run(tmp_path, "gpt2"), tmp_path), lambda _: None)


@pytest.mark.parametrize(
    ("device", "hip", "lacks"),
    [
        ("cuda:0,1", None, "sm_86 has none; Ada"),
        ("cuda:0", "7.0", "gfx90a has none; MI300"),
        ("xpu:0", None, "torchao has no products of fp8 on XPU"),
    ],
)
def test_devices_without_such_products_are_refused(
    device: str, hip: str | None, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = SimpleNamespace(
        get_device_capability=lambda index: ((8, 9), (8, 6))[index],
        get_device_properties=lambda index: SimpleNamespace(gcnArchName="gfx90a:sramecc+"),
    )
    monkeypatch.setattr(products, "module_of", lambda _: seen)
    monkeypatch.setattr(torch.version, "hip", hip)
    parts = split(zoo.build("llama"))
    with pytest.raises(ConfigError, match=f"products: fp8 on {device}: {lacks}.*; set native"):
        take_products(parts, "fp8", Devices.parse(device))
    if device == "cuda:0,1":
        assert take_products(parts, "fp8", Devices.parse("cuda:0")).endswith("layers of blocks")


def test_the_package_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "outsize.model.linear8", None)  # what imports it
    with pytest.raises(ConfigError, match=r"pip install 'outsize\[fp8\]'"):
        take_products(split(zoo.build("llama")), "fp8", Devices.parse("cpu"))


def test_libraries_of_torchao_for_other_machines_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torchao")
    with quiet_torchao():
        log.warning("Failed to load _C.so")
    log.warning("something else")
    assert caplog.messages == ["something else"]


@pytest.mark.parametrize("activations", ["recompute", "keep-products"])
def test_a_wrapped_model_has_the_gradients_of_a_resident_one(
    activations: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outsize")
    resident, model, batch = zoo.build("llama"), zoo.build("llama"), zoo.batch("llama", num_sequences=4)
    take_products(split(resident), "fp8", Devices.parse("cpu"))
    with wrapped(model, products="fp8", microbatches=2, activations=activations) as streamed:
        loss = streamed_backward(streamed, batch)
        assert torch.equal(loss, resident_backward(resident, batch, 2))
        assert_equal(gradients(streamed), gradients(resident))
    assert [line for line in caplog.messages if line.startswith("products: ")][1].endswith(
        "% off (root mean square)"
    )
    assert not any(type(module).__name__ == "Linear8" for module in model.modules())


def test_what_wrap_refuses() -> None:
    with pytest.raises(ConfigError, match="products='fp4': they are native or fp8 or fp8-rowwise"):
        outsize.wrap(zoo.build("llama"), products="fp4", **ROOM)  # type: ignore[arg-type]
    model = zoo.build("gpt2")
    with pytest.raises(ModelError, match="set native"):
        outsize.wrap(model, products="fp8", **ROOM)
