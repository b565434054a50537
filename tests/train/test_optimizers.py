"""Runs by classes of torch: streamed equals resident, resumed equals whole, and none goes on with another's state."""

from pathlib import Path
from typing import Any

import pytest

from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.session.job.optimizer_layout import layout_for
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training.forecast import plan
from outsize.training.run import train
from outsize.training.short_runs import verify
from outsize.units import align_up
from support import assert_same_end, end_of, in_dir, make_run
from train.test_states import BF16, DISK, EMULATED, RING, interrupted

SGD: dict[str, Any] = {"name": "SGD", "lr": 0.1}
ADAFACTOR: dict[str, Any] = {"name": "Adafactor"}
SPLIT: dict[str, Any] = {**ADAFACTOR, "masters": "split"}
TWO = {"device": "emulated:2"}
# What is trained, by what, and where; each is exact. Classes by themselves are in tests/optim/test_torch_class.py.
EXACT: dict[str, dict[str, Any]] = {
    "SGD with momentum, bf16": {"model": BF16, "optimizer": {**SGD, "weight_decay": 0.1}},
    "SGD, nesterov, split masters, by unit": {
        "model": BF16,
        "optimizer": {**SGD, **RING, "masters": "split", "args": {"momentum": 0.9, "nesterov": True}},
    },
    "SGD without momentum, in small tiles on disk": {
        "model": BF16,
        "optimizer": {**SGD, "args": {"momentum": 0.0}},
        "memory": {**DISK, "tile_elements": 2048},
    },
    "SGD over two workers": {"optimizer": SGD, "memory": TWO, "train": {"microbatches": 2}},
    "Adagrad over a link": {"optimizer": {"name": "Adagrad", "lr": 1e-2}, "memory": EMULATED},
    "Adadelta, fp16": {"model": {"dtype": "fp16"}, "optimizer": {"name": "Adadelta", "lr": 0.5}},
    "AMSGrad over two workers and the disk": {
        "optimizer": {
            "name": "torch.optim.AdamW",
            "lr": 1e-3,
            "args": {"amsgrad": True},
            "weight_decay": 0.1,
        },
        "memory": {**DISK, **TWO},
        "train": {"microbatches": 2},
    },
    "Adam, fused, gradients in bf16": {
        "model": BF16,
        "optimizer": {"name": "Adam", "lr": 1e-3, "args": {"fused": True}, "gradients": "bf16"},
    },
    "Adamax by unit": {"optimizer": {**RING, "name": "Adamax", "lr": 1e-3, "schedule": "linear"}},
    "NAdam on disk": {"model": BF16, "optimizer": {"name": "NAdam", "lr": 1e-3}, "memory": DISK},
    "RAdam": {"model": BF16, "optimizer": {"name": "RAdam", "lr": 1e-2, "warmup_steps": 1}},
    "RMSprop": {"optimizer": {"name": "RMSprop", "lr": 1e-3, "args": {"momentum": 0.9, "centered": True}}},
    "Rprop": {"optimizer": {"name": "Rprop", "lr": 1e-3, "clip": "none", "weight_decay": 0.0}},
    "ASGD": {"model": BF16, "optimizer": {"name": "ASGD", "lr": 0.1, "args": {"t0": 1}}},
    "Adafactor, fp32": {
        "optimizer": {**ADAFACTOR, "weight_decay": 0.1, "args": {"beta2_decay": -0.6, "eps": [1e-6, 1e-3]}}
    },
    "Adafactor, fp16": {"model": {"dtype": "fp16"}, "optimizer": ADAFACTOR},
    "Adafactor, bf16, by unit, beside a device": {
        "model": BF16,
        "optimizer": {**SPLIT, **RING},
        "memory": EMULATED,
    },
    "Adafactor, tiles larger than a unit": {
        "model": BF16,
        "optimizer": {**SPLIT, "clip": "none", "args": {"d": 2.0}},
        "memory": {**DISK, "tile_elements": 2**17},
    },
    "Adafactor, gradients in bf16 on disk": {
        "optimizer": {**SPLIT, "gradients": "bf16"},
        "model": BF16,
        "memory": {**DISK, **EMULATED},
    },
    "Adafactor, frozen prefix": {
        "model": {**BF16, "freeze": ["*embed*", "*layers.0.*"]},
        "optimizer": SPLIT,
    },
    "Adafactor over two workers and the disk": {"optimizer": ADAFACTOR, "memory": {**DISK, **TWO}},
}


@pytest.mark.parametrize("case", EXACT)
def test_streamed_is_resident_bit_for_bit(case: str, tmp_path: Path) -> None:
    result = verify(make_run(tmp_path, **EXACT[case]))
    assert (result.equal, result.differing) == (True, [])
    assert result.loss_streamed[-1] < result.loss_streamed[0]


def test_a_weight_that_units_share_steps_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, "llama_tied", train={"microbatches": 2}, optimizer=ADAFACTOR, memory=DISK)
    result = verify(run)
    assert (result.equal, result.differing) == (True, [])


@pytest.mark.parametrize(
    ("optimizer", "memory"),
    [
        (SGD, DISK),
        (SGD, {}),
        ({"name": "NAdam", "lr": 1e-3}, {}),
        ({"name": "ASGD", "lr": 0.1}, DISK),
        ({"name": "Rprop", "lr": 1e-3, "weight_decay": 0.0}, {}),
        ({"name": "Adam", "lr": 1e-3, "args": {"amsgrad": True}}, DISK),
        ({**SPLIT, **RING}, DISK),
        ({**ADAFACTOR, **RING}, {}),
    ],
    ids=str,
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


def test_a_checkpoint_is_the_same_however_a_unit_lies_at_home(tmp_path: Path) -> None:
    """Begun with split masters on disk, gone on with separate ones in host memory."""
    disk = make_run(tmp_path, model=BF16, optimizer=SPLIT, memory=DISK)
    host = make_run(tmp_path, model=BF16, optimizer={**ADAFACTOR, "masters": "separate"})
    train(in_dir(host, tmp_path / "whole"))
    train(in_dir(disk, tmp_path / "first", steps=2))
    train(in_dir(host, tmp_path / "second", resume=str(tmp_path / "first")))
    assert_same_end(tmp_path / "whole", tmp_path / "second")


def test_a_checkpoint_holds_state_under_the_names_of_its_parameters(tmp_path: Path) -> None:
    train(in_dir(make_run(tmp_path, optimizer=ADAFACTOR), tmp_path / "run", steps=1))
    found = end_of(tmp_path / "run")
    weight, norm = "model.layers.0.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"
    files = f"optimizer/model.layers.0.state.{{}}.safetensors:{weight}"
    rows, columns = found[files.format("row_var")], found[files.format("col_var")]
    assert (rows.shape[1], columns.shape[0]) == (1, 1)
    (weights,) = (value for key, value in found.items() if key.startswith("model") and key.endswith(weight))
    assert (rows.shape[0], columns.shape[1]) == weights.shape
    assert found[f"optimizer/model.layers.0.state.variance.safetensors:{norm}"].dim() == 1
    assert files.format("variance") not in found


@pytest.mark.parametrize(
    ("former", "given", "words", "memory"),
    [
        ({}, SGD, "optimizer.name=adamw, not torch.optim.SGD", {}),
        (ADAFACTOR, {}, "optimizer.name=torch.optim.Adafactor, not adamw", DISK),
        (SGD, {"name": "RMSprop"}, "optimizer.name=torch.optim.SGD, not torch.optim.RMSprop", DISK),
        (
            SGD,
            {**SGD, "args": {"momentum": 0.0}},
            "the state that optimizer.args want=momentum_buffer, not nothing",
            {},
        ),
    ],
)
def test_no_optimizer_goes_on_with_the_state_of_another(
    former: dict[str, Any], given: dict[str, Any], words: str, memory: dict[str, Any], tmp_path: Path
) -> None:
    first = make_run(tmp_path, optimizer=former, memory=memory)
    if memory:
        interrupted(in_dir(first, tmp_path / "run"), 2)
    else:
        train(in_dir(first, tmp_path / "run", steps=1))
    second = make_run(tmp_path, optimizer=given, memory=memory)
    with pytest.raises(ConfigError, match=f"belongs to a run with {words}"):
        train(in_dir(second, tmp_path / "run", resume="auto"))


def test_what_a_class_does_not_take_is_said_before_a_run_begins(tmp_path: Path) -> None:
    for optimizer, words in (
        ({**SGD, "args": {"momentun": 0.9}}, r"optimizer.args: SGD takes no momentun; it takes .*momentum"),
        ({"name": "LBFGS"}, "LBFGS calls the model several times"),
        ({"name": "Rprop", "weight_decay": 0.1}, "optimizer.weight_decay: torch.optim.Rprop has none"),
    ):
        config = make_run(tmp_path, optimizer=optimizer)
        for begin in (plan, train):
            with pytest.raises(ConfigError, match=words):
                begin(config)
        assert not Path(config.train.run_dir).exists()


def test_tiles_smaller_than_a_unit_are_refused_by_name(tmp_path: Path) -> None:
    config = make_run(tmp_path, optimizer=ADAFACTOR, memory={**DISK, "tile_elements": 2048})
    with pytest.raises(ConfigError, match=r"memory.tile_elements: Adafactor steps whole parameters"):
        train(config)


def test_ranks_share_what_steps_by_element_and_nothing_else(tmp_path: Path) -> None:
    config = make_run(tmp_path, optimizer=ADAFACTOR)
    spec = prepare(RunSpec.of(config, tmp_path), str).split.spec
    with pytest.raises(ConfigError, match=r"optimizer.name: Adafactor steps whole parameters, and ranks"):
        layout_for(config, spec, num_ranks=2)
    assert not layout_for(make_run(tmp_path, optimizer=SGD), spec, num_ranks=2).whole


def test_state_is_what_a_class_keeps_and_what_it_makes_for_itself_is_in_the_plan(tmp_path: Path) -> None:
    def state_bytes(**optimizer: Any) -> int:
        return plan(make_run(tmp_path, model=BF16, optimizer=optimizer)).home_parts.get("optimizer state", 0)

    adamw = state_bytes()
    assert state_bytes(**SGD) == adamw / 2 > 0
    assert state_bytes(**SGD, args={"momentum": 0.0}) == 0
    assert state_bytes(name="Adam", args={"amsgrad": True}) == adamw * 3 / 2
    ours = plan(make_run(tmp_path, model=BF16, optimizer=SPLIT))
    # Of tiny units: each plane is at least 8 KiB.
    assert ours.home_parts["optimizer state"] < adamw / 2
    spec = prepare(RunSpec.of(make_run(tmp_path), tmp_path), str).split.spec
    largest = max(tensor.numel for unit in spec.units for tensor in unit.tensors)
    # A split master that is joined, and three tensors of torch's own.
    assert ours.memory["host"]["optimizer scratch"] == 4 * 4 * align_up(largest, 2048)


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
        InfeasiblePlanError, match=r"for optimizer tiles; .* or optimizer.name=adamw, which steps"
    ):
        plan(make_run(tmp_path, model=BF16, optimizer=SPLIT, memory=short))
