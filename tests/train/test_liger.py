"""Runs with Liger's kernels: streamed equals resident under the same ones, and the run's own model alone has them.

A stand-in takes the place of the package (`tests/stand_in`), which saves and overwrites what Liger does.
"""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

import outsize
import zoo
from outsize.accelerators import Devices
from outsize.config import Config
from outsize.errors import ConfigError, ModelError
from outsize.model import liger
from outsize.model.liger import take_liger, take_plain
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training.short_runs import verify
from support import make_run
from wrapped.loops import ROOM, assert_equal, gradients, resident_backward, streamed_backward, wrapped

STAND_IN = Path(__file__).parent.parent / "stand_in"
LIGER = {"kernels": "liger"}
PARTS: dict[str, Any] = {"steps": 2, "microbatches": 4}
LORA: dict[str, Any] = {"r": 2, "target_modules": ("q_proj", "gate_proj")}
KEPT: dict[str, dict[str, Any]] = {
    **{
        kept: {"memory": {"activations": kept}}
        for kept in ("recompute", "keep", "keep-attention", "keep-products")
    },
    **{
        kept: {"memory": {"activations": kept, "device": "emulated:1"}}
        for kept in ("offload", "offload-products")
    },
}
RUNS: dict[str, dict[str, Any]] = {
    **KEPT,
    "disk, bf16": {"model": {"dtype": "bf16"}, "memory": {"home": "disk", "slots": 2}},
    "rounds": {"train": {**PARTS, "round_microbatches": 2}},
    "the model's own loss": {"train": {**PARTS, "loss": "model"}},
    "products in 8 bits": {"model": {"products": "fp8"}},
    "lora over 4 bits": {"train": {**PARTS, "method": "lora"}, "lora": {**LORA, "base_codec": "nf4"}},
    "a frozen prefix": {"model": {"freeze": ("model.embed_tokens.*", "model.layers.0.*")}},
    "three workers": {"memory": {"device": "emulated:3"}},
}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    forget()
    yield
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is to compute on an accelerator, and tensors lie on none."""
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(Devices, "own_processor", True)


def liger_run(directory: Path, name: str = "llama", **sections: Any) -> Config:
    return make_run(
        directory, name, **{"train": PARTS, **sections, "model": {**LIGER, **sections.get("model", {})}}
    )


def losses_of(config: Config) -> list[float]:
    """Verify a run, and return its losses."""
    said: list[str] = []
    result = verify(config, announce=said.append)
    assert (result.equal, result.differing) == (True, [])
    assert any(line.startswith("kernels: ") == (config.model.kernels == "liger") for line in said)
    return list(result.loss_streamed)


@pytest.mark.parametrize("case", RUNS)
def test_streamed_is_resident_bit_for_bit(case: str, tmp_path: Path) -> None:
    losses_of(liger_run(tmp_path, **RUNS[case]))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("activations", ["recompute", "keep", "keep-products"])
def test_a_trial_without_them_serves_a_run_with_them(
    activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liger, "_is_away", lambda _: "calibrate" not in threading.current_thread().name)
    losses_of(liger_run(tmp_path, memory={"activations": activations}))


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_norms_of_queries_and_keys_and_experts_that_stay_as_they_are(name: str, tmp_path: Path) -> None:
    losses_of(liger_run(tmp_path, name))


def test_losses_are_those_of_the_plain_model_but_for_rounding(tmp_path: Path) -> None:
    fused, plain = (
        losses_of(make_run(tmp_path, train=PARTS, model={"kernels": k})) for k in ("liger", "none")
    )
    assert fused == pytest.approx(plain, abs=1e-5)


def test_the_instance_alone_has_them() -> None:
    before, other, model = dict(vars(modeling_llama)), zoo.build("llama"), zoo.build("llama")
    told = take_liger(model, Devices.parse("cpu"))
    assert told == "LigerRMSNorm × 7, LigerSwiGLUMLP × 3, liger_rotary_pos_emb × 3"
    assert all(before[name] is value for name, value in vars(modeling_llama).items())
    assert not any("forward" in vars(module) for module in other.modules())
    batch = zoo.batch("llama")
    with torch.no_grad():
        fused, plain = (one(**batch).logits for one in (model, other))
        take_plain(model)
        again = model(**batch).logits
    assert torch.allclose(fused, plain, atol=1e-6)
    assert torch.equal(again, plain)
    assert repr(model) == repr(other)


@pytest.mark.usefixtures("elsewhere")
def test_the_model_runs_its_own_code_where_triton_does_not_compute() -> None:
    model, other, batch = zoo.build("llama"), zoo.build("llama"), zoo.batch("llama")
    take_liger(model, Devices.parse("cuda"))
    losses = [one(**batch).loss for one in (model, other)]
    assert torch.equal(*losses)
    sum(losses).backward()
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-7), name


def measured_in(directory: Path, config: Config) -> tuple[Any, Any]:
    found = prepare(RunSpec.of(config, directory), lambda _: None).measured
    return found.saved_bytes[1], found.needed[1]


def test_what_kernels_save_is_what_is_measured_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"device": "emulated:1"}
    fused, plain = (
        measured_in(tmp_path, liger_run(tmp_path, memory=memory)),
        measured_in(tmp_path, make_run(tmp_path, train=PARTS, memory=memory)),
    )
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(Devices, "own_processor", True)
    assert measured_in(tmp_path, liger_run(tmp_path, memory=memory)) == fused
    assert 0 < fused[0] < plain[0]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"model": {"compile": "blocks"}}, "model.compile: off"),
        ({"train": {"mlp_parts": 2}}, "train.mlp_parts: 1"),
    ],
)
def test_what_does_not_go_with_them(changes: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"model.kernels: liger goes with {wanted}; or set it none"):
        liger_run(tmp_path, **changes)


def test_a_model_that_liger_does_not_know_is_refused_with_those_that_it_does(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a model of type gpt2, but for llama, mixtral, qwen3; set none"):
        prepare(RunSpec.of(liger_run(tmp_path, "gpt2"), tmp_path), lambda _: None)


def test_a_model_that_liger_fails_at_is_refused_and_nothing_is_left() -> None:
    before, model = dict(vars(modeling_llama)), zoo.build("llama")
    del model.model.layers[1].mlp
    with pytest.raises(
        ModelError, match=r"Liger fails at LlamaForCausalLM: AttributeError: .*try another version"
    ):
        take_liger(model, Devices.parse("cpu"))
    assert all(before[name] is value for name, value in vars(modeling_llama).items())
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_cpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="computes on accelerators, not on cpu"):
        prepare(RunSpec.of(liger_run(tmp_path), tmp_path), lambda _: None)


def test_the_package_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"pip install 'outsize\[liger\]'"):
        take_liger(zoo.build("llama"), Devices.parse("cpu"))


def test_a_model_that_has_them_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_kernel.transformers import monkey_patch

    patched, other = zoo.build("llama"), zoo.build("llama")
    for name in ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb"):
        monkeypatch.setattr(
            modeling_llama, name, getattr(modeling_llama, name)
        )  # as it was, behind this test
    monkey_patch._apply_liger_kernel_to_instance(patched, fused_linear_cross_entropy=False)
    for model in (patched, other):
        with pytest.raises(ModelError, match="in this model already"):
            take_liger(model, Devices.parse("cpu"))
        with pytest.raises(ModelError, match="kernels='liger' of a call"):
            outsize.wrap(model, **ROOM)


@pytest.mark.parametrize("activations", ["recompute", "keep-products"])
def test_a_wrapped_model_has_the_gradients_of_a_resident_one_with_them(activations: str) -> None:
    resident, model, batch = zoo.build("llama"), zoo.build("llama"), zoo.batch("llama", num_sequences=4)
    take_liger(resident, Devices.parse("cpu"))
    with wrapped(model, kernels="liger", microbatches=2, activations=activations) as streamed:
        loss = streamed_backward(streamed, batch)
        assert torch.equal(loss, resident_backward(resident, batch, 2))
        assert_equal(gradients(streamed), gradients(resident))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("named", [{"kernels": "own"}, {"kernels": "liger", "mlp_parts": 2}])
def test_what_wrap_refuses(named: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="kernels"):
        outsize.wrap(zoo.build("llama"), **named, **ROOM)
