"""Whole units in host memory and tiles through a ring step alike; that both are torch's AdamW is tested in optim."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from contracts import same_values
from contracts.home_contract import planes_for
from outsize.model.sizes.model_spec import PLANE_ELEMENTS, ModelSpec, pack_unit
from outsize.optim.adamw import PlaneAdamW
from outsize.planner.program.program import parse_op
from outsize.runtime.ops.optimizer_ops import OptimizerOps, StepMemory
from outsize.storage.home import DiskHome, HostHome
from outsize.storage.ledger import Arena
from outsize.storage.prealloc import IOPool

TILE = PLANE_ELEMENTS
PARAMETERS = [
    ("w", (61, 97), True, True),
    ("frozen", (33,), False, True),
    ("b", (129,), True, False),
    ("idle", (50,), True, True),
]


def spec(dtype: str) -> ModelSpec:
    return ModelSpec(dtype=dtype, units=(pack_unit(0, "u", "block", PARAMETERS),))


def fill(home, model: ModelSpec, arena: Arena) -> None:
    unit = model.units[0]
    for seed, plane in enumerate(planes_for(model.dtype)):
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(model.dtype, torch.float32)
        dtype = dtype if plane == "weights" else torch.float32
        values = arena.take(unit.numel * dtype.itemsize, plane).view(dtype)
        # Weights are their masters, rounded; a second moment is not negative.
        generator = torch.Generator().manual_seed(0 if plane == "master" else seed)
        values.copy_(torch.rand(unit.numel, generator=generator))
        home.write(0, plane, 0, values)


def read(home, model: ModelSpec, arena: Arena) -> dict[str, torch.Tensor]:
    found = {}
    for plane in planes_for(model.dtype):
        dtype = torch.float32 if plane != "weights" or model.dtype == "fp32" else torch.bfloat16
        values = arena.take(model.units[0].numel * dtype.itemsize, plane).view(dtype)
        home.read(0, plane, 0, values)
        found[plane] = values.clone()  # the arena's memory is gone when it closes
    return found


def context(skipped: bool = False, **changes):
    values = {"learning_rate": 0.01, "coefficient": torch.tensor(0.5), "touched": {0: frozenset({0, 2})}}
    found = SimpleNamespace(skipped=skipped, **{**values, **changes})
    found.coefficient_of = lambda unit: found.coefficient
    return found


def tiled_steps(home, model: ModelSpec, arena: Arena, num_buffers: int, contexts) -> OptimizerOps:
    buffers = [arena.take(TILE * sum(planes_for(model.dtype).values()), "tile") for _ in range(num_buffers)]
    ops = OptimizerOps(
        model, home, PlaneAdamW(weight_decay=0.1), StepMemory(tile_buffers=buffers, tile_elements=TILE)
    )
    for each in contexts:
        for tile in range(model.units[0].numel // TILE):
            buffer = tile % num_buffers
            ops.read(parse_op(f"READ 0#{tile}>t{buffer}"), each)
            ops.step(parse_op(f"STEP 0#{tile}@t{buffer}"), each)
            ops.write(parse_op(f"WRITE 0#{tile}<t{buffer}"), each)
    return ops


@pytest.mark.parametrize("num_buffers", [1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tiles_of_a_disk_home_step_as_a_whole_unit_in_memory_does(dtype: str, num_buffers: int, tmp_path):
    model = spec(dtype)
    contexts = [context(), context(coefficient=None), context(touched={0: frozenset({0, 2, 3})})]
    with Arena() as arena, IOPool(2) as pool, HostHome(model, planes_for(dtype), arena) as host:
        fill(host, model, arena)
        whole = OptimizerOps(model, host, PlaneAdamW(weight_decay=0.1))
        gradient = host.view(0, "gradient").clone()
        for each in contexts:
            host.view(0, "gradient").copy_(gradient)  # a step uses it up
            whole.step(parse_op("STEP 0"), each)
        want = read(host, model, arena)
        with DiskHome(model, planes_for(dtype), tmp_path / "home", pool) as disk:
            fill(disk, model, arena)
            tiled = tiled_steps(disk, model, arena, num_buffers, contexts)
            got = read(disk, model, arena)
    assert tiled.updates == whole.updates == {"w": 3, "b": 3, "idle": 1}
    for plane in set(want) - {"gradient"}:
        assert same_values(got[plane], want[plane]), plane


def test_a_skipped_step_moves_and_counts_nothing(tmp_path):
    model = spec("fp32")
    with (
        Arena() as arena,
        IOPool(1) as pool,
        DiskHome(model, planes_for("fp32"), tmp_path / "home", pool) as home,
    ):
        fill(home, model, arena)
        before = read(home, model, arena)
        moved = home.file.statistics()
        ops = tiled_steps(home, model, arena, 2, [context(skipped=True)])
        assert (home.file.statistics().bytes_read, home.file.statistics().bytes_written) == (
            moved.bytes_read,
            moved.bytes_written,
        )
        after = read(home, model, arena)
    assert set(ops.updates.values()) == {0}
    assert all(same_values(after[plane], before[plane]) for plane in before)


def test_a_tile_buffer_holds_all_planes_side_by_side(tmp_path):
    model = spec("bf16")
    with Arena() as arena, IOPool(1) as pool:
        buffer = arena.take(TILE * sum(planes_for("bf16").values()), "tile")
        with DiskHome(model, planes_for("bf16"), tmp_path / "home", pool) as home:
            (planes,) = OptimizerOps(
                model, home, PlaneAdamW(), StepMemory(tile_buffers=[buffer], tile_elements=TILE)
            )._buffers
        ends = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in planes.values())
        assert sum(p.nbytes for p in planes.values()) == buffer.nbytes
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert all(start % 4096 == 0 for start, _ in ends)
        assert set(planes) == set(planes_for("bf16"))
