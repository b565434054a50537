"""Pieces of a unit on its way to a checkpoint: together they are the unit, from any home and for any size of it."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from contracts import pattern, same_values
from contracts.home_contract import planes_for
from outsize.model.sizes.model_spec import GRANULE_ELEMENTS, PLANE_ELEMENTS, ModelSpec, pack_unit
from outsize.optim.adamw import PlaneAdamW
from outsize.optim.optimizer_spec import EXP_AVG, MASTER, WEIGHTS
from outsize.planner.memory.memory_table import store_buffer_bytes
from outsize.runtime.ops.checkpoint_ops import StoreOps
from outsize.runtime.ops.optimizer_ops import OptimizerOps
from outsize.storage.committed import CommittedHome
from outsize.storage.home import DiskHome
from outsize.storage.ledger import Arena
from outsize.storage.prealloc import IOPool

# The buffer of a checkpoint takes neither all of the large unit nor a whole number of granules of it.
SMALL, LARGE = 3 * PLANE_ELEMENTS, 5 * GRANULE_ELEMENTS + PLANE_ELEMENTS


@pytest.mark.parametrize("granule_elements", [None, PLANE_ELEMENTS, GRANULE_ELEMENTS])
@pytest.mark.parametrize("planes", [(WEIGHTS,), (EXP_AVG,), (MASTER, WEIGHTS)], ids=str)
def test_the_pieces_of_a_disk_home_make_the_unit(
    granule_elements: int | None, planes: tuple[str, ...], tmp_path: Path
) -> None:
    """``granule_elements``: of a home that commits; None is one that does not."""
    units = tuple(
        pack_unit(i, f"u{i}", "block", [("w", (size,), True, True)]) for i, size in enumerate((SMALL, LARGE))
    )
    model, path = ModelSpec(dtype="bf16", units=units), tmp_path / "home"
    with Arena() as arena, IOPool(2) as pool:
        home: DiskHome
        if granule_elements is None:
            home = DiskHome(model, planes_for("bf16"), path, pool)
        else:
            home = CommittedHome(
                model, planes_for("bf16"), path, pool, arena=arena, granule_elements=granule_elements
            )
        with closing(home):
            buffer = arena.take(store_buffer_bytes(model, "disk"), "buffer")
            ops = StoreOps(model, home, OptimizerOps(model, home, PlaneAdamW()), buffer)
            for unit in units:
                dtypes = [torch.bfloat16 if plane == WEIGHTS else torch.float32 for plane in planes]
                written = [pattern(unit.numel, dtype, seed, arena) for seed, dtype in enumerate(dtypes)]
                for plane, source in zip(planes, written, strict=True):
                    home.write(unit.index, plane, 0, source)
                found = [[] for _ in planes]
                for start, chunks in ops.chunks(unit, planes):
                    assert start == sum(len(chunk) for chunk in found[0])
                    for pieces, chunk in zip(found, chunks, strict=True):
                        pieces.append(chunk.clone())
                assert all(same_values(torch.cat(p), s) for p, s in zip(found, written, strict=True))
