"""Runs of Adafactor: streamed is ``torch.optim.Adafactor`` resident, resumed is whole, and units step as a whole."""

from pathlib import Path
from typing import Any

import pytest

from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.session.job.optimizer_layout import layout_for
from outsize.session.job.prepare import prepare
from outsize.training.run import plan, train
from outsize.training.verify import verify
from outsize.units import align_up
from support import assert_same_end, end_of, in_dir, make_run
from train.test_states import BF16, DISK, EMULATED, RING, interrupted

NAME: dict[str, Any] = {"name": "adafactor"}
SPLIT: dict[str, Any] = {**NAME, "masters": "split"}
# What is trained, how, and where; each is exact.
EXACT: dict[str, dict[str, Any]] = {
    "fp32": {"optimizer": {**NAME, "weight_decay": 0.1, "beta2_decay": -0.6, "eps1": 1e-6}},
    "fp16": {"model": {"dtype": "fp16"}, "optimizer": NAME},
    "bf16, separate masters on disk": {
        "model": BF16,
        "optimizer": {**NAME, "masters": "separate"},
        "memory": DISK,
    },
    "bf16, by unit, beside a device": {"model": BF16, "optimizer": {**SPLIT, **RING}, "memory": EMULATED},
    "bf16, not clipped, tiles larger than a unit": {
        "model": BF16,
        "optimizer": {**SPLIT, "clip": "none", "d": 2.0},
        "memory": {**DISK, "tile_elements": 2**17},
    },
    "bf16 on disk below another device": {
        "model": BF16,
        "optimizer": SPLIT,
        "memory": {**DISK, **EMULATED},
    },
    "gradients in bf16": {"model": BF16, "optimizer": {**SPLIT, "gradients": "bf16"}},
    "gradients in bf16 on disk": {
        "optimizer": {**NAME, "gradients": "bf16"},
        "memory": {**DISK, "tile_elements": 2**17},
    },
    "frozen prefix": {"model": {**BF16, "freeze": ["*embed*", "*layers.0.*"]}, "optimizer": SPLIT},
    "two workers over the disk": {"optimizer": NAME, "memory": {**DISK, "device": "emulated:2"}},
}


@pytest.mark.parametrize("case", EXACT)
def test_streamed_is_resident_bit_for_bit(case: str, tmp_path: Path) -> None:
    result = verify(make_run(tmp_path, **EXACT[case]))
    assert (result.equal, result.differing) == (True, [])
    assert result.loss_streamed[-1] < result.loss_streamed[0]


def test_a_weight_that_units_share_steps_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, "llama_tied", train={"microbatches": 2}, optimizer=NAME, memory=DISK)
    result = verify(run)
    assert (result.equal, result.differing) == (True, [])


@pytest.mark.parametrize(("optimizer", "memory"), [({**SPLIT, **RING}, DISK), ({**NAME, **RING}, {})])
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


def test_a_checkpoint_is_the_same_however_a_unit_lies_at_home(tmp_path: Path) -> None:
    """Begun with split masters on disk, gone on with separate ones in host memory."""
    disk = make_run(tmp_path, model=BF16, optimizer=SPLIT, memory=DISK)
    host = make_run(tmp_path, model=BF16, optimizer={**NAME, "masters": "separate"})
    train(in_dir(host, tmp_path / "whole"))
    train(in_dir(disk, tmp_path / "first", steps=2))
    train(in_dir(host, tmp_path / "second", resume=str(tmp_path / "first")))
    assert_same_end(tmp_path / "whole", tmp_path / "second")


def test_a_checkpoint_holds_factors_under_the_names_of_their_parameters(tmp_path: Path) -> None:
    train(in_dir(make_run(tmp_path, optimizer=NAME), tmp_path / "run", steps=1))
    found = end_of(tmp_path / "run")
    weight, norm = "model.layers.0.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"
    files = f"optimizer/model.layers.0.{{}}.safetensors:{weight}"
    rows, columns = found[files.format("row_var")], found[files.format("col_var")]
    assert (rows.shape[1], columns.shape[0]) == (1, 1)
    (weights,) = (value for key, value in found.items() if key.startswith("model") and key.endswith(weight))
    assert (rows.shape[0], columns.shape[1]) == weights.shape
    assert found[f"optimizer/model.layers.0.variance.safetensors:{norm}"].dim() == 1
    assert files.format("variance") not in found


@pytest.mark.parametrize(
    ("former", "given", "key"),
    [({}, NAME, "optimizer.name=adamw, not adafactor"), (NAME, {}, "optimizer.name=adafactor, not adamw")],
)
def test_no_optimizer_goes_on_with_the_state_of_another(
    former: dict[str, Any], given: dict[str, Any], key: str, tmp_path: Path
) -> None:
    interrupted(in_dir(make_run(tmp_path, optimizer=former, memory=DISK), tmp_path / "run"), 2)
    second = make_run(tmp_path, optimizer=given, memory=DISK)
    with pytest.raises(ConfigError, match=f"belongs to a run with {key}"):
        train(in_dir(second, tmp_path / "run", resume="auto"))


def test_tiles_smaller_than_a_unit_are_refused_by_name(tmp_path: Path) -> None:
    config = make_run(tmp_path, optimizer=NAME, memory={**DISK, "tile_elements": 2048})
    with pytest.raises(ConfigError, match=r"memory.tile_elements: adafactor steps whole parameters"):
        train(config)


def test_ranks_are_refused_by_name(tmp_path: Path) -> None:
    config = make_run(tmp_path, optimizer=NAME)
    spec = prepare(config, tmp_path, str).split.spec
    with pytest.raises(ConfigError, match=r"optimizer.name: adafactor steps whole parameters, and ranks"):
        layout_for(config, spec, num_ranks=2)


def test_state_is_rows_and_columns_and_scratches_are_in_the_plan(tmp_path: Path) -> None:
    adamw, ours = (plan(make_run(tmp_path, model=BF16, optimizer=o)) for o in ({}, SPLIT))
    # Of tiny units: each plane is at least 8 KiB.
    assert ours.home_parts["optimizer state"] < adamw.home_parts["optimizer state"] / 2
    assert "optimizer scratch" not in adamw.memory["host"]
    spec = prepare(make_run(tmp_path), tmp_path, str).split.spec
    largest = max(tensor.numel for unit in spec.units for tensor in unit.tensors)
    assert ours.memory["host"]["optimizer scratch"] == 4 * align_up(largest, 2048)


def test_a_budget_without_room_for_a_scratch_is_refused_before_the_run(tmp_path: Path) -> None:
    found = plan(make_run(tmp_path, model=BF16, optimizer=SPLIT, memory=EMULATED))
    needed, scratch = sum(found.memory["host"].values()), found.memory["host"]["optimizer scratch"]
    memory = {**EMULATED, "host_memory": needed - scratch // 2}
    with pytest.raises(InfeasiblePlanError) as error:
        plan(make_run(tmp_path, model=BF16, optimizer=SPLIT, memory=memory))
    assert 0 < error.value.short_by["host"] <= scratch


def test_a_disk_home_without_room_for_a_whole_unit_says_what_to_try(tmp_path: Path) -> None:
    memory = {**DISK, **EMULATED}
    found = plan(make_run(tmp_path, model=BF16, optimizer=SPLIT, memory=memory)).memory["host"]
    short = {**memory, "host_memory": found["optimizer scratch"] + 4096}
    with pytest.raises(
        InfeasiblePlanError, match=r"for optimizer tiles; .* or optimizer.name=lion, which steps"
    ):
        plan(make_run(tmp_path, model=BF16, optimizer=SPLIT, memory=short))
