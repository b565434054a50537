"""Runs with kernels of the hub: streamed equals resident under the same ones.

The package `kernels` itself puts them in, from a repository on this machine (`tests/stand_in/hub_layers.py`). Its own
decorators mark what transformers would mark: that does so only beside versions of the package that it names.
"""

import json
import shutil
import sys
import threading
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import LocalLayerRepository, Mode, kernelize, register_kernel_mapping
from kernels import replace_kernel_forward_from_hub as mark_layer
from kernels import use_kernel_forward_from_hub as as_layer
from kernels import use_kernelized_func as uses
from transformers.integrations import hub_kernels as in_transformers
from transformers.models.llama import modeling_llama

import outsize
import zoo
from outsize.accelerators import Devices
from outsize.config import Config
from outsize.errors import ConfigError, ModelError
from outsize.model import liger
from outsize.model.compiled import take_hub
from outsize.model.liger import take_plain
from outsize.training.short_runs import verify
from support import make_run
from train.test_liger import PARTS, RUNS, measured_in
from wrapped.loops import ROOM, assert_equal, gradients, resident_backward, streamed_backward, wrapped

LAYERS = Path(__file__).parent.parent / "stand_in" / "hub_layers.py"
TOLD = "RMSNorm × 7, rotary_pos_emb × 1"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("repository")
    variant = repository / "build" / "torch-universal"
    variant.mkdir(parents=True)
    shutil.copy(LAYERS, variant / "__init__.py")
    told = {"name": "stand-in", "id": "stand_in", "version": 1, "license": "Apache-2.0", "python-depends": []}
    (variant / "metadata.json").write_text(json.dumps({**told, "backend": {"type": "cpu"}}))
    return repository


@pytest.fixture(autouse=True)
def marked(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kernel_layer_name", "kernel_condition"):
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm, name, None, raising=False)
    mark_layer(modeling_llama.LlamaRMSNorm, "RMSNorm")
    attention, rotate = modeling_llama.LlamaAttention, modeling_llama.apply_rotary_pos_emb
    marked_already = isinstance(rotate, torch.nn.Module)  # beside a version that transformers takes
    rotate = deepcopy(rotate) if marked_already else as_layer("rotary_pos_emb")(rotate)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)
    monkeypatch.setattr(attention, "__init__", attention.__init__)  # as it was, behind this test
    uses(rotate)(attention)
    map_to(repository, monkeypatch)


def map_to(repository: Path, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> None:
    """Have transformers map norms and rotations that train on ``device`` to ``repository``."""
    layers = {"RMSNorm": "LigerRMSNorm", "rotary_pos_emb": "Rotary"}
    mapping = {
        name: {device: {Mode.TRAINING: LocalLayerRepository(repository, layer_name=layer)}}
        for name, layer in layers.items()
    }
    monkeypatch.setattr(
        in_transformers,
        "register_kernel_mapping_transformers",
        lambda: register_kernel_mapping(mapping, inherit_mapping=False),
    )


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is to compute on an accelerator, and tensors lie on none."""
    monkeypatch.setattr(Devices, "own_processor", True)


def hub_run(directory: Path, name: str = "llama", **sections: Any) -> Config:
    return make_run(
        directory,
        name,
        **{"train": PARTS, **sections, "model": {"kernels": "hub", **sections.get("model", {})}},
    )


def losses_of(config: Config) -> list[float]:
    """Verify a run, and return its losses."""
    said: list[str] = []
    result = verify(config, announce=said.append)
    assert (result.equal, result.differing) == (True, [])
    assert (f"kernels: {TOLD}" in said) == (config.model.kernels == "hub")
    return list(result.loss_streamed)


@pytest.mark.parametrize(
    "case", ["recompute", "keep", "keep-products", "offload", "disk, bf16", "rounds", "lora over 4 bits"]
)
def test_streamed_is_resident_bit_for_bit(case: str, tmp_path: Path) -> None:
    losses_of(hub_run(tmp_path, **RUNS[case]))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("activations", ["keep", "keep-products"])
def test_a_trial_without_them_serves_a_run_with_them(
    activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liger, "_is_away", lambda _: "calibrate" not in threading.current_thread().name)
    losses_of(hub_run(tmp_path, memory={"activations": activations}))


def test_losses_are_those_of_the_plain_model_but_for_rounding(tmp_path: Path) -> None:
    hub, plain = (losses_of(make_run(tmp_path, train=PARTS, model={"kernels": k})) for k in ("hub", "none"))
    assert hub == pytest.approx(plain, abs=1e-5)


def test_modules_of_other_models_are_as_they_were_and_those_of_this_one_again() -> None:
    other, model, batch = zoo.build("llama"), zoo.build("llama"), zoo.batch("llama")
    before = model(**batch).logits
    assert take_hub(model, Devices.parse("cpu")) == TOLD
    assert not torch.equal(model(**batch).logits, before)
    assert torch.allclose(model(**batch).logits, before, atol=1e-6)
    assert not any("forward" in vars(module) for module in other.modules())
    take_plain(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.usefixtures("elsewhere")
def test_what_kernels_save_is_what_is_measured_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"device": "emulated:1"}
    trial = measured_in(tmp_path, hub_run(tmp_path, memory=memory))
    monkeypatch.setattr(Devices, "own_processor", False)
    plain = measured_in(tmp_path, make_run(tmp_path, train=PARTS, memory=memory))
    assert trial[0] < plain[0]
    assert trial == measured_in(tmp_path, hub_run(tmp_path, memory=memory))


def test_a_device_without_kernels_is_refused(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    map_to(repository, monkeypatch, "xpu")
    model = zoo.build("llama")
    with pytest.raises(ModelError, match="none that trains a layer of LlamaForCausalLM on cpu; set none"):
        take_hub(model, Devices.parse("emulated:2"))
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_kernel_that_cannot_be_loaded_is_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    map_to(tmp_path, monkeypatch)
    model = zoo.build("llama")
    with pytest.raises(ModelError, match=r"on cpu cannot be loaded: FileNotFoundError: .*set none"):
        take_hub(model, Devices.parse("cpu"))
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_package_must_be_there_in_a_version_that_transformers_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other_version() -> None:
        raise RuntimeError("register_kernel_mapping_transformers requires `kernels` to be installed")

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "kernels", None)
        with pytest.raises(ConfigError, match=r"pip install 'outsize\[hub\]'"):
            take_hub(zoo.build("llama"), Devices.parse("cpu"))
    monkeypatch.setattr(in_transformers, "register_kernel_mapping_transformers", other_version)
    with pytest.raises(
        ConfigError, match=r"transformers takes \(another one is installed\): pip install 'outsize\[hub\]'"
    ):
        take_hub(zoo.build("llama"), Devices.parse("cpu"))


def test_a_model_that_has_them_already_is_refused() -> None:
    model = zoo.build("llama")
    model._use_kernels = True  # as transformers says of a model after `use_kernels=True`
    for take in (lambda: take_hub(model, Devices.parse("cpu")), lambda: outsize.wrap(model, **ROOM)):
        with pytest.raises(ModelError, match="in this model already"):
            take()


def test_a_wrapped_model_has_the_gradients_of_a_resident_one_with_them() -> None:
    resident, model, batch = zoo.build("llama"), zoo.build("llama"), zoo.batch("llama", num_sequences=4)
    in_transformers.register_kernel_mapping_transformers()
    kernelize(resident, device="cpu", mode=Mode.TRAINING)
    with wrapped(model, kernels="hub", microbatches=2) as streamed:
        loss = streamed_backward(streamed, batch)
        assert torch.equal(loss, resident_backward(resident, batch, 2))
        assert_equal(gradients(streamed), gradients(resident))


@pytest.mark.parametrize("section", [{"model": {"compile": "blocks"}}, {"train": {"mlp_parts": 2}}])
def test_what_does_not_go_with_them(section: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.kernels: hub goes with"):
        hub_run(tmp_path, **section)
