"""Runs of Muon: streamed is ``torch.optim.Muon`` beside ``torch.optim.AdamW`` resident, and resumed is whole."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outsize.accelerators import Devices
from outsize.config import load_config
from outsize.errors import ConfigError
from outsize.optim.optimizer_names import muon_matrices
from outsize.session.job.optimizer_layout import layout_for
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training.forecast import foresee, plan
from outsize.training.run import train
from outsize.training.short_runs import verify
from support import assert_same_end, end_of, in_dir, make_run
from train.test_activation_choice import on_a_link
from train.test_states import BF16, DISK, EMULATED, RING, interrupted

NAME: dict[str, Any] = {"name": "muon", "lr": 1e-3}
SPLIT: dict[str, Any] = {**NAME, "masters": "split"}
THERE: dict[str, Any] = {**NAME, "ns_on": "device"}
RATES: dict[str, Any] = {
    "layer_decay": 0.7,
    "groups": [{"params": ["*q_proj*"], "lr": 0.3}, {"params": ["*.0.mlp.up*"], "muon": False}],
}
# What is trained, how, and where; each is exact.
EXACT: dict[str, dict[str, Any]] = {
    "fp32, clipped, by layer and group": {"optimizer": {**NAME, **RATES, "max_grad_norm": 0.05}},
    "fp16": {"model": {"dtype": "fp16"}, "optimizer": {**NAME, "nesterov": False, "momentum": 0.8}},
    "bf16, separate masters on disk": {
        "model": BF16,
        "optimizer": {**NAME, "masters": "separate", "adjust_lr_fn": "original", "ns_steps": 3},
        "memory": DISK,
    },
    "bf16, by unit, beside a device": {"model": BF16, "optimizer": {**SPLIT, **RING}, "memory": EMULATED},
    "bf16 on disk below another device": {
        "model": BF16,
        "optimizer": {**SPLIT, "weight_decay": 0.5},
        "memory": {**DISK, **EMULATED},
    },
    "gradients in bf16, in rounds": {
        "model": BF16,
        "optimizer": {**SPLIT, "gradients": "bf16"},
    },
    "in rounds": {
        "optimizer": NAME,
        "train": {"microbatches": 4, "round_microbatches": 2},
    },
    "two workers over the disk": {"optimizer": NAME, "memory": {**DISK, "device": "emulated:2"}},
    "adapters": {"train": {"method": "lora"}, "optimizer": NAME},
    "products on the processor as a device": {
        "optimizer": {**THERE, **RATES, "nesterov": False, "max_grad_norm": 0.05}
    },
    "products on a device, clipped, in rounds": {
        "model": BF16,
        "optimizer": {**SPLIT, **THERE, "gradients": "bf16", "max_grad_norm": 0.05},
        "memory": EMULATED,
    },
    "products on a device, by unit, over the disk": {
        "model": BF16,
        "optimizer": {**SPLIT, **THERE, **RING},
        "memory": {**DISK, **EMULATED},
    },
    "products on two devices, in rounds": {
        "model": BF16,
        "optimizer": {**THERE, "masters": "separate"},
        "memory": {"device": "emulated:2"},
        "train": {"microbatches": 4},
    },
    "products on two devices, over the disk": {
        "optimizer": THERE,
        "memory": {**DISK, "device": "emulated:2"},
    },
    "products on a device, of adapters": {
        "train": {"method": "lora"},
        "optimizer": THERE,
        "memory": EMULATED,
    },
    "frozen prefix": {"model": {**BF16, "freeze": ["*embed*", "*layers.0.*"]}, "optimizer": SPLIT},
}


@pytest.mark.parametrize("case", EXACT)
def test_streamed_is_resident_bit_for_bit(case: str, tmp_path: Path) -> None:
    result = verify(make_run(tmp_path, **EXACT[case]))
    assert (result.equal, result.differing) == (True, [])
    assert result.loss_streamed[-1] < result.loss_streamed[0]


@pytest.mark.parametrize(
    ("optimizer", "memory"), [({**SPLIT, **RING}, DISK), (NAME, {}), ({**NAME, "state": "int8"}, DISK)]
)
def test_a_run_that_goes_on_ends_as_a_whole_one(
    optimizer: dict[str, Any], memory: dict[str, Any], tmp_path: Path
) -> None:
    """From a commit, and from a checkpoint."""
    config = make_run(tmp_path, model=BF16, optimizer=optimizer, memory=memory)
    train(in_dir(config, tmp_path / "whole"))
    if memory:
        interrupted(in_dir(config, tmp_path / "parts"), 2)
    else:
        train(in_dir(config, tmp_path / "parts", steps=2))
    train(in_dir(config, tmp_path / "parts", resume="auto"))
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_a_checkpoint_is_the_same_however_a_unit_lies_at_home(state: str, tmp_path: Path) -> None:
    """Begun on disk, gone on in host memory."""
    optimizer = {**NAME, "state": state, "masters": "split"}
    disk = make_run(tmp_path, model=BF16, optimizer=optimizer, memory=DISK)
    host = make_run(tmp_path, model=BF16, optimizer=optimizer)
    train(in_dir(host, tmp_path / "whole"))
    train(in_dir(disk, tmp_path / "first", steps=2))
    train(in_dir(host, tmp_path / "second", resume=str(tmp_path / "first")))
    assert_same_end(tmp_path / "whole", tmp_path / "second")


def test_a_checkpoint_holds_one_moment_of_a_matrix_and_two_of_all_else(tmp_path: Path) -> None:
    train(in_dir(make_run(tmp_path, optimizer=NAME), tmp_path / "run", steps=1))
    found = end_of(tmp_path / "run")
    matrix, norm = "model.layers.0.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"
    files = "optimizer/model.layers.0.{}.safetensors:{}"
    assert {files.format("exp_avg", matrix), files.format("exp_avg", norm)} <= found.keys()
    assert files.format("exp_avg_sq", norm) in found
    assert files.format("exp_avg_sq", matrix) not in found
    assert "optimizer/lm_head.exp_avg_sq.safetensors:lm_head.weight" in found


def test_no_other_optimizer_goes_on_with_its_state(tmp_path: Path) -> None:
    train(in_dir(make_run(tmp_path, optimizer=NAME), tmp_path / "run", steps=1))
    with pytest.raises(ConfigError, match=r"belongs to a run with optimizer\.name=muon, not adamw"):
        train(in_dir(make_run(tmp_path), tmp_path / "run", resume="auto"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"memory": {**DISK, "tile_elements": 2048}}, "memory.tile_elements: muon steps whole parameters"),
        ({"model": {"freeze": ["*layers*"]}}, "optimizer.name: muon steps matrices of blocks, and none"),
    ],
)
def test_what_it_cannot_step_is_refused_by_name(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(make_run(tmp_path, optimizer=NAME, **changed))


def test_ranks_are_refused_by_name(tmp_path: Path) -> None:
    config = make_run(tmp_path, optimizer=NAME)
    spec = prepare(RunSpec.of(config, tmp_path), str).split.spec
    with pytest.raises(ConfigError, match=r"optimizer.name: muon steps whole parameters, and ranks"):
        layout_for(config, spec, num_ranks=2)


@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_a_momentum_of_fewer_bits_is_the_same_wherever_products_are(state: str, tmp_path: Path) -> None:
    ends = []
    for place, memory in (("host", {}), ("device", EMULATED)):
        optimizer = {**SPLIT, "state": state, "ns_on": place}
        config = make_run(tmp_path, model=BF16, optimizer=optimizer, memory=memory)
        train(in_dir(config, tmp_path / place))
        ends.append(end_of(tmp_path / place))
    host, device = ({name: t for name, t in end.items() if isinstance(t, torch.Tensor)} for end in ends)
    assert host.keys() == device.keys()
    assert [name for name, tensor in host.items() if not torch.equal(tensor, device[name])] == []


@pytest.mark.parametrize("device", ["emulated:1", "emulated:2"])
def test_what_products_take_of_a_device_and_a_link_is_what_the_plan_says(device: str, tmp_path: Path) -> None:
    """Two rooms for the largest matrix and the square of its shorter side, in bf16; a device has no byte more."""
    asked = {"model": BF16, "train": {"microbatches": 4}}
    spec = prepare(RunSpec.of(make_run(tmp_path, **asked), tmp_path), str).split.spec
    matrices = [tensor for unit in spec.units for tensor in muon_matrices(unit)]
    room = max(2 * (tensor.numel + min(tensor.shape) ** 2) for tensor in matrices)
    found = plan(make_run(tmp_path, **asked, optimizer=THERE, memory={"device": device}))
    assert found.memory["device"]["products of Muon"] == 2 * -(-room // 4096) * 4096
    budget = found.total_bytes("device")
    config = make_run(tmp_path, **asked, optimizer=THERE, memory={"device": device, "device_memory": budget})
    train(in_dir(config, tmp_path / "run"))
    told = json.loads((tmp_path / "run" / "plan.json").read_text())
    for line in (tmp_path / "run" / "heartbeat.jsonl").read_text().splitlines():
        beat, sent = json.loads(line), 2 * sum(tensor.numel for tensor in matrices)
        assert beat["wire_bytes"]["up:products"] == beat["wire_bytes"]["down:products"] == sent
        for way in ("up", "down"):
            assert beat[f"bytes_{way}"] == told["bytes_per_step"][way]
        used = [tier["high_water_bytes"] for name, tier in beat["tiers"].items() if name.startswith("device")]
        assert max(used) <= budget


@pytest.mark.parametrize(("host_flops_per_s", "place"), [(1e6, "device"), (1e15, "host")])
def test_a_run_multiplies_where_steps_are_shorter_and_goes_on_there(
    host_flops_per_s: float, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_link(monkeypatch, 1e12, host_flops_per_s)
    monkeypatch.setattr(Devices, "own_processor", True)
    said: list[str] = []
    config = make_run(tmp_path, optimizer=NAME, memory={"device": "emulated:1"})
    train(in_dir(config, tmp_path / "run", steps=2), announce=said.append)
    assert any(line.startswith(f"optimizer.ns_on: auto is {place}: ") for line in said)
    kept = load_config(tmp_path / "run" / "config.yaml", environ={})
    assert kept.optimizer.ns_on == place
    train(in_dir(config, tmp_path / "run", resume="auto"), announce=said.append)
    assert load_config(tmp_path / "run" / "config.yaml", environ={}).optimizer.ns_on == place
    assert sum("optimizer.ns_on" in line for line in said) == 1  # what goes on asks no more


def test_the_processor_of_a_machine_without_another_multiplies(tmp_path: Path) -> None:
    said: list[str] = []
    found, _, *_ = foresee(make_run(tmp_path, optimizer=NAME), announce=said.append)
    assert "optimizer.ns_on: auto is host: its processor is the device's, too" in said
    assert not found.state.products_on_device


def test_scratches_of_the_largest_matrix_are_in_the_plan(tmp_path: Path) -> None:
    """One where a master is joined, one for products; of no embedding, however large."""
    found = plan(make_run(tmp_path, model=BF16, optimizer=SPLIT))
    spec = prepare(RunSpec.of(make_run(tmp_path), tmp_path), str).split.spec
    largest = max(tensor.numel for unit in spec.units for tensor in muon_matrices(unit))
    assert found.memory["host"]["optimizer scratch"] == 2 * 4 * -(-largest // 2048) * 2048
