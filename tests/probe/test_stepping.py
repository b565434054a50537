"""AdamW as the engine runs it: the executor's STEPs, over the planes that a run keeps."""

import threading
from dataclasses import replace

import pytest

from outsize.config import load_config
from outsize.model.sizes.model_spec import ModelSpec, pack_unit
from outsize.optim.optimizer_spec import StateLayout
from outsize.probing.compute import measure_adamw, measure_products
from outsize.runtime.ops.optimizer_ops import OptimizerOps
from outsize.session.job.optimizer_layout import layout_for
from probe.efforts import MIB, TINY


@pytest.fixture
def stepped(monkeypatch):
    """Text, thread and planes of every STEP."""
    seen = []
    real = OptimizerOps.step

    def step(self, op, context):
        seen.append((str(op), threading.current_thread().name, self.state))
        real(self, op, context)

    monkeypatch.setattr(OptimizerOps, "step", step)
    return seen


def test_products_are_timed_on_the_largest_matrix_that_fits():
    sizes = {"small": (32, 16), "large": (256, 512), "huge": (2**10, 2**11)}
    units = [pack_unit(0, "block", "block", [(name, size, True, True) for name, size in sizes.items()])]
    rate = measure_products(replace(TINY, plane_bytes=MIB), units, 3)
    assert rate.source.startswith("3 iterations on 256 x 512, ")
    assert "32 x 16" in measure_products(replace(TINY, plane_bytes=64), units, 1).source
    assert len(rate.samples) == TINY.num_samples_min


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_probe_runs_the_ops_of_a_run_on_its_lane_over_its_planes(stepped, dtype):
    rate = measure_adamw(TINY, dtype)
    ops = [op for op, _, _ in stepped]
    assert ops == [f"STEP {index}" for index in range(5)] * (TINY.num_samples_min + 1)
    assert {thread for _, thread, _ in stepped} == {"host"}
    spec = ModelSpec(units=(), dtype=dtype)
    of_a_run = layout_for(load_config(None, ["model.path=x", "data.path=y", "train.steps=1"]), spec)
    assert {state for _, _, state in stepped} == {of_a_run}
    assert len(rate.samples) == TINY.num_samples_min
    assert f"STEPs of 5 units, {5 * (12 * 64 * 64 - 2 * 64 + 2 * 64)} parameters" in rate.source
    assert f"{dtype} compute" in rate.source
    if dtype == "bf16":
        assert rate.source.endswith(f"{of_a_run.masters} masters")


def test_units_of_a_model_stand_for_it_as_far_as_they_fit(stepped):
    matrix = [("weight", (128, 256), True, True)]
    units = (
        pack_unit(0, "embed", "embedding", [("huge", (2**10, 2**10), True, True)]),
        pack_unit(1, "frozen", "block", [("weight", (128, 256), False, True)]),
        *(pack_unit(index, f"block.{index}", "block", matrix) for index in (2, 3)),
        pack_unit(4, "head", "head", [*matrix, ("fixed", (64,), False, False)]),
    )
    rate = measure_adamw(replace(TINY, plane_bytes=MIB // 2), "fp32", units)
    assert [op for op, _, _ in stepped][:3] == ["STEP 0", "STEP 1", "STEP 2"]
    assert f"STEPs of 3 units, {3 * 128 * 256} parameters" in rate.source
    assert "STEPs of 2 units" in measure_adamw(replace(TINY, plane_bytes=MIB // 4), "fp32", units[2:]).source
    large = measure_adamw(TINY, "fp32", units[:1])
    assert "STEPs of 1 units, 196736 parameters" in large.source, "one block as large as may be"
    norm = pack_unit(1, "norm", "resident", [("weight", (256,), True, False)])
    mostly = measure_adamw(TINY, "fp32", [units[0], norm])
    assert "STEPs of 1 units, 196736 parameters" in mostly.source, (
        "a norm does not stand for what is too large"
    )
    assert "STEPs of 1 units, 256 parameters" in measure_adamw(TINY, "fp32", [norm]).source


@pytest.mark.parametrize(
    "layout",
    [
        StateLayout(dtype="bf16", masters="split", moments="int8"),
        StateLayout(dtype="bf16", masters="separate", gradients="bf16"),
        StateLayout(dtype="fp32", gradients="none"),
    ],
    ids=str,
)
def test_every_layout_of_a_run_can_be_timed(stepped, layout):
    assert measure_adamw(TINY, layout).median > 0
    (used,) = {state for _, _, state in stepped}
    assert used == (layout if layout.gradients != "none" else layout.durable)
