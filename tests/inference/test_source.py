"""Rows of tables at home, on their way to a device."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outsize.inference.source import LARGE_ROW_BYTES, Source
from outsize.model.sizes.model_spec import TensorSpec


@pytest.mark.parametrize(("width", "in_place"), [(LARGE_ROW_BYTES // 4, True), (64, False)])
def test_large_rows_are_copied_from_where_they_lie(width: int, in_place: bool):
    """An expert lies pinned; a copy of it on the host would be pageable. Rows of tokens are gathered first."""
    table = torch.randn(6, width)
    copied: list[torch.Tensor] = []

    def copy(into: torch.Tensor, source: torch.Tensor) -> None:
        copied.append(source)
        into.copy_(source)

    source: Any = SimpleNamespace(
        _spec=SimpleNamespace(dtype="fp32"),
        _device=SimpleNamespace(torch_device=torch.device("cpu"), copy=copy),
        _count=lambda num_bytes: None,
        table=lambda unit, tensor: table,
    )
    tensor = TensorSpec(name="experts", shape=(6, width), offset=0)
    numbers = torch.tensor([1, 4])
    assert torch.equal(Source.rows(cast("Source", source), 0, tensor, numbers), table[numbers])
    memory = range(table.data_ptr(), table.data_ptr() + table.nbytes)
    assert all((each.data_ptr() in memory) == in_place for each in copied)
    source.table = lambda unit, tensor: None  # as on a disk
    nothing = Source.rows(cast("Source", source), 0, tensor, torch.empty(0, dtype=torch.int64))
    assert nothing.shape == (0, width)
