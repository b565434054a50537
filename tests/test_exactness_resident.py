"""Units that rest on the device with their state: exact wherever they are, however many, and on from run to run."""

from pathlib import Path
from typing import Any

import pytest

from outsize.errors import ConfigError, InfeasiblePlanError, NonFiniteError
from outsize.planner.program.program import Kind
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training.forecast import plan
from outsize.training.run import train
from outsize.training.short_runs import verify
from support import assert_same_end, in_dir, make_batches, make_run
from test_exactness import compare

LINK = {"device": "emulated:1"}
ALL = 99
BF16 = {"model": {"dtype": "bf16"}}


@pytest.mark.parametrize("device", ["cpu", "emulated:1"])
@pytest.mark.parametrize(
    ("name", "resident", "sections"),
    [
        ("llama", 1, {}),
        ("llama", ALL, {"optimizer": {"max_grad_norm": 0.05}}),
        (
            "llama",
            ALL,
            {"optimizer": {"max_grad_norm": 0.0}},
        ),  # steps behind each backward, tiles of the others
        ("llama", 3, {"optimizer": {"max_grad_norm": 0.0}, "train": {"microbatches": 1}}),
        ("llama_tied", 1, {"train": {"microbatches": 1}}),
        ("llama", 3, BF16),
        ("llama", ALL, {**BF16, "optimizer": {"gradients": "bf16"}, "train": {"microbatches": 2}}),
        ("llama", 2, {**BF16, "optimizer": {"masters": "separate"}}),
        ("llama", 2, {"model": {"dtype": "fp16"}}),
        ("llama", 2, {"model": {"freeze": ("model.embed_tokens.*", "*self_attn*")}}),
        ("gpt2", 3, {"memory": {"offload": True, "activations": "offload"}}),
        ("qwen3_moe", 2, {"memory": {"slots": 1}}),
        ("llama", 2, {"train": {"round_microbatches": 2}}),
        ("llama", 2, {"train": {"round_microbatches": 1}, "optimizer": {"max_grad_norm": 0.0}}),
    ],
)
def test_resident_units_are_exact(
    name: str, resident: int, sections: dict[str, Any], device: str, tmp_path: Path
):
    own = {"microbatches": 3, **sections.get("train", {})}
    memory = {"device": device, "resident": resident, **sections.get("memory", {})}
    batches = make_batches(name, num_sequences=5)
    sections = {**sections, "train": own, "memory": memory}
    found = compare(name, tmp_path, batches=batches, **sections).plan
    layout = found.layout
    assert len(layout.resident) == min(resident, len(layout.step_order))
    for kind, units in ((Kind.UPDATE, layout.resident), (Kind.STEP, {*layout.step_order} - layout.resident)):
        assert {op.unit for op in found.program if op.kind is kind} == units


def test_what_is_resident_moves_no_more(tmp_path: Path):
    """Neither weights nor gradients cross the link, and host memory holds nothing of a model that is there."""
    config = make_run(tmp_path, memory={**LINK, "resident": ALL})
    assert verify(config).equal
    found = prepare(RunSpec.of(config, tmp_path / "run"), lambda _: None).plan
    assert (found.traffic.up, found.traffic.down) == (0, 0)
    assert "home" not in found.memory["host"]
    assert found.layout.slot_bytes == found.layout.accumulator_bytes == ()


@pytest.mark.parametrize("resident", [2, ALL])
def test_each_unit_may_be_clipped_by_its_own_norm(resident: int, tmp_path: Path):
    optimizer = {"clip": "unit", "max_grad_norm": 0.05}
    for own in ({"microbatches": 1}, {"microbatches": 3, "round_microbatches": 2}):
        memory = {**LINK, "resident": resident}
        assert verify(make_run(tmp_path, optimizer=optimizer, train=own, memory=memory)).equal


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_goes_on_with_other_units_resident(dtype: str, tmp_path: Path):
    """What is saved is the same wherever it lay and whether masters are split: a run may go on with another budget."""

    def run(name: str, resident: int, steps: int, **own: Any) -> None:
        memory = {**LINK, "resident": resident}
        sections = {"train": {"microbatches": 2, **own}}
        if (dtype, resident) == ("bf16", ALL):  # where all are there, the planner may choose so
            sections["optimizer"] = {"masters": "separate"}
        config = make_run(tmp_path, model={"dtype": dtype}, memory=memory, **sections)
        train(in_dir(config, tmp_path / name, steps=steps))

    run("whole", 0, 3)
    for steps, resident in ((1, 2), (2, 0), (3, ALL)):
        run("parts", resident, steps, resume="auto", save_every=1)
        if steps == 1:
            run("start", 0, 1)
            assert_same_end(tmp_path / "start", tmp_path / "parts")
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


def test_a_step_that_is_not_finite_changes_nothing(tmp_path: Path):
    """Behind a norm it is skipped; without one no unit steps behind the one that was looked at."""
    skipping = {"on_nonfinite": "skip", "microbatches": 2}
    memory = {**LINK, "resident": 2}
    assert verify(make_run(tmp_path, optimizer={"lr": 1e30}, train=skipping, memory=memory)).equal
    config = make_run(
        tmp_path, optimizer={"lr": 1e30, "max_grad_norm": 0.0}, memory={**LINK, "resident": ALL}
    )
    with pytest.raises(NonFiniteError, match="nothing of this step is saved"):
        train(config)


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"memory": {"home": "disk"}}, "a home on disk keeps all state"),
        ({"memory": {"device": "emulated:2"}}, "several workers take turns"),
        ({"optimizer": {"state": "int8"}}, "only AdamW with its exact state"),
        ({"optimizer": {"name": "SGD"}}, "only AdamW with its exact state"),
        ({"transport": {"gradients": "int8"}}, "encoded weights and gradients"),
    ],
)
def test_where_no_unit_can_be_resident_a_number_is_refused(
    sections: dict[str, Any], reason: str, tmp_path: Path
):
    memory = {**LINK, "resident": 1, **sections.pop("memory", {})}
    with pytest.raises(ConfigError, match=f"memory.resident: {reason}"):
        plan(make_run(tmp_path, memory=memory, **sections))


def test_more_units_than_fit_are_refused(tmp_path: Path):
    least = plan(make_run(tmp_path, memory={**LINK, "slots": 1}))
    memory = {**LINK, "slots": 1, "resident": ALL, "device_memory": least.total_bytes("device")}
    with pytest.raises(InfeasiblePlanError, match=r"memory\.resident"):
        plan(make_run(tmp_path, memory=memory))
